"""Kernels of the collectives in kernels/collectives.py.

SIZE ranks · B elements of a block · N elements of a part · M elements of a result.

Ranks may share a GPU, so a waiting kernel must leave room for the peers it waits for: few, small
programs wait. Small parts take one kernel, whose programs write, signal, wait and read; large parts
take a kernel that writes and signals, a wait of one program, and a kernel that reads.

Kernels pass `source` = (addresses of all regions, of this rank's, offset of the plane, bytes of a
part with its head, half, lane) and `places` = (the arguments PLACES).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.a2a import ChannelCall
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
    active_ranks,
    all_bases,
    await_flags,
    byte_at,
    flag_word,
    is_last,
    lanes,
    raise_flags,
    signal_arguments,
    times_raised,
    window_arguments,
)
from moesaic.kernels.triton.launch import (
    Relaunch,
    await_inputs,
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
            _push_kernel, ("x", "out"), ("tag", "count", "begin", "stop", "share", *PLACES),
            failure_ptr=signals.failure, plane=planes.pushed,
            slot=HEAD_BYTES + planes.lane_bytes, PUT=x_N is not None, TAKE=out_M is not None,
            BLOCK=BLOCK_BYTES // itemsize, **_kinds(kind), **signal_arguments(signals, WARPS),
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
            plane=planes.published, slot=HEAD_BYTES + planes.publish_bytes,
            SUMS=sums, EVEN=even, BLOCK=block, **signal_arguments(signals, WARPS),
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
            LANES=lanes(signals.size, WARPS), **_kinds(kind), **window_arguments(signals, WARPS),
        )  # fmt: skip
    numbers = (call.channel, span.begin, span.stop, *_places(target, out_M))
    launch(triton.cdiv(len(span), block), (out_M,), numbers)


def _wait(call: ChannelCall) -> None:
    signals = call.signals
    launch = signals.prepared.get("wait for published")
    if launch is None:
        launch = signals.prepared["wait for published"] = Relaunch(
            _wait_kernel, (), ("channel", "tag"),
            failure_ptr=signals.failure, **signal_arguments(signals, WARPS),
        )  # fmt: skip
    launch(1, (), (call.channel, call.tag))


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
def _round_channel(state, channel, back: tl.constexpr):
    """(half of the next round (0) or of the last one that this rank gave its part to (1), the count
    of its channel in that round, address of this count)"""
    counts = state + CHANNELS + 2 * channel
    first, second = times_raised(counts), times_raised(counts + 2)
    half = ((first + second - back) & 1).to(tl.int32)
    return half, tl.where(half == 0, first, second) + (1 - back), counts + 2 * half


@triton.jit
def _part(source, peer: tl.constexpr, SIZE: tl.constexpr, PUSHED: tl.constexpr):
    """Address behind the head of the part of `peer`: in this region if pushed, else in its own."""
    regions, own, plane, slot, half, lane = source
    if PUSHED:
        place = (lane * _HALVES + half) * SIZE + peer
        return own + plane + place.to(tl.int64) * slot + _HEAD
    else:
        return regions[peer] + plane + half.to(tl.int64) * slot + _HEAD


@triton.jit
def _sum_parts(
    source, place_B, mask_B, TYPE: tl.constexpr, SIZE: tl.constexpr, PUSHED: tl.constexpr
):
    """Sums in rank order: narrow floats in float32, others in their own type."""
    NARROW: tl.constexpr = TYPE.is_floating() and TYPE.primitive_bitwidth < 32
    WIDE: tl.constexpr = tl.float32 if NARROW else TYPE
    total_B = tl.zeros(place_B.shape, WIDE)
    for peer in tl.static_range(SIZE):
        part = byte_at(_part(source, peer, SIZE, PUSHED), 0, TYPE, 16)
        found_B = tl.load(part + place_B, mask=mask_B, other=0, cache_modifier=".cg").to(WIDE)
        # The first part is not added to zero: a negative zero stays.
        total_B = found_B if peer == 0 else total_B + found_B
    return total_B.to(TYPE)


@triton.jit
def _lay_out(
    out, source, at_B, place_B, stop, ok, places,
    EVEN: tl.constexpr, FLAT: tl.constexpr, SIZE: tl.constexpr, PUSHED: tl.constexpr,
):  # fmt: skip
    """Places elements at_B of all parts side by side."""
    first, limit, rows, width, total, shift = places
    start = tl.full([], 0, tl.int64) + shift
    for peer in tl.static_range(SIZE):
        at = _part(source, peer, SIZE, PUSHED)
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
def _read_parts(
    out, source, at_B, place_B, stop, ok, places,
    SUM: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, SIZE: tl.constexpr,
    PUSHED: tl.constexpr,
):  # fmt: skip
    """Writes elements at_B, at place_B of all parts, to the result; zeros if not `ok`."""
    if SUM:
        to_B = at_B - places[0]
        mask_B = (at_B < stop) & (to_B >= 0) & (to_B < places[1])
        total_B = _sum_parts(source, place_B, mask_B & ok, out.dtype.element_ty, SIZE, PUSHED)
        tl.store(out + to_B, total_B, mask=mask_B)
    else:
        _lay_out(out, source, at_B, place_B, stop, ok, places, EVEN, FLAT, SIZE, PUSHED)


@triton.jit
def _write_to_all(
    x, regions, plane, slot, half, rank, lane, start, length, count, width,
    EVEN: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes elements of x from `start` on to this rank's part in all regions."""
    offset = ((lane * _HALVES + half) * SIZE + rank).to(tl.int64) * slot + plane + _HEAD
    for begin in range(0, length, BLOCK):
        place_B = begin + tl.arange(0, BLOCK)
        mask_B = start + place_B < count
        x_B = tl.load(x + start + place_B, mask=mask_B)
        for peer in tl.static_range(SIZE):
            part = byte_at(regions[peer], offset, x.dtype.element_ty, 16)
            tl.store(part + place_B, x_B, mask=mask_B)
    if not EVEN:
        for peer in tl.static_range(SIZE):
            tl.store(byte_at(regions[peer], offset - _HEAD, tl.int64, 16), width)


@triton.jit(do_not_specialize=["tag", "rank"])
def _push_kernel(
    x, out, bases_ptr, state_ptr, failure_ptr, flags, plane, slot, tag, rank,
    count, begin, stop, share, first, limit, rows, width, total, shift,
    SUM: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, PUT: tl.constexpr,
    TAKE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    SCOPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i handles lane i: `share` elements from begin + i * share on."""
    await_inputs(PDL)
    lane = tl.program_id(0)
    half, number, counter = _round_channel(state_ptr, _HALVES * lane, 0 if PUT else 1)
    place = (bases_ptr, state_ptr, rank, flags, lane * _HALVES + half)
    start = begin + lane * share
    length = tl.minimum(share, stop - start)
    thread = tl.arange(0, LANES)
    active = active_ranks(state_ptr, thread)
    regions, own = all_bases(bases_ptr, SIZE), tl.load(bases_ptr + rank)
    word = flag_word(state_ptr, number, tag)
    ok = active != 0
    if PUT:  # noqa: SIM102  known when it is compiled, the other is not
        if ok:
            _write_to_all(
                x, regions, plane, slot, half, rank, lane, start, length, count, width,
                EVEN, SIZE, BLOCK,
            )  # fmt: skip
            raise_flags(place, word, active, thread, SIZE, SCOPE)
            tl.store(counter, number)
    if TAKE:
        if ok:
            ok = await_flags(place, failure_ptr, word, active, thread, SIZE, SCOPE)
        source = (regions, own, plane, slot, half, lane)
        places = (first, limit, rows, width, total, shift)
        for offset in range(0, length, BLOCK):
            place_B = offset + tl.arange(0, BLOCK)
            at_B = start + place_B
            _read_parts(out, source, at_B, place_B, stop, ok, places, SUM, EVEN, FLAT, SIZE, True)
    release_next(PDL)


@triton.jit(do_not_specialize=["channel", "tag", "rank"])
def _publish_kernel(
    x, bases_ptr, state_ptr, flags, plane, slot, channel, tag, rank, begin, count, width,
    SUMS: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, SCOPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Publishes `count` elements from `begin` on: of x, or of the sum of the parts published
    before. The last program to end signals."""
    await_inputs(PDL)
    release_next(PDL)
    half, number, counter = _round_channel(state_ptr, channel, 0)
    thread = tl.arange(0, LANES)
    active = active_ranks(state_ptr, thread)
    regions, own = all_bases(bases_ptr, SIZE), tl.load(bases_ptr + rank)
    offset = plane + half.to(tl.int64) * slot + _HEAD
    mine = byte_at(own, offset, x.dtype.element_ty, 16)
    if active != 0:
        for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            place_B = block * BLOCK + tl.arange(0, BLOCK)
            mask_B = place_B < count
            if SUMS:
                source = (regions, own, plane, slot, 1 - half, 0)
                x_B = _sum_parts(source, begin + place_B, mask_B, x.dtype.element_ty, SIZE, False)
            else:
                x_B = tl.load(x + begin + place_B, mask=mask_B)
            tl.store(mine + place_B, x_B, mask=mask_B)
        if not EVEN:
            tl.store(byte_at(own, offset - _HEAD, tl.int64, 16), width)
        if is_last(state_ptr + CHANNELS + 2 * channel + 1, "gpu"):
            word = flag_word(state_ptr, number, tag)
            place = (bases_ptr, state_ptr, rank, flags, channel + half)
            raise_flags(place, word, active, thread, SIZE, SCOPE)
            tl.store(counter, number)


@triton.jit(do_not_specialize=["channel", "tag", "rank"])
def _wait_kernel(
    bases_ptr, state_ptr, failure_ptr, flags, channel, tag, rank,
    SIZE: tl.constexpr, LANES: tl.constexpr, SCOPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Waits until all ranks have published as often as this one."""
    await_inputs(PDL)
    half, number, _ = _round_channel(state_ptr, channel, 1)
    thread = tl.arange(0, LANES)
    active = active_ranks(state_ptr, thread)
    if active != 0:
        word = flag_word(state_ptr, number, tag)
        place = (bases_ptr, state_ptr, rank, flags, channel + half)
        await_flags(place, failure_ptr, word, active, thread, SIZE, SCOPE)
    release_next(PDL)


@triton.jit(do_not_specialize=["channel", "rank"])
def _pull_kernel(
    out, bases_ptr, state_ptr, plane, slot, channel, rank, begin, stop,
    first, limit, rows, width, total, shift,
    SUM: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Takes one block of all parts, which have arrived."""
    await_inputs(PDL)
    release_next(PDL)
    half, _, _ = _round_channel(state_ptr, channel, 1)
    ok = active_ranks(state_ptr, tl.arange(0, LANES)) != 0
    regions, own = all_bases(bases_ptr, SIZE), tl.load(bases_ptr + rank)
    place_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = (regions, own, plane, slot, half, 0)
    places = (first, limit, rows, width, total, shift)
    _read_parts(
        out, source, begin + place_B, place_B, stop, ok, places, SUM, EVEN, FLAT, SIZE, False
    )
