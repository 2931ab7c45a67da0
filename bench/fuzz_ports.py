"""Strangers at every port and socket between the processes of a service, with good requests beside.

    python -m bench.fuzz_ports --number 5000 --seed 1
    python -m bench.fuzz_ports --markdown

starts a server on two nodes of this machine, connects to everything that its processes listen on
but the HTTP port, and says what no process of the service would. It fails if a stranger is told
more than the first message of a handshake, if a connection that proves nothing stays open, if a
good request's answer differs from what it was alone, if a process ends, or if afterwards the
processes hold more descriptors or memory than before. Cases depend on seed and number alone.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import psutil
from tqdm import tqdm

from bench.common import cpu_name
from bench.fuzz_server import GOOD, MODEL, State, Tally, compare, run_fuzzer, state_of
from bench.http_server import free_port, started
from moesaic.comm.network.handshake import GREETING, IDENTITY, NONCE_BYTES, PROOF_BYTES, Role
from moesaic.comm.windows.tcp_links import FrameKind, frame

# What a listener answers to any greeting: a nonce, an identity, a proof; or its part of a TLS
# handshake. A stranger that is told more was taken for a process of the service.
ANSWER_BYTES: Final = NONCE_BYTES + IDENTITY.size + PROOF_BYTES
TLS_ANSWER_BYTES: Final = 1024
# A connection that proves nothing is closed after 5 s, or later on a machine with much to do.
CLOSED_SECONDS: Final = 60.0
ENDLESS_BYTES: Final = 4 << 20
FLOOD: Final = 100
# The supervisor's other sockets are libzmq's, which answers a greeting with its own.
ZMQ_SOCKETS: Final = ("client", "ranks")
ZMQ_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)

Address = tuple[str, int] | str
Say = Callable[[random.Random, socket.socket], None]


def silence(chance: random.Random, connection: socket.socket) -> None:
    """Nothing is said; it must hang up by itself."""


def noise(chance: random.Random, connection: socket.socket) -> None:
    connection.sendall(chance.randbytes(chance.randrange(1, 5000)))


def greeting(chance: random.Random, connection: socket.socket) -> None:
    """The right greeting for some role, then anything in place of a proof."""
    role = chance.choice([*Role, 0, 255])
    said = GREETING + bytes([role]) + chance.randbytes(NONCE_BYTES + IDENTITY.size)
    connection.sendall(said + chance.randbytes(chance.randrange(200)))


def cut_off(chance: random.Random, connection: socket.socket) -> None:
    """The beginning of a greeting, and then the end."""
    said = GREETING + bytes([chance.choice([*Role])]) + chance.randbytes(48)
    connection.sendall(said[: chance.randrange(len(said))])
    with suppress(OSError):  # it may have hung up already
        connection.shutdown(socket.SHUT_WR)


def byte_by_byte(chance: random.Random, connection: socket.socket) -> None:
    for byte in GREETING + bytes([chance.choice([*Role])]) + chance.randbytes(8):
        connection.sendall(bytes([byte]))
        time.sleep(0.01)


def endless(chance: random.Random, connection: socket.socket) -> None:
    """As much as it takes, up to a bound."""
    block, sent = chance.randbytes(1 << 16), 0
    if chance.random() < 0.5:
        connection.sendall(GREETING + bytes([chance.choice([*Role])]))
    while sent < ENDLESS_BYTES:
        sent += connection.send(block)


def frames(chance: random.Random, connection: socket.socket) -> None:
    """Frames of a data link, without a handshake."""
    pieces = [(chance.randrange(1 << 20), 64)]
    said = frame(FrameKind.POST, chance.randrange(9), 0, 1 << 40, "lies", pieces)
    connection.sendall(said + chance.randbytes(64))


def other_protocols(chance: random.Random, connection: socket.socket) -> None:
    said = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", ZMQ_GREETING, b"\x16\x03\x01\x02\x00\x01\x00")
    connection.sendall(chance.choice(said) + chance.randbytes(chance.randrange(100)))


def tls_handshake(chance: random.Random, connection: socket.socket) -> None:
    """The first message of TLS, by a stranger that would accept any certificate and has none, then
    anything in place of a proof."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    said = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said).do_handshake()
    connection.sendall(said.read() + chance.randbytes(chance.choice((0, 1, 100, 1 << 15))))


KINDS: Final[tuple[Say, ...]] = (
    silence,
    noise,
    greeting,
    cut_off,
    byte_by_byte,
    endless,
    frames,
    other_protocols,
    tls_handshake,
)


@dataclass
class Outcome:
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def listening(pids: Sequence[int]) -> list[Address]:
    """Where these processes listen: network addresses, and Unix sockets by their path."""
    found: set[Address] = set()
    for pid in pids:
        process = psutil.Process(pid)
        for one in process.net_connections("inet"):
            if one.status == psutil.CONN_LISTEN:
                found.add((one.laddr.ip, one.laddr.port))
        for unix in process.net_connections("unix"):
            path = str(unix.laddr)
            if path.startswith("/") and os.path.basename(path) in ("store", *ZMQ_SOCKETS):
                found.add(path)
    return sorted(found, key=str)


def connect(address: Address) -> socket.socket:
    if isinstance(address, tuple):
        return socket.create_connection(address, CLOSED_SECONDS)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(CLOSED_SECONDS)
    connection.connect(address)
    return connection


def one_case(addresses: Sequence[Address], seed: int, number: int, outcome: Outcome) -> None:
    chance = random.Random(f"{seed} {number}")
    address, say = chance.choice(addresses), chance.choice(KINDS)
    outcome.kinds[say.__name__] += 1
    heard = 0
    try:
        with connect(address) as connection, suppress(BrokenPipeError, ConnectionResetError):
            say(chance, connection)
            if _is_zmq(address):
                return  # it answers with its own greeting, and may wait for the rest of ours
            while more := connection.recv(4096):
                heard += len(more)
    except TimeoutError:
        outcome.problems.append(f"case {number}: {say.__name__} at {address} is not closed")
    except OSError as error:
        outcome.problems.append(f"case {number}: {say.__name__} at {address}: {error!r}")
    if heard > (TLS_ANSWER_BYTES if say is tls_handshake else ANSWER_BYTES):
        outcome.problems.append(f"case {number}: {say.__name__} at {address} heard {heard} bytes")


def _is_zmq(address: Address) -> bool:
    return isinstance(address, str) and os.path.basename(address) in ZMQ_SOCKETS


def flood(addresses: Sequence[Address]) -> None:
    """Many connections at once that say nothing, to each port."""
    for address in addresses:
        with ExitStack() as stack:
            for _ in range(FLOOD):
                with suppress(OSError):
                    stack.enter_context(connect(address))


def attack(addresses: Sequence[Address], numbers: range, seed: int, width: int = 16) -> Outcome:
    """All cases, `width` at a time, and a flood at the end."""
    outcome = Outcome()
    with ThreadPoolExecutor(width) as pool:
        cases = pool.map(lambda number: one_case(addresses, seed, number, outcome), numbers)
        for _ in tqdm(cases, total=len(numbers), unit="case", mininterval=1.0):
            pass
    flood(addresses)
    return outcome


class GoodClient(threading.Thread):
    """Asks the same again and again, and compares."""

    def __init__(self, url: str, body: dict[str, Any], tally: Tally) -> None:
        super().__init__(daemon=True)
        self._url, self._body, self._tally = url, body, tally
        self._expected = self._ask()
        self._over = threading.Event()

    def _ask(self) -> list[int]:
        answer = httpx.post(f"{self._url}/generate", json=self._body, timeout=120)
        answer.raise_for_status()
        ids: list[int] = answer.json()["output_ids"]
        return ids

    def run(self) -> None:
        while not self._over.is_set():
            try:
                ids = self._ask()
            except httpx.HTTPError as error:
                self._tally.problem(f"a good request failed: {error!r}")
                return
            self._tally.good += 1
            if ids != self._expected:
                self._tally.problem(f"a good request got {ids}, alone {self._expected}")

    def end(self) -> None:
        self._over.set()
        self.join()


@contextmanager
def second_node(flags: Sequence[str]) -> Iterator[int]:
    """The process of node 1, which waits for node 0."""
    command = [sys.executable, "-m", "moesaic.launch_server", "--model-path", MODEL]
    process = subprocess.Popen([*command, "--log-level", "warning", "--node-rank", "1", *flags])
    try:
        yield process.pid
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def measure(numbers: range, seed: int) -> dict[str, Any]:
    address = f"127.0.0.1:{free_port()}"
    flags = f"--tp 4 --ep 4 --num-threads 1 --nnodes 2 --dist-init-addr {address}".split()
    os.environ.setdefault("MOESAIC_SECRET", random.SystemRandom().randbytes(16).hex())
    with second_node(flags) as node, started(MODEL, [*flags, "--node-rank", "0"]) as server:
        assert server.pid is not None
        http = int(server.url.rpartition(":")[2])
        tally = Tally()
        clients = [GoodClient(server.url, body, tally) for body in GOOD]
        addresses = [one for one in listening(_family(server.pid, node)) if one[1] != http]
        attack(addresses, range(1_000_000, 1_000_200), seed)  # what is allocated once is no leak
        before = [asyncio.run(state_of(http, pid)) for pid in (server.pid, node)]
        begun = time.monotonic()
        for client in clients:
            client.start()
        outcome = attack(addresses, numbers, seed)
        seconds = time.monotonic() - begun
        for client in clients:
            client.end()
        after = [asyncio.run(state_of(http, pid)) for pid in (server.pid, node)]
        for first, last in zip(before, after, strict=True):
            compare(tally, first, last)
    return {
        "cpu": cpu_name(),
        "flags": flags,
        "seed": seed,
        "cases": len(numbers),
        "listeners": Counter("Unix" if isinstance(one, str) else "TCP" for one in addresses),
        "seconds": round(seconds, 1),
        "kinds": dict(outcome.kinds.most_common()),
        "good_requests": tally.good,
        "problems": outcome.problems + tally.problems,
        "descriptors": [_total(states, "descriptors") for states in (before, after)],
        "memory_mib": [_total(states, "memory") >> 20 for states in (before, after)],
    }


def _family(*pids: int) -> list[int]:
    roots = [psutil.Process(pid) for pid in pids]
    return [one.pid for root in roots for one in (root, *root.children(recursive=True))]


def _total(states: Sequence[State], name: str) -> int:
    return sum(getattr(state, name) for state in states)


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    listeners = ", ".join(f"{number} {kind}" for kind, number in found["listeners"].items())
    return [
        ("listeners", listeners),
        ("connections of strangers", f"{found['cases']:,} in {found['seconds']:.0f} s"),
        ("of them", ", ".join(f"{number:,} {kind}" for kind, number in found["kinds"].items())),
        ("good requests beside them, all with the right answer", f"{found['good_requests']:,}"),
        ("problems (told too much, left open, deaths, wrong answers)", str(len(found["problems"]))),
        ("open descriptors", " → ".join(map(str, found["descriptors"]))),
        ("resident memory of all processes, MiB", " → ".join(map(str, found["memory_mib"]))),
    ]


if __name__ == "__main__":
    sys.exit(run_fuzzer("fuzz_ports", 5_000, __doc__.partition("\n")[0], measure, rows))
