"""How a layer's work is split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moesaic.comm.collectives.collective import Collective, SingleRank
from moesaic.comm.mesh import share


@dataclass(frozen=True)
class Parallel:
    """The groups of ranks in this rank's pipeline stage.

    `attention`: the ranks that share each request's attention and embedding. `stage`: all
    tensor-parallel ranks of the stage, in `dp` attention groups one after the other. `dense_tp`,
    `vocab_tp`: the number of ranks that split dense layers and logits: 1, or the size of
    `attention` or `stage`. `layers`: the decoder layers of this stage, None for all.
    """

    attention: Collective = field(default_factory=SingleRank)
    stage: Collective = field(default_factory=SingleRank)
    dp: int = 1
    dense_tp: int = 1
    vocab_tp: int = 1
    layers: range | None = None
    is_first: bool = True
    is_last: bool = True
    deterministic: bool = False

    @property
    def dp_rank(self) -> int:
        return self.stage.rank // self.attention.size

    def shard_group(self, size: int) -> tuple[Collective, int, int]:
        """The group that splits a layer over `size` ranks, this rank's part, and all parts."""
        if size == self.attention.size:
            return self.attention, self.attention.rank, size
        if size == self.stage.size:
            return self.stage, self.stage.rank, size
        assert size == 1, f"{size} of {self.attention.size} and {self.stage.size} ranks"
        return SingleRank(), 0, 1

    def spans_groups(self, size: int) -> bool:
        """Whether a layer split over `size` ranks needs the tokens of all groups."""
        return size not in (1, self.attention.size)

    def stage_layer(self, layer: int) -> int:
        """The index of a layer in this stage."""
        return layer - (0 if self.layers is None else self.layers.start)

    def own_rows(self, count: int) -> slice:
        """This rank's part of its group's `count` rows."""
        rows = share(count, self.attention.rank, self.attention.size)
        return slice(rows.start, rows.stop)

    def own_tokens(self, tokens: int, count: int) -> int:
        """The number of this rank's rows among the group's first `tokens`."""
        own = self.own_rows(count)
        return max(0, min(tokens, own.stop) - own.start)

    def most_rows(self, count: int) -> int:
        """The largest part of `count` rows in a group."""
        return -(-count // self.attention.size)

    def row_counts(self, counts: Sequence[int]) -> list[int]:
        """The rows of each rank, from the rows of each group."""
        size = self.attention.size
        return [len(share(count, rank, size)) for count in counts for rank in range(size)]

    def group_rows(self, counts: Sequence[int]) -> slice:
        """The rows of this rank's group among those of all groups."""
        assert len(counts) == self.dp, f"counts of {len(counts)} groups, and there are {self.dp}"
        start = sum(counts[: self.dp_rank])
        return slice(start, start + counts[self.dp_rank])
