"""Windows of ranks on GPUs of one node, or on one GPU that they share: torch's symmetric memory.

torch maps every rank's region into all processes; the physical memory lives until the last of them
has let go of it, so a rank that dies takes nothing from under the kernels of others. For the
meeting torch wants a store and a process group. It is given ours: each of its exchanges is one of
the group's. So a rank that does not come is named, and what fails on one rank, wherever in the
meeting, is an error on all of them.
"""

from __future__ import annotations

import faulthandler
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    ProcessGroup,
    Store,
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)

from moesaic.comm.collectives.group import Peers
from moesaic.comm.lifecycle import Membership
from moesaic.comm.windows.device_window import DeviceWindow, layout, new_state, round_up
from moesaic.comm.windows.window import PlaneSpec, layout_of
from moesaic.kernels.a2a import NUM_FAILURE_WORDS, SignalPlanes

logger = logging.getLogger(__name__)

# The driver hands out such pieces; torch puts its own signals into the same memory.
PIECE: Final = 2 << 20
TORCH_BYTES: Final = 64 << 10
# Several ranks may use one GPU; multicast would only make the meeting longer.
SWITCHES: Final = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
FINE, TROUBLE = b"+", b"-"
STDERR: Final = 2
MIB: Final = 1 << 20

T = TypeVar("T")
_numbers = itertools.count()


def symmetric_bytes(nbytes: int) -> int:
    """What so many bytes take on the device."""
    return round_up(nbytes + TORCH_BYTES, PIECE)


class SymmetricWindow(DeviceWindow):
    """Regions in device memory. The desk is pinned host memory, which kernels write as they run."""

    def __init__(
        self,
        group_rank: int,
        regions: Sequence[Tensor],
        specs: Sequence[PlaneSpec],
        timeout: float,
        channels: int,
        near: bool = False,
    ) -> None:
        size, device = len(regions), regions[0].device
        super().__init__(specs, size, timeout, channels)
        state = new_state(channels, range(size), timeout).to(device)
        bases = torch.tensor([region.data_ptr() for region in regions], device=device)
        desk = torch.zeros(NUM_FAILURE_WORDS, dtype=torch.int64, pin_memory=True)
        self.signals = SignalPlanes(group_rank, size, tuple(regions), bases, 0, state, desk, near)
        self._device = device
        self._owners: tuple[Any, ...] = ()

    @classmethod
    def create(
        cls,
        group: Peers,
        specs: Sequence[PlaneSpec],
        timeout: float,
        channels: int,
        device: torch.device,
    ) -> SymmetricWindow:
        """Called by all ranks of the group with the same planes; one RuntimeError on all of them
        if it fails on any."""
        nbytes = layout(specs, channels, group.size)[1]
        if device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())
        if group.size == 1:
            region = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            return cls(0, [region], specs, timeout, channels)
        with torch.cuda.device(device):
            meeting = SymmetricRendezvous(group, symmetric_bytes(nbytes))
            meeting.agree(layout_of(specs, channels))
            owner = meeting.part(lambda: _allocate(group, nbytes, device))
            # All have memory of zeros before anybody sees another's.
            gpu = str(torch.cuda.get_device_properties(device).uuid)
            near = len(set(meeting.exchange(gpu.encode()))) == 1
            handle = meeting.part(lambda: _rendezvous(owner, group, meeting))
            window = meeting.part(
                lambda: cls(
                    group.rank, _regions(handle, owner, group), specs, timeout, channels, near
                )
            )
            window._owners = (owner, handle)
            meeting.exchange(b"")
        return window

    def restart(self, membership: Membership) -> None:
        """Also waits for this rank's own kernels."""
        torch.cuda.synchronize(self._device)
        super().restart(membership)
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Views of regions are no good after it: torch does not let them own the memory."""
        if "signals" in vars(self):
            torch.cuda.synchronize(self._device)
            del self.signals
        self._owners = ()


class SymmetricRendezvous(Store):
    """What ranks tell each other on the way to a window, and the store that torch asks for.

    Every message begins with whether all is well where it comes from. A rank in trouble says so in
    its next exchange and leaves; the others, who hear it in the same one, leave too.

    As a store it knows the two uses that torch makes of it: everybody sets a value under a name
    that ends with its rank and reads those of all; everybody adds 1 to a value and waits for the
    last. The rest of a name is not looked at: torch counts in it how often a process has met
    others, and a rank that was replaced has done so less often.
    """

    def __init__(self, group: Peers, nbytes: int) -> None:
        super().__init__()
        self._group, self._nbytes = group, nbytes
        self._value = b""
        self._values: list[bytes] | None = None
        self._refusal: Exception | None = None

    def exchange(self, data: bytes, mark: bytes = FINE) -> list[bytes]:
        """What each rank gave; raises if any is in trouble, or does not come."""
        try:
            parts = self._group.all_gather_bytes(mark + data, "create a device window")
            troubles = [(r, part[1:]) for r, part in enumerate(parts) if part[:1] == TROUBLE]
            if troubles:
                text = "; ".join(f"rank {r}: {why.decode()}" for r, why in troubles)
                size = f"{self._nbytes / MIB:.1f} MiB a rank"
                raise RuntimeError(f"no window of {size} on the GPU: {text}")
        except Exception as error:
            self._refusal = error
            raise
        return [part[1:] for part in parts]

    def agree(self, planes: str) -> None:
        """That all ask for the same."""
        parts = self.exchange(planes.encode())
        strange = [rank for rank, part in enumerate(parts) if part != parts[0]]
        if strange:
            raise RuntimeError(f"no window: ranks {strange} ask for other planes than rank 0")

    def part(self, work: Callable[[], T]) -> T:
        """This rank's own part; what goes wrong in it is told to all."""
        try:
            return work()
        except Exception as error:
            # It came out of an exchange of torch's: all know it.
            if self._refusal is not None:
                raise self._refusal from error
            self.exchange(_reason(error).encode(), TROUBLE)
            raise

    def set(self, key: str, value: str | bytes) -> None:
        self._value = value.encode() if isinstance(value, str) else value
        self._values = None

    def add(self, key: str, value: int) -> int:
        """Nobody is the last, so all go on to wait."""
        self.set(key, b"")
        return 1

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def get(self, key: str) -> bytes:
        self.wait([key])
        assert self._values is not None
        return self._values[int(key.rpartition("/")[2])]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if self._values is None:
            self._values = self.exchange(self._value)


def _reason(error: BaseException) -> str:
    """Its first line: torch puts a stack of C++ calls behind it."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _allocate(group: Peers, nbytes: int, device: torch.device) -> Tensor:
    """Zeros that others can map."""
    needed, (free, total) = symmetric_bytes(nbytes), torch.cuda.mem_get_info(device)
    logger.info(
        "window of %d ranks: rank %d takes %.1f MiB of %s, which has %.1f of %.1f free",
        *(group.size, group.rank, needed / MIB, device, free / MIB, total / MIB),
    )
    if needed > free:
        raise RuntimeError(
            f"{device} has {free / MIB:.1f} MiB free: lower --mem-fraction-static, "
            f"--chunked-prefill-size or --max-running-requests"
        )
    memory = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    memory.zero_()
    torch.cuda.synchronize(device)
    return memory


def _rendezvous(memory: Tensor, group: Peers, store: SymmetricRendezvous) -> Any:
    """The same region of all ranks, mapped. torch looks the group up by its name."""
    os.environ.update(SWITCHES)
    name: Any = f"moesaic-window-{next(_numbers)}"  # newer versions have a type of its own for it
    processes = ProcessGroup(store, group.rank, group.size)
    processes._set_group_name(name)
    _register_process_group(name, processes)
    try:
        with _time_limit(group):
            return _meet(memory, name, group, store)
    finally:
        _unregister_process_group(name)


def _meet(memory: Tensor, name: str, group: Peers, store: SymmetricRendezvous) -> Any:
    try:
        return _SymmetricMemory.rendezvous(memory, name)
    except RuntimeError as error:
        if "group info" not in str(error):
            raise
    # Versions of torch that do not look at the process group say so before they exchange anything.
    _SymmetricMemory.set_group_info(name, group.rank, group.size, store)
    return _SymmetricMemory.rendezvous(memory, name)


@contextmanager
def _time_limit(group: Peers) -> Iterator[None]:
    """torch waits without a limit for handles of a rank that died after it had come, and holds the
    interpreter: all that is left is to end this process too. Exchanges have their own limit, which
    is to come first."""
    faulthandler.dump_traceback_later(2 * group.timeout + 10, exit=True, file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _regions(handle: Any, memory: Tensor, group: Peers) -> list[Tensor]:
    """Of all ranks, as bytes."""
    if handle.buffer_ptrs[group.rank] != memory.data_ptr():
        raise RuntimeError(f"torch {torch.__version__} has moved the memory: use 2.11 to 2.13")
    regions = [handle.get_buffer(r, memory.shape, torch.uint8) for r in range(group.size)]
    regions[group.rank] = memory
    return regions
