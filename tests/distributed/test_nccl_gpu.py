"""NCCL over the service's own store: two ranks that share a GPU, as if they were on two hosts."""

from __future__ import annotations

import os

import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.collectives.nccl_collective import NcclCollective
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
