"""Collectives of ranks that compute on GPUs: over shared device memory, or by NCCL.

T tokens · H channels · R rows · V vocabulary · N elements of a rank's part · M elements of a result
· P ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from moesaic.comm.collectives.collective import (
    Collective,
    PartsDiffer,
    SingleRank,
    WindowCollective,
    check_counts,
    chosen_rows,
    cut_into,
)
from moesaic.comm.collectives.group import Peers
from moesaic.comm.collectives.nccl_collective import NcclCollective
from moesaic.comm.lifecycle import Membership
from moesaic.comm.windows.device_window import DeviceWindow
from moesaic.comm.windows.factory import create_device_window, device_window_bytes
from moesaic.comm.windows.shared_memory import round_up
from moesaic.comm.windows.window import PlaneSpec
from moesaic.config.gpus import processor_percent
from moesaic.kernels.a2a import COUNT_SHIFT, MAX_TAG, ChannelCall, FailureWords
from moesaic.kernels.collectives import (
    BLOCK_BYTES,
    HALVES,
    HEAD_BYTES,
    CollectivePlanes,
    Columns,
    ElementRange,
    Sum,
    publish,
    publish_sums,
    pull,
    push,
)

# Programs of a rank that wait for peers on a shared GPU. All ranks but one may wait, and must leave
# processors to the kernels of that one, some of which need a whole processor: most of an H200's,
# even if all waiting programs run on processors that it may use.
MOST_LANES: Final = 32
MOST_WAITING: Final = 56
PROCESSORS: Final = 132
LEFT: Final = 4
# The largest part that one kernel sends: a decode step's rows, [64, 2048] of two bytes, unless
# there are so few lanes that one would take too long.
PUSH_BYTES: Final = 128 * BLOCK_BYTES
MOST_LANE_BYTES: Final = 32 * BLOCK_BYTES
# Shares of a sum begin at multiples of this, so that they are read in whole words.
ALIGN: Final = 16
# The integer types by which gathered bytes are moved.
WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def device_collective(
    group: Peers,
    nbytes: int,
    timeout: float,
    device: torch.device,
    *,
    shares_gpu: bool,
    neighbours: int = 0,
) -> Collective:
    """All ranks call it with the same arguments. `nbytes`: the largest part of a rank that is sent
    in one piece. `shares_gpu`: whether two ranks of the group share a GPU, which NCCL refuses.
    `neighbours`: ranks that may wait on one GPU, those of other groups included."""
    if group.size == 1:
        return SingleRank()
    if shares_gpu:
        return DeviceCollective.create(group, nbytes, timeout, device, neighbours)
    return NcclCollective(group, timeout, device)


def rail_collective(
    group: Peers, nbytes: int, timeout: float, device: torch.device
) -> WindowCollective | NcclCollective:
    """The collective of ranks of different nodes; arguments as in `device_collective`."""
    if device.type == "cpu":
        return WindowCollective(group, nbytes, timeout)
    return NcclCollective(group, timeout, device)


class DeviceCollective(Collective):
    """Kernels write into the memory of other ranks (kernels/collectives.py).

    One kernel moves a small tensor. Large sums take two rounds: every rank sums a share and reads
    what it needs from the others; between two ranks one round reads less. The host never waits, and
    everything can be captured in a graph. One stream at a time uses a collective.

    Kernels do not raise: `check` does, after the step. On CPU, where kernels run synchronously,
    every operation checks. All ranks use the same name for an operation.
    """

    def __init__(self, window: DeviceWindow, nbytes: int, lanes: int, lane_bytes: int) -> None:
        """`window` has the planes and channels that `planes` and `channels` return."""
        self.rank, self.size = window.rank, window.size
        self.window = window
        pushed, posted = (window.offset(name) for name in ("pushed", "posted"))
        capacity = round_up(nbytes, HEAD_BYTES)
        self._planes = CollectivePlanes(pushed, posted, lanes, lane_bytes, capacity)
        self._device = window.signals.state.device.type
        self._parts: dict[int, tuple[str, str]] = {}

    @classmethod
    def create(
        cls, group: Peers, nbytes: int, timeout: float, device: torch.device, neighbours: int = 0
    ) -> DeviceCollective:
        if nbytes < 1:
            raise ValueError(f"{nbytes} bytes for a rank's part: give 1 or more")
        lanes, lane_bytes = lanes_of(max(group.size, neighbours))
        specs = cls.planes(group.size, nbytes, lanes, lane_bytes)
        window = create_device_window(group, specs, timeout, cls.channels(lanes), device)
        collective = cls(window, nbytes, lanes, lane_bytes)
        group.register(collective)
        return collective

    @staticmethod
    def planes(size: int, nbytes: int, lanes: int, lane_bytes: int) -> list[PlaneSpec]:
        pushed = (lanes, HALVES, size, HEAD_BYTES + lane_bytes)
        return [
            PlaneSpec("pushed", pushed, torch.uint8),
            PlaneSpec("posted", (HALVES, HEAD_BYTES + round_up(nbytes, HEAD_BYTES)), torch.uint8),
        ]

    @staticmethod
    def channels(lanes: int) -> int:
        return HALVES * (lanes + 1)

    @classmethod
    def window_bytes(cls, size: int, nbytes: int, device: torch.device, neighbours: int = 0) -> int:
        """Device memory of one rank's collective."""
        if size == 1:
            return 0
        lanes, lane_bytes = lanes_of(max(size, neighbours))
        specs = cls.planes(size, nbytes, lanes, lane_bytes)
        return device_window_bytes(specs, size, cls.channels(lanes), device)

    def sum_rows(self, x_NH: Tensor, rows: slice, operation: str) -> Tensor:
        chosen, width = chosen_rows(rows, len(x_NH)), math.prod(x_NH.shape[1:])
        x_N = self._flat(x_NH)
        first = chosen.start * width
        out_M = x_N.new_empty(len(chosen) * width)
        tag = self._tag(operation, "sum_rows", x_N.dtype, (len(x_N),))
        if len(x_N) and x_N.nbytes <= self._planes.push_bytes:
            call = ChannelCall(self.window.signals, 0, tag)
            push(call, self._planes, x_N, out_M, ElementRange(0, len(x_N)), Sum(first))
        else:
            self._sum_large(x_N, out_M, first, tag)
        self._check_twins()
        return out_M.view(len(chosen), *x_NH.shape[1:])

    def gather_rows(self, x_TH: Tensor, counts: Sequence[int], operation: str) -> Tensor:
        check_counts(self, counts, len(x_TH), "rows")
        row = math.prod(x_TH.shape[1:])
        out = self._room(x_TH, counts, (sum(counts), *x_TH.shape[1:]))
        tag = self._tag(operation, "gather_rows", x_TH.dtype, (*counts, row))
        self._gather(x_TH, out, [count * row for count in counts], range(1), tag)
        return out

    def gather_columns(
        self, x_RV: Tensor, widths: Sequence[int], rows: slice, operation: str
    ) -> Tensor:
        check_counts(self, widths, x_RV.shape[1], "columns")
        chosen = chosen_rows(rows, len(x_RV))
        out = self._room(x_RV, widths, (len(chosen), sum(widths)))
        tag = self._tag(operation, "gather_columns", x_RV.dtype, (len(x_RV), *widths))
        self._gather(x_RV, out, widths, range(chosen.start, len(x_RV)), tag)
        return out

    def abort(self, reason: str) -> None:
        self.window.abort(reason)

    def restart(self, membership: Membership) -> None:
        self.window.restart(membership)

    def check(self) -> None:
        failure = self.window.signals.failure
        if not failure[FailureWords.FAILURE]:
            return
        expected, seen = int(failure[FailureWords.WANTED]), int(failure[FailureWords.SEEN])
        operation, ours = self._parts.get(expected & MAX_TAG, ("?", "?"))
        if expected != seen and expected >> COUNT_SHIFT == seen >> COUNT_SHIFT:
            peers = int(failure[FailureWords.PEERS])
            other = next(rank for rank in range(self.size) if peers >> rank & 1)
            theirs = self._parts.get(seen & MAX_TAG, ("", "another operation"))[1]
            raise PartsDiffer(
                f"{operation}: rank {other} is in {theirs}, this rank ({self.rank}) in {ours}"
            )
        channel = int(failure[FailureWords.CHANNEL])
        # The window does not know the operations of all tags.
        flags = self.window.flags_seen(failure.tolist()).values()
        for tag in {flag & MAX_TAG for flag in (expected, *flags)} & self._parts.keys():
            self.window.call(channel, "{} ({})".format(*self._parts[tag]), tag)
        self.window.check()

    def close(self) -> None:
        self.window.close()

    def _sum_large(self, x_N: Tensor, out_M: Tensor, first: int, tag: int) -> None:
        planes = self._planes
        call = ChannelCall(self.window.signals, planes.publish_channel, tag)
        itemsize = x_N.element_size()
        for piece in cut_into(len(x_N), planes.publish_bytes // itemsize):
            cut = ElementRange(piece.start, piece.stop)
            publish(call, planes, x_N, cut, Sum())
            if self.size == 2:
                pull(call, planes, out_M, cut, Sum(first))
                continue
            unit = max(1, ALIGN // itemsize)
            size = -(-len(cut) // (self.size * unit)) * unit
            publish_sums(call, planes, x_N.dtype, cut, size)
            limit = max(0, min(len(out_M), cut.stop - first))
            shares = Columns(1, size, True, 0, shift=cut.begin - first, limit=limit)
            pull(call, planes, out_M, ElementRange(0, size), shares)

    def _gather(self, x: Tensor, out: Tensor, widths: Sequence[int], rows: range, tag: int) -> None:
        """`widths`: elements per row of each rank. `rows`: from the first requested to the last."""
        itemsize = x.element_size()
        word = math.gcd(8, *(width * itemsize for width in widths))
        x_N = self._flat(x).view(torch.uint8).view(WORDS[word])
        out_M = out.view(-1).view(torch.uint8).view(WORDS[word])
        words = [width * itemsize // word for width in widths]
        even = len(set(words)) == 1
        target = Columns(rows.stop, words[self.rank], even, sum(words), rows.start)
        count, planes = rows.stop * max(words), self._planes
        if count and count * word <= planes.push_bytes:
            call = ChannelCall(self.window.signals, 0, tag)
            push(call, planes, x_N, out_M, ElementRange(0, count), target)
        else:
            call = ChannelCall(self.window.signals, planes.publish_channel, tag)
            for piece in cut_into(count, planes.publish_bytes // word):
                cut = ElementRange(piece.start, piece.stop)
                publish(call, planes, x_N, cut, target)
                pull(call, planes, out_M, cut, target)
        self._check_twins()

    def _room(self, like: Tensor, counts: Sequence[int], shape: tuple[int, ...]) -> Tensor:
        """Allocates a result; zeros with uneven parts, as a missing rank's part has no position."""
        even = len(set(counts)) == 1
        return like.new_empty(shape) if even else like.new_zeros(shape)

    def _flat(self, x: Tensor) -> Tensor:
        if x.device.type != self._device:
            raise ValueError(
                f"a tensor on {x.device} for ranks that compute on {self._device}: give one there, "
                "or use a collective of the host"
            )
        x_N = x.detach().contiguous().view(-1)
        return x_N if x_N.data_ptr() % ALIGN == 0 else x_N.clone()

    def _tag(self, operation: str, kind: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> int:
        """The tag of flags; it nearly always differs where ranks give parts of other tensors."""
        tag, text = _tag_of(operation, kind, dtype, sizes)
        self._parts[tag] = operation, text
        return tag

    def _check_twins(self) -> None:
        if self._device == "cpu":
            self.check()


@lru_cache(maxsize=4096)
def _tag_of(
    operation: str, kind: str, dtype: torch.dtype, sizes: tuple[int, ...]
) -> tuple[int, str]:
    text = f"{kind} {str(dtype).removeprefix('torch.')} {' '.join(map(str, sizes))}"
    return zlib.crc32(f"{operation} {text}".encode()) & MAX_TAG, text


def lanes_of(size: int) -> tuple[int, int]:
    """(lanes, bytes per lane) for `size` waiting ranks: 2: 32 of 8 KiB, 8: 4 of 64, 30: 1 of 64."""
    share = PROCESSORS * processor_percent(size) // 100
    lanes, most = MOST_LANES, min(MOST_WAITING, share - LEFT)
    while lanes > 1 and (size - 1) * lanes > most:
        lanes //= 2
    return lanes, min(PUSH_BYTES // lanes, MOST_LANE_BYTES)
