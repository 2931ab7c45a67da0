"""All-to-all between ranks that write into each other's memory: tokens to experts, results back,
and the flags that signal their arrival.

P ranks · C rows of a rank in this step, the same on all ranks · T <= C tokens of this rank ·
K chosen · e slots of a group · W ranks of a group, which share its slots · H hidden ·
N = P * C * K pairs.

    send             sends rows to the ranks that need them, then signals
    receive          waits for the rows of all ranks
    signal, wait     the same without rows, for results
    collect_rows     sums a token's results, one row of each group
    collect_pairs    sums the weighted results of a token's pairs, in the order of k

Token t of rank p is row p * C + t on every rank that needs it. So no rank counts or sorts before it
sends, no counts travel, and the position of every result is known. A row that was not sent has ids
of -1 and undefined values.

A region is the memory that a rank shares with its peers: planes at the same offsets on all ranks,
and flags. A rank raises its flag on a channel by writing a word into every region:

    (generation << 32) + (count % 2**16 << 16) + tag

`count` is how often the rank has raised it in this generation; it is stored on the device, so that
a graph can be replayed. `tag` identifies the operation (a layer). A wait expects the word that its
own rank wrote last: an older word means that the peer has not arrived, any other word that the two
ranks are not in the same operation. Flags survive a restart, so every word of a generation must
exceed all words of earlier ones; hence `count` wraps around below the generation's bits. Within a
generation `ahead` compares words modulo 2**32, as ranks that wait for each other are at most a few
counts off. A wait that fails records why in the failure words and returns; later calls neither wait
nor signal until the rank restarts. So every kernel ends, whatever its peers do, and the host reads
the reason (comm/windows/device_window.py).

moe/dispatch/host/exchange.py explains why nothing is overwritten too early; it holds here, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.link import (
    NO_LOAD,
    LinkLoad,
    arrival_ns,
    book_results,
    book_rows,
    sleep_until,
)
from moesaic.kernels.native import native

A2A = "moesaic.kernels.triton.a2a"
COUNT_SHIFT, GENERATION_SHIFT = 16, 32
MAX_TAG = (1 << COUNT_SHIFT) - 1
COUNT_MASK = (1 << GENERATION_SHIFT - COUNT_SHIFT) - 1


class DeviceStateWord(IntEnum):
    """Words of a rank's state on its device. Behind them each channel has two: how often it was
    raised, and how many programs of the running kernel have ended (0 between kernels)."""

    GENERATION = 0
    TIMEOUT_NS = 1
    ACTIVE = 2  # one bit for each active rank
    BROKEN = 3  # a wait has failed
    CHANNELS = 8  # those before belong to an emulated link (kernels/link.py)


class FailureWords(IntEnum):
    """Words of memory that both host and device access."""

    ABORT = 0  # written by the host: stop waiting
    FAILURE = 1
    CHANNEL = 2
    PEERS = 3  # one bit for each rank that is missing or in another operation
    SEEN = 4  # the flag of the first of them
    WANTED = 5


NUM_FAILURE_WORDS = 8


class Failure(IntEnum):
    NONE = 0
    TIMEOUT = 1
    OUT_OF_STEP = 2
    ABORTED = 3


@dataclass(frozen=True, slots=True)
class SignalPlanes:
    """The memory of a window, for kernels: `regions` of all ranks as bytes, `bases_P` their
    addresses (int64, on the device), `flags` the byte offset of [channels, P] flags, `state` and
    `failure` words (int64). With `same_gpu` all regions are on one GPU, whose memory order
    suffices."""

    rank: int
    size: int
    regions: tuple[Tensor, ...]
    bases_P: Tensor
    flags: int
    state: Tensor
    failure: Tensor
    same_gpu: bool = False
    link: int = 0
    """The byte offset of the words of an emulated link; 0: none."""
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Launches that kernels reuse on this window."""

    @property
    def scope(self) -> str:
        """The scope of the kernels' fences."""
        return "gpu" if self.same_gpu else "sys"

    @property
    def values(self) -> Tensor:
        """The tensor whose device decides where to compute (kernels/native.py)."""
        return self.state

    def plane(self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = prod(shape) * dtype.itemsize
        return self.regions[rank][offset : offset + nbytes].view(dtype).view(shape)

    def flag(self, rank: int, channel: int) -> Tensor:
        """The flags [P] of a channel in a rank's region, one for each peer."""
        offset = self.flags + channel * self.size * 8
        return self.plane(rank, offset, (self.size,), torch.int64)


@dataclass(frozen=True, slots=True)
class ChannelCall:
    """One operation on a channel, on behalf of layer `tag`. `programs` limits kernels that run
    beside others; 0: no limit."""

    signals: SignalPlanes
    channel: int
    tag: int = 0
    programs: int = 0
    load: LinkLoad = NO_LOAD
    """What a signal sends over an emulated link, beyond rows."""

    @property
    def values(self) -> Tensor:
        return self.signals.state


@dataclass(frozen=True, slots=True)
class RowPlanes:
    """Byte offsets, in every region, of the planes that rows arrive in: values, scales (if the
    payload has any), ids [rows, K] int32 and weights [rows, K] float32, which are not sent if
    `weights` is below 0. `value_bytes`, `scale_bytes`: size of a row in the payload's format."""

    payload: str
    values: int
    scales: int
    ids: int
    weights: int
    value_bytes: int
    scale_bytes: int
    scale: float = 1.0
    """Global scale of payloads that have one."""
    local_rows: bool = False
    """Values and scales stay in the region of the token's rank, at row t of their planes; only ids
    and weights are sent."""

    def wire_bytes(self, top_k: int) -> int:
        """What a row takes of a link, also where its reader fetches it."""
        sent = 4 if self.weights < 0 else 8
        return self.value_bytes + self.scale_bytes + sent * top_k


@dataclass(frozen=True, slots=True)
class SlotOwners:
    """`width` ranks hold slot s, from rank s // slots * width on. With `everywhere` tokens go to
    all ranks, even to those that hold none of their slots."""

    slots: int
    width: int = 1
    everywhere: bool = False


@dataclass(frozen=True, slots=True)
class ResultPlane:
    """The results' plane at byte offset `offset` of every region. `rows`: C."""

    rows: int
    offset: int
    owners: SlotOwners


@dataclass(frozen=True, slots=True)
class LocalTokens:
    """This rank's tokens. `num_tokens_1` (int32): how many rows are tokens, if not all."""

    x_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    num_tokens_1: Tensor | None = None

    @property
    def values(self) -> Tensor:
        return self.x_TH

    @property
    def count(self) -> int:
        """Reads `num_tokens_1` back; only twins do."""
        return len(self.x_TH) if self.num_tokens_1 is None else int(self.num_tokens_1)


@native(A2A)
def signal(call: ChannelCall) -> None:
    """Raises this rank's flag in all regions; peers that see it also see all earlier writes."""
    signals, state = call.signals, call.signals.state
    if state[DeviceStateWord.BROKEN]:
        return
    if signals.link:
        book_results(call, list(_active(signals)))
    _raise(call)


def _raise(call: ChannelCall) -> None:
    signals, state = call.signals, call.signals.state
    place = DeviceStateWord.CHANNELS + 2 * call.channel
    state[place] += 1
    word = _word(call, int(state[place]))
    _fence()
    for rank in _active(signals):
        signals.flag(rank, call.channel)[signals.rank] = word


@native(A2A)
def wait(call: ChannelCall) -> None:
    """Waits until all active ranks have raised the same flag as often as this one."""
    signals, state = call.signals, call.signals.state
    if state[DeviceStateWord.BROKEN]:
        return
    wanted = _word(call, int(state[DeviceStateWord.CHANNELS + 2 * call.channel]))
    deadline = time.monotonic_ns() + int(state[DeviceStateWord.TIMEOUT_NS])
    flags = signals.flag(signals.rank, call.channel)
    for rank in _active(signals):
        while (seen := int(flags[rank])) != wanted:
            late = time.monotonic_ns() > deadline
            if ahead(seen, wanted) > 0 or late or signals.failure[FailureWords.ABORT]:
                _fail(call, wanted)
                return
            time.sleep(0)
    _fence()
    if signals.link:
        sleep_until(arrival_ns(call, list(_active(signals))))


def _fail(call: ChannelCall, wanted: int) -> None:
    """Records the missing peers, and the flag of the first of them."""
    signals, words = call.signals, call.signals.failure
    flags = signals.flag(signals.rank, call.channel).tolist()
    strange = [rank for rank in _active(signals) if ahead(flags[rank], wanted) > 0]
    missing = strange or [rank for rank in _active(signals) if flags[rank] != wanted]
    reason = Failure.OUT_OF_STEP if strange else Failure.TIMEOUT
    if words[FailureWords.ABORT] and not strange:
        reason = Failure.ABORTED
    words[FailureWords.CHANNEL] = call.channel
    words[FailureWords.PEERS] = sum(1 << rank for rank in missing)
    words[FailureWords.SEEN] = flags[missing[0]] if missing else wanted
    words[FailureWords.WANTED] = wanted
    words[FailureWords.FAILURE] = reason
    signals.state[DeviceStateWord.BROKEN] = 1


@native(A2A)
def send(
    tokens: LocalTokens,
    rows: int,
    planes: RowPlanes,
    owners: SlotOwners,
    call: ChannelCall,
    receives: bool = False,
) -> None:
    """Sends each token once to every rank that holds one of its slots, then signals. `rows`: C. Ids
    are local to the receiving group; -1 marks slots of other groups and rows without a token. With
    `receives`, `receive` follows.

    Two ranks of two slots each, C 2, rank 1 with one token of ids [3, 0]: row 2 of rank 0 is that
    token with ids [-1, 0], row 2 of rank 1 the same with ids [1, -1]; rows 3 have ids [-1, -1].
    """
    from moesaic.kernels.payloads import encode_rows

    signals, count, top_k = call.signals, tokens.count, tokens.ids_TK.shape[1]
    if signals.state[DeviceStateWord.BROKEN]:
        return
    ids_TK = tokens.ids_TK[:count]
    values, scales = encode_rows(tokens.x_TH[:count], planes.payload, planes.scale)
    first = signals.rank * rows
    rows_P, pairs_P = [0] * signals.size, [0] * signals.size
    for rank in _active(signals):
        group = rank // owners.width
        here_TK = ids_TK.div(owners.slots, rounding_mode="floor") == group
        local_TK = torch.where(here_TK, ids_TK - group * owners.slots, -1).int()
        ids_CK = signals.plane(rank, planes.ids + first * top_k * 4, (rows, top_k), torch.int32)
        ids_CK[:count], ids_CK[count:] = local_TK, -1
        goes_T = here_TK.any(1) | owners.everywhere
        rows_P[rank], pairs_P[rank] = int(goes_T.sum()), int(here_TK.sum())
        if not planes.local_rows:
            _put_rows(signals, rank, planes, first, (values, scales), goes_T)
        if planes.weights >= 0:
            place = planes.weights + first * top_k * 4
            _put(signals, rank, place, tokens.weights_TK[:count], goes_T)
    if planes.local_rows:
        goes_T = (ids_TK >= 0).any(1) | owners.everywhere
        _put_rows(signals, signals.rank, planes, 0, (values, scales), goes_T)
    if signals.link:
        unit = planes.wire_bytes(top_k)
        book_rows(call, rows_P, pairs_P, unit, list(_active(signals)))
    _raise(call)
    if receives:
        receive.twin(call, rows, top_k, planes.ids)


def _put_rows(
    signals: SignalPlanes,
    rank: int,
    planes: RowPlanes,
    first: int,
    rows: tuple[Tensor, Tensor | None],
    goes_T: Tensor,
) -> None:
    """Writes values and scales from row `first` on."""
    values, scales = rows
    _put(signals, rank, planes.values + first * planes.value_bytes, values, goes_T)
    if scales is not None:
        _put(signals, rank, planes.scales + first * planes.scale_bytes, scales, goes_T)


def _put(signals: SignalPlanes, rank: int, offset: int, source: Tensor, goes_T: Tensor) -> None:
    """Copies the selected rows as bytes."""
    source = source.contiguous().view(torch.uint8)
    target = signals.plane(rank, offset, tuple(source.shape), torch.uint8)
    target[goes_T] = source[goes_T]


@native(A2A)
def receive(call: ChannelCall, rows: int, top_k: int, ids: int) -> None:
    """Waits for the rows of all ranks, and sets the ids of inactive ranks' rows to -1. `ids`:
    offset of their plane."""
    wait.twin(call)
    signals = call.signals
    absent = set(range(signals.size)) - set(_active(signals))
    for rank in absent:
        signals.plane(
            signals.rank, ids + rank * rows * top_k * 4, (rows, top_k), torch.int32
        ).fill_(-1)


@native(A2A)
def collect_rows(
    out_TH: Tensor,
    tokens: LocalTokens,
    results: ResultPlane,
    call: ChannelCall,
    signal_first: bool = False,
) -> Tensor:
    """Waits, then out[t] = sum over the ranks r that token t went to, in order, of row p * C + t of
    their results (planes [P * C, H] of the type of out), in float32; p is this rank. A token that
    went nowhere gets zeros; rows without a token are not written. With `signal_first` this rank
    signals first that its own results are complete."""
    _exchange_flags(call, signal_first)
    signals, owners, count, hidden = call.signals, results.owners, tokens.count, out_TH.shape[1]
    groups_TK = tokens.ids_TK[:count].div(owners.slots, rounding_mode="floor")
    total_TH = torch.zeros(count, hidden, dtype=torch.float32, device=out_TH.device)
    offset = results.offset + signals.rank * results.rows * hidden * out_TH.element_size()
    for rank in _active(signals):
        went_T = (groups_TK == rank // owners.width).any(1) | owners.everywhere
        y_TH = signals.plane(rank, offset, (count, hidden), out_TH.dtype)
        total_TH += torch.where(went_T[:, None], y_TH.float(), 0.0)
    out_TH[:count] = total_TH
    return out_TH


@native(A2A)
def collect_pairs(
    out_TH: Tensor,
    tokens: LocalTokens,
    results: ResultPlane,
    call: ChannelCall,
    signal_first: bool = False,
) -> Tensor:
    """Waits, then out[t] = sum over k, in order, of weights[t, k] times the sum, over the ranks of
    the slot's group, of row (p * C + t) * K + k of their results (planes [P * C * K, H])."""
    _exchange_flags(call, signal_first)
    signals, owners, count, hidden = call.signals, results.owners, tokens.count, out_TH.shape[1]
    top_k = tokens.ids_TK.shape[1]
    row_bytes = hidden * out_TH.element_size()
    offset = results.offset + signals.rank * results.rows * top_k * row_bytes
    total_TH = torch.zeros(count, hidden, dtype=torch.float32, device=out_TH.device)
    for k in range(top_k):
        groups_T = tokens.ids_TK[:count, k].div(owners.slots, rounding_mode="floor")
        y_TH = torch.zeros_like(total_TH)
        for rank in _active(signals):
            y_TKH = signals.plane(rank, offset, (count, top_k, hidden), out_TH.dtype)
            here_T = groups_T == rank // owners.width
            y_TH += torch.where(here_T[:, None], y_TKH[:, k].float(), 0.0)
        weighted_TH = y_TH * tokens.weights_TK[:count, k, None]
        total_TH += torch.where((groups_T >= 0)[:, None], weighted_TH, 0.0)
    out_TH[:count] = total_TH
    return out_TH


def _exchange_flags(call: ChannelCall, signal_first: bool) -> None:
    if signal_first:
        signal.twin(call)
    wait.twin(call)


def _word(call: ChannelCall, count: int) -> int:
    generation = int(call.signals.state[DeviceStateWord.GENERATION])
    turn = count & COUNT_MASK
    return (generation << GENERATION_SHIFT) + (turn << COUNT_SHIFT) + call.tag


def ahead(seen: int, wanted: int) -> int:
    """Above 0 if `seen` is newer than `wanted`, below 0 if it is older.

    In one generation count 0 is ahead of count 65535, and 65535 behind 0.
    """
    if seen >> GENERATION_SHIFT != wanted >> GENERATION_SHIFT:
        return seen - wanted
    half = 1 << GENERATION_SHIFT - 1
    return (seen - wanted + half) % (2 * half) - half


def _active(signals: SignalPlanes) -> Iterator[int]:
    mask = int(signals.state[DeviceStateWord.ACTIVE])
    return (rank for rank in range(signals.size) if mask >> rank & 1)


_lock = threading.Lock()


def _fence() -> None:
    """Orders a CPU's earlier writes before its later ones."""
    _lock.acquire()
    _lock.release()
