"""One-sided memory for kernels: every rank owns a region that all ranks' kernels read and write.

Planes have the same offsets in all regions, after the flags (kernels/a2a.py). On CPU, where the
kernels' torch twins run, regions are shared memory; on CUDA they are symmetric memory
(comm/windows/symmetric_memory.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from moesaic.comm.collectives.group import Peers
from moesaic.comm.errors import OutOfStep, PeerTimeout, WindowAborted
from moesaic.comm.lifecycle import Membership
from moesaic.comm.windows.shared_memory import round_up
from moesaic.comm.windows.window import PlaneSpec, check_names, layout_of, share_memory
from moesaic.core.link import EmulatedLink
from moesaic.kernels.a2a import (
    COUNT_SHIFT,
    GENERATION_SHIFT,
    MAX_TAG,
    NUM_FAILURE_WORDS,
    ChannelCall,
    DeviceStateWord,
    Failure,
    FailureWords,
    SignalPlanes,
    ahead,
)
from moesaic.kernels.link import LinkState, LinkWord

# Planes begin at multiples of this, so that 16 bytes can be copied at once.
ALIGN: Final = 512
# Flags are signed words.
MAX_GENERATION: Final = (1 << 63 - GENERATION_SHIFT) - 1
UNREADABLE: Final = "unknown: the GPU can no longer be read"


class DeviceWindow(ABC):
    """`signals` is what kernels use. One thread of a rank uses it at a time. Kernels do not raise:
    a failed wait is recorded in host memory, and `check` raises it."""

    def __init__(
        self,
        group_rank: int,
        regions: Sequence[Tensor],
        specs: Sequence[PlaneSpec],
        timeout: float,
        channels: int,
        near: bool = False,
        link: EmulatedLink | None = None,
    ) -> None:
        """`near`: all regions are on one GPU."""
        self.rank, self.size = group_rank, len(regions)
        self.members: Sequence[int] = range(self.size)
        """The ranks of the service, for errors."""
        size, device = self.size, regions[0].device
        self.link = link
        state = new_state(channels, range(size), timeout, link).to(device)
        bases = torch.tensor([region.data_ptr() for region in regions], device=device)
        pinned = device.type == "cuda"  # kernels write it as they run
        failure = torch.zeros(NUM_FAILURE_WORDS, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.signals = SignalPlanes(
            group_rank, size, tuple(regions), bases, 0, state, failure, near,
            link=0 if link is None else channels * size * 8,
        )  # fmt: skip
        self._offsets, self.region_bytes = layout(specs, channels, size, link)
        self._specs = {spec.name: spec for spec in specs}
        self.timeout = timeout
        self._channels = channels
        self._operations: dict[int, str] = {}
        self._reason = ""
        self.generation = 0

    def offset(self, name: str) -> int:
        """The offset of a plane in a region, in bytes."""
        if name not in self._offsets:
            raise ValueError(f"no plane {name!r}: this window has {sorted(self._offsets)}")
        return self._offsets[name]

    def plane(self, name: str, rank: int | None = None) -> Tensor:
        """The array of a rank (None: this one), not a copy."""
        offset, spec = self.offset(name), self._specs[name]
        rank = self.rank if rank is None else rank
        return self.signals.plane(rank, offset, spec.shape, spec.dtype)

    def call(self, channel: int, operation: str, tag: int = 0) -> ChannelCall:
        """The argument of a kernel that signals or waits; errors name `operation`."""
        assert 0 <= channel < self._channels, f"channel {channel} of {self._channels}"
        assert 0 <= tag <= MAX_TAG, f"tag {tag}, which is at most {MAX_TAG}"
        self._operations[channel << COUNT_SHIFT | tag] = operation
        return ChannelCall(self.signals, channel, tag)

    def check(self) -> None:
        """Raises the error of the first wait that failed so far."""
        failure = self.signals.failure
        if failure[FailureWords.FAILURE]:
            raise self._failure(failure.tolist())

    def restart(self, membership: Membership) -> None:
        """Drops what is in flight. All active ranks call it when no kernel of the last one runs."""
        membership.check(self.rank, self.size, self.generation, MAX_GENERATION + 1)
        self.generation, self._reason = membership.generation, ""
        state = new_state(self._channels, membership.active, self.timeout, self.link)
        state[DeviceStateWord.GENERATION] = self.generation
        self.signals.state.copy_(state)
        self.signals.failure.zero_()

    @contextmanager
    def longer_timeout(self, seconds: float) -> Iterator[None]:
        """Extends the timeout of kernels launched inside: a peer may have to compile."""
        before = self.timeout
        self._set_timeout(max(before, seconds))
        try:
            yield
        finally:
            self._set_timeout(before)

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Kernels launched inside neither wait for other ranks nor signal them, and their results
        are meaningless: they are only compiled. No other kernel may be running."""
        self._set_broken(True)
        try:
            yield
        finally:
            self._set_broken(False)

    def _set_broken(self, broken: bool) -> None:
        if self.signals.state.is_cuda:
            torch.cuda.synchronize(self.signals.state.device)
        self.signals.state[DeviceStateWord.BROKEN] = int(broken)

    def set_link(self, link: EmulatedLink) -> None:
        """Changes the speed of the link that the window was made with. Nothing may be in flight."""
        assert self.link is not None, "its region has no words of a link"
        self.link = link
        self.signals.state[LinkState.COST] = link.cost
        self.signals.state[LinkState.LATENCY] = link.latency_ns

    def _set_timeout(self, seconds: float) -> None:
        self.timeout = seconds
        self.signals.state[DeviceStateWord.TIMEOUT_NS] = int(seconds * 1e9)

    def abort(self, reason: str) -> None:
        """Ends the waits of this rank's kernels, also of running ones. Any thread may call it."""
        self._reason = reason
        self.signals.failure[FailureWords.ABORT] = 1

    @abstractmethod
    def close(self) -> None:
        """Frees the memory; no kernel of this rank may use it any more. May be repeated."""

    def _failure(self, failure: Sequence[int]) -> Exception:
        word = FailureWords
        expected, seen, channel = failure[word.WANTED], failure[word.SEEN], failure[word.CHANNEL]
        peers = tuple(rank for rank in range(self.size) if failure[word.PEERS] >> rank & 1)
        operation = self._operation(channel, expected)
        if failure[word.FAILURE] == Failure.ABORTED:
            return WindowAborted(self._reason)
        if failure[word.FAILURE] == Failure.TIMEOUT:
            last_seen = dict.fromkeys(peers, UNREADABLE)
            for rank, flag in self.flags_seen(failure).items():
                if rank in last_seen:
                    last_seen[rank] = self._last_seen(channel, flag, expected)
            return PeerTimeout(peers, operation, self.timeout, last_seen).among(self.members)
        return OutOfStep(f"{operation}: {_difference(self.members[peers[0]], seen, expected)}")

    def flags_seen(self, failure: Sequence[int]) -> dict[int, int]:
        """The flag of each rank on the channel of the failed wait. After a CUDA error only host
        memory can be read, which has the flag of the first missing rank."""
        try:
            flags = self.signals.flag(self.rank, failure[FailureWords.CHANNEL])
            return dict(enumerate(flags.tolist()))
        except RuntimeError:
            peers = failure[FailureWords.PEERS]
            return {(peers & -peers).bit_length() - 1: failure[FailureWords.SEEN]}

    def _last_seen(self, channel: int, flag: int, expected: int) -> str:
        """The last operation of a rank on a channel, by its flag."""
        if ahead(flag, expected) >= 0:
            return "it arrived after the timeout"
        if not flag or flag >> GENERATION_SHIFT != self.generation:
            return ""
        return self._operation(channel, flag)

    def _operation(self, channel: int, flag: int) -> str:
        tag = flag & MAX_TAG
        return self._operations.get(channel << COUNT_SHIFT | tag, f"channel {channel}, layer {tag}")


def _difference(rank: int, seen: int, expected: int) -> str:
    if seen >> GENERATION_SHIFT != expected >> GENERATION_SHIFT:
        return (
            f"rank {rank} is in generation {seen >> GENERATION_SHIFT}, this rank in "
            f"{expected >> GENERATION_SHIFT}: one of them has been left behind"
        )
    if seen >> COUNT_SHIFT != expected >> COUNT_SHIFT:
        return f"rank {rank} has moved to a later step"
    return f"rank {rank} is in layer {seen & MAX_TAG}, this rank in layer {expected & MAX_TAG}"


class CpuDeviceWindow(DeviceWindow):
    """A window of ranks that compute on CPU, in several processes or in one (`between`)."""

    @classmethod
    def create(
        cls,
        group: Peers,
        specs: Sequence[PlaneSpec],
        timeout: float,
        channels: int,
        link: EmulatedLink | None = None,
    ) -> CpuDeviceWindow:
        """All ranks of the group call it with the same planes."""
        nbytes = layout(specs, channels, group.size, link)[1]
        if group.size == 1:
            return cls(0, [torch.zeros(nbytes, dtype=torch.uint8)], specs, timeout, channels)
        memory = share_memory(group, group.size * nbytes, layout_of(specs, channels))
        data = torch.frombuffer(memory, dtype=torch.uint8)
        return cls(group.rank, data.split(nbytes), specs, timeout, channels, link=link)

    @classmethod
    def between(
        cls,
        size: int,
        specs: Sequence[PlaneSpec],
        timeout: float,
        channels: int,
        link: EmulatedLink | None = None,
    ) -> list[CpuDeviceWindow]:
        """Windows of ranks in one process, for tests of kernels."""
        nbytes = layout(specs, channels, size, link)[1]
        regions = torch.zeros(size, nbytes, dtype=torch.uint8).unbind(0)
        return [cls(rank, regions, specs, timeout, channels, link=link) for rank in range(size)]

    def close(self) -> None:
        """The memory is freed with the last tensor that views it."""
        vars(self).pop("signals", None)


def new_state(
    channels: int, active: Sequence[int], timeout: float, link: EmulatedLink | None = None
) -> Tensor:
    """The initial state of a rank, on the CPU."""
    state = torch.zeros(DeviceStateWord.CHANNELS + 2 * channels, dtype=torch.int64, device="cpu")
    state[DeviceStateWord.TIMEOUT_NS] = int(timeout * 1e9)
    state[DeviceStateWord.ACTIVE] = sum(1 << rank for rank in active)
    if link is not None:
        state[LinkState.COST] = link.cost
        state[LinkState.LATENCY] = link.latency_ns
    return state


def layout(
    specs: Sequence[PlaneSpec], channels: int, size: int, link: EmulatedLink | None = None
) -> tuple[dict[str, int], int]:
    """The offset of each plane in a region, and the bytes of the region."""
    check_names(specs)
    words = 1 if link is None else 1 + len(LinkWord)
    offsets, end = {}, round_up(channels * size * 8 * words, ALIGN)
    for spec in specs:
        offsets[spec.name] = end
        end += round_up(spec.nbytes, ALIGN)
    return offsets, end
