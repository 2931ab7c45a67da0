"""Token embedding and logits. T tokens · H hidden · R rows with logits · V vocabulary or a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.comm.mesh import share
from moesaic.kernels.linear import logits
from moesaic.layers.linear import product
from moesaic.layers.module import MatrixSlot, Module, Shard, TensorSlot, parameter
from moesaic.layers.parallel import Parallel


class Embedding(Module):
    """The vocabulary is split over the ranks of the attention group: one rank has a token's row,
    the others add zeros."""

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, parallel: Parallel
    ) -> None:
        super().__init__()
        self.group = parallel.attention
        self.held = share(vocab_size, self.group.rank, self.group.size)
        self.weight = parameter(len(self.held), hidden_size, dtype=dtype)
        self.shards = {"weight": Shard.of((vocab_size, hidden_size), self.held, range(hidden_size))}

    def forward(self, ids_T: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(ids_T, self.weight)
        local_T = ids_T - self.held.start
        here_T = (local_T >= 0) & (local_T < len(self.held))
        # Computed for all tokens: only the device knows how many are local.
        x_TH = F.embedding(local_T.clamp(0, len(self.held) - 1), self.weight)
        x_TH = torch.where(here_T[:, None], x_TH, 0)
        return self.group.all_reduce(x_TH, "embedding")


class LMHead(Module):
    """Logits, split by vocabulary over `parallel.vocab_tp` ranks. A tied head uses the weights of
    the embedding if both are split alike, else it holds a copy."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        parallel: Parallel,
        embedding: Embedding | None = None,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.group, self.shard, size = parallel.shard_group(parallel.vocab_tp)
        self.widths = [len(share(vocab_size, part, size)) for part in range(size)]
        held = share(vocab_size, self.shard, size)
        self.is_tied = embedding is not None and embedding.held == held
        if embedding is not None and self.is_tied:
            self.weight = embedding.weight
        else:
            self.weight = parameter(len(held), hidden_size, dtype=dtype)
        self.product = product(parallel.deterministic)
        # Directly in float32: these logits are neither gathered nor compared with another rank's.
        samples = parallel.attention.rank == 0
        self.float32 = self.group.size == 1 and samples and not parallel.deterministic
        self.shards = {"weight": Shard.of((vocab_size, hidden_size), held, range(hidden_size))}

    def slots(self, prefix: str) -> Iterator[TensorSlot | MatrixSlot]:
        return iter(()) if self.is_tied else super().slots(prefix)

    def forward(self, x_RH: Tensor, rows: Sequence[int]) -> Tensor:
        """`rows`: the number of rows of each attention group, if there are several."""
        wanted = slice(0, len(x_RH))
        if self.parallel.spans_groups(self.parallel.vocab_tp):
            wanted = self.parallel.group_rows(rows)
            x_RH = self._gather_rows(x_RH, rows)
        if self.float32:
            part_RV = logits(x_RH, self.weight)
        else:
            part_RV = self.product(x_RH, self.weight, None)
        if self.parallel.attention.rank > 0:  # the first rank of the group samples
            wanted = slice(0, 0)
        return self.group.gather_columns(part_RV, self.widths, wanted, "logits").float()

    def _gather_rows(self, x_RH: Tensor, rows: Sequence[int]) -> Tensor:
        """The first rank of a group contributes all of its rows, which are few."""
        group, others = self.parallel.attention, [0] * (self.parallel.attention.size - 1)
        counts = [brought for count in rows for brought in (count, *others)]
        mine_RH = x_RH if group.rank == 0 else x_RH[:0]
        return self.parallel.stage.gather_rows(mine_RH, counts, "rows of logits")


class CutHead(LMHead):
    """Some tokens' rows of another head, each on the rank that has it there. Logits are those of
    the tokens in ascending order. Copy the rows once the other head is loaded."""

    def __init__(self, whole: LMHead, tokens: Sequence[int]) -> None:
        Module.__init__(self)
        self.parallel, self.group = whole.parallel, whole.group
        self.product, self.float32, self.is_tied = whole.product, whole.float32, True
        starts = list(accumulate(whole.widths, initial=0))
        ranges = [range(*ends) for ends in pairwise(starts)]
        self.widths = [sum(token in held for token in tokens) for held in ranges]
        own = ranges[whole.shard]
        self._rows = [token - own.start for token in sorted(tokens) if token in own]
        self.shard = whole.shard
        self.weight = parameter(len(self._rows), whole.weight.shape[1], dtype=whole.weight.dtype)
        # In a tuple, torch does not take it for a module of this one.
        self._whole = (whole,)

    def copy_rows(self) -> None:
        self.weight.copy_(self._whole[0].weight[self._rows])
