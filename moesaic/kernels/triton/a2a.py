"""Rows and results between ranks: kernels that read and write the regions of others. Twins, and how
it all goes together, in kernels/a2a.py; programs in kernels/a2a_plan.py.

Regions are addresses, of memory that may be another GPU's. A kernel that waits lets the next one
begin only then: what sits on the GPU before could keep a peer out that is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.a2a import ChannelCall, LocalTokens, RowPlanes, SignalPlanes, SlotOwners
from moesaic.kernels.a2a_plan import GROUPS, GpuModel, LaunchPlan
from moesaic.kernels.a2a_tuned import Kernel, plan_of
from moesaic.kernels.payloads import PLAIN
from moesaic.kernels.triton.a2a_collect import collect_pairs_kernel, collect_rows_kernel
from moesaic.kernels.triton.a2a_signals import (
    ACTIVE,
    CHANNELS,
    VARYING,
    all_bases,
    await_flags,
    bit,
    byte_at,
    flag_word,
    groups_of,
    is_last,
    lanes,
    raise_counted,
    signal_once,
    taking_part,
    times_raised,
)
from moesaic.kernels.triton.launch import (
    Relaunch,
    await_inputs,
    dependent_launch,
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
COLLECTORS = {"collect_rows": collect_rows_kernel, "collect_pairs": collect_pairs_kernel}
# Arguments of kernels that send and collect which differ from launch to launch.
TENSORS = ("ids_ptr", "weights_ptr", "num_tokens_ptr")
NUMBERS = ("stride", "num_rows", "rows", "channel", "tag", "scale")
SCALE_TYPES = {"fp8": tl.float32, "int8": tl.float32, "nvfp4": tl.uint8, "mxfp4": tl.uint8}


@triton.jit(do_not_specialize=VARYING)
def _signal_kernel(
    bases_ptr,
    state_ptr,
    rank,
    flags,
    channel,
    tag,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    SCOPE: tl.constexpr,
    PDL: tl.constexpr,
):
    await_inputs(PDL)
    release_next(PDL)
    lane = tl.arange(0, LANES)
    active = taking_part(state_ptr, lane)
    signal_once(bases_ptr, state_ptr, active, lane, rank, flags, channel, tag, SIZE, SCOPE)


@triton.jit(do_not_specialize=[*VARYING, "fill"])
def _wait_kernel(
    bases_ptr,
    state_ptr,
    desk_ptr,
    rank,
    flags,
    channel,
    tag,
    ids,
    fill,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    SCOPE: tl.constexpr,
    SIGNALS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program."""
    await_inputs(PDL)
    lane = tl.arange(0, LANES)
    active = taking_part(state_ptr, lane)
    if SIGNALS:
        wanted = signal_once(
            bases_ptr, state_ptr, active, lane, rank, flags, channel, tag, SIZE, SCOPE
        )
    else:
        wanted = flag_word(state_ptr, times_raised(state_ptr + CHANNELS + 2 * channel), tag)
    await_flags(
        bases_ptr, state_ptr, desk_ptr, wanted, active, lane, rank, flags, channel, SIZE, SCOPE
    )
    release_next(PDL)
    _clear_absent(bases_ptr, state_ptr, rank, ids, fill, SIZE)


@triton.jit
def _clear_absent(bases_ptr, state_ptr, rank, ids, fill, SIZE: tl.constexpr):
    """Ids of -1, `fill` of them, for each rank that takes no part."""
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
    """A bit for each group that is among them."""
    if EVERYWHERE:
        return tl.full((), -1, tl.int64)
    else:
        ones = tl.full(groups.shape, 1, tl.int64) << tl.maximum(groups, 0).to(tl.int64)
        return tl.reduce(tl.where(groups < 0, 0, ones), 0, _either)


@triton.jit(do_not_specialize=[*VARYING, "scale"])
def _send_kernel(
    x_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens_ptr,
    bases_ptr,
    state_ptr,
    desk_ptr,
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
    AT_HOME: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    EVERYWHERE: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    SCOPE: tl.constexpr,
    RECEIVES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Item by item: BLOCK channels of a row to all ranks that need it, or to where their own rank
    keeps them; ids to all ranks. RECEIVES: the last program then waits for everybody's."""
    PARTS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    GROUPS: tl.constexpr = BLOCK // GROUP
    HALVES: tl.constexpr = 2 if PAYLOAD == "nvfp4" or PAYLOAD == "mxfp4" else 1
    lane = tl.arange(0, LANES)
    k = tl.arange(0, K_BLOCK)
    await_inputs(PDL)
    if not RECEIVES:
        release_next(PDL)
    active = taking_part(state_ptr, lane)
    bases = all_bases(bases_ptr, SIZE)
    # Now, as it would be waited for behind the rows.
    count = times_raised(state_ptr + CHANNELS + 2 * channel) + (active != 0)
    word = flag_word(state_ptr, count, tag)
    tokens = num_rows if num_tokens_ptr is None else tl.load(num_tokens_ptr)
    for item in range(tl.program_id(0), rows * PARTS, tl.num_programs(0)):
        part = item % PARTS
        token = tl.cast(item // PARTS, tl.int64)
        is_token = token < tokens
        row = rank.to(tl.int64) * rows + token
        # What is no token may hold anything: read, so that nothing waits for what says so.
        is_row = token < num_rows
        slots = tl.load(ids_ptr + token * K + k, (k < K) & is_row, -1)
        slots = tl.where(is_token, slots, -1)
        groups = groups_of(slots, SLOTS)
        goes = tl.where(is_token, _destinations(groups, EVERYWHERE), 0)
        group = part * GROUPS + tl.arange(0, GROUPS)
        inside = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(x_ptr + token * stride + inside, (inside < H) & is_row, 0.0)
        encoded, scalings = encode_tile(x, scale, PAYLOAD, VALUE_TYPE)
        place = group[:, None] * (GROUP // HALVES) + tl.arange(0, GROUP // HALVES)[None, :]
        if weights_ptr is not None:
            by = tl.load(weights_ptr + token * K + k, (k < K) & is_token, 0.0)
        if AT_HOME:
            stays = (goes != 0) & (active != 0)
            home = tl.load(bases_ptr + rank)
            at = byte_at(home, values + token * VALUE_BYTES, VALUE_TYPE, VALUE_ALIGN)
            tl.store(at + place, encoded, (place < H // HALVES) & stays)
            if SCALE_TYPE is not None:
                at = byte_at(home, scales + token * SCALE_BYTES, SCALE_TYPE, 1)
                tl.store(at + group, scalings, (group * GROUP < H) & stays)
        for to in tl.static_range(SIZE):
            there = bit(active, to)
            wants = there & bit(goes, to // WIDTH)
            if not AT_HOME:
                at = byte_at(bases[to], values + row * VALUE_BYTES, VALUE_TYPE, VALUE_ALIGN)
                tl.store(at + place, encoded, (place < H // HALVES) & wants)
                if SCALE_TYPE is not None:
                    at = byte_at(bases[to], scales + row * SCALE_BYTES, SCALE_TYPE, 1)
                    tl.store(at + group, scalings, (group * GROUP < H) & wants)
            first = (k < K) & (part == 0)
            local = tl.where(groups == to // WIDTH, slots - groups * SLOTS, -1)
            at = byte_at(bases[to], ids + row * (K * 4), tl.int32, 4)
            tl.store(at + k, local.to(tl.int32), first & there)
            if weights_ptr is not None:
                at = byte_at(bases[to], weights + row * (K * 4), tl.float32, 4)
                tl.store(at + k, by, first & wants)
    # Each program releases what it wrote to everybody, ranks on other GPUs too.
    if is_last(state_ptr + CHANNELS + 2 * channel + 1, SCOPE):
        raise_counted(
            bases_ptr, state_ptr, count, word, active, lane, rank, flags, channel, SIZE, SCOPE
        )
        if RECEIVES:
            await_flags(
                bases_ptr, state_ptr, desk_ptr, word, active, lane, rank, flags, channel, SIZE,
                SCOPE,
            )  # fmt: skip
            release_next(PDL)
            _clear_absent(bases_ptr, state_ptr, rank, ids, rows * K, SIZE)


def _place(mail: SignalPlanes, warps: int) -> dict[str, Any]:
    """What all kernels take of a window, and how they are launched."""
    pdl = dependent_launch(mail.state)
    return {
        "bases_ptr": mail.bases_P,
        "state_ptr": mail.state,
        "rank": mail.rank,
        "SIZE": mail.size,
        "num_warps": warps,
        "PDL": pdl.on,
        **pdl.options,
    }


def _fixed(mail: SignalPlanes, warps: int) -> dict[str, Any]:
    """Of those that signal or wait."""
    threads = lanes(mail.size, warps)
    return {**_place(mail, warps), "flags": mail.flags, "LANES": threads, "SCOPE": mail.scope}


def signal(call: ChannelCall) -> None:
    mail = call.mail
    launch = mail.prepared.get("signal")
    if launch is None:
        launch = Relaunch(_signal_kernel, (), ("channel", "tag"), **_fixed(mail, 1))
        mail.prepared["signal"] = launch
    launch(1, (), (call.channel, call.tag))


def wait(call: ChannelCall) -> None:
    _wait(call)


def receive(call: ChannelCall, rows: int, top_k: int, ids: int) -> None:
    _wait(call, ids=ids, fill=rows * top_k)


def _wait(call: ChannelCall, signals: bool = False, ids: int = 0, fill: int = 0) -> None:
    mail, key = call.mail, ("wait", signals, ids)
    launch = mail.prepared.get(key)
    if launch is None:
        launch = mail.prepared[key] = Relaunch(
            _wait_kernel, (), ("channel", "tag", "fill"),
            desk_ptr=mail.desk, ids=ids, SIGNALS=signals, **_fixed(mail, 1),
        )  # fmt: skip
    launch(1, (), (call.channel, call.tag, fill))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Of a kernel on a window: how its plan is found, and what launches it by the plan's sizes of
    items."""

    kernel: Kernel
    machine: GpuModel
    ranks: int
    launches: dict[tuple[int, int], Relaunch] = field(default_factory=dict)

    def plan(self, rows: int) -> LaunchPlan:
        return plan_of(self.kernel, rows, self.machine, self.ranks)


def send(
    tokens: LocalTokens,
    rows: int,
    inbox: RowPlanes,
    spread: SlotOwners,
    call: ChannelCall,
    receives: bool = False,
) -> None:
    mail, x_TH = call.mail, tokens.x_TH
    (num_rows, hidden), top_k = x_TH.shape, tokens.ids_TK.shape[1]
    # A window has one inbox a lane and payload; only its scale differs from layer to layer.
    place = (inbox.payload, inbox.ids, inbox.weights, inbox.at_home)
    key = (*place, spread, hidden, top_k, receives, call.programs)
    found = mail.prepared.get(key)
    if found is None:
        found = mail.prepared[key] = _sender(inbox, spread, hidden, top_k, call)
    plan = found.plan(rows)
    launch = found.launches.get((plan.block, plan.warps))
    if launch is None:
        launch = found.launches[plan.block, plan.warps] = Relaunch(
            _send_kernel, ("x_ptr", *TENSORS), NUMBERS, desk_ptr=mail.desk, RECEIVES=receives,
            values=inbox.values, scales=inbox.scales, ids=inbox.ids, weights=max(0, inbox.weights),
            **send_constants(inbox, hidden, top_k, plan), **_spread_constants(spread),
            **_fixed(mail, plan.warps),
        )  # fmt: skip
    stride, step = x_TH.stride()
    if step != 1:
        x_TH, stride = x_TH.contiguous(), hidden
    weights_TK = tokens.weights_TK.contiguous() if inbox.weights >= 0 else None
    launch(
        plan.programs,
        (x_TH, tokens.ids_TK.contiguous(), weights_TK, tokens.num_tokens_1),
        (stride, num_rows, rows, call.channel, call.tag, float(inbox.scale)),
    )


def _sender(
    inbox: RowPlanes, spread: SlotOwners, hidden: int, top_k: int, call: ChannelCall
) -> _Prepared:
    size = call.mail.size
    ranks = size if spread.everywhere else min(size, top_k * spread.width)
    name = "gather" if spread.everywhere else "send"
    if inbox.at_home:
        ranks, name = 1, "keep"
    return _Prepared(Kernel(name, size, hidden, inbox.payload), _machine(call), ranks)


def send_constants(inbox: RowPlanes, hidden: int, top_k: int, plan: LaunchPlan) -> dict[str, Any]:
    """What a kernel is compiled for, of a payload."""
    return {
        "H": hidden,
        "K": top_k,
        "K_BLOCK": triton.next_power_of_2(top_k),
        "BLOCK": plan.block,
        "GROUP": GROUPS.get(inbox.payload, plan.block),
        "PAYLOAD": "plain" if inbox.payload in PLAIN else inbox.payload,
        "VALUE_TYPE": VALUE_TYPES[inbox.payload],
        "SCALE_TYPE": SCALE_TYPES.get(inbox.payload),
        "VALUE_BYTES": inbox.value_bytes,
        "SCALE_BYTES": inbox.scale_bytes,
        "VALUE_ALIGN": _alignment(inbox.value_bytes),
        "AT_HOME": inbox.at_home,
    }


def collect_rows(
    out_TH: Tensor,
    tokens: LocalTokens,
    rows: int,
    results: int,
    spread: SlotOwners,
    call: ChannelCall,
    signals: bool = False,
) -> Tensor:
    _collect("collect_rows", out_TH, tokens, (rows, results), spread, call, signals)
    return out_TH


def collect_pairs(
    out_TH: Tensor,
    tokens: LocalTokens,
    rows: int,
    results: int,
    spread: SlotOwners,
    call: ChannelCall,
    signals: bool = False,
) -> Tensor:
    _collect("collect_pairs", out_TH, tokens, (rows, results), spread, call, signals)
    return out_TH


def _collect(
    name: str,
    out_TH: Tensor,
    tokens: LocalTokens,
    where: tuple[int, int],
    spread: SlotOwners,
    call: ChannelCall,
    signals: bool,
) -> None:
    """`where`: C, and the offset of the results."""
    _wait(call, signals)
    mail, ids_TK = call.mail, tokens.ids_TK
    (num_rows, hidden), top_k = out_TH.shape, ids_TK.shape[1]
    if not num_rows:
        return
    stride, step = out_TH.stride()
    assert step == 1
    rows, results = where
    key = (name, results, spread, hidden, top_k, out_TH.dtype, call.programs)
    found = mail.prepared.get(key)
    if found is None:
        kernel = Kernel(name, mail.size, hidden)
        found = mail.prepared[key] = _Prepared(kernel, _machine(call), mail.size)
    plan = found.plan(num_rows)
    launch = found.launches.get((plan.block, plan.warps))
    if launch is None:
        launch = found.launches[plan.block, plan.warps] = Relaunch(
            COLLECTORS[name], ("out_ptr", *TENSORS), ("stride", "num_rows", "rows"),
            results=results, **collect_constants(hidden, top_k, out_TH.dtype, plan),
            **_spread_constants(spread), **_place(mail, plan.warps),
            enable_fp_fusion=False,  # products are rounded before they are added, as in the twin
        )  # fmt: skip
    launch(
        plan.programs,
        (out_TH, ids_TK.contiguous(), tokens.weights_TK.contiguous(), tokens.num_tokens_1),
        (stride, num_rows, rows),
    )


def collect_constants(
    hidden: int, top_k: int, dtype: torch.dtype, plan: LaunchPlan
) -> dict[str, Any]:
    return {
        "H": hidden,
        "K": top_k,
        "BLOCK": plan.block,
        "ALIGN": _alignment(hidden * dtype.itemsize),
    }


def _spread_constants(spread: SlotOwners) -> dict[str, Any]:
    return {"SLOTS": spread.slots, "WIDTH": spread.width, "EVERYWHERE": spread.everywhere}


def _alignment(row_bytes: int) -> int:
    """Rows begin at multiples of this: planes do so at more."""
    return min(16, row_bytes & -row_bytes)


def _machine(call: ChannelCall) -> GpuModel:
    state = call.mail.state
    if not state.is_cuda:
        return GpuModel(limit=call.programs)
    name = device_facts(state.device).name
    return GpuModel(num_processors(state.device.index), call.programs, name)
