"""One-sided memory for kernels: every rank owns a region that the others' kernels read and write.

Planes lie at the same offsets in all regions, behind the flags (kernels/a2a.py). On CPU, where the
kernels' torch twins compute, regions are shared memory; on CUDA they are symmetric memory
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
from moesaic.comm.windows.window import PlaneSpec, layout_of, share_memory
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

# Planes begin at multiples of this, so that rows of 16 bytes can be copied at once.
ALIGN: Final = 512
# The mask of who takes part is one signed word.
MAX_RANKS: Final = 63
# Flags are signed words.
MAX_GENERATION: Final = (1 << 63 - GENERATION_SHIFT) - 1
UNREADABLE: Final = "unknown: the GPU can no longer be read"


def create(
    group: Peers, specs: Sequence[PlaneSpec], timeout: float, channels: int, device: torch.device
) -> DeviceWindow:
    """Called by all ranks of a group on one node with the same planes. `timeout`: seconds that a
    wait of a kernel may take."""
    if not 1 <= group.size <= MAX_RANKS:
        raise ValueError(f"a window holds 1..{MAX_RANKS} ranks, not {group.size}")
    if len(set(group.nodes)) > 1:
        raise ValueError(
            f"ranks on nodes {sorted(set(group.nodes))}: kernels reach memory of one node only; "
            f"keep the ranks that share experts on one"
        )
    # Groups make tensors where the default is, and gloo wants them on the CPU; and what is made in
    # inference mode could not be written outside it.
    with torch.device("cpu"), torch.inference_mode(False):
        if device.type == "cpu":
            return HostWindow.create(group, specs, timeout, channels)
        from moesaic.comm.windows.symmetric_memory import SymmetricWindow

        return SymmetricWindow.create(group, specs, timeout, channels, device)


def window_bytes(specs: Sequence[PlaneSpec], size: int, channels: int, device: torch.device) -> int:
    """What a rank of a window of so many ranks takes on its device, at most."""
    nbytes = layout(specs, channels, size)[1]
    if device.type == "cpu" or size == 1:
        return nbytes
    from moesaic.comm.windows.symmetric_memory import symmetric_bytes

    return symmetric_bytes(nbytes)


class DeviceWindow(ABC):
    """`mail` is what kernels take of it. One thread of a rank uses it at a time.

    Kernels do not raise: what went wrong in a wait they leave on the desk, and `check` raises it.
    """

    mail: SignalPlanes

    def __init__(
        self, specs: Sequence[PlaneSpec], size: int, timeout: float, channels: int
    ) -> None:
        self._offsets, self.region_bytes = layout(specs, channels, size)
        self._specs = {spec.name: spec for spec in specs}
        self.timeout = timeout
        self._channels = channels
        self._operations: dict[int, str] = {}
        self._reason = ""
        self.generation = 0

    @property
    def rank(self) -> int:
        return self.mail.rank

    @property
    def size(self) -> int:
        return self.mail.size

    def offset(self, name: str) -> int:
        """Bytes from where a region begins to a plane."""
        if name not in self._offsets:
            raise ValueError(f"no plane {name!r}: this window has {sorted(self._offsets)}")
        return self._offsets[name]

    def plane(self, name: str, rank: int | None = None) -> Tensor:
        """The array of a rank (None: of this one) itself, not a copy."""
        offset, spec = self.offset(name), self._specs[name]
        rank = self.rank if rank is None else rank
        return self.mail.plane(rank, offset, spec.shape, spec.dtype)

    def call(self, channel: int, operation: str, tag: int = 0) -> ChannelCall:
        """For a kernel that signals or waits; `operation` is what an error will name."""
        assert 0 <= channel < self._channels, f"channel {channel} of {self._channels}"
        assert 0 <= tag <= MAX_TAG, f"tag {tag}, which is at most {MAX_TAG}"
        self._operations[channel << COUNT_SHIFT | tag] = operation
        return ChannelCall(self.mail, channel, tag)

    def check(self) -> None:
        """Raises what a wait of a kernel has left on the desk, as far as kernels have come."""
        desk = self.mail.failure
        if desk[FailureWords.FAILURE]:
            raise self._complaint(desk.tolist())

    def restart(self, generation: int, active: Sequence[int] | None = None) -> None:
        """Forgets what is in flight. All ranks that go on call it with one number, higher than any
        before, when no kernel of the last generation is under way on any of them; `active`: who
        goes on, all unless given."""
        ranks = range(self.size) if active is None else active
        if not self.generation < generation <= MAX_GENERATION:
            raise ValueError(
                f"generation {generation}: give one of {self.generation + 1}..{MAX_GENERATION}"
            )
        if self.rank not in ranks or not set(ranks) <= set(range(self.size)):
            raise ValueError(
                f"active ranks {list(ranks)}: give some of 0..{self.size - 1}, with "
                f"{self.rank} among them"
            )
        self.generation, self._reason = generation, ""
        state = new_state(self._channels, ranks, self.timeout)
        state[DeviceStateWord.GENERATION] = generation
        self.mail.state.copy_(state)
        self.mail.failure.zero_()

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Waits of kernels that are launched inside last so long, if that is longer: a peer may
        have something to compile."""
        before = self.timeout
        self._set_timeout(max(before, seconds))
        try:
            yield
        finally:
            self._set_timeout(before)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Kernels that are launched inside neither wait for other ranks nor tell them anything, and
        what they give is good for nothing: so they can be compiled. No other may be under way."""
        self._set_broken(True)
        try:
            yield
        finally:
            self._set_broken(False)

    def _set_broken(self, broken: bool) -> None:
        if self.mail.state.is_cuda:
            torch.cuda.synchronize(self.mail.state.device)
        self.mail.state[DeviceStateWord.BROKEN] = int(broken)

    def _set_timeout(self, seconds: float) -> None:
        self.timeout = seconds
        self.mail.state[DeviceStateWord.TIMEOUT_NS] = int(seconds * 1e9)

    def abort(self, reason: str) -> None:
        """Makes waits of this rank's kernels, those under way too, give up. Any thread may."""
        self._reason = reason
        self.mail.failure[FailureWords.ABORT] = 1

    @abstractmethod
    def close(self) -> None:
        """Gives the memory back; no kernel of this rank may use it any more. May be repeated."""

    def _complaint(self, desk: Sequence[int]) -> Exception:
        wanted, seen, channel = (
            desk[FailureWords.WANTED],
            desk[FailureWords.SEEN],
            desk[FailureWords.CHANNEL],
        )
        peers = tuple(rank for rank in range(self.size) if desk[FailureWords.PEERS] >> rank & 1)
        operation = self._operation(channel, wanted)
        if desk[FailureWords.FAILURE] == Failure.ABORTED:
            return WindowAborted(self._reason)
        if desk[FailureWords.FAILURE] == Failure.TIMEOUT:
            last_seen = dict.fromkeys(peers, UNREADABLE)
            for rank, flag in self.flags_seen(desk).items():
                if rank in last_seen:
                    last_seen[rank] = self._last_seen(channel, flag, wanted)
            return PeerTimeout(peers, operation, self.timeout, last_seen)
        return OutOfStep(f"{operation}: {_difference(peers[0], seen, wanted)}")

    def flags_seen(self, desk: Sequence[int]) -> dict[int, int]:
        """By rank, on the channel of which the desk complains. After an error of CUDA's own only
        the desk can still be read, which has that of the first rank that was not there."""
        try:
            return dict(enumerate(self.mail.flag(self.rank, desk[FailureWords.CHANNEL]).tolist()))
        except RuntimeError:
            peers = desk[FailureWords.PEERS]
            return {(peers & -peers).bit_length() - 1: desk[FailureWords.SEEN]}

    def _last_seen(self, channel: int, flag: int, wanted: int) -> str:
        """What a rank did last on a channel, as far as its flag tells."""
        if ahead(flag, wanted) >= 0:
            return "it came later"
        if not flag or flag >> GENERATION_SHIFT != self.generation:
            return ""
        return self._operation(channel, flag)

    def _operation(self, channel: int, flag: int) -> str:
        tag = flag & MAX_TAG
        return self._operations.get(channel << COUNT_SHIFT | tag, f"channel {channel}, layer {tag}")


def _difference(rank: int, seen: int, wanted: int) -> str:
    if seen >> GENERATION_SHIFT != wanted >> GENERATION_SHIFT:
        return (
            f"rank {rank} is in generation {seen >> GENERATION_SHIFT}, this rank in "
            f"{wanted >> GENERATION_SHIFT}: one of them has been left behind"
        )
    if seen >> COUNT_SHIFT != wanted >> COUNT_SHIFT:
        return f"rank {rank} has gone on without this one"
    return f"rank {rank} is in layer {seen & MAX_TAG}, this rank in layer {wanted & MAX_TAG}"


class HostWindow(DeviceWindow):
    """Of ranks that compute on CPU: between processes, or in one (`between`)."""

    def __init__(
        self,
        group_rank: int,
        regions: Sequence[Tensor],
        specs: Sequence[PlaneSpec],
        timeout: float,
        channels: int,
    ) -> None:
        size = len(regions)
        super().__init__(specs, size, timeout, channels)
        state = new_state(channels, range(size), timeout)
        bases = torch.tensor([region.data_ptr() for region in regions])
        desk = torch.zeros(NUM_FAILURE_WORDS, dtype=torch.int64)
        self.mail = SignalPlanes(group_rank, size, tuple(regions), bases, 0, state, desk)

    @classmethod
    def create(
        cls, group: Peers, specs: Sequence[PlaneSpec], timeout: float, channels: int
    ) -> HostWindow:
        """Called by all ranks of the group with the same planes."""
        nbytes = layout(specs, channels, group.size)[1]
        if group.size == 1:
            return cls(0, [torch.zeros(nbytes, dtype=torch.uint8)], specs, timeout, channels)
        memory = share_memory(group, group.size * nbytes, layout_of(specs, channels))
        data = torch.frombuffer(memory, dtype=torch.uint8)
        return cls(group.rank, data.split(nbytes), specs, timeout, channels)

    @classmethod
    def between(
        cls, size: int, specs: Sequence[PlaneSpec], timeout: float, channels: int
    ) -> list[HostWindow]:
        """Of ranks in one process: for tests of kernels."""
        nbytes = layout(specs, channels, size)[1]
        regions = torch.zeros(size, nbytes, dtype=torch.uint8).unbind(0)
        return [cls(rank, regions, specs, timeout, channels) for rank in range(size)]

    def close(self) -> None:
        """It is gone with the last tensor that views it."""
        vars(self).pop("mail", None)


def new_state(channels: int, active: Sequence[int], timeout: float) -> Tensor:
    """As a rank's own state begins; on the CPU."""
    state = torch.zeros(DeviceStateWord.CHANNELS + 2 * channels, dtype=torch.int64, device="cpu")
    state[DeviceStateWord.TIMEOUT_NS] = int(timeout * 1e9)
    state[DeviceStateWord.ACTIVE] = sum(1 << rank for rank in active)
    return state


def layout(specs: Sequence[PlaneSpec], channels: int, size: int) -> tuple[dict[str, int], int]:
    """Where each plane begins in a region of one of so many ranks, and how many bytes that has."""
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise ValueError(f"planes {names}: give each a name of its own")
    offsets, end = {}, round_up(channels * size * 8, ALIGN)
    for spec in specs:
        offsets[spec.name] = end
        end += round_up(spec.nbytes, ALIGN)
    return offsets, end


def round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
