"""Splits pairs between replicas; the twins and examples are in kernels/split.py.

T tokens · K chosen · N = T * K pairs · E experts · P ranks with tokens · D ranks with slots · R
replicated experts at most · C chunks of pairs.

Chunks of pairs are counted as for sorting (kernels/triton/sort.py). One warp fills the replicas:
the experts one after the other, each on all ranks at once, a rank a thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.split import SWEEPS, PairCounts, ReplicaTable
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next
from moesaic.kernels.triton.sort import (
    CHUNK,
    COUNTS,
    PLACE_WARPS,
    chunk_parts,
    constants,
    count_chunks,
    earlier_in_part,
    expert_keys,
)

COUNTED_SOURCES = 8
"""Ranks whose counts are added at once."""
COUNTED_EXPERTS = 32
RANKS_AT_ONCE = 32
NO_END = tl.constexpr(2**31 - 1)


def count_pairs(ids_TK: Tensor, num_experts: int) -> PairCounts:
    num_pairs, padded = ids_TK.numel(), constants(num_experts, 1)["EP"]
    chunks, parts = triton.cdiv(num_pairs, CHUNK), chunk_parts(padded)
    hist_CE = torch.empty(chunks, padded, dtype=torch.int32, device=ids_TK.device)
    before_CSE = hist_CE.new_empty(chunks, parts, padded)
    if not num_pairs:
        return PairCounts(hist_CE.new_zeros(num_experts), hist_CE, before_CSE)
    pdl = dependent_launch(ids_TK)
    count_chunks[(chunks,)](
        ids_TK.contiguous(), hist_CE, before_CSE, num_pairs, EP=padded, CHUNK=CHUNK, PARTS=parts,
        PDL=pdl.on, num_warps=4, **pdl.options,
    )  # fmt: skip
    count_E = hist_CE[0] if chunks == 1 else hist_CE.sum(0, dtype=torch.int32)
    return PairCounts(count_E[:num_experts], hist_CE, before_CSE)


def fill_replicas(counts_PE: Tensor, table: ReplicaTable, rank: int) -> Tensor:
    sources, experts = counts_PE.shape
    ranks = table.slots_ED.shape[1]
    sizes = constants(experts, 1)
    width = max(32, triton.next_power_of_2(ranks))
    ends_ED = torch.empty_like(table.slots_ED)
    rows = table.several_R.numel()
    # Totals and earlier pairs of experts, and the shares of replicated experts on ranks.
    scratch = ends_ED.new_empty(2 * sizes["EP"] + rows * width)
    pdl = dependent_launch(counts_PE)
    _fill_kernel[(1,)](
        counts_PE.contiguous(), table.slots_ED, table.single_E, table.several_R, scratch, ends_ED,
        sources, rank, rows, D=ranks, DP=width, E=experts, EP=sizes["EP"], BP=COUNTED_SOURCES,
        BE=COUNTED_EXPERTS, SWEEPS=SWEEPS, PDL=pdl.on, num_warps=1, **pdl.options,
    )  # fmt: skip
    return ends_ED


def take_replicas(
    ids_TK: Tensor, counts: PairCounts, ends_ED: Tensor, table: ReplicaTable
) -> Tensor:
    ids_TK = ids_TK.contiguous()
    slots_TK = torch.empty_like(ids_TK)
    assert counts.hist_CE is not None and counts.before_CSE is not None
    chunks, parts, padded = counts.before_CSE.shape
    ranks = ends_ED.shape[1]
    if chunks:
        pdl = dependent_launch(ids_TK)
        _take_kernel[(chunks,)](
            ids_TK, counts.hist_CE, counts.before_CSE, ends_ED, table.slots_ED, table.single_E,
            slots_TK, ids_TK.numel(), D=ranks, BD=min(RANKS_AT_ONCE, triton.next_power_of_2(ranks)),
            EP=padded, CHUNK=CHUNK, PARTS=parts, BC=min(128, COUNTS // padded), BJ=32, PDL=pdl.on,
            num_warps=PLACE_WARPS, **pdl.options,
        )  # fmt: skip
    return slots_TK


@triton.jit
def _add_counts(
    counts, totals, before, num_sources, rank, E: tl.constexpr, EP: tl.constexpr, BP: tl.constexpr
):
    """Stores the pairs of each expert on all ranks, and on those before this one."""
    expert_E = tl.arange(0, EP)
    total_E = tl.zeros([EP], dtype=tl.int32)
    before_E = tl.zeros([EP], dtype=tl.int32)
    for start in range(0, num_sources, BP):
        source_P = start + tl.arange(0, BP)
        mask = (source_P < num_sources)[:, None] & (expert_E < E)[None, :]
        found_PE = tl.load(counts + source_P[:, None] * E + expert_E[None, :], mask, 0)
        total_E += tl.sum(found_PE, 0)
        before_E += tl.sum(tl.where((source_P < rank)[:, None], found_PE, 0), 0)
    tl.store(totals + expert_E, total_E)
    tl.store(before + expert_E, before_E)


@triton.jit
def _fixed_levels(
    totals, slots, single, E: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BE: tl.constexpr
):
    """The pairs of experts that one rank has, by rank."""
    rank_D = tl.arange(0, DP)
    level_D = tl.zeros([DP], dtype=tl.int32)
    for start in range(0, E, BE):
        expert_B = start + tl.arange(0, BE)
        mask = (expert_B < E)[:, None] & (rank_D < D)[None, :]
        slot_BD = tl.load(slots + expert_B[:, None] * D + rank_D[None, :], mask, -1)
        fixed_B = tl.load(single + expert_B, expert_B < E, -1) >= 0
        total_B = tl.load(totals + expert_B, expert_B < E, 0)
        here_BD = (slot_BD >= 0) & fixed_B[:, None]
        level_D += tl.sum(tl.where(here_BD, total_B[:, None], 0), 0)
    return level_D


@triton.jit
def _fill(level_D, vessel_D, amount):
    """What each vessel gets, as `fill` of the twin."""
    left_D = vessel_D
    count = tl.sum(left_D.to(tl.int32), 0)
    total = amount + tl.sum(tl.where(left_D, level_D, 0), 0)
    height = total // count
    below_D = left_D & (level_D <= height)
    low = tl.sum(below_D.to(tl.int32), 0)
    while low < count:
        left_D = below_D
        count = low
        total = amount + tl.sum(tl.where(left_D, level_D, 0), 0)
        height = total // count
        below_D = left_D & (level_D <= height)
        low = tl.sum(below_D.to(tl.int32), 0)
    number_D = tl.cumsum(left_D.to(tl.int32), 0) - 1
    more_D = (number_D < total - height * count).to(tl.int32)
    return tl.where(left_D, height - level_D + more_D, 0)


@triton.jit(do_not_specialize=["num_sources", "rank", "num_several"])
def _fill_kernel(
    counts, slots, single, several, scratch, ends, num_sources, rank, num_several,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BP: tl.constexpr,
    BE: tl.constexpr, SWEEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    await_inputs(PDL)
    totals, before, shares = scratch, scratch + EP, scratch + 2 * EP
    _add_counts(counts, totals, before, num_sources, rank, E, EP, BP)
    tl.debug_barrier()  # Other threads read what one has stored.
    level_D = _fixed_levels(totals, slots, single, E, D, DP, BE)
    rank_D = tl.arange(0, DP)
    for sweep in range(SWEEPS):
        tl.debug_barrier()
        for number in range(num_several):
            expert = tl.load(several + number)
            if expert >= 0:
                slot_D = tl.load(slots + expert * D + rank_D, rank_D < D, -1)
                share_ptr = shares + number * DP + rank_D
                rest_D = level_D - tl.load(share_ptr, (rank_D < D) & (sweep > 0), 0)
                share_D = _fill(rest_D, slot_D >= 0, tl.load(totals + expert))
                level_D = rest_D + share_D
                tl.store(share_ptr, share_D)
                end_D = tl.cumsum(share_D, 0) - tl.load(before + expert)
                tl.store(ends + expert * D + rank_D, end_D, (rank_D < D) & (sweep == SWEEPS - 1))


@triton.jit
def _take_kernel(
    ids, hist, before, ends, slots, single, out, num_pairs,
    D: tl.constexpr, BD: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program takes the replicas of a chunk."""
    release_next(PDL)
    await_inputs(PDL)
    pid = tl.program_id(0)
    place_I = tl.arange(0, CHUNK)
    key_I = expert_keys(ids, pid * CHUNK + place_I, num_pairs, EP)
    valid_I = key_I < EP
    part_I = pid * PARTS + place_I // (CHUNK // PARTS)
    number_I = tl.load(before + part_I * EP + key_I, valid_I, 0)
    earlier_SI = earlier_in_part(ids, pid * CHUNK, num_pairs, EP, PARTS, CHUNK // PARTS, BJ)
    number_I += tl.reshape(earlier_SI, [CHUNK])
    expert_E = tl.arange(0, EP)
    before_E = tl.zeros([EP], dtype=tl.int32)
    for start in range(0, pid, BC):
        chunk_C = start + tl.arange(0, BC)
        at = chunk_C[:, None] * EP + expert_E[None, :]
        before_E += tl.sum(tl.load(hist + at, (chunk_C < pid)[:, None], 0), 0)
    number_I += tl.gather(before_E, tl.minimum(key_I, EP - 1), 0)

    single_I = tl.load(single + key_I, valid_I, -1)
    several_I = valid_I & (single_I < 0)
    taken_I = tl.zeros([CHUNK], dtype=tl.int32)
    for start in range(0, D, BD):
        rank_B = start + tl.arange(0, BD)
        mask = several_I[:, None] & (rank_B < D)[None, :]
        end_IB = tl.load(ends + key_I[:, None] * D + rank_B[None, :], mask, NO_END)
        taken_I += tl.sum((end_IB <= number_I[:, None]).to(tl.int32), 1)
    # After a failed exchange counts are zeros, and no rank takes these pairs.
    taken_I = tl.minimum(taken_I, D - 1)
    slot_I = tl.load(slots + key_I * D + taken_I, several_I, -1)
    slot_I = tl.where(several_I, slot_I, single_I)
    pair_I = pid * CHUNK + place_I
    tl.store(out + pair_I, slot_I.to(out.dtype.element_ty), pair_I < num_pairs)
