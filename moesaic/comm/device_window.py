"""One-sided memory for kernels: every rank owns a region that the others' kernels read and write.

Planes lie at the same offsets in all regions, behind the flags (kernels/a2a.py). On CPU, where the
kernels' torch twins compute, regions are shared memory; on CUDA they are symmetric memory
(comm/symmetric.py).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from moesaic.comm.errors import PeerTimeout, WindowAborted
from moesaic.comm.group import Peers
from moesaic.comm.window import PlaneSpec, share_memory
from moesaic.kernels.a2a import (
    COUNT_SHIFT,
    DESK_WORDS,
    GENERATION_SHIFT,
    MAX_TAG,
    Call,
    Desk,
    Failure,
    Mail,
    State,
)

# Planes begin at multiples of this, so that rows of 16 bytes can be copied at once.
ALIGN: Final = 512
# The mask of who takes part is one signed word.
MAX_RANKS: Final = 63


class OutOfStep(RuntimeError):
    """Ranks are not in the same operation, or some have gone on without this one."""


class DeviceWindow(ABC):
    """`mail` is what kernels take of it. One thread of a rank uses it at a time.

    Kernels do not raise: what went wrong in a wait they leave on the desk, and `check` raises it.
    """

    mail: Mail

    def __init__(self, specs: Sequence[PlaneSpec], channels: int) -> None:
        self._offsets, self.region_bytes = layout(specs, channels)
        self._specs = {spec.name: spec for spec in specs}
        self._channels = channels
        self._operations: dict[int, str] = {}

    @property
    def rank(self) -> int:
        return self.mail.rank

    @property
    def size(self) -> int:
        return self.mail.size

    def offset(self, name: str) -> int:
        """Bytes from where a region begins to a plane."""
        return self._offsets[name]

    def plane(self, name: str, rank: int | None = None) -> Tensor:
        """The array of a rank (None: of this one) itself, not a copy."""
        spec = self._specs[name]
        rank = self.rank if rank is None else rank
        return self.mail.plane(rank, self._offsets[name], spec.shape, spec.dtype)

    def call(self, channel: int, operation: str, tag: int = 0) -> Call:
        """For a kernel that signals or waits; `operation` is what an error will name."""
        assert 0 <= channel < self._channels and 0 <= tag <= MAX_TAG
        self._operations[channel << COUNT_SHIFT | tag] = operation
        return Call(self.mail, channel, tag)

    def check(self) -> None:
        """Raises what a wait of a kernel has left on the desk, as far as kernels have come."""
        desk = self.mail.desk
        if not desk[Desk.FAILURE]:
            return
        raise self._complaint(desk.tolist())

    def restart(self, generation: int, active: Sequence[int] | None = None) -> None:
        """Forgets what is in flight. All ranks that go on call it with one number, higher than any
        before, when no kernel of the last generation is under way on any of them."""
        state = torch.zeros(len(self.mail.state), dtype=torch.int64)
        ranks = range(self.size) if active is None else active
        state[State.GENERATION] = generation
        state[State.TIMEOUT_NS] = self.mail.state[State.TIMEOUT_NS]
        state[State.ACTIVE] = sum(1 << rank for rank in ranks)
        self.mail.state.copy_(state)
        self.mail.desk.zero_()

    def abort(self, reason: str) -> None:
        """Makes waits of this rank's kernels, those under way too, give up."""
        self._reason = reason
        self.mail.desk[Desk.ABORT] = 1

    def close(self) -> None:
        """Gives the memory back once the last tensor that views it is gone. May be repeated."""

    def _complaint(self, desk: Sequence[int]) -> Exception:
        wanted, seen, channel = desk[Desk.WANTED], desk[Desk.SEEN], desk[Desk.CHANNEL]
        peers = tuple(rank for rank in range(self.size) if desk[Desk.PEERS] >> rank & 1)
        operation = self._operations.get(channel << COUNT_SHIFT | wanted & MAX_TAG, "?")
        if desk[Desk.FAILURE] == Failure.ABORTED:
            return WindowAborted(self._reason)
        if desk[Desk.FAILURE] == Failure.TIMEOUT:
            seconds = int(self.mail.state[State.TIMEOUT_NS]) / 1e9
            return PeerTimeout(peers, operation, seconds, dict.fromkeys(peers, ""))
        return OutOfStep(f"{operation}: {_difference(peers[0], seen, wanted)}")


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
        super().__init__(specs, channels)
        state = new_state(channels, len(regions), timeout)
        bases = torch.tensor([region.data_ptr() for region in regions])
        desk = torch.zeros(DESK_WORDS, dtype=torch.int64)
        self.mail = Mail(group_rank, len(regions), tuple(regions), bases, 0, state, desk)

    @classmethod
    def create(
        cls, group: Peers, specs: Sequence[PlaneSpec], timeout: float, channels: int
    ) -> HostWindow:
        """Called by all ranks of the group with the same planes."""
        if group.size > MAX_RANKS:
            raise ValueError(f"a window holds {MAX_RANKS} ranks, not {group.size}")
        nbytes = layout(specs, channels)[1]
        if group.size == 1:
            return cls(0, [torch.zeros(nbytes, dtype=torch.uint8)], specs, timeout, channels)
        memory = share_memory(group, group.size * nbytes, repr((tuple(specs), channels)))
        with torch.inference_mode(False):
            data = torch.frombuffer(memory, dtype=torch.uint8)
        return cls(group.rank, data.split(nbytes), specs, timeout, channels)

    @classmethod
    def between(
        cls, size: int, specs: Sequence[PlaneSpec], timeout: float, channels: int
    ) -> list[HostWindow]:
        """Of ranks in one process: for tests of kernels."""
        nbytes = layout(specs, channels)[1]
        regions = torch.zeros(size, nbytes, dtype=torch.uint8).unbind(0)
        return [cls(rank, regions, specs, timeout, channels) for rank in range(size)]


def create_window(
    group: Peers,
    specs: Sequence[PlaneSpec],
    timeout: float,
    channels: int,
    device: torch.device,
) -> DeviceWindow:
    """Of the kind that kernels on this device can use; called by all ranks with the same planes."""
    if device.type != "cpu":
        raise ValueError(
            f"no window for {device.type}: ranks there cannot reach each other's memory"
        )
    return HostWindow.create(group, specs, timeout, channels)


def new_state(channels: int, size: int, timeout: float) -> Tensor:
    state = torch.zeros(State.CHANNELS + 2 * channels, dtype=torch.int64)
    state[State.TIMEOUT_NS] = int(timeout * 1e9)
    state[State.ACTIVE] = (1 << size) - 1
    return state


def layout(
    specs: Sequence[PlaneSpec], channels: int, size: int = MAX_RANKS
) -> tuple[dict[str, int], int]:
    """Where each plane begins in a region, and how many bytes that has."""
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise ValueError(f"planes {names}: give each a name of its own")
    offsets, end = {}, _round_up(channels * size * 8)
    for spec in specs:
        offsets[spec.name] = end
        end += _round_up(spec.nbytes)
    return offsets, end


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
