"""Kernels of the collectives in kernels/collectives.py.

P ranks · B elements of a block · N elements of a part · M elements of a result.

Ranks may share a GPU, so a waiting kernel must leave room for the peers it waits for: few, small
programs wait. Small parts take one kernel, whose programs write, signal, wait and read; large parts
take a kernel that writes and signals, a wait of one program, and a kernel that reads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.a2a import ChannelCall, SignalPlanes
from moesaic.kernels.collectives import (
    BLOCK_BYTES,
    HALVES,
    HEAD_BYTES,
    CollectivePlanes,
    Columns,
    ElementRange,
    Sum,
    Target,
)
from moesaic.kernels.triton.a2a_signals import (
    CHANNELS,
    all_bases,
    await_flags,
    byte_at,
    flag_word,
    is_last,
    lanes,
    raise_flags,
    taking_part,
    times_raised,
)
from moesaic.kernels.triton.launch import (
    Relaunch,
    await_inputs,
    dependent_launch,
    release_next,
)

WARPS = 4
# Programs of a kernel that writes and signals: enough for the memory's write bandwidth.
MOST_PROGRAMS = 128
MOST_ELEMENTS = 2**31 - 1
PLACES = ("first", "limit", "rows", "width", "total", "shift")
_HALVES = tl.constexpr(HALVES)
_HEAD = tl.constexpr(HEAD_BYTES)


def push(
    call: ChannelCall,
    planes: CollectivePlanes,
    x_N: Tensor | None,
    out_M: Tensor | None,
    span: ElementRange,
    target: Target,
) -> None:
    given = x_N if x_N is not None else out_M
    assert given is not None and span.stop <= MOST_ELEMENTS
    size = planes.lane_elements(len(span), given.element_size())
    programs = max(1, triton.cdiv(len(span), size))
    assert programs <= planes.lanes, (span, planes)
    signals, kind, itemsize = call.signals, _kind(target), given.element_size()
    key = ("push", planes, kind, x_N is None, out_M is None, itemsize)
    launch = signals.prepared.get(key)
    if launch is None:
        launch = signals.prepared[key] = Relaunch(
            _push_kernel, ("x", "out"), ("tag", "count", "begin", "stop", "size", *PLACES),
            failure=signals.failure, flags=signals.flags, plane=planes.pushed,
            slot=HEAD_BYTES + planes.lane_bytes, PUT=x_N is not None, TAKE=out_M is not None,
            BLOCK=BLOCK_BYTES // itemsize, SCOPE=signals.scope, **_kinds(kind), **_fixed(signals),
        )  # fmt: skip
    count = 0 if x_N is None else min(x_N.numel(), span.stop)
    numbers = (call.tag, count, span.begin, span.stop, size, *_places(target, out_M))
    launch(programs, (x_N, out_M), numbers)


def publish(
    call: ChannelCall, planes: CollectivePlanes, x_N: Tensor, span: ElementRange, target: Target
) -> None:
    own = ElementRange(span.begin, max(span.begin, min(x_N.numel(), span.stop)))
    _publish(call, planes, x_N, own, target, sums=False)


def publish_sums(
    call: ChannelCall, planes: CollectivePlanes, dtype: torch.dtype, span: ElementRange, size: int
) -> None:
    _wait(call)
    start = min(len(span), call.signals.rank * size)
    # Only its type matters.
    like = torch.empty(0, dtype=dtype, device=call.signals.state.device)
    share = ElementRange(start, min(len(span), start + size))
    _publish(call, planes, like, share, Sum(), sums=True)


def _publish(
    call: ChannelCall,
    planes: CollectivePlanes,
    x_N: Tensor,
    span: ElementRange,
    target: Target,
    *,
    sums: bool,
) -> None:
    signals, itemsize, (_, even, _) = call.signals, x_N.element_size(), _kind(target)
    block = BLOCK_BYTES // itemsize
    key = ("publish", planes, even, sums, itemsize)
    launch = signals.prepared.get(key)
    if launch is None:
        launch = signals.prepared[key] = Relaunch(
            _publish_kernel, ("x",), ("channel", "tag", "begin", "count", "width"),
            flags=signals.flags, plane=planes.published, slot=HEAD_BYTES + planes.publish_bytes,
            SUMS=sums, EVEN=even, BLOCK=block, SCOPE=signals.scope, **_fixed(signals),
        )  # fmt: skip
    width = 0 if isinstance(target, Sum) or even else target.width
    programs = max(1, min(MOST_PROGRAMS, triton.cdiv(len(span), block)))
    launch(programs, (x_N,), (call.channel, call.tag, span.begin, len(span), width))


def pull(
    call: ChannelCall, planes: CollectivePlanes, out_M: Tensor, span: ElementRange, target: Target
) -> None:
    assert span.stop <= MOST_ELEMENTS
    _wait(call)
    if not out_M.numel() or not len(span):
        return
    signals, kind, block = call.signals, _kind(target), BLOCK_BYTES // out_M.element_size()
    key = ("pull", planes, kind, block)
    launch = signals.prepared.get(key)
    if launch is None:
        launch = signals.prepared[key] = Relaunch(
            _pull_kernel, ("out",), ("channel", "begin", "stop", *PLACES),
            plane=planes.published, slot=HEAD_BYTES + planes.publish_bytes, BLOCK=block,
            **_kinds(kind), **_fixed(signals),
        )  # fmt: skip
    numbers = (call.channel, span.begin, span.stop, *_places(target, out_M))
    launch(triton.cdiv(len(span), block), (out_M,), numbers)


def _wait(call: ChannelCall) -> None:
    signals = call.signals
    launch = signals.prepared.get("wait for published")
    if launch is None:
        launch = signals.prepared["wait for published"] = Relaunch(
            _wait_kernel, (), ("channel", "tag"),
            failure=signals.failure, flags=signals.flags, SCOPE=signals.scope, **_fixed(signals),
        )  # fmt: skip
    launch(1, (), (call.channel, call.tag))


def _fixed(signals: SignalPlanes) -> dict[str, Any]:
    """Arguments and launch options that all kernels of a window share."""
    pdl = dependent_launch(signals.state)
    return {
        "bases": signals.bases_P,
        "state": signals.state,
        "rank": signals.rank,
        "P": signals.size,
        "THREADS": lanes(signals.size, WARPS),
        "num_warps": WARPS,
        "PDL": pdl.on,
        **pdl.options,
    }


def _places(target: Target, out_M: Tensor | None) -> tuple[int, ...]:
    """The kernel's arguments PLACES for this target."""
    size = 0 if out_M is None else out_M.numel()
    if isinstance(target, Sum):
        return target.first, size, 1, 0, 0, 0
    limit = size if target.limit is None else target.limit
    return target.first, limit, target.rows, target.width, target.total, target.shift


def _kind(target: Target) -> tuple[bool, bool, bool]:
    """SUM, EVEN, FLAT"""
    if isinstance(target, Columns):
        return False, target.even, target.rows == 1
    return True, True, True


def _kinds(kind: tuple[bool, bool, bool]) -> dict[str, bool]:
    return dict(zip(("SUM", "EVEN", "FLAT"), kind, strict=True))


@triton.jit
def _turn(state, channel, back: tl.constexpr):
    """(half of the next round (0) or of the last one that this rank gave its part to (1), the count
    of its channel in that round, address of this count)"""
    counts = state + CHANNELS + 2 * channel
    first, second = times_raised(counts), times_raised(counts + 2)
    half = ((first + second - back) & 1).to(tl.int32)
    return half, tl.where(half == 0, first, second) + (1 - back), counts + 2 * half


@triton.jit
def _part(
    regions, own, plane, slot, half, lane, peer: tl.constexpr, P: tl.constexpr,
    PUSHED: tl.constexpr,
):  # fmt: skip
    """Address of the part of `peer`, behind its head: in this rank's region (`own`) if pushed, in
    the peer's if published."""
    if PUSHED:
        place = (lane * _HALVES + half) * P + peer
        return own + plane + place.to(tl.int64) * slot + _HEAD
    else:
        return regions[peer] + plane + half.to(tl.int64) * slot + _HEAD


@triton.jit
def _sum_parts(
    regions, own, plane, slot, half, lane, place_B, mask_B,
    TYPE: tl.constexpr, P: tl.constexpr, PUSHED: tl.constexpr,
):  # fmt: skip
    """Sums in rank order: narrow floats in float32, others in their own type."""
    NARROW: tl.constexpr = TYPE.is_floating() and TYPE.primitive_bitwidth < 32
    WIDE: tl.constexpr = tl.float32 if NARROW else TYPE
    total_B = tl.zeros(place_B.shape, WIDE)
    for peer in tl.static_range(P):
        at = _part(regions, own, plane, slot, half, lane, peer, P, PUSHED)
        part = byte_at(at, 0, TYPE, 16)
        found_B = tl.load(part + place_B, mask=mask_B, other=0, cache_modifier=".cg").to(WIDE)
        # The first part is not added to zero: a negative zero stays.
        total_B = found_B if peer == 0 else total_B + found_B
    return total_B.to(TYPE)


@triton.jit
def _lay_out(
    out, regions, own, plane, slot, half, lane, at_B, place_B, stop, ok,
    first, limit, rows, width, total, shift,
    EVEN: tl.constexpr, FLAT: tl.constexpr, P: tl.constexpr, PUSHED: tl.constexpr,
):  # fmt: skip
    """Places elements at_B of all parts side by side."""
    start = tl.full([], 0, tl.int64) + shift
    for peer in tl.static_range(P):
        at = _part(regions, own, plane, slot, half, lane, peer, P, PUSHED)
        if EVEN:
            columns = width
        else:
            head = byte_at(at, -_HEAD, tl.int64, 16)
            columns = tl.load(head, mask=ok, other=0, cache_modifier=".cg").to(tl.int32)
        if FLAT:
            mask_B = (at_B < stop) & (at_B < columns)
            to_B = start + at_B
        else:
            row_B = at_B // (width if EVEN else tl.maximum(columns, 1))
            mask_B = (at_B < stop) & (row_B >= first) & (row_B < rows) & (columns > 0)
            to_B = start + (row_B - first).to(tl.int64) * total + (at_B - row_B * columns)
        mask_B = mask_B & (to_B >= 0) & (to_B < limit)
        part = byte_at(at, 0, out.dtype.element_ty, 16)
        found_B = tl.load(part + place_B, mask=mask_B & ok, other=0, cache_modifier=".cg")
        tl.store(out + to_B, found_B, mask=mask_B)
        start += columns


@triton.jit
def _take(
    out, regions, own, plane, slot, half, lane, at_B, place_B, stop, ok,
    first, limit, rows, width, total, shift,
    SUM: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, P: tl.constexpr,
    PUSHED: tl.constexpr,
):  # fmt: skip
    """Writes elements at_B, at place_B of all parts, to the result; zeros if not `ok`."""
    if SUM:
        to_B = at_B - first
        mask_B = (at_B < stop) & (to_B >= 0) & (to_B < limit)
        total_B = _sum_parts(
            regions, own, plane, slot, half, lane, place_B, mask_B & ok, out.dtype.element_ty, P,
            PUSHED,
        )  # fmt: skip
        tl.store(out + to_B, total_B, mask=mask_B)
    else:
        _lay_out(
            out, regions, own, plane, slot, half, lane, at_B, place_B, stop, ok,
            first, limit, rows, width, total, shift, EVEN, FLAT, P, PUSHED,
        )  # fmt: skip


@triton.jit
def _give_to_all(
    x, regions, plane, slot, half, rank, lane, start, length, count, width,
    EVEN: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes elements of x from `start` on to this rank's part in all regions."""
    offset = ((lane * _HALVES + half) * P + rank).to(tl.int64) * slot + plane + _HEAD
    for begin in range(0, length, BLOCK):
        place_B = begin + tl.arange(0, BLOCK)
        mask_B = start + place_B < count
        x_B = tl.load(x + start + place_B, mask=mask_B)
        for peer in tl.static_range(P):
            part = byte_at(regions[peer], offset, x.dtype.element_ty, 16)
            tl.store(part + place_B, x_B, mask=mask_B)
    if not EVEN:
        for peer in tl.static_range(P):
            tl.store(byte_at(regions[peer], offset - _HEAD, tl.int64, 16), width)


@triton.jit(do_not_specialize=["tag", "rank"])
def _push_kernel(
    x, out, bases, state, failure, flags, plane, slot, tag, rank, count, begin, stop, size,
    first, limit, rows, width, total, shift,
    SUM: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, PUT: tl.constexpr,
    TAKE: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr,
    SCOPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i handles lane i: `size` elements from begin + i * size on."""
    await_inputs(PDL)
    lane = tl.program_id(0)
    half, number, counter = _turn(state, _HALVES * lane, 0 if PUT else 1)
    channel = _HALVES * lane + half
    start = begin + lane * size
    length = tl.minimum(size, stop - start)
    thread = tl.arange(0, THREADS)
    active = taking_part(state, thread)
    regions, own = all_bases(bases, P), tl.load(bases + rank)
    word = flag_word(state, number, tag)
    ok = active != 0
    if PUT:  # noqa: SIM102  known when it is compiled, the other is not
        if ok:
            _give_to_all(
                x, regions, plane, slot, half, rank, lane, start, length, count, width,
                EVEN, P, BLOCK,
            )  # fmt: skip
            raise_flags(bases, word, active, thread, rank, flags, channel, P, SCOPE)
            tl.store(counter, number)
    if TAKE:
        if ok:
            ok = await_flags(
                bases, state, failure, word, active, thread, rank, flags, channel, P, SCOPE
            )
        for offset in range(0, length, BLOCK):
            place_B = offset + tl.arange(0, BLOCK)
            _take(
                out, regions, own, plane, slot, half, lane, start + place_B, place_B, stop, ok,
                first, limit, rows, width, total, shift, SUM, EVEN, FLAT, P, True,
            )  # fmt: skip
    release_next(PDL)


@triton.jit(do_not_specialize=["channel", "tag", "rank"])
def _publish_kernel(
    x, bases, state, flags, plane, slot, channel, tag, rank, begin, count, width,
    SUMS: tl.constexpr, EVEN: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    THREADS: tl.constexpr, SCOPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Publishes `count` elements from `begin` on: of x, or of the sum of the parts published
    before. The last program to end signals."""
    await_inputs(PDL)
    release_next(PDL)
    half, number, counter = _turn(state, channel, 0)
    thread = tl.arange(0, THREADS)
    active = taking_part(state, thread)
    regions, own = all_bases(bases, P), tl.load(bases + rank)
    offset = plane + half.to(tl.int64) * slot + _HEAD
    mine = byte_at(own, offset, x.dtype.element_ty, 16)
    if active != 0:
        for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            place_B = block * BLOCK + tl.arange(0, BLOCK)
            mask_B = place_B < count
            if SUMS:
                x_B = _sum_parts(
                    regions, own, plane, slot, 1 - half, 0, begin + place_B, mask_B,
                    x.dtype.element_ty, P, False,
                )  # fmt: skip
            else:
                x_B = tl.load(x + begin + place_B, mask=mask_B)
            tl.store(mine + place_B, x_B, mask=mask_B)
        if not EVEN:
            tl.store(byte_at(own, offset - _HEAD, tl.int64, 16), width)
        if is_last(state + CHANNELS + 2 * channel + 1, "gpu"):
            word = flag_word(state, number, tag)
            raise_flags(bases, word, active, thread, rank, flags, channel + half, P, SCOPE)
            tl.store(counter, number)


@triton.jit(do_not_specialize=["channel", "tag", "rank"])
def _wait_kernel(
    bases, state, failure, flags, channel, tag, rank,
    P: tl.constexpr, THREADS: tl.constexpr, SCOPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Waits until all ranks have published as often as this one."""
    await_inputs(PDL)
    half, number, _ = _turn(state, channel, 1)
    thread = tl.arange(0, THREADS)
    active = taking_part(state, thread)
    if active != 0:
        word = flag_word(state, number, tag)
        await_flags(
            bases, state, failure, word, active, thread, rank, flags, channel + half, P, SCOPE
        )
    release_next(PDL)


@triton.jit(do_not_specialize=["channel", "rank"])
def _pull_kernel(
    out, bases, state, plane, slot, channel, rank, begin, stop,
    first, limit, rows, width, total, shift,
    SUM: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Takes one block of all parts, which have arrived."""
    await_inputs(PDL)
    release_next(PDL)
    half, _, _ = _turn(state, channel, 1)
    ok = taking_part(state, tl.arange(0, THREADS)) != 0
    regions, own = all_bases(bases, P), tl.load(bases + rank)
    place_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _take(
        out, regions, own, plane, slot, half, 0, begin + place_B, place_B, stop, ok,
        first, limit, rows, width, total, shift, SUM, EVEN, FLAT, P, False,
    )  # fmt: skip
