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
    """What the kernel keeps: counts of chunks of pairs, and of the earlier parts of a chunk."""
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
    totals_E = counts_PE.sum(0)
    before_E = counts_PE[:rank].sum(0)
    several_R = table.several_R[table.several_R >= 0].long()
    amounts = dict(zip(several_R.tolist(), totals_E[several_R].tolist(), strict=True))
    ranks_of = {
        e: [d for d, slot in enumerate(slots) if slot >= 0]
        for e, slots in zip(amounts, table.slots_ED[several_R].tolist(), strict=True)
    }
    fixed_ED = (table.slots_ED >= 0) & (table.single_E >= 0)[:, None]
    levels = (fixed_ED * totals_E[:, None]).sum(0).tolist()
    shares = {e: [0] * len(ranks) for e, ranks in ranks_of.items()}
    for _ in range(SWEEPS):
        for e, ranks in ranks_of.items():
            rest = [levels[d] - share for d, share in zip(ranks, shares[e], strict=True)]
            shares[e] = fill(rest, amounts[e])
            for d, level, share in zip(ranks, rest, shares[e], strict=True):
                levels[d] = level + share
    quotas = [dict(zip(ranks, shares[e], strict=True)) for e, ranks in ranks_of.items()]
    quota_RD = torch.tensor(
        [[quota.get(d, 0) for d in range(len(levels))] for quota in quotas],
        device=table.slots_ED.device,
    )
    ends_ED = torch.zeros_like(table.slots_ED)
    if quotas:
        ends_ED[several_R] = (quota_RD.cumsum(1) - before_E[several_R, None]).int()
    return ends_ED


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
    order_N = flat_N.argsort(stable=True)[int((flat_N < 0).sum()) :]
    count_E1 = counts.count_E[:, None]
    end_ED = torch.minimum(ends_ED.clamp(min=0), count_E1)
    taken_ED = end_ED.diff(dim=1, prepend=torch.zeros_like(count_E1))
    fixed_ED = (table.single_E >= 0)[:, None]
    taken_ED = torch.where(fixed_ED, (table.slots_ED >= 0) * count_E1, taken_ED)
    slots_N = torch.full_like(flat_N, -1)
    slots_N[order_N] = torch.repeat_interleave(table.slots_ED.flatten(), taken_ED.flatten()).long()
    return slots_N.view_as(ids_TK).to(ids_TK.dtype)
