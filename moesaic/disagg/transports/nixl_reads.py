"""KV caches that are read by NIXL, between CPUs of any machines: UCX chooses RDMA, TCP or shared
memory. From PyPI: pip install nixl."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from moesaic.disagg.messages import Place
from moesaic.disagg.send_buffer import ENTRIES, EPOCH_BYTES, MOST_REGION, SendBuffer

KIND: Final = "DRAM"
# How long a read may take.
READ_SECONDS: Final = 5.0
SPINS: Final = 1000


class NixlError(OSError):
    """NIXL has refused something, or a read did not end."""


class NixlHandle(msgspec.Struct, array_like=True, frozen=True):
    agent: bytes
    """Its metadata."""
    address: int
    """Of the epochs, which the data follows."""
    nbytes: int


@contextmanager
def _errors() -> Iterator[None]:
    """NIXL's own have no common base."""
    try:
        yield
    except Exception as error:
        raise NixlError(f"NIXL: {error!r}") from error


def _agent(serves: bool) -> Any:
    """`serves`: others read what it has registered, for which it has a thread."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    with _errors():
        from nixl._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(enable_prog_thread=serves, backends=["UCX"])
        return nixl_agent(f"moesaic-{secrets.token_hex(8)}", config)


def _register(agent: Any, memory: Tensor) -> None:
    with _errors():
        agent.register_memory([(memory.data_ptr(), memory.nbytes, 0, "")], KIND)


@cache
def _serve(buffer: SendBuffer) -> Any:
    agent = _agent(serves=True)
    _register(agent, buffer.shared)
    return agent


def export(buffer: SendBuffer) -> bytes:
    with _exporting:
        metadata = _serve(buffer).get_agent_metadata()
    handle = NixlHandle(metadata, buffer.shared.data_ptr(), buffer.shared_bytes)
    return msgspec.msgpack.encode(handle)


_exporting = threading.Lock()


class NixlSource:
    """The send buffer of a process anywhere. Each has an agent, and a buffer for what it reads."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        self._handle = msgspec.msgpack.decode(handle, type=NixlHandle)
        self._agent = _agent(serves=False)
        self._buffer = torch.empty(EPOCH_BYTES + MOST_REGION["cpu"], dtype=torch.uint8)
        _register(self._agent, self._buffer)
        with _errors():
            self._remote = self._agent.add_remote_agent(self._handle.agent).decode()

    def read(self, place: Place) -> Tensor:
        """Valid until the next one."""
        self._fetch(ENTRIES * EPOCH_BYTES + place.offset, EPOCH_BYTES, place.nbytes)
        return self._buffer[EPOCH_BYTES : EPOCH_BYTES + place.nbytes]

    def is_current(self, place: Place) -> bool:
        self._fetch(place.entry * EPOCH_BYTES, 0, EPOCH_BYTES)
        return int(self._buffer[:EPOCH_BYTES].view(torch.int64)) == place.epoch

    def _fetch(self, offset: int, into: int, nbytes: int) -> None:
        if offset + nbytes > self._handle.nbytes or into + nbytes > self._buffer.nbytes:
            raise NixlError(f"{nbytes} bytes at {offset} are not in the send buffer")
        with _errors():
            agent, kind = self._agent, KIND
            here = agent.get_xfer_descs([(self._buffer.data_ptr() + into, nbytes, 0)], kind)
            there = agent.get_xfer_descs([(self._handle.address + offset, nbytes, 0)], kind)
            order = agent.initialize_xfer("READ", here, there, self._remote)
            self._wait(order)
            agent.release_xfer_handle(order)

    def _wait(self, order: Any) -> None:
        deadline, turns = time.monotonic() + READ_SECONDS, 0
        state = self._agent.transfer(order)
        while state == "PROC":
            if (turns := turns + 1) > SPINS:
                time.sleep(0.0002)
            if time.monotonic() > deadline:
                raise TimeoutError(f"a read has taken {READ_SECONDS:g} s")
            state = self._agent.check_xfer_state(order)
        if state != "DONE":
            raise NixlError(f"a read ended in {state}")

    def close(self) -> None:
        with _errors():
            self._agent.remove_remote_agent(self._remote)
            memory = [(self._buffer.data_ptr(), self._buffer.nbytes, 0, "")]
            self._agent.deregister_memory(self._agent.get_reg_descs(memory, KIND))
