"""KV caches between two processes that share a GPU or a machine's memory, for bench.pd.

The cache is a rank's of Qwen3-30B-A3B, in random pages. `stream`: as many chunks as make up
`total_bytes`, sent one after the other as behind the steps of prefill, until the other process has
all of them: gathering, transfer and copy. `one`: a single chunk, from sending it until it is there.
`read`: the receiver's copy of a chunk out of the other process's memory alone. `copy`: a plain copy
of as many bytes within a process. On a GPU the last two are the device's own time (bench/gpu.py).
The best of several runs, since other work may share the machine.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from bench import gpu
from moesaic.comm.network.connect import connect
from moesaic.comm.network.handshake import Identity, Role
from moesaic.core.disagg import KVRank, KVSend, KVShare, KVTarget, Ticket
from moesaic.disagg.messages import Arrived, Chunk, Close, Open, Place, receive, send
from moesaic.disagg.outlets import KVOutlets
from moesaic.disagg.receiver import KVReceiver
from moesaic.disagg.send_buffer import MOST_BYTES, SendBuffer
from moesaic.disagg.sender import KVSender
from moesaic.disagg.staging import StagedCache
from moesaic.disagg.transports.registry import AUTO, TRANSPORTS, open_source
from moesaic.layers.context import CacheSpec
from moesaic.layers.paged_cache import PagedCache

SECRET: Final = b"of the benchmark's two processes"
SHARE: Final = KVShare((0, 48), (0, 4), 128, 128)
DTYPE: Final = torch.bfloat16
PAGE: Final = 16
TOKEN_BYTES: Final = 48 * 4 * 256 * 2
CHUNKS: Final = 32
# Of a stream, by the kind of the device.
MOST_TOTAL: Final = {"cpu": 256 << 20, "cuda": 2 << 30}
# A target of the project: reading, against a plain copy, from this size on.
LEAST_SHARE, FROM_BYTES = 0.8, 1 << 20


@dataclass
class TransferRow:
    """Times in microseconds, rates in GB/s of the bytes that arrive. None: by TCP there is nothing
    to read."""

    device: str
    transport: str
    chunk_bytes: int
    total_bytes: int
    stream_gbs: float
    one_us: float
    read_gbs: float | None
    copy_gbs: float

    @property
    def key(self) -> tuple[object, ...]:
        return self.device, self.transport, self.chunk_bytes

    @property
    def share(self) -> float | None:
        return None if self.read_gbs is None else self.read_gbs / self.copy_gbs


def _serve(kind: str, threads: int, pipe: Any) -> None:
    """The process of the decode instance's rank. It answers what is asked by the pipe."""
    torch.set_num_threads(threads)
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device(kind)
    listening = socket.create_server(("127.0.0.1", 0))
    receiver = KVReceiver([SHARE], DTYPE, listening, Identity(0, 0), SECRET, device, AUTO)
    pipe.send(receiver.port)
    while (asked := pipe.recv()) is not None:
        pipe.send(_read_seconds(*asked, device))
    os._exit(0)  # threads of the receiver may be freeing tensors


def _read_seconds(transport: str, handle: bytes, tokens: int, device: torch.device) -> float:
    """How long reading takes a chunk at the beginning of the send buffer."""
    source = open_source(transport, handle, AUTO, device)
    place = Place(0, tokens * TOKEN_BYTES, 0, 0)
    staged = StagedCache(SHARE, 0, 2 * tokens, DTYPE, device)  # a chunk is a part of a prompt
    staged.allocated = None  # an event from outside of the graph that is measured
    chunk = Chunk(Ticket(0, 0), 0, tokens, SHARE.layers, SHARE.heads, "bfloat16")
    return _seconds(lambda: staged.write(chunk, source.read(place)), device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        return gpu.measure(work) / 1e6
    found = []
    for _ in range(9):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found)


def _plain_copy(nbytes: int, device: torch.device) -> Callable[[], object]:
    """On a GPU by a kernel, since a graph gives `copy_` to the copy engine, which is slower."""
    source, target = (torch.ones(nbytes // 4, dtype=torch.int32, device=device) for _ in "ab")
    if device.type == "cuda":
        return lambda: torch.bitwise_not(source, out=target)
    return lambda: target.copy_(source)


@contextmanager
def _receiver(kind: str, threads: int) -> Iterator[tuple[int, Any]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(kind, threads, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(120):
            raise RuntimeError("the other process does not start")
        yield ours.recv(), ours
        ours.send(None)
        process.join(30)
    finally:
        process.kill()
        process.join()


class TransferBench:
    """The process of the prefill instance's rank."""

    def __init__(
        self, transport: str, device: torch.device, port: int, pipe: Any, most_bytes: int
    ) -> None:
        self._transport, self._device, self._pipe = transport, device, pipe
        self._buffer = SendBuffer(MOST_BYTES[device.type], device)
        outlets = KVOutlets(Identity(0, 1), SECRET, self._buffer, transport)
        self._sender = KVSender([(SHARE,)], 0, outlets)
        dial = partial(socket.create_connection, ("127.0.0.1", port))
        self._leader, _ = connect(dial, Role.KV, Identity(0, 0), SECRET, 5)
        self._leader.settimeout(60)
        self._rank = KVRank(0, 0, 0, (SHARE,), "127.0.0.1", port)
        self._most = min(MOST_TOTAL[device.type], CHUNKS * most_bytes)
        pages = -(-max(self._most, most_bytes + TOKEN_BYTES) // (PAGE * TOKEN_BYTES))
        self._cache = PagedCache(CacheSpec(48, 4, 128, 128), pages, PAGE, DTYPE, device)
        for part in (self._cache.keys, self._cache.values):
            part.view(torch.int16).random_(0, 1 << 14)
        order = torch.randperm(pages) + 1
        places = torch.arange(pages * PAGE)
        self._slots: Tensor = (order[places // PAGE] * PAGE + places % PAGE).to(device)
        self._epoch = 0

    def seconds(self, tokens: int, chunks: int) -> float:
        """How long so many chunks take until the last one is there."""
        self._epoch += 1
        ticket, total = Ticket(1, self._epoch), tokens * chunks
        send(self._leader, Open(ticket, 0, total))
        time.sleep(0.05)  # the other process allocates memory for it
        target = KVTarget(ticket, 0, total, (self._rank,))
        self._synchronise()
        begin = time.perf_counter()
        for first in range(0, total, tokens):
            order = KVSend(target, first, first + tokens)
            self._sender.send(order, self._cache, self._slots[first : first + tokens])
        answer, _ = receive(self._leader)
        took = time.perf_counter() - begin
        if not isinstance(answer, Arrived):
            raise RuntimeError(f"it did not arrive: {answer}")
        send(self._leader, Close(ticket))
        return took

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def row(self, nbytes: int, device_name: str, rounds: int) -> TransferRow:
        tokens = max(1, round(nbytes / TOKEN_BYTES))
        nbytes = tokens * TOKEN_BYTES
        chunks = max(1, min(CHUNKS, self._most // nbytes))
        self.seconds(tokens, chunks)
        used = set(self._sender.transports.values())
        if used != {self._transport}:
            raise RuntimeError(f"by {used}, not by {self._transport}")
        one = min(self.seconds(tokens, 1) for _ in range(rounds))
        stream = min(self.seconds(tokens, chunks) for _ in range(rounds))
        read = None
        if self._transport in TRANSPORTS and nbytes <= self._buffer.largest:
            handle = TRANSPORTS[self._transport].export(self._buffer)
            self._pipe.send((self._transport, handle, tokens))
            read = nbytes / self._pipe.recv() / 1e9
        copy = nbytes / _seconds(_plain_copy(nbytes, self._device), self._device) / 1e9
        total = nbytes * chunks
        return TransferRow(
            device_name, self._transport, nbytes, total, total / stream / 1e9, one * 1e6, read, copy
        )


def measure(
    transport: str, kind: str, sizes: list[int], device_name: str, rounds: int
) -> list[TransferRow]:
    threads = 1
    torch.set_num_threads(threads)
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    with _receiver(kind, threads) as (port, pipe), torch.inference_mode():
        bench = TransferBench(transport, device, port, pipe, max(sizes))
        return [bench.row(nbytes, device_name, rounds) for nbytes in sizes]
