"""Ranks that write into each other's memory: tokens on their way to experts, results on their way
back, and the signals that tell when they are there.

P ranks · C rows of a rank in this step, the same on all ranks · T <= C tokens of this rank ·
K chosen · e slots of a group · W ranks of a group, which share its slots · H hidden ·
N = P * C * K pairs.

    send             rows to those who need them, and the signal that they are there
    receive          until everybody's rows are here
    signal, wait     the same without rows: of results
    collect_rows     results of a token from all groups, one row of each, summed
    collect_pairs    results of a token's pairs, weighted and summed in the order of k

Token t of rank p is row p * C + t of whoever needs it. So nobody counts or sorts before it sends,
no counts travel, and whoever waits for a result knows where it is. A row that was not sent has ids
of -1 and may hold anything.

A region is what a rank shows to its peers: planes at the same offsets on all ranks, and flags. A
rank raises its flag on a channel by writing a word into everybody's region:

    (generation << 32) + (count % 2**16 << 16) + tag

`count` is how often it has done so in this generation, which each rank keeps on its device, so that
a graph can be replayed; `tag` is what it was of (a layer). Who waits wants the word that it has
written itself last: an older one means that the peer is not here yet, any other that the two are
not in the same operation. Flags stay as they are when ranks restart, so any word of a generation
must be above all of the ones before, after however many days: a count begins at 0 again before it
would reach into the generation. That does no harm, as ranks that wait for each other are never far
apart: within a generation the shorter way around tells which of two words is older (`ahead`). A
wait that fails writes on its desk, and goes on; all that follow neither wait nor signal until the
rank restarts. So a kernel ends whatever its peers do, and the host finds out why
(comm/windows/device_window.py).

Why nothing is overwritten too early is told in moe/dispatch/host/exchange.py; it is the same here.
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

from moesaic.kernels.native import native

A2A = "moesaic.kernels.triton.a2a"
COUNT_SHIFT, GENERATION_SHIFT = 16, 32
MAX_TAG = (1 << COUNT_SHIFT) - 1
COUNT_MASK = (1 << GENERATION_SHIFT - COUNT_SHIFT) - 1


class DeviceStateWord(IntEnum):
    """Words of a rank's own state on its device; then, of each channel, how often it was raised and
    how many programs of the kernel under way have ended (0 between kernels)."""

    GENERATION = 0
    TIMEOUT_NS = 1
    ACTIVE = 2  # a bit for each rank that takes part
    BROKEN = 3  # a wait has failed
    CHANNELS = 8


class FailureWords(IntEnum):
    """Words of memory that host and device see."""

    ABORT = 0  # written by the host: give up waiting
    FAILURE = 1
    CHANNEL = 2
    PEERS = 3  # a bit for each that was not there, or elsewhere
    SEEN = 4  # the flag of the first of them
    WANTED = 5


DESK_WORDS = 8


class Failure(IntEnum):
    NONE = 0
    TIMEOUT = 1
    OUT_OF_STEP = 2
    ABORTED = 3


@dataclass(frozen=True, slots=True)
class SignalPlanes:
    """What kernels know of a window. `regions`: of all ranks, as bytes; `bases_P`: where they begin
    (int64, on the device). `flags`: byte offset of [channels, P] flags. `state`, `desk`: int64.
    `near`: all of them are memory of one GPU, whose own order of writes is all that counts."""

    rank: int
    size: int
    regions: tuple[Tensor, ...]
    bases_P: Tensor
    flags: int
    state: Tensor
    desk: Tensor
    near: bool = False
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What kernels keep for their next launch on this window."""

    @property
    def scope(self) -> str:
        """Of who must see in what order a rank has written, as kernels call it."""
        return "gpu" if self.near else "sys"

    @property
    def values(self) -> Tensor:
        """Where it is computed (kernels/native.py)."""
        return self.state

    def plane(self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = prod(shape) * dtype.itemsize
        return self.regions[rank][offset : offset + nbytes].view(dtype).view(shape)

    def flag(self, rank: int, channel: int) -> Tensor:
        """[P]: who has raised what on a channel, as this rank sees it."""
        offset = self.flags + channel * self.size * 8
        return self.plane(rank, offset, (self.size,), torch.int64)


@dataclass(frozen=True, slots=True)
class ChannelCall:
    """A use of a channel: by which layer. `programs`: so many at most, for kernels that run beside
    others; 0: as many as serve."""

    mail: SignalPlanes
    channel: int
    tag: int = 0
    programs: int = 0

    @property
    def values(self) -> Tensor:
        return self.mail.state


@dataclass(frozen=True, slots=True)
class RowPlanes:
    """Byte offsets, in every region, of planes of rows that arrive: values, scales (of payloads
    that have some), ids [rows, K] int32 and weights [rows, K] float32. `weights` below 0: they
    stay. `value_bytes`, `scale_bytes`: of a row, in the payload's format."""

    payload: str
    values: int
    scales: int
    ids: int
    weights: int
    value_bytes: int
    scale_bytes: int
    scale: float = 1.0
    """Of all rows, for payloads with a global one."""
    at_home: bool = False
    """Values and scales stay in the region of the token's rank, row t of their planes: only ids
    and weights travel."""


@dataclass(frozen=True, slots=True)
class SlotOwners:
    """Slot s is held by ranks s // slots * width and the next, `width` of them in all.
    `everywhere`: tokens go to all ranks, whether these hold a slot of theirs or not."""

    slots: int
    width: int = 1
    everywhere: bool = False


@dataclass(frozen=True, slots=True)
class LocalTokens:
    """This rank's: `num_tokens_1` (int32) says how many rows are tokens where not all are."""

    x_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    num_tokens_1: Tensor | None = None

    @property
    def values(self) -> Tensor:
        return self.x_TH

    @property
    def count(self) -> int:
        """For twins."""
        return len(self.x_TH) if self.num_tokens_1 is None else int(self.num_tokens_1)


@native(A2A)
def signal(call: ChannelCall) -> None:
    """Raises this rank's flag everywhere: what it has written before is there for who sees it."""
    mail, state = call.mail, call.mail.state
    if state[DeviceStateWord.BROKEN]:
        return
    place = DeviceStateWord.CHANNELS + 2 * call.channel
    state[place] += 1
    word = _word(call, int(state[place]))
    _fence()
    for rank in _active(mail):
        mail.flag(rank, call.channel)[mail.rank] = word


@native(A2A)
def wait(call: ChannelCall) -> None:
    """Until all ranks that take part have raised the flag as often as this one, of the same."""
    mail, state = call.mail, call.mail.state
    if state[DeviceStateWord.BROKEN]:
        return
    wanted = _word(call, int(state[DeviceStateWord.CHANNELS + 2 * call.channel]))
    deadline = time.monotonic_ns() + int(state[DeviceStateWord.TIMEOUT_NS])
    flags = mail.flag(mail.rank, call.channel)
    for rank in _active(mail):
        while (seen := int(flags[rank])) != wanted:
            late = time.monotonic_ns() > deadline
            if ahead(seen, wanted) > 0 or late or mail.desk[FailureWords.ABORT]:
                _fail(call, wanted)
                return
            time.sleep(0)
    _fence()


def _fail(call: ChannelCall, wanted: int) -> None:
    """Writes down who is not here; of those, the first one's flag."""
    mail, desk = call.mail, call.mail.desk
    flags = mail.flag(mail.rank, call.channel).tolist()
    strange = [rank for rank in _active(mail) if ahead(flags[rank], wanted) > 0]
    missing = strange or [rank for rank in _active(mail) if flags[rank] != wanted]
    failure = Failure.OUT_OF_STEP if strange else Failure.TIMEOUT
    if desk[FailureWords.ABORT] and not strange:
        failure = Failure.ABORTED
    desk[FailureWords.CHANNEL] = call.channel
    desk[FailureWords.PEERS] = sum(1 << rank for rank in missing)
    desk[FailureWords.SEEN] = flags[missing[0]] if missing else wanted
    desk[FailureWords.WANTED] = wanted
    desk[FailureWords.FAILURE] = failure
    mail.state[DeviceStateWord.BROKEN] = 1


@native(A2A)
def send(
    tokens: LocalTokens,
    rows: int,
    inbox: RowPlanes,
    spread: SlotOwners,
    call: ChannelCall,
    receives: bool = False,
) -> None:
    """Tokens to the ranks that hold a slot of theirs, each once, and the signal. `rows`: C. Ids
    become those within a group, -1 for slots of other groups, and of rows that are no tokens.
    `receives`: and then what `receive` does.

    Two ranks of two slots each, C 2, rank 1 with one token of ids [3, 0]: row 2 of rank 0 is that
    token with ids [-1, 0], row 2 of rank 1 the same with ids [1, -1]; rows 3 have ids [-1, -1].
    """
    from moesaic.kernels.payloads import encode_rows

    mail, count, top_k = call.mail, tokens.count, tokens.ids_TK.shape[1]
    if mail.state[DeviceStateWord.BROKEN]:
        return
    ids_TK = tokens.ids_TK[:count]
    values, scales = encode_rows(tokens.x_TH[:count], inbox.payload, inbox.scale)
    first = mail.rank * rows
    for rank in _active(mail):
        group = rank // spread.width
        here_TK = ids_TK.div(spread.slots, rounding_mode="floor") == group
        local_TK = torch.where(here_TK, ids_TK - group * spread.slots, -1).int()
        ids_CK = mail.plane(rank, inbox.ids + first * top_k * 4, (rows, top_k), torch.int32)
        ids_CK[:count], ids_CK[count:] = local_TK, -1
        goes_T = here_TK.any(1) | spread.everywhere
        if not inbox.at_home:
            _put_rows(mail, rank, inbox, first, (values, scales), goes_T)
        if inbox.weights >= 0:
            place = inbox.weights + first * top_k * 4
            _put(mail, rank, place, tokens.weights_TK[:count], goes_T)
    if inbox.at_home:
        goes_T = (ids_TK >= 0).any(1) | spread.everywhere
        _put_rows(mail, mail.rank, inbox, 0, (values, scales), goes_T)
    signal.twin(call)
    if receives:
        receive.twin(call, rows, top_k, inbox.ids)


def _put_rows(
    mail: SignalPlanes,
    rank: int,
    inbox: RowPlanes,
    first: int,
    rows: tuple[Tensor, Tensor | None],
    goes_T: Tensor,
) -> None:
    """Values and scales, from row `first` on."""
    values, scales = rows
    _put(mail, rank, inbox.values + first * inbox.value_bytes, values, goes_T)
    if scales is not None:
        _put(mail, rank, inbox.scales + first * inbox.scale_bytes, scales, goes_T)


def _put(mail: SignalPlanes, rank: int, offset: int, source: Tensor, goes_T: Tensor) -> None:
    """Bytes of the rows that go."""
    source = source.contiguous().view(torch.uint8)
    target = mail.plane(rank, offset, tuple(source.shape), torch.uint8)
    target[goes_T] = source[goes_T]


@native(A2A)
def receive(call: ChannelCall, rows: int, top_k: int, ids: int) -> None:
    """Until everybody's rows are here. Rows of ranks that take no part get ids of -1; `ids` is the
    offset of the plane."""
    wait.twin(call)
    mail = call.mail
    absent = set(range(mail.size)) - set(_active(mail))
    for rank in absent:
        mail.plane(mail.rank, ids + rank * rows * top_k * 4, (rows, top_k), torch.int32).fill_(-1)


@native(A2A)
def collect_rows(
    out_TH: Tensor,
    tokens: LocalTokens,
    rows: int,
    results: int,
    spread: SlotOwners,
    call: ChannelCall,
    signals: bool = False,
) -> Tensor:
    """Waits, then out[t] = sum over ranks r, in their order, that a token went to, of row
    p * C + t of their results (planes [P * C, H] at offset `results`, of the type of out), in
    float32; p is this rank. Zeros for a token that went nowhere; rows that are no tokens are left.
    `signals`: first this rank's own signal, that its results are there."""
    _exchange_flags(call, signals)
    mail, count, hidden = call.mail, tokens.count, out_TH.shape[1]
    groups_TK = tokens.ids_TK[:count].div(spread.slots, rounding_mode="floor")
    total_TH = torch.zeros(count, hidden, dtype=torch.float32, device=out_TH.device)
    offset = results + mail.rank * rows * hidden * out_TH.element_size()
    for rank in _active(mail):
        went_T = (groups_TK == rank // spread.width).any(1) | spread.everywhere
        y_TH = mail.plane(rank, offset, (count, hidden), out_TH.dtype)
        total_TH += torch.where(went_T[:, None], y_TH.float(), 0.0)
    out_TH[:count] = total_TH
    return out_TH


@native(A2A)
def collect_pairs(
    out_TH: Tensor,
    tokens: LocalTokens,
    rows: int,
    results: int,
    spread: SlotOwners,
    call: ChannelCall,
    signals: bool = False,
) -> Tensor:
    """Waits, then out[t] = sum over k, in order, of weights[t, k] times the sum over the ranks of
    its slot's group of row (p * C + t) * K + k of their results (planes [P * C * K, H])."""
    _exchange_flags(call, signals)
    mail, count, hidden = call.mail, tokens.count, out_TH.shape[1]
    active = set(_active(mail))
    top_k = tokens.ids_TK.shape[1]
    offset = results + mail.rank * rows * top_k * hidden * out_TH.element_size()
    total_TH = torch.zeros(count, hidden, dtype=torch.float32, device=out_TH.device)
    for k in range(top_k):
        groups_T = tokens.ids_TK[:count, k].div(spread.slots, rounding_mode="floor")
        y_TH = torch.zeros_like(total_TH)
        for rank in range(mail.size):
            if rank in active:
                y_TKH = mail.plane(rank, offset, (count, top_k, hidden), out_TH.dtype)
                here_T = groups_T == rank // spread.width
                y_TH += torch.where(here_T[:, None], y_TKH[:, k].float(), 0.0)
        weighted_TH = y_TH * tokens.weights_TK[:count, k, None]
        total_TH += torch.where((groups_T >= 0)[:, None], weighted_TH, 0.0)
    out_TH[:count] = total_TH
    return out_TH


def _exchange_flags(call: ChannelCall, signals: bool) -> None:
    if signals:
        signal.twin(call)
    wait.twin(call)


def _word(call: ChannelCall, count: int) -> int:
    generation = int(call.mail.state[DeviceStateWord.GENERATION])
    turn = count & COUNT_MASK
    return (generation << GENERATION_SHIFT) + (turn << COUNT_SHIFT) + call.tag


def ahead(seen: int, wanted: int) -> int:
    """Above 0 of a flag beyond what is wanted, below 0 of one that is behind.

    In one generation count 0 is ahead of count 65535, and 65535 behind 0.
    """
    if seen >> GENERATION_SHIFT != wanted >> GENERATION_SHIFT:
        return seen - wanted
    half = 1 << GENERATION_SHIFT - 1
    return (seen - wanted + half) % (2 * half) - half


def _active(mail: SignalPlanes) -> Iterator[int]:
    mask = int(mail.state[DeviceStateWord.ACTIVE])
    return (rank for rank in range(mail.size) if mask >> rank & 1)


_lock = threading.Lock()


def _fence() -> None:
    """What a CPU writes before is seen before what it writes after."""
    _lock.acquire()
    _lock.release()
