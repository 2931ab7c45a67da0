"""Windows of kernels whose memory outlives the ranks: the supervisor has descriptors of it.

A rank that is lost leaves its region, which the others go on to map at the same addresses, so that
their CUDA graphs stay valid. The rank that is started in its place maps the same regions.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from moesaic.comm.collectives.group import Peers
from moesaic.comm.lifecycle import Membership
from moesaic.comm.network.held_memory import HeldMemory
from moesaic.comm.windows.agreement import WindowAgreement
from moesaic.comm.windows.cuda_pieces import CudaPieces
from moesaic.comm.windows.device_window import DeviceWindow, layout
from moesaic.comm.windows.shared_memory import create_memory
from moesaic.comm.windows.window import PlaneSpec, layout_of
from moesaic.core.link import EmulatedLink

MEMORY = "moesaic-device-window"


class MappedPiece(Protocol):
    """A mapping of memory; `tensor` are its bytes."""

    tensor: Tensor

    def close(self) -> None: ...


class Pieces(Protocol):
    """Memory with descriptors, of a GPU (comm/windows/cuda_pieces.py) or of the host."""

    def create(self, nbytes: int) -> int:
        """The descriptor of new zeros."""

    def map(self, descriptor: int, nbytes: int) -> MappedPiece: ...


class HeldWindow(DeviceWindow):
    _pieces: tuple[MappedPiece, ...] = ()

    @classmethod
    def create(
        cls,
        group: Peers,
        held: HeldMemory,
        key: str,
        specs: Sequence[PlaneSpec],
        timeout: float,
        channels: int,
        device: torch.device,
        link: EmulatedLink | None = None,
    ) -> HeldWindow:
        """All ranks call it with the same planes, and a rank that is started again does so without
        the others; a failure on one is a RuntimeError on all. `key`: of its regions in `held`."""
        nbytes = layout(specs, channels, group.size, link)[1]
        agreement = WindowAgreement(group, nbytes)
        agreement.agree(layout_of(specs, channels))
        own = f"{key}/{group.rank}"
        pieces = agreement.part(lambda: _pieces_on(device, nbytes, held, own))
        place = _place_of(device).encode()
        near = len(set(agreement.exchange(place))) == 1
        if link is not None and not near:
            raise ValueError("--emulate-link needs ranks that share a GPU: clocks of GPUs differ")
        keys = [f"{key}/{rank}" for rank in range(group.size)]
        mapped = agreement.part(lambda: [_map(pieces, held, one, nbytes) for one in keys])
        regions = [piece.tensor for piece in mapped]
        window = cls(group.rank, regions, specs, timeout, channels, near, link)
        window._pieces = tuple(mapped)
        agreement.exchange(b"")
        return window

    def restart(self, membership: Membership) -> None:
        """Also waits for this rank's own kernels."""
        _synchronise(self.signals.state.device)
        super().restart(membership)
        _synchronise(self.signals.state.device)

    def close(self) -> None:
        """Views of regions are invalid afterwards. The supervisor still holds the memory."""
        if "signals" in vars(self):
            _synchronise(self.signals.state.device)
            del self.signals
        pieces, self._pieces = self._pieces, ()
        for piece in pieces:
            piece.close()


class HostPieces:
    """The same on the host, where the twins of kernels compute."""

    def create(self, nbytes: int) -> int:
        return create_memory(MEMORY, nbytes)

    def map(self, descriptor: int, nbytes: int) -> HostPiece:
        return HostPiece(descriptor, nbytes)


class HostPiece:
    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.tensor = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)

    def close(self) -> None:
        """The mapping ends with the last tensor that views it."""
        del self.tensor


def _pieces_on(device: torch.device, nbytes: int, held: HeldMemory, own: str) -> Pieces:
    """Has this rank's region held, unless its predecessor's is."""
    pieces = _open_pieces(device)
    if (found := held.take(own)) is not None:
        os.close(found)
        return pieces
    descriptor = pieces.create(nbytes)
    try:
        held.hold(own, descriptor)
    finally:
        os.close(descriptor)
    return pieces


def _open_pieces(device: torch.device) -> Pieces:
    if device.type == "cpu":
        return HostPieces()
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaPieces(torch.device(device.type, index))


def _map(pieces: Pieces, held: HeldMemory, key: str, nbytes: int) -> MappedPiece:
    descriptor = held.take(key)
    if descriptor is None:
        raise RuntimeError(f"the supervisor holds no memory {key!r}")
    try:
        return pieces.map(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _place_of(device: torch.device) -> str:
    """What ranks on the same device have in common."""
    if device.type == "cpu":
        return "host"
    return str(torch.cuda.get_device_properties(device).uuid)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
