"""Trees of drafts. Row 0 is the newest token of a request, and the others are drafts, each behind
its parent: `parents[n]` is the row before row n + 1, and lower than it. No parents: a chain.

The tree a - (b, c - d) has the rows 0: a, 1: b, 2: c, 3: d, and the parents [0, 0, 2].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

Parents = Sequence[int]

MOST_ROWS: Final = 64
"""A row knows by the bits of one number which rows it sees."""
_BITS: Final = (1 << MOST_ROWS) - 1
_SIGN: Final = 1 << MOST_ROWS - 1


def is_chain(parents: Parents) -> bool:
    return list(parents) == list(range(len(parents)))


def depths(parents: Parents) -> list[int]:
    """How far each row is behind row 0: [0, 1, 1, 2] in the example."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


def row_masks(parents: Parents) -> list[int]:
    """What each row sees, as a signed number of 64 bits: bit n is the row n before it, itself
    included, or a token before row 0, all of which it sees. In the example -1, -1, -3 (all but the
    row before), -5."""
    found = [-1]
    for row, parent in enumerate(parents, 1):
        found.append(found[parent] << row - parent | 1)
    return [((mask & _BITS) ^ _SIGN) - _SIGN for mask in found]


def behind(drafts: Sequence[int], parents: Parents, row: int) -> Sequence[int]:
    """The drafts whose parent is this row, in their order. In the example: b and c behind row 0."""
    if not parents:
        return drafts[row : row + 1]
    return [draft for draft, parent in zip(drafts, parents, strict=True) if parent == row]


def first_path(parents: Parents) -> list[int]:
    """The rows of the first branch: behind each of them the first row that has it as its parent. In
    the example only row 1."""
    last, path = 0, list[int]()
    for row, parent in enumerate(parents, 1):
        if parent == last:
            path.append(row)
            last = row
    return path


def path_to(parents: Parents, row: int) -> list[int]:
    """The rows from behind row 0 up to this one."""
    if not parents:
        return list(range(1, row + 1))
    path = list[int]()
    while row:
        path.append(row)
        row = parents[row - 1]
    return path[::-1]


def path_of(drafts: Sequence[int], parents: Parents, tokens: Sequence[int]) -> list[int]:
    """The rows of accepted drafts, if the answer continues with `tokens`: all but the last of them
    are drafts."""
    if not parents:
        return list(range(1, len(tokens)))
    row, path = 0, list[int]()
    for token in tokens[:-1]:
        behind = (n for n, parent in enumerate(parents, 1) if parent == row)
        row = next(n for n in behind if drafts[n - 1] == token)
        path.append(row)
    return path


def preorder(parents: Parents, count: int) -> list[int]:
    """The rows of `count` drafts, each before those behind it, and these before its siblings."""
    if not parents:
        return list(range(1, count + 1))
    children: list[list[int]] = [[] for _ in range(count + 1)]
    for row, parent in enumerate(parents, 1):
        children[parent].append(row)
    order, open_rows = list[int](), children[0][::-1]
    while open_rows:
        row = open_rows.pop()
        order.append(row)
        open_rows += children[row][::-1]
    return order
