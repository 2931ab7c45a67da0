"""How a rank of a decode instance reads the send buffer of a rank of a prefill instance.

A transport makes a handle of a send buffer, and of the handle a source on the other side. Where
none can be used, the bytes are sent behind their message, by TCP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from moesaic.disagg.messages import Place
from moesaic.disagg.send_buffer import SendBuffer
from moesaic.disagg.transports import device, nixl_reads, shared

AUTO: Final = "auto"
TCP: Final = "tcp"


class Source(Protocol):
    """A send buffer of another process."""

    def read(self, place: Place) -> Tensor:
        """The bytes of a region, valid until the next read."""
        ...

    def is_current(self, place: Place) -> bool:
        """Whether what was read before is what the region had when it was announced."""
        ...

    def close(self) -> None: ...


class Transport(NamedTuple):
    device: str
    """Where the send buffer is: cpu or cuda."""
    is_first_choice: bool
    """What auto takes there."""
    export: Callable[[SendBuffer], bytes]
    open: Callable[[bytes, torch.device], Source]


TRANSPORTS: Final = {
    "shm": Transport("cpu", True, shared.export, shared.SharedSource),
    "cuda_ipc": Transport("cuda", True, device.export, device.DeviceSource),
    "nixl": Transport("cpu", False, nixl_reads.export, nixl_reads.NixlSource),
}


def transport_of(asked: str, kind: str) -> str:
    """The transport that a rank offers. `asked`: a name, or auto; `kind`: of its device."""
    if asked != AUTO:
        return asked
    fits = (name for name, one in TRANSPORTS.items() if one.device == kind and one.is_first_choice)
    return next(fits, TCP)


def open_source(name: str, handle: bytes, asked: str, own: torch.device) -> Source:
    """Raises where it cannot be used here. `asked`: what this rank is to use."""
    if asked not in (AUTO, name) or name not in TRANSPORTS:
        raise ValueError(f"this rank takes {asked}")
    return TRANSPORTS[name].open(handle, own)
