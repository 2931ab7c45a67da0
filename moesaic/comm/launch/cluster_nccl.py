"""How fast NCCL is between every pair of nodes, for `moesaic doctor --cluster` on GPUs.

Each node starts a process for it, since NCCL may wait forever and ends only with its process. Pairs
are measured one after the other. The first one that fails ends the measurement.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from moesaic.comm.network.handshake import Identity
from moesaic.comm.network.store import StoreAddress, StoreClient
from moesaic.core.process import child_environment

if TYPE_CHECKING:
    import torch

    from moesaic.comm.collectives.collective import Collective
    from moesaic.comm.collectives.group import Peers

T = TypeVar("T")

# How long a process may take to load torch and open its GPU, and NCCL to measure a pair.
LOAD_SECONDS: Final = 120.0
PAIR_SECONDS: Final = 30.0
MARGIN: Final = 10.0
LOOK_SECONDS: Final = 0.2
# What each rank gives: a decode step's rows, and enough for the full speed.
SMALL_BYTES: Final = 16 << 10
LARGE_BYTES: Final = 64 << 20
# How often each is gathered before it counts, and then.
SMALL_TIMES, LARGE_TIMES = (3, 30), (1, 3)
LOG: Final = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
OVER: Final = " over "
LOG_FILE: Final = "NCCL_DEBUG_FILE"


class NcclPair(msgspec.Struct, frozen=True):
    latency_us: float = 0.0
    """The median time of an all-gather of SMALL_BYTES."""
    gbit_s: float = 0.0
    """Each way, both at once."""
    error: str = ""


class NcclEnd(msgspec.Struct, frozen=True):
    """How the process of a node has ended. `network`: what NCCL says that it uses."""

    network: str = ""
    error: str = ""


class NcclFacts(msgspec.Struct, frozen=True):
    """`pairs`: as in ClusterReport, up to the first that failed."""

    nodes: list[NcclEnd]
    pairs: dict[str, NcclPair]


class NcclSpec(msgspec.Struct, frozen=True):
    """What the process of a node is told. `host`, `port`, `secret`: of the store."""

    node: int
    addresses: list[str]
    gpu: int
    host: str
    port: int
    secret: bytes


def measure_nccl(spec: NcclSpec, store: StoreClient) -> NcclFacts:
    """All nodes call it; all get the same."""
    size = len(spec.addresses)
    names = [f"{first}-{second}" for first, second in combinations(range(size), 2)]
    limit = LOAD_SECONDS + len(names) * (PAIR_SECONDS + MARGIN)
    store.set(_end_key(spec.node), msgspec.msgpack.encode(_run(spec, limit)))
    keys = [_end_key(node) for node in range(size)]
    store.wait(keys, limit + MARGIN)
    ends = [
        NcclEnd(error="it has not ended") if data is None else _decode(data, NcclEnd)
        for data in store.get_now(keys)
    ]
    found = zip(names, store.get_now([_key(name) for name in names]), strict=True)
    return NcclFacts(ends, {name: _decode(data, NcclPair) for name, data in found if data})


def network_of(log: str) -> str:
    """What NCCL's log says of its network: `Socket over eth0`, `IB over mlx5_0, mlx5_1`."""
    used = re.findall(r"NET/(\w+)\s*: Using (.*)", log)
    if not used:
        named = re.findall(r"(?:Using network|Assigned NET plugin) (\w+)", log)
        return str(named[-1]) if named else ""
    name, text = used[-1]
    devices = re.findall(r"\[\d+\]\s*([^:\s]+)", text)
    return f"{name}{OVER}{', '.join(devices)}" if devices else str(name)


def devices_of(network: str) -> list[str]:
    """Its interfaces or RDMA devices."""
    return network.partition(OVER)[2].split(", ")


def check_pairs(
    node: int,
    size: int,
    store: StoreClient,
    make: Callable[[Peers], Collective],
    device: torch.device,
    large: int = LARGE_BYTES,
) -> None:
    """Measures the pairs of this node, and waits for the others. `make`: the collective of a
    pair; `large`: the bytes whose rate counts. Raises RuntimeError if a node does not come, or has
    ended."""
    from moesaic.comm.network.rendezvous import StoreGroup

    def await_all(keys: Sequence[str], seconds: float) -> None:
        if missing := store.wait(keys, seconds, lambda: _check_ends(store, size)):
            raise RuntimeError(f"{', '.join(missing)}: missing after {seconds:g} s")

    store.set(f"nccl ready/{node}", b"")
    await_all([f"nccl ready/{other}" for other in range(size)], LOAD_SECONDS)
    for pair in combinations(range(size), 2):
        name = "{}-{}".format(*pair)
        if node in pair:
            group = StoreGroup(store, f"nccl {name}", pair.index(node), 2, PAIR_SECONDS)
            with _limit(store, _key(name)):
                facts = _measure(partial(make, group), node, device, large)
            if facts.error or node == pair[0]:
                _tell(store, name, facts)
        await_all([_key(name)], PAIR_SECONDS + MARGIN)
        (data,) = store.get_now([_key(name)])
        if _decode(data or b"", NcclPair).error:
            return


def _check_ends(store: StoreClient, size: int) -> None:
    """Raises RuntimeError if the process of a node has ended."""
    for node, data in enumerate(store.get_now([_end_key(node) for node in range(size)])):
        if data is not None:
            raise RuntimeError(f"node {node} has given up")


def _measure(
    make: Callable[[], Collective], node: int, device: torch.device, large: int
) -> NcclPair:
    try:
        collective = make()
        seconds = _times(collective, SMALL_BYTES, SMALL_TIMES, device)
        best = min(_times(collective, large, LARGE_TIMES, device))
    except (RuntimeError, OSError) as error:
        return NcclPair(error=f"node {node}: {_first_line(error)}")
    return NcclPair(1e6 * statistics.median(seconds), 8e-9 * large / best)


def _times(
    collective: Collective, nbytes: int, times: tuple[int, int], device: torch.device
) -> list[float]:
    """Seconds of all-gathers."""
    import torch

    (warm, counted), found = times, []
    part = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    for _ in range(warm + counted):
        begin = time.perf_counter()
        collective.gather_rows(part, [nbytes] * 2, "measure")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begin)
    return found[warm:]


@contextmanager
def _limit(store: StoreClient, key: str) -> Iterator[None]:
    """Ends this process if NCCL does not return, or if the other node has failed."""
    over = threading.Event()

    def watch() -> None:
        end = time.monotonic() + PAIR_SECONDS
        try:
            while not over.wait(LOOK_SECONDS):
                (data,) = store.get_now([key])
                if data and _decode(data, NcclPair).error:
                    os._exit(1)
                if time.monotonic() > end:
                    late = f"NCCL has not connected and measured them within {PAIR_SECONDS:g} s"
                    store.set(key, msgspec.msgpack.encode(NcclPair(error=late)))
                    os._exit(1)
        except OSError:  # node 0 has ended
            os._exit(1)

    thread = threading.Thread(target=watch, name="nccl limit", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _run(spec: NcclSpec, seconds: float) -> NcclEnd:
    """The process of this node."""
    command = [sys.executable, "-m", "moesaic.comm.launch.cluster_nccl"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "nccl.log")
        environment = child_environment() | LOG | {LOG_FILE: str(log)}
        try:
            done = subprocess.run(
                command,
                input=msgspec.msgpack.encode(spec),
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return NcclEnd(error=f"it has not ended within {seconds:g} s")
        text = log.read_text(errors="replace") if log.exists() else ""
    said = done.stderr.decode(errors="replace").strip().splitlines()
    error = "" if done.returncode == 0 else (said or [f"exit status {done.returncode}"])[-1]
    return NcclEnd(network_of(text), error)


def _key(name: str) -> str:
    return f"nccl pair/{name}"


def _end_key(node: int) -> str:
    return f"nccl end/{node}"


def _tell(store: StoreClient, name: str, facts: NcclPair) -> None:
    store.set(_key(name), msgspec.msgpack.encode(facts))


def _decode(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def main() -> int:
    """The process of a node. Its environment has what NCCL is to log."""
    spec = _decode(sys.stdin.buffer.read(), NcclSpec)
    import torch

    from moesaic.comm.collectives.nccl_collective import NcclCollective, set_up_nccl

    set_up_nccl(spec.node, spec.node, spec.addresses[spec.node], shares_gpu=False)
    torch.cuda.init()  # says what is missing
    device = torch.device("cuda", spec.gpu)
    torch.cuda.set_device(device)
    own = Identity(-1, spec.node)
    store = StoreAddress(spec.host, spec.port, spec.secret).connect(PAIR_SECONDS, own)

    def make(group: Peers) -> Collective:
        return NcclCollective(group, PAIR_SECONDS, device)

    check_pairs(spec.node, len(spec.addresses), store, make, device)
    sys.stderr.flush()
    os._exit(0)  # NCCL may wait for its peers at the end


if __name__ == "__main__":
    sys.exit(main())
