"""Whether the nodes of a service can work together: all run this at once, meet at node 0's address,
compare what they have, and measure the connection of every pair, by TCP and, on GPUs, by NCCL. No
torch here."""

from __future__ import annotations

import hashlib
import os
import socket
import statistics
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import msgspec

from moesaic.comm.launch.cluster_nccl import NcclFacts, NcclSpec, devices_of, measure_nccl
from moesaic.comm.launch.node_place import NodePlace
from moesaic.comm.network.connect import connect
from moesaic.comm.network.handshake import Identity, Role, Session, read_exactly
from moesaic.comm.network.listener import Listener, RoleHandler
from moesaic.comm.network.node_secret import NO_SECRET
from moesaic.comm.network.store import StoreAddress, StoreClient, StoreTable
from moesaic.comm.supervise.address import address_towards, family_of, interface_of, numeric
from moesaic.comm.supervise.config_check import differences
from moesaic.comm.supervise.service_spec import split_address
from moesaic.comm.supervise.supervisor_links import taken

# How long nodes wait for each other, and for the measurement of a pair.
MEET_SECONDS: Final = 10.0
PAIR_SECONDS: Final = 30.0
PINGS: Final = 50
# Bytes are sent in such pieces, for so long.
PIECE: Final = bytes(8 << 20)
SEND_SECONDS: Final = 0.3
# Less is called slow, as is less than this share of the fastest pair.
SLOW_GBIT: Final = 1.0
SLOW_SHARE: Final = 0.3
CLOCK_SECONDS: Final = 1.0
PING, DATA = b"p", b"d"
NUMBER: Final = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Installed:
    """What is on this node before it meets others, as in NodeFacts."""

    versions: dict[str, str]
    model: str
    flags: dict[str, Any]
    gpu: int = 0
    """The first that the service would use, if it computes on GPUs."""


class NodeFacts(msgspec.Struct, frozen=True):
    host: str
    address: str
    """That node 0 sees; others connect to its port for the measurement."""
    port: int
    interface: str
    link_mbit: int
    """The speed of the interface by its driver; 0 if that is unknown."""
    rdma: list[str]
    """Devices."""
    versions: dict[str, str]
    model: str
    """A digest of its files; empty without a model."""
    flags: dict[str, Any]
    """Those that all nodes must have in common."""
    has_secret: bool

    @property
    def device(self) -> str:
        return str(self.flags.get("device", ""))


class PairFacts(msgspec.Struct, frozen=True):
    latency_us: float = 0.0
    """There and back, the median."""
    gbit_s: float = 0.0
    clock_s: float = 0.0
    """How far the second node's clock is ahead."""
    error: str = ""


class ClusterReport(msgspec.Struct, frozen=True):
    nodes: list[NodeFacts]
    pairs: dict[str, PairFacts]
    """By `0-1`: the lower node sends."""
    problems: list[str]
    notes: list[str]
    nccl: NcclFacts | None = None
    """If all nodes compute on GPUs."""


def check_cluster(
    place: NodePlace,
    secret: bytes,
    installed: Installed,
    seconds: float = MEET_SECONDS,
) -> ClusterReport:
    """Raises ValueError if nodes are missing."""
    assert place.address is not None
    node = place.node_rank
    name, port = split_address(place.address)
    host = numeric(name)
    with ExitStack() as stack:
        if node == 0:
            served = {Role.STORE: StoreTable().serve}
            stack.enter_context(closing(_listen((host, port), 0, secret, served)[0]))
        try:
            store = StoreAddress(host, port, secret).connect(seconds, Identity(-1, node))
        except ConnectionError as error:
            raise ValueError(
                f"node 0 is not at {place.address} within {seconds:g} s: {error}"
            ) from None
        stack.enter_context(closing(store))
        if store.add(f"came/{node}", 1) > 1:
            raise ValueError(taken(node))
        own = host if node == 0 else address_towards(host, port)
        listener, own_port = _listen((own, 0), node, secret, {Role.LINK: _answer})
        stack.enter_context(closing(listener))
        stack.enter_context(_naming_node_0(place))
        facts = _facts(own, own_port, installed, secret != NO_SECRET)
        nodes = _meet(store, place, facts, seconds)
        pairs, nccl = _measure_all(store, nodes, node, secret), None
        if all(one.device == "cuda" for one in nodes):
            addresses = [one.address for one in nodes]
            spec = NcclSpec(node, addresses, installed.gpu, host, port, secret)
            nccl = measure_nccl(spec, store)
        _leave_together(store, place, range(place.nnodes))
    problems = [*_differences(nodes), *_bad_pairs(nodes, pairs)]
    if nccl is not None:
        problems += _bad_nccl(nodes, pairs, nccl)
    return ClusterReport(nodes, pairs, problems, list(_notes(nodes, nccl)), nccl)


@contextmanager
def _naming_node_0(place: NodePlace) -> Iterator[None]:
    """What is asked of the store inside fails only if node 0 is gone."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"node 0 at {place.address} is lost: {error}") from None


def _listen(
    address: tuple[str, int], node: int, secret: bytes, handlers: Mapping[Role, RoleHandler]
) -> tuple[Listener, int]:
    listening = socket.create_server(address, family=family_of(address[0]), reuse_port=False)
    listener = Listener(listening, Identity(-1, node), secret, handlers)
    return listener, int(listening.getsockname()[1])


def _answer(connection: socket.socket, session: Session, name: str) -> None:
    """Answers pings with the time, and confirms data."""
    with suppress(OSError):
        while True:
            kind, size = (
                read_exactly(connection, 1),
                NUMBER.unpack(read_exactly(connection, NUMBER.size))[0],
            )
            if kind == DATA:
                _discard(connection, int(size))
            connection.sendall(NUMBER.pack(time.time()))


def _discard(connection: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(1 << 20))
    while size > 0:
        count = connection.recv_into(buffer[: min(size, len(buffer))])
        if not count:
            raise ConnectionError("the connection was closed")
        size -= count


def _facts(address: str, port: int, installed: Installed, has_secret: bool) -> NodeFacts:
    interface = interface_of(address)
    speed = _text(Path("/sys/class/net", interface, "speed")) if interface else ""
    devices = Path("/sys/class/infiniband")
    return NodeFacts(
        host=socket.gethostname(),
        address=address,
        port=port,
        interface=interface,
        link_mbit=int(speed) if speed.isdecimal() else 0,
        rdma=sorted(one.name for one in devices.iterdir()) if devices.is_dir() else [],
        versions=installed.versions,
        model=installed.model,
        flags=installed.flags,
        has_secret=has_secret,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # also what drivers without a speed answer
        return ""


def _meet(
    store: StoreClient, place: NodePlace, facts: NodeFacts, seconds: float
) -> list[NodeFacts]:
    """Node 0 decides who is missing, so that all say the same."""
    keys = [f"node/{node}" for node in range(place.nnodes)]
    store.set(keys[place.node_rank], msgspec.msgpack.encode(facts))
    if place.node_rank == 0:
        store.set("missing", msgspec.msgpack.encode(store.wait(keys, seconds)))
    if store.wait(["missing"], 2 * seconds):
        raise ValueError(f"node 0 at {place.address} has not answered within {2 * seconds:g} s")
    (data,) = store.get_now(["missing"])
    missing = msgspec.msgpack.decode(data or b"", type=list[str])
    if missing:
        numbers = [int(key.removeprefix("node/")) for key in missing]
        _leave_together(store, place, [n for n in range(place.nnodes) if n not in numbers])
        names = ", ".join(f"node {number}" for number in numbers)
        raise ValueError(
            f"{names} of {place.nnodes} did not come to {place.address} within {seconds:g} s: run "
            "the same command there, with its --node-rank, or look at its log"
        )
    found = [data for data in store.get_now(keys) if data is not None]
    nodes = [msgspec.msgpack.decode(data, type=NodeFacts) for data in found]
    first = nodes[0].flags.get("nnodes")
    for number, node in enumerate(nodes):
        if (other := node.flags.get("nnodes")) != first:
            _leave_together(store, place, range(len(nodes)))
            raise ValueError(
                f"--nnodes is {first} on node 0 and {other} on node {number}: give all the same"
            )
    return nodes


def _measure_all(
    store: StoreClient, nodes: Sequence[NodeFacts], own: int, secret: bytes
) -> dict[str, PairFacts]:
    """One pair after the other, so that none disturbs another. A node is waited for once."""
    found, late = {}, set[int]()
    for first, second in combinations(range(len(nodes)), 2):
        name = f"{first}-{second}"
        if first == own:
            facts = _measure(nodes[second], own, secret)
            store.set(f"pair/{name}", msgspec.msgpack.encode(facts))
        if store.wait([f"pair/{name}"], 0.0 if first in late else PAIR_SECONDS):
            late.add(first)
            found[name] = PairFacts(error=f"node {first} has not measured it")
            continue
        (data,) = store.get_now([f"pair/{name}"])
        found[name] = msgspec.msgpack.decode(data or b"", type=PairFacts)
    return found


def _measure(there: NodeFacts, own: int, secret: bytes) -> PairFacts:
    where = (there.address, there.port)
    try:
        connection, _ = connect(
            lambda: socket.create_connection(where, MEET_SECONDS),
            Role.LINK,
            Identity(-1, own),
            secret,
            MEET_SECONDS,
            waits=False,
        )
    except OSError as error:
        return PairFacts(error=f"no connection to {there.address}: {error}")
    assert isinstance(connection, socket.socket), "a data link is not encrypted"
    with connection:
        connection.settimeout(PAIR_SECONDS)
        try:
            pings = [_exchange(connection) for _ in range(PINGS)]
            rate = max(_rate(connection) for _ in range(2))
        except OSError as error:
            return PairFacts(error=f"the connection to {there.address} broke off: {error}")
    ahead = min(pings)[1]
    return PairFacts(statistics.median(seconds for seconds, _ in pings) * 1e6, rate, ahead)


def _exchange(connection: socket.socket) -> tuple[float, float]:
    """Seconds there and back, and how far the clock there is ahead."""
    begin, clock = time.perf_counter(), time.time()
    connection.sendall(PING + NUMBER.pack(0))
    there = NUMBER.unpack(read_exactly(connection, NUMBER.size))[0]
    seconds = time.perf_counter() - begin
    return seconds, there - clock - seconds / 2


def _rate(connection: socket.socket) -> float:
    """Gbit/s."""
    begin, sent = time.perf_counter(), 0
    while time.perf_counter() - begin < SEND_SECONDS:
        connection.sendall(DATA + NUMBER.pack(len(PIECE)))
        connection.sendall(PIECE)
        read_exactly(connection, NUMBER.size)
        sent += len(PIECE)
    return 8e-9 * sent / (time.perf_counter() - begin)


def _leave_together(store: StoreClient, place: NodePlace, present: Sequence[int]) -> None:
    """Node 0 serves the others until they have read everything."""
    store.set(f"done/{place.node_rank}", b"")
    if place.node_rank == 0:
        store.wait([f"done/{node}" for node in present], MEET_SECONDS)


def _differences(nodes: Sequence[NodeFacts]) -> Iterator[str]:
    first = nodes[0]
    for number, node in enumerate(nodes[1:], 1):
        for name in {**first.versions, **node.versions}:
            ours, theirs = (facts.versions.get(name, "none") for facts in (first, node))
            if ours != theirs:
                yield f"node 0 has {name} {ours}, node {number} {theirs}: install the same"
        if node.model != first.model:
            yield (
                f"node {number} ({node.host}) has another model than node 0: its JSON files or the "
                "sizes of its files differ, or it is not there"
            )
        unlike = differences({"flags": first.flags}, {"flags": node.flags}, number)
        if unlike:
            yield f"nodes 0 and {number} have different settings: {unlike}"


def _bad_pairs(nodes: Sequence[NodeFacts], pairs: Mapping[str, PairFacts]) -> Iterator[str]:
    best = max((pair.gbit_s for pair in pairs.values()), default=0.0)
    for name, pair in pairs.items():
        first, second = map(int, name.split("-"))
        if pair.error:
            yield f"node {first} and node {second} ({nodes[second].host}): {pair.error}"
            continue
        if pair.gbit_s < max(SLOW_GBIT, SLOW_SHARE * best):
            over = nodes[second].interface or nodes[second].address
            yield (
                f"node {first} reaches node {second} over {over} at {pair.gbit_s:.1f} Gbit/s: if "
                "there is a faster network, give --dist-init-addr an address of node 0 in it"
            )
        if abs(pair.clock_s) > CLOCK_SECONDS:
            yield f"the clocks of node {first} and node {second} differ by {pair.clock_s:.1f} s"


def _bad_nccl(
    nodes: Sequence[NodeFacts], pairs: Mapping[str, PairFacts], nccl: NcclFacts
) -> Iterator[str]:
    """NCCL chooses its interfaces by itself, and not those of the nodes' addresses."""
    failed = [name for name, pair in nccl.pairs.items() if pair.error]
    for name in failed:
        first, second = map(int, name.split("-"))
        yield (
            f"NCCL between node {first} and node {second} ({nodes[second].host}): "
            f"{nccl.pairs[name].error}; if that is the network, set NCCL_SOCKET_IFNAME to the "
            f"interface that connects them ({_interfaces(nodes, first, second)})"
        )
    for number, end in enumerate(nccl.nodes):
        if end.error and not failed:
            yield f"NCCL on node {number} ({nodes[number].host}): {end.error}"
    best = max((pair.gbit_s for pair in nccl.pairs.values()), default=0.0)
    for name, pair in nccl.pairs.items():
        first, second = map(int, name.split("-"))
        rate, networks = pairs[name].gbit_s, [nccl.nodes[n].network for n in (first, second)]
        elsewhere = any(
            nodes[n].interface not in devices_of(network)
            for n, network in zip((first, second), networks, strict=True)
        )
        fastest = max(best, rate) if elsewhere else best
        if not pair.error and pair.gbit_s < max(SLOW_GBIT, SLOW_SHARE * fastest):
            yield (
                f"node {first} reaches node {second} by NCCL ({networks[1]}) at "
                f"{pair.gbit_s:.1f} Gbit/s, and over TCP at {rate:.1f}: set NCCL_SOCKET_IFNAME to "
                f"the interface of the fastest network ({_interfaces(nodes, first, second)})"
            )


def _interfaces(nodes: Sequence[NodeFacts], *numbers: int) -> str:
    return ", ".join(f"node {n} has {nodes[n].interface or nodes[n].address}" for n in numbers)


def _notes(nodes: Sequence[NodeFacts], nccl: NcclFacts | None = None) -> Iterator[str]:
    if not nodes[0].has_secret:
        yield "the nodes have no secret: node 0 accepts every process of this machine"
    for number, end in enumerate([] if nccl is None else nccl.nodes):
        rdma = nodes[number].rdma
        if rdma and end.network.startswith("Socket"):
            yield (
                f"node {number} has RDMA devices ({', '.join(rdma)}), but NCCL takes sockets: see "
                "NCCL_IB_DISABLE and NCCL_IB_HCA, and whether this process may open /dev/infiniband"
            )


def model_digest(path: str) -> str:
    """Hashes the JSON files of a model's folder and the names and sizes of all its files. A name
    that is no folder is returned unchanged."""
    folder = Path(path)
    if not path or not folder.is_dir():
        return path
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file():
            digest.update(f"{file.name} {os.path.getsize(file)}\n".encode())
            if file.suffix == ".json":
                digest.update(file.read_bytes())
    return digest.hexdigest()
