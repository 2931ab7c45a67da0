"""The shape of a draft: a chain, or a tree with a number of levels and of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from moesaic.core.draft_tree import Parents, depths, first_path
from moesaic.core.speculation import Speculation

LENGTHS: Final = (1, 2, 3, 4, 6, 8)
"""The controller chooses among chains of these lengths and of the longest one."""


class DraftShape(NamedTuple):
    """The `drafts` likeliest tokens of a tree of `steps` levels, in which up to `branches` tokens
    are behind each one. With one branch it is a chain."""

    branches: int
    steps: int
    drafts: int

    @property
    def is_tree(self) -> bool:
        return self.branches > 1

    def is_within(self, other: DraftShape) -> bool:
        """Whether a draft of the other shape can be cut to this one."""
        return all(own <= more for own, more in zip(self, other, strict=True))

    def cut(self, drafts: Sequence[int], parents: Parents) -> tuple[list[int], list[int]]:
        """What is left of a draft and its parents: of a tree cut to a chain, the first branch."""
        most = min(self.steps, self.drafts)
        if not parents:
            return list(drafts[:most]), []
        parents = parents[: len(drafts)]
        if self.is_tree and len(drafts) <= most:
            return list(drafts), list(parents)
        if self.is_tree:
            rows = [row for row, depth in enumerate(depths(parents)) if 0 < depth <= self.steps]
        else:
            rows = first_path(parents)[: self.steps]
        rows = rows[: self.drafts]
        places = {0: 0} | {row: place for place, row in enumerate(rows, 1)}
        behind = [places[parents[row - 1]] for row in rows] if self.is_tree else []
        return [drafts[row - 1] for row in rows], behind


NO_DRAFTS: Final = DraftShape(0, 0, 0)
ANY_DRAFTS: Final = DraftShape(1 << 20, 1 << 20, 1 << 20)


def chains(longest: int) -> list[DraftShape]:
    """The shape without drafts, and those of chains of up to `longest` tokens."""
    lengths = [*(length for length in LENGTHS if length < longest), longest]
    return [NO_DRAFTS, *(DraftShape(1, length, length) for length in lengths)]


def draft_shapes(speculation: Speculation, trees: bool) -> list[DraftShape]:
    """Those that fit into the buffers of the flags, the largest one last; `trees`: not only chains.
    Trees have all levels and tokens, or half of them, and so on."""
    most, on_ranks = speculation.num_drafts, speculation.makes.on_ranks
    levels = speculation.num_steps if on_ranks else most
    found = set(chains(min(levels, most)))
    if trees:
        breadth = speculation.breadth
        found.add(DraftShape(breadth, levels, most))
        for steps in _halves(levels) if on_ranks else [levels]:
            nodes = breadth + (steps - 1) * breadth**2 if on_ranks else most
            found |= {
                DraftShape(breadth, steps, drafts)
                for drafts in _halves(min(most, nodes))
                if drafts > (steps if on_ranks else 1)
            }
    return sorted(found, key=lambda shape: (shape.drafts, shape.is_tree, shape.steps))


def _halves(number: int) -> Iterator[int]:
    """The number, half of it, and so on, down to 1."""
    while number > 1:
        yield number
        number = (number + 1) // 2
    yield number
