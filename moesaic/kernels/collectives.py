"""Ranks that put their parts of one tensor together, each in the others' memory.

P ranks · N elements of a rank's part · M elements of the result · R rows · V columns of a rank.

    push       small parts: into everybody's memory at once; what has come is summed or laid out
    post       large parts: into the rank's own memory, and the signal that they are there
    post_sums  the same with a share of the sum of what all have posted
    pull       waits, then sums or lays out what all have posted

An operation is one round (push; post, pull) or two (post, post_sums, pull: every rank sums a share,
and reads what others have summed). The part of a round is elements begin..stop of every rank's
part; what does not fit goes in several rounds.

Rounds use two halves in turn, and each half has a channel of its own. Which is next follows from
how often the two have been raised, which is counted on the device (kernels/a2a.py): so a graph
takes turns when it is replayed. Why nothing is overwritten too early: round k + 2 writes where
round k was read, and a rank that is in it has seen everybody's flag of round k + 1, which each
raised after it had read all of round k. So every rank waits in every round, even if it wants
nothing. And nobody raises a flag a second time before all have seen it, for the same reason; one
channel alone would show some a flag of round k + 1 while they wait for that of round k.

Small parts are cut into lanes. A lane has channels, halves and counts of its own, and one program
writes, signals, waits and reads it, so that no program waits for another of its rank and the
argument above holds for each lane by itself, whatever lanes the rounds before took.

What follows a wait that failed writes nothing to others, and zeros as results: what is computed of
them is abandoned, but must not read where nothing is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.a2a import ChannelCall, DeviceStateWord, signal, wait
from moesaic.kernels.native import native

COLLECTIVES = "moesaic.kernels.triton.collectives"
HALVES = 2
# Stands before each part: how many columns it has, where ranks bring different numbers.
HEAD_BYTES = 128
# Bytes that the threads of a program copy at once; lanes begin at multiples of it.
BLOCK_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Board:
    """Byte offsets, in every region, of planes [lanes, 2, P, HEAD + lane_bytes] (`pushed`) and
    [2, HEAD + post_bytes] (`posted`). Lane i has channels 2 * i and the next, posts the two behind
    the last lane's."""

    pushed: int
    posted: int
    lanes: int
    lane_bytes: int
    post_bytes: int

    @property
    def push_bytes(self) -> int:
        """Of the largest part that can be pushed."""
        return self.lanes * self.lane_bytes

    @property
    def post_channel(self) -> int:
        return HALVES * self.lanes

    def lane_elements(self, count: int, itemsize: int) -> int:
        """Of a lane, where parts have `count`; all ranks find the same."""
        block = BLOCK_BYTES // itemsize
        return max(1, -(-count // (self.lanes * block))) * block

    def part_offset(self, call: ChannelCall, source: int) -> int:
        """For twins: where a part begins, behind its head, that which `source` has pushed or
        posted in the half of the call's channel."""
        if call.channel >= self.post_channel:
            half = call.channel - self.post_channel
            return self.posted + half * (HEAD_BYTES + self.post_bytes) + HEAD_BYTES
        place = call.channel * call.mail.size + source
        return self.pushed + place * (HEAD_BYTES + self.lane_bytes) + HEAD_BYTES


@dataclass(frozen=True, slots=True)
class ElementRange:
    """Elements of parts that travel in this round. `begin` is a multiple of 16 bytes."""

    begin: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.begin


@dataclass(frozen=True, slots=True)
class Sum:
    """The result is the sum of the parts in rank order, from element `first` on: floats in float32
    at least, rounded once; integers in their own type."""

    first: int = 0


@dataclass(frozen=True, slots=True)
class Columns:
    """Parts are matrices [R, V]; the result has them side by side, from row `first` on. `width`: V
    of this rank. `even`: all ranks have it, else each tells the others. `shift` is where the result
    begins to be written; what would stand before it or at `limit` and behind is left out."""

    rows: int
    width: int
    even: bool
    total: int
    first: int = 0
    shift: int = 0
    limit: int | None = None


Target = Sum | Columns


@native(COLLECTIVES)
def push(
    call: ChannelCall,
    board: Board,
    x_N: Tensor | None,
    out_M: Tensor | None,
    cut: ElementRange,
    target: Target,
) -> None:
    """This rank's part to all, and the result from all of theirs. Without x_N it only takes, after
    another call gave; without out_M it only gives. `call` is on channel 0.

    Ranks 0 and 1 with [1, 2, 3] and [10, 20, 30], Cut(0, 3): Sum(1) gives [22, 33]; as
    Columns(3, 1, True, 2) it gives [1, 10, 2, 20, 3, 30].
    """
    given = x_N if x_N is not None else out_M
    assert given is not None
    size = board.lane_elements(len(cut), given.element_size())
    lanes = [
        (
            ChannelCall(call.mail, HALVES * lane, call.tag),
            ElementRange(start, min(start + size, cut.stop)),
        )
        for lane, start in enumerate(range(cut.begin, max(cut.stop, cut.begin + 1), size))
    ]
    assert len(lanes) <= board.lanes, (cut, board)
    if x_N is not None:
        for own, part in lanes:
            _give(_turn(own, 0), board, x_N[part.begin : part.stop], target)
    if out_M is not None:
        for own, part in lanes:
            _take(_turn(own, 1), board, out_M, part, target)


@native(COLLECTIVES)
def post(call: ChannelCall, board: Board, x_N: Tensor, cut: ElementRange, target: Target) -> None:
    """This rank's part where others can read it, and the signal. `call` is on the posts' channel,
    here and below."""
    _give(_turn(call, 0), board, x_N[cut.begin : cut.stop], target)


@native(COLLECTIVES)
def post_sums(
    call: ChannelCall, board: Board, dtype: torch.dtype, cut: ElementRange, size: int
) -> None:
    """Waits, then posts elements rank * size and the next, `size` of them, of the sum of what all
    have posted in the last round, which was of elements `cut`."""
    start = min(len(cut), call.mail.rank * size)
    share = ElementRange(start, min(len(cut), start + size))
    sums = torch.empty(len(share), dtype=dtype)
    _take(_turn(call, 1), board, sums, ElementRange(0, share.stop), Sum(start))
    _give(_turn(call, 0), board, sums, Sum())


@native(COLLECTIVES)
def pull(call: ChannelCall, board: Board, out_M: Tensor, cut: ElementRange, target: Target) -> None:
    """Waits until all have posted, then sums their parts or lays them out."""
    _take(_turn(call, 1), board, out_M, cut, target)


def _turn(call: ChannelCall, back: int) -> ChannelCall:
    """On the channel of the next round (0), or of the one that this rank has given its part of
    last (1); `call` is on that of the first."""
    state, place = call.mail.state, DeviceStateWord.CHANNELS + 2 * call.channel
    rounds = int(state[place] + state[place + 2])
    return ChannelCall(call.mail, call.channel + (rounds - back) % HALVES, call.tag)


def _give(call: ChannelCall, board: Board, part: Tensor, target: Target) -> None:
    """To all what is pushed, to itself what is posted, and the signal."""
    mail = call.mail
    if mail.state[DeviceStateWord.BROKEN]:
        return
    offset = board.part_offset(call, mail.rank)
    for peer in range(mail.size) if call.channel < board.post_channel else (mail.rank,):
        mail.plane(peer, offset, tuple(part.shape), part.dtype).copy_(part)
        if isinstance(target, Columns):
            mail.plane(peer, offset - HEAD_BYTES, (1,), torch.int64).fill_(target.width)
    signal.twin(call)  # type: ignore[attr-defined]


def _take(
    call: ChannelCall, board: Board, out_M: Tensor, cut: ElementRange, target: Target
) -> None:
    """Waits; then of elements `cut` those that the result has."""
    mail = call.mail
    wait.twin(call)  # type: ignore[attr-defined]
    if mail.state[DeviceStateWord.BROKEN]:
        out_M.zero_()
        return
    here = call.channel < board.post_channel
    places = [
        (mail.rank if here else peer, board.part_offset(call, peer)) for peer in range(mail.size)
    ]
    parts = [mail.plane(region, at, (len(cut),), out_M.dtype) for region, at in places]
    if isinstance(target, Sum):
        _add(out_M, parts, cut, target)
        return
    heads = [mail.plane(region, at - HEAD_BYTES, (1,), torch.int64) for region, at in places]
    widths = [target.width if target.even else int(head) for head in heads]
    start = 0
    for part, width in zip(parts, widths, strict=True):
        _lay_out(out_M, part, cut, target, width, start)
        start += width


def _add(out_M: Tensor, parts: list[Tensor], cut: ElementRange, target: Sum) -> None:
    begin = max(cut.begin, target.first)
    stop = max(begin, min(cut.stop, target.first + len(out_M)))
    first, *others = (part[begin - cut.begin : stop - cut.begin] for part in parts)
    narrow = out_M.is_floating_point() and out_M.element_size() < 4
    total = first.float() if narrow else first.clone()
    for other in others:
        total += other
    out_M[begin - target.first : stop - target.first] = total


def _lay_out(
    out_M: Tensor, part_N: Tensor, cut: ElementRange, target: Columns, width: int, start: int
) -> None:
    """A rank's part, whose columns are those from `start` on."""
    at_N = torch.arange(cut.begin, min(cut.stop, max(cut.begin, target.rows * width)))
    row_N = at_N.div(max(1, width), rounding_mode="floor")
    column_N = at_N - row_N * width
    to_N = (row_N - target.first) * target.total + start + column_N + target.shift
    limit = len(out_M) if target.limit is None else target.limit
    wanted_N = (row_N >= target.first) & (to_N >= 0) & (to_N < limit)
    out_M[to_N[wanted_N]] = part_N[: len(at_N)][wanted_N]
