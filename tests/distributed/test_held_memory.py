"""Memory that outlives a rank: descriptors with the supervisor, and windows that are made of it."""

from __future__ import annotations

import mmap
import os
import signal as signals
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from moesaic.comm.lifecycle import Membership
from moesaic.comm.network.handshake import Identity
from moesaic.comm.network.held_memory import HEAD, HeldMemory
from moesaic.comm.network.rendezvous import StoreGroup
from moesaic.comm.network.store import LocalStore
from moesaic.comm.windows.factory import create_device_window
from moesaic.comm.windows.held_window import HeldWindow
from moesaic.comm.windows.shared_memory import create_memory
from moesaic.comm.windows.window import PlaneSpec
from moesaic.kernels.a2a import signal, wait

ME = Identity(0, 0)
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
SPECS = (PlaneSpec("x", (4,), torch.float32),)
OWNER = """
import mmap, os, sys, time
from moesaic.comm.network.handshake import Identity
from moesaic.comm.network.store import StoreAddress
from moesaic.comm.windows.shared_memory import create_memory
store = StoreAddress(sys.argv[1], 0, bytes.fromhex(sys.argv[2]))
descriptor = create_memory("held", 4096)
store.connect_memory(5.0, Identity(1, 0)).hold("region/1", descriptor)
mmap.mmap(descriptor, 4096)[:5] = b"alive"
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    made = LocalStore(tmp_path)
    yield made
    made.close()


def held_by(store: LocalStore) -> HeldMemory:
    return store.address.connect_memory(5.0, ME)


def test_memory_outlives_the_process_that_made_it(store: LocalStore):
    address = store.address
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, address.host, address.secret.hex()], stdout=subprocess.PIPE
    )
    assert owner.stdout is not None and owner.stdout.readline() == b"held\n"
    owner.send_signal(signals.SIGKILL)
    owner.wait()
    owner.stdout.close()
    held = held_by(store)
    for _ in range(2):
        descriptor = held.take("region/1")
        assert descriptor is not None and not os.get_inheritable(descriptor)
        assert mmap.mmap(descriptor, 4096)[:5] == b"alive"
        os.close(descriptor)
    assert held.take("region/0") is None


def test_the_first_descriptor_of_a_key_stays(store: LocalStore):
    held, descriptor = held_by(store), create_memory("held", 4096)
    held.hold("a", descriptor)
    with pytest.raises(RuntimeError, match="does not hold 'a': it has one"):
        held.hold("a", descriptor)
    with pytest.raises(ValueError, match="a key of 0 bytes"):
        held.take("")
    # A request without a descriptor, one that is cut and one that is none hold nothing.
    for request in (HEAD.pack(1, 1) + b"b", HEAD.pack(1, 9) + b"b", b"\xff" * 40):
        other = held_by(store)._connection
        other.sendall(request)
        other.shutdown(socket.SHUT_WR)
        assert other.recv(1) in (b"", b"-")
    assert held.take("b") is None
    # One that comes with the wrong request is closed.
    open_before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        socket.send_fds(held._connection, [HEAD.pack(2, 1) + b"b"], [descriptor])
        assert held._connection.recv(1) == b"-"
    assert len(os.listdir("/proc/self/fd")) == open_before
    os.close(descriptor)


class Rank:
    """A rank of two, in this process; `start` makes its window as it does at its start."""

    def __init__(self, store: LocalStore, rank: int, device: str = "cpu") -> None:
        self.device = torch.device(device)
        held = store.address.connect_memory(5.0, Identity(rank, 0))
        own = store.address.connect(5.0, Identity(rank, 0))
        self.group = StoreGroup(own, "team", rank, 2, 5.0)
        self.group.lasts, self.group.connect_memory = True, lambda: held
        self.window: HeldWindow

    def start(self) -> Rank:
        found = create_device_window(self.group, SPECS, 5.0, 1, self.device)
        assert isinstance(found, HeldWindow)
        self.window = found
        return self

    def tell(self, value: float) -> None:
        """Writes into all regions, then signals."""
        for peer in range(2):
            self.window.plane("x", peer)[self.group.rank] = value
        signal(self.window.call(0, "tell"))

    def hear(self) -> list[float]:
        wait(self.window.call(0, "tell"))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.window.check()
        return self.window.plane("x")[:2].tolist()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_a_rank_that_is_started_again_maps_the_regions_of_its_predecessor(
    store: LocalStore, device: str
):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: Rank(store, rank, device).start(), range(2))
    first.tell(1.0), second.tell(2.0)
    assert first.hear() == second.hear() == [1.0, 2.0]
    places = [region.data_ptr() for region in first.window.signals.regions]
    second.window.close()
    # The first goes on alone: it writes into memory that nobody reads, and waits for none.
    first.window.restart(Membership(1, (0,)))
    first.tell(3.0)
    assert first.hear() == [3.0, 2.0]
    # The successor needs nobody to start, and finds what the first has written meanwhile.
    again = Rank(store, 1, device).start()
    assert again.window.plane("x").tolist()[:2] == [3.0, 2.0]
    assert again.window.plane("x", 0).tolist()[:2] == [3.0, 2.0]
    for rank in (first, again):
        rank.window.restart(Membership(2, (0, 1)))
    again.tell(5.0), first.tell(4.0)
    assert first.hear() == again.hear() == [4.0, 5.0]
    assert places == [region.data_ptr() for region in first.window.signals.regions]


def test_a_missing_region_is_an_error_on_all_ranks(store: LocalStore):
    class Lost(HeldMemory):
        def hold(self, key: str, descriptor: int) -> None:
            raise RuntimeError("no descriptor is free")

    ranks = [Rank(store, rank) for rank in range(2)]
    bad = Lost(held_by(store)._connection)
    ranks[1].group.connect_memory = lambda: bad
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(rank.start) for rank in ranks]
        errors = [str(one.exception(10)) for one in found]
    assert errors == ["no window of 0.0 MiB a rank on the GPU: rank 1: no descriptor is free"] * 2
