"""Collectives of ranks that combine their parts of one tensor in each other's memory.

P ranks · N elements of a rank's part · M elements of the result · R rows · V columns of a rank.

    push          writes a small part to all ranks; sums or lays out the parts that have arrived
    publish       writes a large part to the rank's own memory, then signals
    publish_sums  the same with a share of the sum of all published parts
    pull          waits, then sums or lays out all published parts

An operation is one round (push; publish, pull) or two (publish, publish_sums, pull: every rank sums
a share, and reads the other shares). A round covers elements begin..stop of every part; larger
parts take several rounds.

Rounds alternate between two halves, each with a channel of its own. The counts on the device
(kernels/a2a.py) tell which half is next, so a replayed graph alternates as well. Nothing is
overwritten too early: round k + 2 writes where round k was read, and a rank in it has seen all
flags of round k + 1, which every rank raised after it had read all of round k. So every rank waits
in every round, even if it needs no result. For the same reason no flag is raised twice before all
ranks have seen it; a single channel could show the flag of round k + 1 to a rank that waits for
round k.

Small parts are cut into lanes. A lane has its own channels, halves and counts, and one program
writes, signals, waits and reads it. So no program waits for another of its rank, and the argument
above holds for each lane, whatever lanes earlier rounds used.

After a failed wait nothing is written to peers, and results are zeros: they are discarded, but must
not address memory that does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.a2a import ChannelCall, DeviceStateWord, signal, wait
from moesaic.kernels.native import native

COLLECTIVES = "moesaic.kernels.triton.collectives"
HALVES = 2
# Before each part: its number of columns, where ranks have different ones.
HEAD_BYTES = 128
# Bytes that a program's threads copy at once; lanes begin at multiples.
BLOCK_BYTES = 2048


@dataclass(frozen=True, slots=True)
class CollectivePlanes:
    """Byte offsets, in every region, of planes [lanes, 2, P, HEAD + lane_bytes] (`pushed`) and [2,
    HEAD + publish_bytes] (`published`). Lane i has channels 2 * i and 2 * i + 1; published parts
    have the two after those of the last lane."""

    pushed: int
    published: int
    lanes: int
    lane_bytes: int
    publish_bytes: int

    @property
    def push_bytes(self) -> int:
        """Size of the largest part that can be pushed."""
        return self.lanes * self.lane_bytes

    @property
    def publish_channel(self) -> int:
        return HALVES * self.lanes

    def lane_elements(self, count: int, itemsize: int) -> int:
        """Elements of a lane for parts of `count`, the same on all ranks."""
        block = BLOCK_BYTES // itemsize
        return max(1, -(-count // (self.lanes * block))) * block

    def part_offset(self, call: ChannelCall, source: int) -> int:
        """Offset of `source`'s part, after its head, in the half of the call's channel."""
        if call.channel >= self.publish_channel:
            half = call.channel - self.publish_channel
            return self.published + half * (HEAD_BYTES + self.publish_bytes) + HEAD_BYTES
        place = call.channel * call.signals.size + source
        return self.pushed + place * (HEAD_BYTES + self.lane_bytes) + HEAD_BYTES


@dataclass(frozen=True, slots=True)
class ElementRange:
    """Elements of the parts that a round covers. `begin` is a multiple of 16 bytes."""

    begin: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.begin


@dataclass(frozen=True, slots=True)
class Sum:
    """Sums the parts in rank order from element `first` on: floats in float32 at least, rounded
    once; integers in their own type."""

    first: int = 0


@dataclass(frozen=True, slots=True)
class Columns:
    """Places the parts, matrices [R, V], side by side."""

    rows: int
    width: int
    """V of this rank."""
    even: bool
    """All ranks have the same V; otherwise each part's head stores it."""
    total: int
    first: int = 0
    """First row of the result."""
    shift: int = 0
    """Offset of the result; elements before 0 or from `limit` on are dropped."""
    limit: int | None = None


Target = Sum | Columns


@native(COLLECTIVES)
def push(
    call: ChannelCall,
    planes: CollectivePlanes,
    x_N: Tensor | None,
    out_M: Tensor | None,
    span: ElementRange,
    target: Target,
) -> None:
    """Writes this rank's part to all ranks, and combines the parts that arrive. Without x_N it only
    reads, without out_M it only writes. `call` is on channel 0.

    Ranks 0 and 1 with [1, 2, 3] and [10, 20, 30], ElementRange(0, 3): Sum(1) returns [22, 33];
    Columns(3, 1, True, 2) returns [1, 10, 2, 20, 3, 30].
    """
    given = x_N if x_N is not None else out_M
    assert given is not None
    size = planes.lane_elements(len(span), given.element_size())
    lanes = [
        (
            ChannelCall(call.signals, HALVES * lane, call.tag),
            ElementRange(start, min(start + size, span.stop)),
        )
        for lane, start in enumerate(range(span.begin, max(span.stop, span.begin + 1), size))
    ]
    assert len(lanes) <= planes.lanes, (span, planes)
    if x_N is not None:
        for own, part in lanes:
            _write_part(_round_call(own, 0), planes, x_N[part.begin : part.stop], target)
    if out_M is not None:
        for own, part in lanes:
            _read_parts(_round_call(own, 1), planes, out_M, part, target)


@native(COLLECTIVES)
def publish(
    call: ChannelCall, planes: CollectivePlanes, x_N: Tensor, span: ElementRange, target: Target
) -> None:
    """Writes this rank's part where peers can read it, then signals. `call` is on
    `publish_channel`, here and below."""
    _write_part(_round_call(call, 0), planes, x_N[span.begin : span.stop], target)


@native(COLLECTIVES)
def publish_sums(
    call: ChannelCall, planes: CollectivePlanes, dtype: torch.dtype, span: ElementRange, size: int
) -> None:
    """Waits, then publishes `size` elements from rank * size on of the sum of all parts published
    in the last round, which covered `span`."""
    start = min(len(span), call.signals.rank * size)
    share = ElementRange(start, min(len(span), start + size))
    sums = torch.empty(len(share), dtype=dtype)
    _read_parts(_round_call(call, 1), planes, sums, ElementRange(0, share.stop), Sum(start))
    _write_part(_round_call(call, 0), planes, sums, Sum())


@native(COLLECTIVES)
def pull(
    call: ChannelCall, planes: CollectivePlanes, out_M: Tensor, span: ElementRange, target: Target
) -> None:
    """Waits until all ranks have published, then sums their parts or lays them out."""
    _read_parts(_round_call(call, 1), planes, out_M, span, target)


def _round_call(call: ChannelCall, back: int) -> ChannelCall:
    """The call on the channel of the next round (0) or of the last round this rank wrote to (1);
    `call` is on that of the first round."""
    state, place = call.signals.state, DeviceStateWord.CHANNELS + 2 * call.channel
    rounds = int(state[place] + state[place + 2])
    return ChannelCall(call.signals, call.channel + (rounds - back) % HALVES, call.tag)


def _write_part(call: ChannelCall, planes: CollectivePlanes, part: Tensor, target: Target) -> None:
    """Writes a pushed part to all ranks, a published one to this rank; then signals."""
    signals = call.signals
    if signals.state[DeviceStateWord.BROKEN]:
        return
    offset = planes.part_offset(call, signals.rank)
    for peer in range(signals.size) if call.channel < planes.publish_channel else (signals.rank,):
        signals.plane(peer, offset, tuple(part.shape), part.dtype).copy_(part)
        if isinstance(target, Columns):
            signals.plane(peer, offset - HEAD_BYTES, (1,), torch.int64).fill_(target.width)
    signal.twin(call)


def _read_parts(
    call: ChannelCall, planes: CollectivePlanes, out_M: Tensor, span: ElementRange, target: Target
) -> None:
    """Waits, then writes the elements of `span` that the result contains."""
    signals = call.signals
    wait.twin(call)
    if signals.state[DeviceStateWord.BROKEN]:
        out_M.zero_()
        return
    here = call.channel < planes.publish_channel
    places = [
        (signals.rank if here else peer, planes.part_offset(call, peer))
        for peer in range(signals.size)
    ]
    parts = [signals.plane(region, at, (len(span),), out_M.dtype) for region, at in places]
    if isinstance(target, Sum):
        _add(out_M, parts, span, target)
        return
    heads = [signals.plane(region, at - HEAD_BYTES, (1,), torch.int64) for region, at in places]
    widths = [target.width if target.even else int(head) for head in heads]
    start = 0
    for part, width in zip(parts, widths, strict=True):
        _lay_out(out_M, part, span, target, width, start)
        start += width


def _add(out_M: Tensor, parts: list[Tensor], span: ElementRange, target: Sum) -> None:
    begin = max(span.begin, target.first)
    stop = max(begin, min(span.stop, target.first + len(out_M)))
    first, *others = (part[begin - span.begin : stop - span.begin] for part in parts)
    narrow = out_M.is_floating_point() and out_M.element_size() < 4
    total = first.float() if narrow else first.clone()
    for other in others:
        total += other
    out_M[begin - target.first : stop - target.first] = total


def _lay_out(
    out_M: Tensor, part_N: Tensor, span: ElementRange, target: Columns, width: int, start: int
) -> None:
    """Places a rank's part at the columns from `start` on."""
    at_N = torch.arange(span.begin, min(span.stop, max(span.begin, target.rows * width)))
    row_N = at_N.div(max(1, width), rounding_mode="floor")
    column_N = at_N - row_N * width
    to_N = (row_N - target.first) * target.total + start + column_N + target.shift
    limit = len(out_M) if target.limit is None else target.limit
    wanted_N = (row_N >= target.first) & (to_N >= 0) & (to_N < limit)
    out_M[to_N[wanted_N]] = part_N[: len(at_N)][wanted_N]
