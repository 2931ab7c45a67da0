"""All-to-all kernels, which read and write the regions of other ranks. kernels/a2a.py has the twins
and the protocol, kernels/a2a_plan.py the number of programs.

Regions are addresses, possibly of another GPU's memory. A kernel that waits releases the next one
only afterwards: programs that occupy the GPU earlier could keep out a peer that it waits for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.a2a import (
    ChannelCall,
    LocalTokens,
    ResultPlane,
    RowPlanes,
    SlotOwners,
)
from moesaic.kernels.a2a_plan import GROUPS, GpuModel, LaunchPlan
from moesaic.kernels.a2a_tuned import Kernel, plan_of
from moesaic.kernels.payloads import PLAIN
from moesaic.kernels.triton.a2a_collect import collect_kernel
from moesaic.kernels.triton.a2a_link import (
    await_arrival,
    book_results,
    book_rows,
    count_sent,
    load_arguments,
)
from moesaic.kernels.triton.a2a_signals import (
    ACTIVE,
    CHANNELS,
    VARYING,
    active_ranks,
    all_bases,
    await_flags,
    bit,
    byte_at,
    flag_word,
    groups_of,
    is_last,
    raise_counted,
    signal_arguments,
    signal_once,
    times_raised,
    window_arguments,
)
from moesaic.kernels.triton.launch import (
    Relaunch,
    await_inputs,
    num_processors,
    release_next,
)
from moesaic.kernels.triton.payloads import encode_tile
from moesaic.kernels.tuning import device_facts

FILL = tl.constexpr(512)
PLAIN_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
VALUE_TYPES = {name: PLAIN_TYPES[dtype] for name, dtype in PLAIN.items()} | {
    "fp8": tl.float8e4nv,
    "int8": tl.int8,
    "nvfp4": tl.uint8,
    "mxfp4": tl.uint8,
}
# Arguments of the send and collect kernels that vary between launches.
TENSORS = ("ids_ptr", "weights_ptr", "num_tokens_ptr")
NUMBERS = ("stride", "num_rows", "rows", "channel", "tag", "scale")
# What a signal puts on an emulated link.
LOAD = ("counts", "unit", "fixed")
SCALE_TYPES = {"fp8": tl.float32, "int8": tl.float32, "nvfp4": tl.uint8, "mxfp4": tl.uint8}


@triton.jit(do_not_specialize=[*VARYING, *LOAD])
def _signal_kernel(
    bases_ptr,
    state_ptr,
    rank,
    flags,
    channel,
    tag,
    counts,
    unit,
    fixed,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    SCOPE: tl.constexpr,
    LINK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_inputs(PDL)
    release_next(PDL)
    lane = tl.arange(0, LANES)
    active = active_ranks(state_ptr, lane)
    place = (bases_ptr, state_ptr, rank, flags, channel)
    if LINK:
        book_results(place, LINK, counts, unit, fixed, active, lane, SIZE)
    signal_once(place, active, lane, tag, SIZE, SCOPE)


@triton.jit(do_not_specialize=[*VARYING, "fill", *LOAD])
def _wait_kernel(
    bases_ptr,
    state_ptr,
    failure_ptr,
    rank,
    flags,
    channel,
    tag,
    ids,
    fill,
    counts,
    unit,
    fixed,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    SCOPE: tl.constexpr,
    LINK: tl.constexpr,
    SIGNAL_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Runs as one program."""
    await_inputs(PDL)
    lane = tl.arange(0, LANES)
    active = active_ranks(state_ptr, lane)
    place = (bases_ptr, state_ptr, rank, flags, channel)
    if SIGNAL_FIRST:
        if LINK:
            book_results(place, LINK, counts, unit, fixed, active, lane, SIZE)
        wanted = signal_once(place, active, lane, tag, SIZE, SCOPE)
    else:
        wanted = flag_word(state_ptr, times_raised(state_ptr + CHANNELS + 2 * channel), tag)
    here = await_flags(place, failure_ptr, wanted, active, lane, SIZE, SCOPE)
    if LINK:
        await_arrival(place, failure_ptr, LINK, here, active, lane, SIZE)
    release_next(PDL)
    _clear_absent(bases_ptr, state_ptr, rank, ids, fill, SIZE)


@triton.jit
def _clear_absent(bases_ptr, state_ptr, rank, ids, fill, SIZE: tl.constexpr):
    """Writes `fill` ids of -1 for each inactive rank."""
    members = tl.load(state_ptr + ACTIVE)
    for peer in range(SIZE):
        if not bit(members, peer):
            offset = ids + fill.to(tl.int64) * peer * 4
            at = byte_at(tl.load(bases_ptr + rank), offset, tl.int32, 4)
            for first in range(0, fill, FILL):
                place = first + tl.arange(0, FILL)
                tl.store(at + place, -1, place < fill)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _destinations(groups, EVERYWHERE: tl.constexpr):
    """Returns one bit for each group that occurs."""
    if EVERYWHERE:
        return tl.full((), -1, tl.int64)
    else:
        ones = tl.full(groups.shape, 1, tl.int64) << tl.maximum(groups, 0).to(tl.int64)
        return tl.reduce(tl.where(groups < 0, 0, ones), 0, _either)


@triton.jit(do_not_specialize=[*VARYING, "scale", "unit"])
def _send_kernel(
    x_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens_ptr,
    bases_ptr,
    state_ptr,
    failure_ptr,
    stride,
    num_rows,
    rows,
    rank,
    values,
    scales,
    ids,
    weights,
    flags,
    channel,
    tag,
    scale,
    unit,
    H: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PAYLOAD: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    VALUE_ALIGN: tl.constexpr,
    LOCAL_ROWS: tl.constexpr,
    OWNERS: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    SCOPE: tl.constexpr,
    LINK: tl.constexpr,
    RECEIVES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sends items of BLOCK channels of a row to all ranks that need it, or with LOCAL_ROWS stores
    them in the own region; ids go to all ranks. RECEIVES: the last program waits for all peers."""
    PARTS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    GROUPS: tl.constexpr = BLOCK // GROUP
    HALVES: tl.constexpr = 2 if PAYLOAD == "nvfp4" or PAYLOAD == "mxfp4" else 1
    lane = tl.arange(0, LANES)
    k = tl.arange(0, K_BLOCK)
    await_inputs(PDL)
    if not RECEIVES:
        release_next(PDL)
    active = active_ranks(state_ptr, lane)
    bases = all_bases(bases_ptr, SIZE)
    # Loaded now; behind the rows' loads it would stall.
    count = times_raised(state_ptr + CHANNELS + 2 * channel) + (active != 0)
    word = flag_word(state_ptr, count, tag)
    tokens = num_rows if num_tokens_ptr is None else tl.load(num_tokens_ptr)
    rows_to = tl.zeros_like(lane).to(tl.int64)
    pairs_to = tl.zeros_like(lane).to(tl.int64)
    for item in range(tl.program_id(0), rows * PARTS, tl.num_programs(0)):
        part = item % PARTS
        token = tl.cast(item // PARTS, tl.int64)
        is_token = token < tokens
        row = rank.to(tl.int64) * rows + token
        # Rows without a token are loaded, too: no load depends on the number of tokens.
        is_row = token < num_rows
        slots = tl.load(ids_ptr + token * K + k, (k < K) & is_row, -1)
        slots = tl.where(is_token, slots, -1)
        groups = groups_of(slots, OWNERS.slots)
        goes = tl.where(is_token, _destinations(groups, OWNERS.everywhere), 0)
        if LINK:
            counted = part == 0
            rows_to += (bit(goes, lane // OWNERS.width) & counted).to(tl.int64)
            chosen = groups[:, None] == (lane // OWNERS.width)[None, :]
            pairs_to += tl.where(counted, tl.sum(chosen.to(tl.int64), 0), 0)
        group = part * GROUPS + tl.arange(0, GROUPS)
        inside = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(x_ptr + token * stride + inside, (inside < H) & is_row, 0.0)
        encoded, scalings = encode_tile(x, scale, PAYLOAD, VALUE_TYPE)
        place = group[:, None] * (GROUP // HALVES) + tl.arange(0, GROUP // HALVES)[None, :]
        if weights_ptr is not None:
            by = tl.load(weights_ptr + token * K + k, (k < K) & is_token, 0.0)
        if LOCAL_ROWS:
            stays = (goes != 0) & (active != 0)
            home = tl.load(bases_ptr + rank)
            at = byte_at(home, values + token * VALUE_BYTES, VALUE_TYPE, VALUE_ALIGN)
            tl.store(at + place, encoded, (place < H // HALVES) & stays)
            if SCALE_TYPE is not None:
                at = byte_at(home, scales + token * SCALE_BYTES, SCALE_TYPE, 1)
                tl.store(at + group, scalings, (group * GROUP < H) & stays)
        for to in tl.static_range(SIZE):
            there = bit(active, to)
            needs = there & bit(goes, to // OWNERS.width)
            if not LOCAL_ROWS:
                at = byte_at(bases[to], values + row * VALUE_BYTES, VALUE_TYPE, VALUE_ALIGN)
                tl.store(at + place, encoded, (place < H // HALVES) & needs)
                if SCALE_TYPE is not None:
                    at = byte_at(bases[to], scales + row * SCALE_BYTES, SCALE_TYPE, 1)
                    tl.store(at + group, scalings, (group * GROUP < H) & needs)
            first = (k < K) & (part == 0)
            local = tl.where(groups == to // OWNERS.width, slots - groups * OWNERS.slots, -1)
            at = byte_at(bases[to], ids + row * (K * 4), tl.int32, 4)
            tl.store(at + k, local.to(tl.int32), first & there)
            if weights_ptr is not None:
                at = byte_at(bases[to], weights + row * (K * 4), tl.float32, 4)
                tl.store(at + k, by, first & needs)
    own = (bases_ptr, state_ptr, rank, flags, channel)
    if LINK:
        count_sent(own, LINK, rows_to, pairs_to, lane, SIZE)
    # Each program releases its own writes to all ranks, on other GPUs as well.
    if is_last(state_ptr + CHANNELS + 2 * channel + 1, SCOPE):
        if LINK:
            book_rows(own, LINK, unit, active, lane, SIZE)
        raise_counted(own, count, word, active, lane, SIZE, SCOPE)
        if RECEIVES:
            here = await_flags(own, failure_ptr, word, active, lane, SIZE, SCOPE)
            if LINK:
                await_arrival(own, failure_ptr, LINK, here, active, lane, SIZE)
            release_next(PDL)
            _clear_absent(bases_ptr, state_ptr, rank, ids, rows * K, SIZE)


def signal(call: ChannelCall) -> None:
    signals = call.signals
    launch = signals.prepared.get(("signal", call.load))
    if launch is None:
        launch = signals.prepared["signal", call.load] = Relaunch(
            _signal_kernel, (), ("channel", "tag"),
            **load_arguments(call), **signal_arguments(signals, 1),
        )  # fmt: skip
    launch(1, (), (call.channel, call.tag))


def wait(call: ChannelCall) -> None:
    _wait(call)


def receive(call: ChannelCall, rows: int, top_k: int, ids: int) -> None:
    _wait(call, ids=ids, fill=rows * top_k)


def _wait(call: ChannelCall, signal_first: bool = False, ids: int = 0, fill: int = 0) -> None:
    signals, key = call.signals, ("wait", signal_first, ids, call.load)
    launch = signals.prepared.get(key)
    if launch is None:
        launch = signals.prepared[key] = Relaunch(
            _wait_kernel, (), ("channel", "tag", "fill"),
            failure_ptr=signals.failure, ids=ids, SIGNAL_FIRST=signal_first,
            **load_arguments(call), **signal_arguments(signals, 1),
        )  # fmt: skip
    launch(1, (), (call.channel, call.tag, fill))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A kernel on a window: how its plan is found, and its launches by the plan's item size."""

    kernel: Kernel
    machine: GpuModel
    ranks: int
    launches: dict[tuple[int, int], Relaunch] = field(default_factory=dict)

    def plan(self, rows: int) -> LaunchPlan:
        return plan_of(self.kernel, rows, self.machine, self.ranks)


def send(
    tokens: LocalTokens,
    rows: int,
    planes: RowPlanes,
    owners: SlotOwners,
    call: ChannelCall,
    receives: bool = False,
) -> None:
    signals, x_TH = call.signals, tokens.x_TH
    (num_rows, hidden), top_k = x_TH.shape, tokens.ids_TK.shape[1]
    # A window has one set of planes for each lane and payload; only the scale varies by layer.
    place = (planes.payload, planes.ids, planes.weights, planes.local_rows)
    key = (*place, owners, hidden, top_k, receives, call.programs)
    found = signals.prepared.get(key)
    if found is None:
        found = signals.prepared[key] = _sender(planes, owners, hidden, top_k, call)
    plan = found.plan(rows)
    launch = found.launches.get((plan.block, plan.warps))
    if launch is None:
        launch = found.launches[plan.block, plan.warps] = Relaunch(
            _send_kernel, ("x_ptr", *TENSORS), NUMBERS, failure_ptr=signals.failure,
            values=planes.values, scales=planes.scales, ids=planes.ids,
            weights=max(0, planes.weights), RECEIVES=receives, OWNERS=owners,
            LINK=signals.link, unit=planes.wire_bytes(top_k),
            **send_constants(planes, hidden, top_k, plan),
            **signal_arguments(signals, plan.warps),
        )  # fmt: skip
    stride, step = x_TH.stride()
    if step != 1:
        x_TH, stride = x_TH.contiguous(), hidden
    weights_TK = tokens.weights_TK.contiguous() if planes.weights >= 0 else None
    launch(
        plan.programs,
        (x_TH, tokens.ids_TK.contiguous(), weights_TK, tokens.num_tokens_1),
        (stride, num_rows, rows, call.channel, call.tag, float(planes.scale)),
    )


def _sender(
    planes: RowPlanes, owners: SlotOwners, hidden: int, top_k: int, call: ChannelCall
) -> _Prepared:
    size = call.signals.size
    ranks = size if owners.everywhere else min(size, top_k * owners.width)
    name = "gather" if owners.everywhere else "send"
    if planes.local_rows:
        ranks, name = 1, "keep"
    return _Prepared(Kernel(name, size, hidden, planes.payload), _machine(call), ranks)


def send_constants(planes: RowPlanes, hidden: int, top_k: int, plan: LaunchPlan) -> dict[str, Any]:
    """The constants of a payload."""
    return {
        "H": hidden,
        "K": top_k,
        "K_BLOCK": triton.next_power_of_2(top_k),
        "BLOCK": plan.block,
        "GROUP": GROUPS.get(planes.payload, plan.block),
        "PAYLOAD": "plain" if planes.payload in PLAIN else planes.payload,
        "VALUE_TYPE": VALUE_TYPES[planes.payload],
        "SCALE_TYPE": SCALE_TYPES.get(planes.payload),
        "VALUE_BYTES": planes.value_bytes,
        "SCALE_BYTES": planes.scale_bytes,
        "VALUE_ALIGN": _alignment(planes.value_bytes),
        "LOCAL_ROWS": planes.local_rows,
    }


def _collect(
    name: str,
    out_TH: Tensor,
    tokens: LocalTokens,
    results: ResultPlane,
    call: ChannelCall,
    signal_first: bool = False,
) -> Tensor:
    _wait(call, signal_first)
    signals, ids_TK = call.signals, tokens.ids_TK
    (num_rows, hidden), top_k = out_TH.shape, ids_TK.shape[1]
    if not num_rows:
        return out_TH
    stride, step = out_TH.stride()
    assert step == 1
    place = (name, results.offset, results.owners)
    key = (*place, hidden, top_k, out_TH.dtype, call.programs)
    found = signals.prepared.get(key)
    if found is None:
        kernel = Kernel(name, signals.size, hidden)
        found = signals.prepared[key] = _Prepared(kernel, _machine(call), signals.size)
    plan = found.plan(num_rows)
    launch = found.launches.get((plan.block, plan.warps))
    if launch is None:
        launch = found.launches[plan.block, plan.warps] = Relaunch(
            collect_kernel, ("out_ptr", *TENSORS), ("stride", "num_rows", "rows"),
            results=results.offset, PAIRS=name == "collect_pairs",
            **collect_constants(hidden, top_k, out_TH.dtype, plan),
            OWNERS=results.owners, **window_arguments(signals, plan.warps),
            enable_fp_fusion=False,  # products are rounded before they are added, as in the twin
        )  # fmt: skip
    launch(
        plan.programs,
        (out_TH, ids_TK.contiguous(), tokens.weights_TK.contiguous(), tokens.num_tokens_1),
        (stride, num_rows, results.rows),
    )
    return out_TH


collect_rows = partial(_collect, "collect_rows")
collect_pairs = partial(_collect, "collect_pairs")


def collect_constants(
    hidden: int, top_k: int, dtype: torch.dtype, plan: LaunchPlan
) -> dict[str, Any]:
    return {
        "H": hidden,
        "K": top_k,
        "BLOCK": plan.block,
        "ALIGN": _alignment(hidden * dtype.itemsize),
    }


def _alignment(row_bytes: int) -> int:
    """Rows begin at multiples of this; planes at larger ones."""
    return min(16, row_bytes & -row_bytes)


def _machine(call: ChannelCall) -> GpuModel:
    state = call.signals.state
    if not state.is_cuda:
        return GpuModel(limit=call.programs)
    name = device_facts(state.device).name
    return GpuModel(num_processors(state.device.index), call.programs, name)
