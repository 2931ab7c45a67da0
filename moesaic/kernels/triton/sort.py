"""Sorts pairs of row and expert, and sums their results; see moesaic.kernels.experts.

R rows · K chosen · N = R * K pairs · E experts · X tiles · C chunks of pairs · S parts of a chunk.

A pair's place is the number of pairs before it in the order (expert, pair), counted without
atomics: the result is deterministic, and no buffer needs zeroing. Up to `FEW_PAIRS`, one launch
compares each pair with all others; above, chunks and their parts are counted first, and pairs are
compared within their part.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.experts import Groups, Matrices, max_tiles
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next
from moesaic.kernels.tuning import ExpertsShape, plan_for

FEW_PAIRS = 4096
PAIRS_A_PROGRAM = 16
CHUNK = 512
BINS = 512
"""Counts of a chunk: with more experts it has fewer parts."""
PART = 32
"""The fewest pairs of a part."""
MAX_EXPERTS = 1024
COUNTS = 16384
"""Elements of `hist_CE` that a program adds at once."""
PLACE_WARPS = 16
ALIGN = 16
ZEROED_ROWS = 8
ZEROED_COLUMNS = 2048


@cache
def constants(experts: int, block: int) -> dict[str, int]:
    """Kernel constants: experts, also padded to a power of two, and rows of a tile."""
    if not 0 < experts <= MAX_EXPERTS:
        raise ValueError(f"cannot sort {experts} experts: use 1..{MAX_EXPERTS}")
    return {"E": experts, "EP": max(32, triton.next_power_of_2(experts)), "BLOCK": block}


def sort_pairs(
    ids_RK: Tensor, num_experts: int, block: int, load_E: Tensor | None = None
) -> Groups:
    ids_RK = ids_RK.contiguous()
    num_pairs = ids_RK.numel()
    sizes = constants(num_experts, block)
    groups, out = _allocate(num_pairs, num_pairs, sizes, ids_RK.shape[1], ids_RK.device)
    pdl = dependent_launch(ids_RK)
    if num_pairs <= FEW_PAIRS:
        width = max(32, triton.next_power_of_2(num_pairs))
        _sort_few[(1 + triton.cdiv(num_pairs, PAIRS_A_PROGRAM),)](
            ids_RK, *out, load_E, num_pairs, groups.counters.numel(), **sizes,
            BI=PAIRS_A_PROGRAM, BJ=min(width, 1024), NP=width, PDL=pdl.on,
            num_warps=8 if width > 256 else 4, **pdl.options,
        )  # fmt: skip
        return groups
    chunks, parts = triton.cdiv(num_pairs, CHUNK), chunk_parts(sizes["EP"])
    # Counts of each chunk, and of the earlier parts of its chunk for each part.
    hist_CE = torch.empty(chunks, sizes["EP"], dtype=torch.int32, device=ids_RK.device)
    before_CSE = hist_CE.new_empty(chunks, parts, sizes["EP"])
    count_chunks[(chunks,)](
        ids_RK, hist_CE, before_CSE, num_pairs, EP=sizes["EP"], CHUNK=CHUNK, PARTS=parts,
        PDL=pdl.on, num_warps=4, **pdl.options,
    )  # fmt: skip
    _place_chunks[(chunks,)](
        ids_RK, hist_CE, before_CSE, *out, load_E, num_pairs, groups.counters.numel(), chunks,
        **sizes, CHUNK=CHUNK, PARTS=parts, BC=min(128, COUNTS // sizes["EP"]), BJ=32,
        PDL=pdl.on, num_warps=PLACE_WARPS, **pdl.options,
    )  # fmt: skip
    return groups


def chunk_parts(padded: int) -> int:
    return max(1, min(BINS // padded, CHUNK // PART))


def group_pairs(ids_RK: Tensor, w2: Matrices, load_E: Tensor | None = None) -> Groups:
    ids_RK = ids_RK.contiguous()
    num_experts, num_pairs = w2.shape[0], ids_RK.numel()
    plan = plan_for(ids_RK.device, ExpertsShape(w2.format, *w2.shape), num_pairs)
    if len(ids_RK) != 1 or plan.implementation != "small" or plan.fused:
        return sort_pairs(ids_RK, num_experts, plan.block, load_E)
    sizes = constants(num_experts, plan.block)
    groups, _ = _allocate(num_pairs, num_pairs, sizes, num_pairs, ids_RK.device)
    return replace(groups, ids_K=ids_RK.view(-1), load_E=load_E)


def row_arguments(groups: Groups) -> dict[str, object]:
    """Arguments of `sort_row` besides a kernel's lists, by name."""
    sizes = constants(groups.count_E.numel(), groups.block)
    direct = groups.ids_K is not None
    return {
        "ids": groups.ids_K,
        "counters": groups.counters if direct else None,
        "load": groups.load_E,
        "num_counters": groups.counters.numel() if direct else 0,
        "num_pairs": groups.num_places if direct else 0,
        "E": sizes["E"] if direct else 0,
        "EP": sizes["EP"] if direct else 0,
        "NP": max(32, triton.next_power_of_2(groups.num_places)) if direct else 0,
    }


def blocks(count_E: Tensor, rows: int, block: int, load_E: Tensor | None = None) -> Groups:
    sizes = constants(count_E.numel(), block)
    groups, (_, *out) = _allocate(None, sizes["E"] * rows, sizes, 1, count_E.device)
    pdl = dependent_launch(count_E)
    _blocks[(1,)](
        count_E, *out, load_E, rows, groups.counters.numel(), **sizes, PDL=pdl.on,
        num_warps=4, **pdl.options,
    )  # fmt: skip
    return groups


def _allocate(
    pairs: int | None, places: int, sizes: dict[str, int], top_k: int, device: torch.device
) -> tuple[Groups, tuple[Tensor, ...]]:
    """Allocates all arrays in one tensor; without `pairs` there is no order. Also returns them in
    the order of the kernels' parameters."""
    tiles = max(1, max_tiles(places, sizes["E"], sizes["BLOCK"]))
    lengths = (pairs or 0, sizes["E"], sizes["E"], tiles, tiles, 1, tiles + 2)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + -(-length // ALIGN) * ALIGN)
    memory = torch.empty(starts[-1], dtype=torch.int32, device=device)
    views = zip(starts, lengths, strict=False)
    arrays = tuple(memory[start : start + length] for start, length in views)
    order, *lists, counters = arrays
    shown = None if pairs is None else order
    return Groups(shown, *lists, sizes["BLOCK"], top_k, places, counters), arrays


@triton.jit
def expert_keys(ids, places, num_pairs, E: tl.constexpr):
    """The expert of each pair; E for a pair without one."""
    found = tl.load(ids + places, mask=places < num_pairs, other=-1).to(tl.int32)
    return tl.where(found < 0, E, found)


@triton.jit
def _write_tiles(count_E, first_E, experts_E, lists, begin, step, BLOCK: tl.constexpr):
    """Writes tiles begin, begin + step, … of every expert; returns the number of all tiles."""
    _, _, tile_expert, tile_place, _, _, _ = lists
    tiles_E = (count_E + BLOCK - 1) // BLOCK
    at_E = tl.cumsum(tiles_E, 0) - tiles_E
    for tile in range(begin, tl.max(tiles_E, 0), step):
        tl.store(tile_expert + at_E + tile, experts_E, mask=tile < tiles_E)
        tl.store(tile_place + at_E + tile, first_E + tile * BLOCK, mask=tile < tiles_E)
    return tl.sum(tiles_E, 0)


@triton.jit
def _write_summary(
    count_E, first_E, experts_E, total, lists, num_counters, E: tl.constexpr, EP: tl.constexpr
):
    """Writes all lists but the order and the tiles; adds the counts to `load` without waiting."""
    first, count, _, _, num_tiles, counters, load = lists
    if load is not None:
        some = (experts_E < E) & (count_E > 0)
        tl.atomic_add(load + experts_E, count_E.to(tl.int64), mask=some, sem="relaxed")
    tl.store(first + experts_E, first_E, mask=experts_E < E)
    tl.store(count + experts_E, count_E, mask=experts_E < E)
    tl.store(num_tiles, total)
    for start in range(0, num_counters, EP):
        place = start + experts_E
        tl.store(counters + place, tl.zeros_like(place), mask=place < num_counters)


@triton.jit
def _write_lists(
    ids, lists, num_pairs, num_counters,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Writes all lists but the order, in one program that reads all pairs."""
    key_N = expert_keys(ids, tl.arange(0, NP), num_pairs, E)
    experts_E = tl.arange(0, EP)
    count_E = tl.histogram(key_N, EP, mask=key_N < E)
    first_E = tl.cumsum(count_E, 0) - count_E
    total = _write_tiles(count_E, first_E, experts_E, lists, 0, 1, BLOCK)
    _write_summary(count_E, first_E, experts_E, total, lists, num_counters, E, EP)


@triton.jit
def _place_pairs(
    ids, order, begin, num_pairs,
    E: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Writes BI pairs, from `begin` on, to their places in the order."""
    pair_I = begin + tl.arange(0, BI)
    rank_I = expert_keys(ids, pair_I, num_pairs, E) * NP + pair_I
    before_IJ = tl.zeros([BI, BJ], dtype=tl.int32)
    for start in range(0, num_pairs, BJ):
        pair_J = start + tl.arange(0, BJ)
        rank_J = expert_keys(ids, pair_J, num_pairs, E) * NP + pair_J
        before_IJ += (rank_J[None, :] < rank_I[:, None]).to(tl.int32)
    tl.store(order + tl.sum(before_IJ, 1), pair_I, mask=pair_I < num_pairs)


@triton.jit
def sort_row(
    ids, order, first, count, tile_expert, tile_place, num_tiles, counters, load,
    num_pairs, num_counters,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Writes all lists of one row's pairs, in one program of a kernel that needs none of them."""
    lists = (first, count, tile_expert, tile_place, num_tiles, counters, load)
    _write_lists(ids, lists, num_pairs, num_counters, E, EP, BLOCK, NP)
    _place_pairs(ids, order, 0, num_pairs, E, NP, NP, NP)


@triton.jit(do_not_specialize=["num_counters"])
def _sort_few(
    ids, order, first, count, tile_expert, tile_place, num_tiles, counters, load,
    num_pairs, num_counters,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, NP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 counts and writes the tiles; each other one places BI pairs."""
    await_inputs(PDL)
    release_next(PDL)
    pid = tl.program_id(0)
    if pid == 0:
        lists = (first, count, tile_expert, tile_place, num_tiles, counters, load)
        _write_lists(ids, lists, num_pairs, num_counters, E, EP, BLOCK, NP)
    else:
        _place_pairs(ids, order, (pid - 1) * BI, num_pairs, E, BI, BJ, NP)


@triton.jit
def count_chunks(
    ids, hist, before, num_pairs,
    EP: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    release_next(PDL)
    pid = tl.program_id(0)
    place_I = tl.arange(0, CHUNK)
    key_I = expert_keys(ids, pid * CHUNK + place_I, num_pairs, EP)
    bin_I = place_I // (CHUNK // PARTS) * EP + key_I
    count_SE = tl.reshape(tl.histogram(bin_I, PARTS * EP, mask=key_I < EP), [PARTS, EP])
    tl.store(hist + pid * EP + tl.arange(0, EP), tl.sum(count_SE, 0))
    at = (pid * PARTS + tl.arange(0, PARTS))[:, None] * EP + tl.arange(0, EP)[None, :]
    tl.store(before + at, tl.cumsum(count_SE, 0) - count_SE)


@triton.jit
def earlier_in_part(
    ids, begin, num_pairs,
    EP: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Number of earlier pairs of the same part and expert, for each pair: [PARTS, SIZE]."""
    part_S = begin + tl.arange(0, PARTS) * SIZE
    place_I = tl.arange(0, SIZE)
    key_SI = expert_keys(ids, part_S[:, None] + place_I[None, :], num_pairs, EP)
    earlier_SIJ = tl.zeros([PARTS, SIZE, BJ], dtype=tl.int32)
    for start in range(0, SIZE, BJ):
        place_J = start + tl.arange(0, BJ)
        key_SJ = expert_keys(ids, part_S[:, None] + place_J[None, :], num_pairs, EP)
        before_SIJ = (place_J[None, :] < place_I[:, None])[None, :, :]
        same_SIJ = key_SJ[:, None, :] == key_SI[:, :, None]
        earlier_SIJ += (same_SIJ & before_SIJ).to(tl.int32)
    return tl.sum(earlier_SIJ, 2)


@triton.jit(do_not_specialize=["num_counters", "num_chunks"])
def _place_chunks(
    ids, hist, before, order, first, count, tile_expert, tile_place, num_tiles, counters, load,
    num_pairs, num_counters, num_chunks,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program places its chunk and writes its share of the tiles."""
    pid = tl.program_id(0)
    await_inputs(PDL)
    release_next(PDL)
    place_I = tl.arange(0, CHUNK)
    key_I = expert_keys(ids, pid * CHUNK + place_I, num_pairs, EP)
    part_I = pid * PARTS + place_I // (CHUNK // PARTS)
    in_chunk_I = tl.load(before + part_I * EP + key_I, mask=key_I < EP, other=0)
    experts_E = tl.arange(0, EP)
    count_E = tl.zeros([EP], dtype=tl.int32)
    before_E = tl.zeros([EP], dtype=tl.int32)
    for start in range(0, num_chunks, BC):
        chunk_C = start + tl.arange(0, BC)
        at = chunk_C[:, None] * EP + experts_E[None, :]
        found_CE = tl.load(hist + at, mask=chunk_C[:, None] < num_chunks, other=0)
        count_E += tl.sum(found_CE, 0)
        before_E += tl.sum(tl.where(chunk_C[:, None] < pid, found_CE, 0), 0)
    earlier_SI = earlier_in_part(ids, pid * CHUNK, num_pairs, EP, PARTS, CHUNK // PARTS, BJ)
    in_chunk_I += tl.reshape(earlier_SI, [CHUNK])
    first_E = tl.cumsum(count_E, 0) - count_E
    to_I = tl.gather(first_E + before_E, tl.minimum(key_I, EP - 1), 0) + in_chunk_I
    tl.store(order + to_I, pid * CHUNK + place_I, mask=key_I < EP)

    lists = (first, count, tile_expert, tile_place, num_tiles, counters, load)
    total = _write_tiles(count_E, first_E, experts_E, lists, pid, num_chunks, BLOCK)
    if pid == 0:
        _write_summary(count_E, first_E, experts_E, total, lists, num_counters, E, EP)


@triton.jit(do_not_specialize=["num_counters"])
def _blocks(
    counts, first, count, tile_expert, tile_place, num_tiles, counters, load,
    rows, num_counters,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    release_next(PDL)
    experts_E = tl.arange(0, EP)
    count_E = tl.load(counts + experts_E, mask=experts_E < E, other=0).to(tl.int32)
    first_E = experts_E * rows
    lists = (first, count, tile_expert, tile_place, num_tiles, counters, load)
    total = _write_tiles(count_E, first_E, experts_E, lists, 0, 1, BLOCK)
    _write_summary(count_E, first_E, experts_E, total, lists, num_counters, E, EP)


def sum_pairs(y_NH: Tensor, ids_RK: Tensor, out_RH: Tensor, add_RH: Tensor | None = None) -> Tensor:
    rows, top_k = ids_RK.shape
    hidden = y_NH.shape[1]
    if not rows:
        return out_RH
    assert y_NH.is_contiguous() and ids_RK.is_contiguous() and out_RH.is_contiguous()
    assert add_RH is None or add_RH.is_contiguous()
    if add_RH is None and out_RH.data_ptr() == y_NH.data_ptr():
        assert top_k == 1, top_k
        return _zero_missing(out_RH, ids_RK)
    # Few rows get narrow programs, to have more of them.
    few = rows < 128
    width = min(_power_of_2(hidden), 512 if few else 2048)
    pdl = dependent_launch(y_NH)
    _sum_pairs[(rows, -(-hidden // width))](
        y_NH, ids_RK, add_RH, out_RH, H=hidden, K=top_k, BH=width, EAGER=few, PDL=pdl.on,
        num_warps=max(1, min(8, width // 256)), **pdl.options,
    )  # fmt: skip
    return out_RH


# The uncached function takes microseconds.
_power_of_2 = cache(triton.next_power_of_2)


@triton.jit
def _sum_pairs(
    y, ids, add, out, H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr,
    EAGER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BH + tl.arange(0, BH)
    inside = column < H
    release_next(PDL)
    await_inputs(PDL)
    if EAGER:
        total = sum_few_pairs(y, ids, row, column, row >= 0, inside, H, K)
    else:
        total = tl.zeros([BH], dtype=tl.float32)
        for k in tl.static_range(K):
            pair = row * K + k
            known = tl.load(ids + pair) >= 0
            part = tl.load(y + pair * H + column, mask=inside & known, other=0.0)
            total += part.to(tl.float32)
    if add is not None:
        total += tl.load(add + row * H + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * H + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_few_pairs(
    y, ids, row, column, there, inside, H: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Sums in float32. Loads pairs without an expert, too, so that no load waits for an id. Without
    the barrier, the compiler would keep only three loads in flight: it cannot add without the ids,
    which are loaded behind the barrier, and must load all pairs before it."""
    parts = ()
    for k in tl.static_range(K):
        parts = parts + (tl.load(y + (row * K + k) * H + column, mask=inside, other=0.0),)
    tl.debug_barrier()
    total = tl.zeros(inside.shape, dtype=tl.float32)
    for k in tl.static_range(K):
        known = tl.load(ids + row * K + k, mask=there, other=-1) >= 0
        total += tl.where(known, parts[k], 0.0).to(tl.float32)
    return total


def _zero_missing(y_RH: Tensor, ids_R1: Tensor) -> Tensor:
    rows, hidden = y_RH.shape
    width = min(triton.next_power_of_2(hidden), ZEROED_COLUMNS)
    pdl = dependent_launch(y_RH)
    _zero_missing_kernel[(triton.cdiv(rows, ZEROED_ROWS), triton.cdiv(hidden, width))](
        y_RH, ids_R1, rows, H=hidden, BR=ZEROED_ROWS, BH=width, PDL=pdl.on,
        num_warps=4, **pdl.options,
    )  # fmt: skip
    return y_RH


@triton.jit
def _zero_missing_kernel(
    y, ids, rows, H: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr
):
    row_R = tl.program_id(0) * BR + tl.arange(0, BR)
    column_H = tl.program_id(1) * BH + tl.arange(0, BH)
    await_inputs(PDL)
    release_next(PDL)
    empty_R = tl.load(ids + row_R, mask=row_R < rows, other=0) < 0
    if tl.max(empty_R.to(tl.int32), 0) > 0:
        to_RH = y + row_R.to(tl.int64)[:, None] * H + column_H[None, :]
        zeros_RH = tl.zeros([BR, BH], dtype=y.dtype.element_ty)
        tl.store(to_RH, zeros_RH, mask=empty_R[:, None] & (column_H < H)[None, :])
