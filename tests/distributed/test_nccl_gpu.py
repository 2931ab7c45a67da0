"""NCCL over the service's own store: two ranks that share a GPU, as if they were on two hosts."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.collectives.nccl_collective import NcclCollective
from moesaic.comm.errors import WindowAborted
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.lifecycle import Membership
from moesaic.config.devices import cuda_missing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(cuda_missing()), reason=f"needs a CUDA device: {cuda_missing()}"),
]


def collectives(group: RankGroup) -> tuple[list[float], list[float]]:
    """A sum, then the communicator is given up and formed again, then a gather."""
    os.environ |= {"NCCL_HOSTID": f"host {group.rank}", "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device(0)
    nccl = NcclCollective(group, 60.0, torch.device("cuda", 0))
    x_TH = torch.full((3, 8), float(group.rank + 1), device="cuda")
    total = nccl.sum_rows(x_TH, slice(0, 3), "sum")
    torch.cuda.synchronize()
    nccl.restart(Membership(1, tuple(range(nccl.size))))
    rows = nccl.gather_rows(x_TH[: 1 + group.rank], [1, 2], "gather")
    torch.cuda.synchronize()
    nccl.close()
    return total.unique().tolist(), rows[:, 0].tolist()


def test_collectives_of_two_ranks_on_one_gpu():
    with LocalRanks(2, timeout=180, peer_timeout=120) as ranks:
        assert ranks.run(collectives) == [([3.0], [1.0, 2.0, 2.0])] * 2


def sockets() -> set[int]:
    """The descriptors of this process that are sockets."""
    found = set[int]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found


def shut_down(descriptors: set[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            one.shutdown(socket.SHUT_RDWR)


def cut(group: RankGroup) -> tuple[list[str], list[float]]:
    """Rank 1's connections of NCCL are shut down; all ranks are told so, and begin anew."""
    os.environ |= {"NCCL_HOSTID": f"host {group.rank}", "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device(0)
    before = sockets()
    nccl = NcclCollective(group, 60.0, torch.device("cuda", 0))
    x_TH = torch.full((3, 8), float(group.rank + 1), device="cuda")
    nccl.gather_rows(x_TH, [3, 3], "gather")
    torch.cuda.synchronize()
    told = [nccl.broken()]
    group.barrier("all is well")
    if group.rank == 1:
        shut_down(sockets() - before)
    group.barrier("the connections are cut")
    nccl.gather_rows(x_TH, [3, 3], "gather")  # returns, its kernel waits
    deadline = time.monotonic() + 60
    while not nccl.broken() and time.monotonic() < deadline:
        time.sleep(0.02)
    told.append(nccl.broken())
    nccl.abort(told[-1])
    torch.cuda.synchronize()
    with pytest.raises(WindowAborted, match="NCCL has failed"):
        nccl.check()
    assert nccl.broken() == "", "it is known"
    group.barrier("all know")
    nccl.restart(Membership(1, tuple(range(nccl.size))))
    rows = nccl.gather_rows(x_TH, [3, 3], "gather")
    torch.cuda.synchronize()
    return told, rows[:, 0].tolist()


@pytest.mark.timeout(200)
def test_a_connection_that_is_cut():
    """Nobody waits for a limit, and the ranks are named."""
    with LocalRanks(2, timeout=180, peer_timeout=120) as ranks:
        for (well, told), rows in ranks.run(cut):
            assert well == "" and rows == [1.0] * 3 + [2.0] * 3
            who = "NCCL has failed between rank 0 (127.0.0.1), rank 1 (127.0.0.1): "
            assert told.startswith(who), told
