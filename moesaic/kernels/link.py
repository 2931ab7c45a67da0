"""An emulated link: flags that are seen at once count as arrived only when a network of the link's
speed would have delivered them. P ranks.

A rank that signals books what it sends: its link is one queue for all channels of a window, so that
two micro-batches share it. It tells each rank when the transfer left and when it is due, and how
many bytes are for that rank. A rank that waits goes on at the latest due time, or when all bytes
that are for it could have passed its own link, if that is later. Waiting takes one program.

The bytes are those of the step, counted on the device as rows are sent, so that a graph's replay
has its own. Results that return are as many as the rows that came. Clocks of ranks on one GPU are
the same clock, and so are those of processes on one host.

A channel of a window has a row of P words for each LinkWord, in every region behind the flags.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moesaic.core.link import COST_BITS

if TYPE_CHECKING:
    from moesaic.kernels.a2a import ChannelCall, SignalPlanes


class LinkState(IntEnum):
    """Words of a rank's state on its device, which DeviceStateWord leaves to them."""

    COST = 4  # 2**-20 ns a byte
    LATENCY = 5  # in ns
    FREE = 6  # when the link has sent all that was put on it


class LinkWord(IntEnum):
    """Of each rank, in the region of the one it sends to; the last two in its own."""

    START = 0  # when its transfer began to leave, in ns
    DUE = 1  # when it arrives
    BYTES = 2  # how many of it are for this rank
    ROWS = 3  # rows that it has sent here
    PAIRS = 4  # pairs of these rows and slots of this rank
    ROWS_TO = 5  # rows that the running kernel has sent there so far
    PAIRS_TO = 6


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What a signal sends to each other rank: `fixed` bytes, and `unit` bytes for each row, or pair
    of row and slot, that came from it on `channel`."""

    fixed: int = 0
    unit: int = 0
    channel: int = 0
    pairs: bool = False


NO_LOAD = LinkLoad()


def link_offset(signals: SignalPlanes, channel: int, word: LinkWord) -> int:
    """The byte offset of a row of P words."""
    return signals.link + (channel * len(LinkWord) + word) * signals.size * 8


def link_words(signals: SignalPlanes, rank: int, channel: int, word: LinkWord) -> Tensor:
    """[P] in a rank's region."""
    offset = link_offset(signals, channel, word)
    return signals.plane(rank, offset, (signals.size,), torch.int64)


def book_results(call: ChannelCall, active: list[int]) -> None:
    """Books what a signal sends."""
    signals, load = call.signals, call.load
    word = LinkWord.PAIRS if load.pairs else LinkWord.ROWS
    came_P = link_words(signals, signals.rank, load.channel, word)
    book_transfer(call, (came_P * load.unit + load.fixed).tolist(), active)


def book_rows(
    call: ChannelCall, rows_P: list[int], pairs_P: list[int], unit: int, active: list[int]
) -> None:
    """Books rows that were sent, and tells each rank how many are for it."""
    signals = call.signals
    for rank in active:
        link_words(signals, rank, call.channel, LinkWord.ROWS)[signals.rank] = rows_P[rank]
        link_words(signals, rank, call.channel, LinkWord.PAIRS)[signals.rank] = pairs_P[rank]
    book_transfer(call, [unit * rows for rows in rows_P], active)


def book_transfer(call: ChannelCall, bytes_P: list[int], active: list[int]) -> None:
    """Puts a transfer behind what is on this rank's link."""
    signals, state = call.signals, call.signals.state
    others = [rank for rank in active if rank != signals.rank]
    took = sum(bytes_P[rank] for rank in others) * int(state[LinkState.COST])
    begin = max(time.monotonic_ns(), int(state[LinkState.FREE]))
    free = begin + (took >> COST_BITS)
    state[LinkState.FREE] = free
    due = free + int(state[LinkState.LATENCY])
    for rank in others:
        told = {LinkWord.START: begin, LinkWord.DUE: due, LinkWord.BYTES: bytes_P[rank]}
        for word, value in told.items():
            link_words(signals, rank, call.channel, word)[signals.rank] = value


def arrival_ns(call: ChannelCall, active: list[int]) -> int:
    """When all that this rank waits for has arrived; the flags have."""
    signals, state = call.signals, call.signals.state
    others = [rank for rank in active if rank != signals.rank]
    start, due, nbytes = (
        [int(link_words(signals, signals.rank, call.channel, word)[rank]) for rank in others]
        for word in (LinkWord.START, LinkWord.DUE, LinkWord.BYTES)
    )
    if not others:
        return 0
    cost, latency = state[LinkState.COST], state[LinkState.LATENCY]
    passed = min(start) + (sum(nbytes) * int(cost) >> COST_BITS) + int(latency)
    return max(*due, passed)


def sleep_until(due_ns: int) -> None:
    """Gives the processor to others meanwhile."""
    while (left := due_ns - time.monotonic_ns()) > 0:
        time.sleep(left * 1e-9)
