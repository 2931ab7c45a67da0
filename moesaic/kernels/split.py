"""Splits the pairs of replicated experts between their replicas, by the counts of all ranks.

T tokens · K chosen · E experts · P ranks with tokens · D ranks with slots · R replicated experts at
most.

    count_pairs    this rank's pairs of each expert; ranks then exchange them
    fill_replicas  how many pairs each replica gets, so that the fullest rank has few
    take_replicas  the slot of each pair, by its number among the pairs of its expert

Everything is in whole numbers, so all ranks find the same split, and a replica gets exactly the
pairs that it was given. Nothing depends on the host: the three can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.native import native

SPLIT = "moesaic.kernels.triton.split"
SWEEPS = 3
"""How often each expert is split. The second and third time it gives way to the experts that came
after it; more gain less than 0.2%."""


@dataclass(frozen=True, slots=True)
class ReplicaTable:
    """Where experts are, as int32. Two slots of an expert on one rank count as the first."""

    slots_ED: Tensor
    """The slot of each expert on each rank; -1: it has none there."""
    single_E: Tensor
    """The slot of an expert that one rank has; -1: several have it."""
    several_R: Tensor
    """The experts that several ranks have, padded by -1."""


@dataclass(frozen=True, slots=True)
class PairCounts:
    count_E: Tensor
    """This rank's pairs of each expert (int32)."""
    hist_CE: Tensor | None = None
    """Of the kernel: counts of chunks of pairs, and of the earlier parts of a chunk."""
    before_CSE: Tensor | None = None


@native(SPLIT)
def count_pairs(ids_TK: Tensor, num_experts: int) -> PairCounts:
    """Pairs of each expert; ids of -1 are none. Ids [[1, 0], [1, -1]] of 3: [1, 2, 0]."""
    flat_N = ids_TK.flatten().long()
    return PairCounts(torch.bincount(flat_N[flat_N >= 0], minlength=num_experts).int())


@native(SPLIT)
def fill_replicas(counts_PE: Tensor, table: ReplicaTable, rank: int) -> Tensor:
    """Ends [E, D] (int32): of the pairs that `rank` has of an expert, numbered from 0, rank d gets
    those from the end before its own to its own. Ranks take their pairs of an expert one rank after
    the other, so an end may lie before a rank's first pair or after its last. Rows of experts on
    one rank are not defined.

    Expert 0 on rank 0, expert 1 on ranks 0 and 1, 4 and 6 pairs of one source: the ends of expert 1
    are [1, 6], and both ranks have 5 pairs. If rank 1 of two sources has 2 of the 6: [-3, 2].
    """
    total_E = counts_PE.sum(0).tolist()
    before_E = counts_PE[:rank].sum(0).tolist()
    single_E, slots_ED = table.single_E.tolist(), table.slots_ED.tolist()
    ranks_of = {
        e: [d for d, slot in enumerate(slots_ED[e]) if slot >= 0]
        for e in table.several_R.tolist()
        if e >= 0
    }
    levels = [0] * len(slots_ED[0])
    for expert, slot in enumerate(single_E):
        if slot >= 0:
            levels[slots_ED[expert].index(slot)] += total_E[expert]
    shares = {e: [0] * len(ranks) for e, ranks in ranks_of.items()}
    for _ in range(SWEEPS):
        for e, ranks in ranks_of.items():
            rest = [levels[d] - share for d, share in zip(ranks, shares[e], strict=True)]
            shares[e] = fill(rest, total_E[e])
            for d, level, share in zip(ranks, rest, shares[e], strict=True):
                levels[d] = level + share
    quota_ED = torch.zeros(table.slots_ED.shape, dtype=torch.int64)
    for e, ranks in ranks_of.items():
        quota_ED[e, ranks] = torch.tensor(shares[e])
    return (quota_ED.cumsum(1) - torch.tensor(before_E)[:, None]).int()


def fill(levels: Sequence[int], amount: int) -> list[int]:
    """What each vessel gets of an amount that is poured over vessels of these levels, so that the
    lowest rise to one height; what does not divide evenly goes to the first of them. Levels 1, 3, 9
    and an amount of 5: 4, 1, 0."""
    filled, left = range(len(levels)), list(range(len(levels)))
    while True:
        total = amount + sum(levels[i] for i in left)
        height = total // len(left)
        below = [i for i in left if levels[i] <= height]
        if len(below) == len(left):
            break
        left = below
    first = left[: total - height * len(left)]
    return [height - levels[i] + (i in first) if i in left else 0 for i in filled]


@native(SPLIT)
def take_replicas(
    ids_TK: Tensor, counts: PairCounts, ends_ED: Tensor, table: ReplicaTable
) -> Tensor:
    """Slots [T, K] in the type of the ids; -1 stays. Pairs of an expert are numbered row by row.

    Ids [[1], [1], [0], [1]] with the slots [[0, -1], [1, 2]] of two experts on two ranks and the
    ends [1, 3] of expert 1: [[1], [2], [0], [2]].
    """
    flat_N = ids_TK.flatten().long()
    known_N = flat_N.clamp(min=0)
    order_N = flat_N.argsort(stable=True)
    missing = (flat_N < 0).sum()
    first_E = counts.count_E.long().cumsum(0) - counts.count_E + missing
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(len(flat_N), device=flat_N.device)
    number_N = place_N - first_E[known_N]
    rank_N = (ends_ED[known_N] <= number_N[:, None]).sum(1)
    rank_N = rank_N.clamp(max=ends_ED.shape[1] - 1)  # of experts on one rank
    single_N = table.single_E[known_N]
    slots_N = torch.where(single_N >= 0, single_N, table.slots_ED[known_N, rank_N])
    return torch.where(flat_N < 0, -1, slots_N).view_as(ids_TK).to(ids_TK.dtype)
