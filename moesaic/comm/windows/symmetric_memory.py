"""Windows of ranks on GPUs of one node, or on a shared GPU: torch's symmetric memory.

torch maps every rank's region into all processes; the physical memory lives until the last of them
frees it, so that kernels survive the death of a peer. For its rendezvous torch needs a store and a
process group. It is given ours: each of its exchanges is one of the group's. So a missing rank is
named, and what fails on one rank is an error on all of them.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

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
from moesaic.comm.windows.agreement import WindowAgreement
from moesaic.comm.windows.cuda_pieces import check_free
from moesaic.comm.windows.device_window import DeviceWindow, layout
from moesaic.comm.windows.shared_memory import round_up
from moesaic.comm.windows.window import PlaneSpec, layout_of
from moesaic.core.link import EmulatedLink

# The driver allocates in such pieces; torch puts its own signals into the same memory.
PIECE: Final = 2 << 20
TORCH_BYTES: Final = 64 << 10
# Several ranks may use one GPU; multicast would only make the rendezvous longer.
SWITCHES: Final = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
STDERR: Final = 2

_numbers = itertools.count()


def symmetric_bytes(nbytes: int) -> int:
    """The device memory that a region of `nbytes` takes."""
    return round_up(nbytes + TORCH_BYTES, PIECE)


class SymmetricWindow(DeviceWindow):
    """Regions in device memory."""

    _owners: tuple[Any, ...] = ()

    @classmethod
    def create(
        cls,
        group: Peers,
        specs: Sequence[PlaneSpec],
        timeout: float,
        channels: int,
        device: torch.device,
        link: EmulatedLink | None = None,
    ) -> SymmetricWindow:
        """All ranks call it with the same planes; a failure on one is a RuntimeError on all."""
        nbytes = layout(specs, channels, group.size, link)[1]
        if device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())
        if group.size == 1:
            region = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            return cls(0, [region], specs, timeout, channels)
        with torch.cuda.device(device):
            rendezvous = SymmetricRendezvous(group, symmetric_bytes(nbytes))
            rendezvous.agree(layout_of(specs, channels))
            owner = rendezvous.part(lambda: _allocate(nbytes, device))
            # All ranks have zeroed their memory before any maps another's.
            gpu = str(torch.cuda.get_device_properties(device).uuid)
            near = len(set(rendezvous.exchange(gpu.encode()))) == 1
            if link is not None and not near:
                raise ValueError(
                    "--emulate-link needs ranks that share a GPU: clocks of GPUs differ"
                )
            handle = rendezvous.part(lambda: _rendezvous(owner, group, rendezvous))
            window = rendezvous.part(
                lambda: cls(
                    group.rank, _regions(handle, owner, group), specs, timeout, channels, near, link
                )
            )
            window._owners = (owner, handle)
            rendezvous.exchange(b"")
        return window

    def restart(self, membership: Membership) -> None:
        """Also waits for this rank's own kernels."""
        device = self.signals.state.device
        torch.cuda.synchronize(device)
        super().restart(membership)
        torch.cuda.synchronize(device)

    def close(self) -> None:
        """Views of regions are invalid afterwards: torch does not let them own the memory."""
        if "signals" in vars(self):
            torch.cuda.synchronize(self.signals.state.device)
            del self.signals
        self._owners = ()


class SymmetricRendezvous(WindowAgreement, Store):
    """The exchanges between ranks that create a window, and the store that torch needs.

    The store supports the two uses that torch makes of it: each rank sets a value under a key that
    ends with its rank and reads those of all; each adds 1 to a value and waits for the last. The
    rest of a key is ignored: torch counts the process's rendezvous in it, of which a replaced rank
    has had fewer.
    """

    def __init__(self, group: Peers, nbytes: int) -> None:
        Store.__init__(self)
        WindowAgreement.__init__(self, group, nbytes)
        self._value = b""
        self._values: list[bytes] | None = None

    def set(self, key: str, value: str | bytes) -> None:
        self._value = value.encode() if isinstance(value, str) else value
        self._values = None

    def add(self, key: str, value: int) -> int:
        """No rank is the last, so that all continue to wait."""
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


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    """Zeros that other ranks can map."""
    check_free(symmetric_bytes(nbytes), device)
    memory = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    memory.zero_()
    torch.cuda.synchronize(device)
    return memory


def _rendezvous(memory: Tensor, group: Peers, store: SymmetricRendezvous) -> Any:
    """The regions of all ranks, mapped. torch looks the group up by its name."""
    os.environ.update(SWITCHES)
    name: Any = f"moesaic-window-{next(_numbers)}"  # newer versions have a type for it
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
    # Versions of torch that ignore the process group raise before they exchange anything.
    _SymmetricMemory.set_group_info(name, group.rank, group.size, store)
    return _SymmetricMemory.rendezvous(memory, name)


@contextmanager
def _time_limit(group: Peers) -> Iterator[None]:
    """torch waits without a limit for a rank that died in the rendezvous, and holds the GIL: ending
    this process is the only way out. Exchanges have a shorter limit."""
    faulthandler.dump_traceback_later(2 * group.timeout + 10, exit=True, file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _regions(handle: Any, memory: Tensor, group: Peers) -> list[Tensor]:
    if handle.buffer_ptrs[group.rank] != memory.data_ptr():
        raise RuntimeError(f"torch {torch.__version__} has moved the memory: use 2.11 to 2.13")
    regions = [handle.get_buffer(r, memory.shape, torch.uint8) for r in range(group.size)]
    regions[group.rank] = memory
    return regions
