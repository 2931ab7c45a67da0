"""Dense collectives by kernels that write into other ranks' memory (kernels/collectives.py).

P ranks · B elements of a block · N elements of a part · M elements of a result.

Ranks may share a GPU, and whoever waits must leave room for those it waits for: so few programs
wait, and they are small. Small parts take one kernel, whose programs write, signal, wait and read;
large ones a kernel that writes and signals, a wait of one program, and a kernel that reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.a2a import Call, State
from moesaic.kernels.collectives import (
    BLOCK_BYTES,
    HALVES,
    HEAD_BYTES,
    Board,
    Columns,
    Cut,
    Sum,
    Target,
)
from moesaic.kernels.triton.flags import await_flags, flag_word, is_broken, raise_flags
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next

WARPS = 4
THREADS = 32 * WARPS
# Programs of a kernel that writes and signals: enough to write as fast as the memory takes it.
MOST_PROGRAMS = 128
MOST_ELEMENTS = 2**31 - 1
_HALVES = tl.constexpr(HALVES)
_HEAD = tl.constexpr(HEAD_BYTES)
_CHANNELS = tl.constexpr(int(State.CHANNELS))


def push(
    call: Call, board: Board, x_N: Tensor | None, out_M: Tensor | None, cut: Cut, target: Target
) -> None:
    given = x_N if x_N is not None else out_M
    assert given is not None and cut.stop <= MOST_ELEMENTS
    size = board.lane_elements(len(cut), given.element_size())
    lanes = max(1, triton.cdiv(len(cut), size))
    assert lanes <= board.lanes, (cut, board)
    mail, pdl = call.mail, dependent_launch(given)
    _push_kernel[(lanes,)](
        x_N, out_M, mail.bases_P, mail.state, mail.desk,
        mail.flags, board.pushed, HEAD_BYTES + board.lane_bytes, call.tag, mail.rank,
        0 if x_N is None else min(x_N.numel(), cut.stop), cut.begin, cut.stop, size,
        **_places(target, out_M), **_kind(target),
        PUT=x_N is not None, TAKE=out_M is not None, P=mail.size,
        BLOCK=BLOCK_BYTES // given.element_size(), THREADS=THREADS, num_warps=WARPS,
        PDL=pdl.on, **pdl.options,
    )  # fmt: skip


def post(call: Call, board: Board, x_N: Tensor, cut: Cut, target: Target) -> None:
    own = Cut(cut.begin, max(cut.begin, min(x_N.numel(), cut.stop)))
    _post(call, board, x_N, own, target, sums=False)


def post_sums(call: Call, board: Board, dtype: torch.dtype, cut: Cut, size: int) -> None:
    _wait(call)
    start = min(len(cut), call.mail.rank * size)
    # Says of what type they are.
    like = torch.empty(0, dtype=dtype, device=call.mail.state.device)
    share = Cut(start, min(len(cut), start + size))
    _post(call, board, like, share, Sum(), sums=True)


def _post(
    call: Call, board: Board, x_N: Tensor, cut: Cut, target: Target, *, sums: bool
) -> None:
    mail, pdl = call.mail, dependent_launch(call.mail.state)
    block = BLOCK_BYTES // x_N.element_size()
    kind = _kind(target)
    _post_kernel[(max(1, min(MOST_PROGRAMS, triton.cdiv(len(cut), block))),)](
        x_N, mail.bases_P, mail.state,
        mail.flags, board.posted, HEAD_BYTES + board.post_bytes, call.channel, call.tag, mail.rank,
        cut.begin, len(cut), 0 if kind["EVEN"] else target.width,
        SUMS=sums, EVEN=kind["EVEN"], P=mail.size, BLOCK=block, THREADS=THREADS, num_warps=WARPS,
        PDL=pdl.on, **pdl.options,
    )  # fmt: skip


def pull(call: Call, board: Board, out_M: Tensor, cut: Cut, target: Target) -> None:
    assert cut.stop <= MOST_ELEMENTS
    _wait(call)
    block = BLOCK_BYTES // out_M.element_size()
    if not out_M.numel() or not len(cut):
        return
    mail, pdl = call.mail, dependent_launch(out_M)
    _pull_kernel[(triton.cdiv(len(cut), block),)](
        out_M, mail.bases_P, mail.state,
        board.posted, HEAD_BYTES + board.post_bytes, call.channel, mail.rank,
        cut.begin, cut.stop, **_places(target, out_M), **_kind(target),
        P=mail.size, BLOCK=block, THREADS=THREADS, num_warps=WARPS, PDL=pdl.on, **pdl.options,
    )  # fmt: skip


def _wait(call: Call) -> None:
    mail, pdl = call.mail, dependent_launch(call.mail.state)
    _wait_kernel[(1,)](
        mail.bases_P, mail.state, mail.desk, mail.flags, call.channel, call.tag, mail.rank,
        P=mail.size, THREADS=THREADS, num_warps=WARPS, PDL=pdl.on, **pdl.options,
    )  # fmt: skip


def _places(target: Target, out_M: Tensor | None) -> dict[str, int]:
    """What a kernel has to know of where the result goes."""
    size = 0 if out_M is None else out_M.numel()
    if isinstance(target, Sum):
        return dict(first=target.first, limit=size, rows=1, width=0, total=0, shift=0)
    return dict(
        first=target.first,
        limit=size if target.limit is None else target.limit,
        rows=target.rows,
        width=target.width,
        total=target.total,
        shift=target.shift,
    )


def _kind(target: Target) -> dict[str, bool]:
    if isinstance(target, Columns):
        return dict(SUM=False, EVEN=target.even, FLAT=target.rows == 1)
    return dict(SUM=True, EVEN=True, FLAT=True)


@triton.jit
def _part(
    bases, plane, slot, half, rank, lane, peer: tl.constexpr, P: tl.constexpr, PUSHED: tl.constexpr
):
    """Address of a rank's part, behind its head: here if it was pushed, there if posted."""
    if PUSHED:
        place = (lane * _HALVES + half) * P + peer
        return tl.load(bases + rank) + plane + place * slot + _HEAD
    else:
        return tl.load(bases + peer) + plane + half * slot + _HEAD


@triton.jit
def _pointer(address, dtype: tl.constexpr):
    """Planes and their parts begin at multiples of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _sum_parts(
    bases, plane, slot, half, rank, lane, place_B, mask_B,
    dtype: tl.constexpr, P: tl.constexpr, PUSHED: tl.constexpr,
):  # fmt: skip
    """In rank order: narrow floats in float32, others in their own type."""
    WIDE: tl.constexpr = tl.float32 if dtype.is_floating() and dtype.primitive_bitwidth < 32 else dtype
    part = _pointer(_part(bases, plane, slot, half, rank, lane, 0, P, PUSHED), dtype)
    total_B = tl.load(part + place_B, mask=mask_B, other=0, cache_modifier=".cg").to(WIDE)
    for peer in tl.static_range(1, P):
        part = _pointer(_part(bases, plane, slot, half, rank, lane, peer, P, PUSHED), dtype)
        found_B = tl.load(part + place_B, mask=mask_B, other=0, cache_modifier=".cg")
        total_B += found_B.to(WIDE)
    return total_B.to(dtype)


@triton.jit
def _lay_out(
    out, bases, plane, slot, half, rank, lane, at_B, place_B, stop, ok,
    first, limit, rows, width, total, shift,
    EVEN: tl.constexpr, FLAT: tl.constexpr, P: tl.constexpr, PUSHED: tl.constexpr,
):  # fmt: skip
    """Elements at_B of all parts, side by side."""
    dtype: tl.constexpr = out.dtype.element_ty
    start = tl.full([], 0, tl.int64) + shift
    for peer in tl.static_range(P):
        part = _part(bases, plane, slot, half, rank, lane, peer, P, PUSHED)
        if EVEN:
            own = width
            row_B = at_B // width
        else:
            head = (part - _HEAD).to(tl.pointer_type(tl.int64))
            own = tl.load(head, mask=ok, other=0, cache_modifier=".cg").to(tl.int32)
            row_B = at_B // tl.maximum(own, 1)
        if FLAT:
            mask_B = (at_B < stop) & (at_B < own)
            to_B = start + at_B
        else:
            mask_B = (at_B < stop) & (row_B >= first) & (row_B < rows) & (own > 0)
            to_B = start + (row_B - first).to(tl.int64) * total + (at_B - row_B * own)
        mask_B = mask_B & (to_B >= 0) & (to_B < limit)
        found_B = tl.load(
            _pointer(part, dtype) + place_B, mask=mask_B & ok, other=0, cache_modifier=".cg"
        )
        tl.store(out + to_B, found_B, mask=mask_B)
        start += own


@triton.jit
def _take(
    out, bases, plane, slot, half, rank, lane, at_B, place_B, stop, ok,
    first, limit, rows, width, total, shift,
    SUM: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, P: tl.constexpr,
    PUSHED: tl.constexpr,
):  # fmt: skip
    """Elements at_B, which stand at place_B of all parts, into the result; zeros if not `ok`."""
    if SUM:
        to_B = at_B - first
        mask_B = (at_B < stop) & (to_B >= 0) & (to_B < limit)
        dtype: tl.constexpr = out.dtype.element_ty
        total_B = _sum_parts(
            bases, plane, slot, half, rank, lane, place_B, mask_B & ok, dtype, P, PUSHED
        )
        tl.store(out + to_B, total_B, mask=mask_B)
    else:
        _lay_out(
            out, bases, plane, slot, half, rank, lane, at_B, place_B, stop, ok,
            first, limit, rows, width, total, shift, EVEN, FLAT, P, PUSHED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tag", "rank"])
def _push_kernel(
    x, out, bases, state, desk, flags, plane, slot, tag, rank, count, begin, stop, size,
    first, limit, rows, width, total, shift,
    SUM: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, PUT: tl.constexpr,
    TAKE: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program i is lane i: elements begin + i * size and the next, `size` of them."""
    await_inputs(PDL)
    lane = tl.program_id(0)
    half, count_ptr, number = _turn(state, 2 * lane, 1 - PUT)
    channel = 2 * lane + half
    word = flag_word(state, number, tag)
    start = begin + lane * size
    length = tl.minimum(size, stop - start)
    ok = is_broken(state, THREADS) == 0
    if PUT:
        if ok:
            for offset in range(0, length, BLOCK):
                place_B = offset + tl.arange(0, BLOCK)
                mask_B = start + place_B < count
                x_B = tl.load(x + start + place_B, mask=mask_B)
                for peer in tl.static_range(P):
                    mine = _part(bases, plane, slot, half, peer, lane, 0, P, True) + rank * slot
                    part = _pointer(mine, x.dtype.element_ty)
                    tl.store(part + place_B, x_B, mask=mask_B)
            if not EVEN:
                for peer in tl.static_range(P):
                    mine = _part(bases, plane, slot, half, peer, lane, 0, P, True) + rank * slot
                    tl.store((mine - _HEAD).to(tl.pointer_type(tl.int64)), width)
            place = flags + (lane.to(tl.int64) * P + rank) * 8
            raise_flags(bases, state, place, word, P, THREADS)
            tl.store(rounds, number)
    if TAKE:
        if ok:
            ok = await_flags(bases, state, desk, flags, lane, word, rank, P, THREADS)
        for offset in range(0, length, BLOCK):
            place_B = offset + tl.arange(0, BLOCK)
            _take(
                out, bases, plane, slot, half, rank, lane, start + place_B, place_B, stop, ok,
                first, limit, rows, width, total, shift, SUM, EVEN, FLAT, P, True,
            )  # fmt: skip
    release_next(PDL)


@triton.jit(do_not_specialize=["channel", "tag", "rank"])
def _post_kernel(
    x, bases, state, flags, plane, slot, channel, tag, rank, begin, count, width,
    SUMS: tl.constexpr, EVEN: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`count` elements from `begin` on: of x, or of the sum of what was posted before. The last
    program to end signals."""
    await_inputs(PDL)
    release_next(PDL)
    rounds = state + _CHANNELS + 2 * channel
    number = tl.load(rounds) + 1
    mine = tl.load(bases + rank) + plane + (number & 1) * slot + _HEAD
    dtype: tl.constexpr = x.dtype.element_ty
    if is_broken(state, THREADS) == 0:
        for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            place_B = block * BLOCK + tl.arange(0, BLOCK)
            mask_B = place_B < count
            if SUMS:
                at_B = begin + place_B
                x_B = _sum_parts(
                    bases, plane, slot, (number - 1) & 1, rank, 0, at_B, mask_B, dtype, P, False
                )
            else:
                x_B = tl.load(x + begin + place_B, mask=mask_B)
            tl.store(_pointer(mine, dtype) + place_B, x_B, mask=mask_B)
        if not EVEN:
            tl.store((mine - _HEAD).to(tl.pointer_type(tl.int64)), width)
        tl.debug_barrier()
        before = tl.atomic_add(rounds + 1, 1, sem="acq_rel", scope="gpu")
        if before == tl.num_programs(0) - 1:
            place = flags + (channel.to(tl.int64) * P + rank) * 8
            raise_flags(bases, state, place, flag_word(state, number, tag), P, THREADS)
            tl.store(rounds + 1, 0)
            tl.store(rounds, number)


@triton.jit(do_not_specialize=["channel", "tag", "rank"])
def _wait_kernel(
    bases, state, desk, flags, channel, tag, rank,
    P: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    word = flag_word(state, tl.load(state + _CHANNELS + 2 * channel), tag)
    if is_broken(state, THREADS) == 0:
        await_flags(bases, state, desk, flags, channel, word, rank, P, THREADS)
    release_next(PDL)


@triton.jit(do_not_specialize=["channel", "rank"])
def _pull_kernel(
    out, bases, state, plane, slot, channel, rank, begin, stop,
    first, limit, rows, width, total, shift,
    SUM: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of all parts; they are there."""
    await_inputs(PDL)
    release_next(PDL)
    half = tl.load(state + _CHANNELS + 2 * channel) & 1
    ok = is_broken(state, THREADS) == 0
    place_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _take(
        out, bases, plane, slot, half, rank, 0, begin + place_B, place_B, stop, ok,
        first, limit, rows, width, total, shift, SUM, EVEN, FLAT, P, False,
    )  # fmt: skip
