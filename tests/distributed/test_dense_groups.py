"""Dense layers that the ranks of several attention groups share, as on a GPU: every group gives the
same number of rows, of which it may use few or none.

T rows of a group · H hidden · O, I outputs and inputs of a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.device_collective import DeviceCollective
from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.mesh import Mesh
from moesaic.core.step import Step
from moesaic.engine.runner.peer_watchdog import PeerWatchdog
from moesaic.engine.setup.memory_plan import collective_bytes
from moesaic.engine.setup.moe_setup import StepLimits
from moesaic.engine.setup.rank_context import RankContext
from moesaic.layers.linear import LinearConfig
from moesaic.layers.mlp import GatedMLP
from moesaic.layers.module import TensorSlot
from moesaic.layers.parallel import Parallel
from moesaic.moe.context import MoeContext
from tests.distributed.model_ranks import Some
from tests.distributed.moe_ranks import Pools
from tests.distributed.test_device_collective import OverGloo

CPU, SECONDS = torch.device("cpu"), 20.0
HIDDEN, INNER = 64, 98  # which no mesh here divides evenly


@dataclass(frozen=True)
class Batch:
    """What all ranks agree on, and the rows of each attention group."""

    agreed: int
    rows: tuple[int, ...]


# One token, odd counts, groups without any, and fewer rows than agreed on in all groups.
BATCHES = {
    2: ((1, (1, 1)), (7, (7, 1)), (8, (3, 8)), (5, (0, 5)), (19, (19, 12)), (33, (2, 1))),
    3: ((1, (1, 0, 1)), (9, (9, 0, 5)), (16, (16, 16, 16)), (12, (1, 12, 4)), (7, (3, 0, 0))),
    4: ((1, (1, 1, 1, 1)), (13, (2, 13, 0, 7)), (64, (64, 1, 64, 3)), (3, (0, 0, 3, 0))),
}  # fmt: skip


def batches(dp: int) -> list[Batch]:
    return [Batch(*batch) for batch in BATCHES[dp]]


def matrices() -> dict[str, Tensor]:
    sizes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    generator = torch.Generator().manual_seed(3)
    return {
        f"mlp.{name}.weight": torch.randn(size, generator=generator) * size[1] ** -0.5
        for name, size in sizes.items()
    }


def make_layer(parallel: Parallel) -> GatedMLP:
    config = LinearConfig(HIDDEN, INNER, torch.float32, deterministic=parallel.deterministic)
    layer, whole = GatedMLP(config, parallel, "mlp of layer 0"), matrices()
    for slot in layer.slots("mlp."):
        assert isinstance(slot, TensorSlot)
        slot.into.copy_(whole[slot.name][slot.cut])
    return layer


def rows_of(number: int, group: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + group)
    return torch.randn(count, HIDDEN, generator=generator)


def context_of(group: RankGroup, dp: int) -> RankContext:
    mesh = Mesh(tp=group.size, dp=dp, ep=group.size, dense_tp=group.size)
    place = mesh.place(group.rank)
    peers = Some(group, mesh.attention_ranks(place))
    made = RankContext(mesh=mesh, place=place, stage_peers=group, attention_peers=peers)
    return made.computing_on(CPU, shares_gpu=True)


def check_batches(parallel: Parallel) -> tuple[float, list[bytes]]:
    """The largest difference to the whole layer on one rank, and the result of each batch."""
    layer = make_layer(parallel)
    alone = make_layer(Parallel(deterministic=parallel.deterministic))
    worst, found = 0.0, []
    for number, batch in enumerate(batches(parallel.dp)):
        x_TH = rows_of(number, parallel.dp_rank, batch.rows[parallel.dp_rank])
        told = layer(x_TH, Step(rows=batch.agreed))
        assert told.shape == x_TH.shape
        if len(x_TH):
            worst = max(worst, float((told - alone(x_TH)).abs().max()))
        found.append(told.numpy().tobytes())
    return worst, found


@torch.inference_mode()
def share_layer(group: RankGroup, dp: int, deterministic: bool) -> tuple[float, list[bytes]]:
    ranks = context_of(group, dp)
    result = check_batches(ranks.parallel(1, deterministic))
    for collective in ranks.device_collectives:
        collective.close()
    return result


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("size", "dp"), [(2, 2), (3, 3), (4, 2), (4, 4)])
def test_groups_get_what_one_rank_computes(
    size: int, dp: int, deterministic: bool, pools: Pools
) -> None:
    told = pools(size).run(share_layer, dp, deterministic)
    for rank, (worst, found) in enumerate(told):
        assert worst < 1e-5 and not (deterministic and worst)
        first = rank - rank % (size // dp)
        assert found == told[first][1], "the same on all ranks of a group"


@torch.inference_mode()
def share_over_gloo(group: RankGroup) -> float:
    comm = OverGloo(group, SECONDS, CPU)
    worst, _ = check_batches(Parallel(stage=comm, dp=group.size, dense_tp=group.size))
    comm.close()
    return worst


def test_so_do_groups_with_a_gpu_each(pools: Pools) -> None:
    """As far as NCCL's place can be taken."""
    assert max(pools(3).run(share_over_gloo)) < 1e-5


@torch.inference_mode()
def spread_poison(group: RankGroup) -> list[bool]:
    """Rows 2 and 3 of every group but the first are not numbers, as padding may be."""
    ranks = context_of(group, group.size)
    layer = make_layer(ranks.parallel(1, deterministic=False))
    x_TH = rows_of(0, group.rank, 4)
    if group.rank:
        x_TH[2:] = torch.nan
    finite_T = layer(x_TH, Step(rows=5)).isfinite().all(1)
    for collective in ranks.device_collectives:
        collective.close()
    return finite_T.tolist()


def test_rows_of_padding_reach_no_others(pools: Pools) -> None:
    told = pools(3).run(spread_poison)
    assert told == [[True] * 4] + [[True, True, False, False]] * 2


@torch.inference_mode()
def too_many(group: RankGroup) -> str:
    """Which would be read as another group's."""
    parallel = Parallel(stage=OverGloo(group, SECONDS, CPU), dp=group.size, dense_tp=group.size)
    with pytest.raises(AssertionError) as caught:
        make_layer(parallel)(rows_of(0, 0, 4), Step(rows=3))
    return str(caught.value)


def test_no_group_has_more_rows_than_agreed_on(pools: Pools) -> None:
    assert pools(2).run(too_many) == ["4 rows in a step of at most 3"] * 2


def windows_of(group: RankGroup, dp: int) -> list[int]:
    """Bytes of the windows, and how many are watched."""
    ranks = context_of(group, dp)
    parallel = ranks.parallel(1, deterministic=False)
    found = [comm.window for comm in ranks.device_collectives if isinstance(comm, DeviceCollective)]
    sizes = [window.region_bytes for window in found]
    told = collective_bytes(ranks.mesh, StepLimits(64, 64), HIDDEN, torch.float32, CPU)
    assert sum(sizes) == told and parallel.stage is ranks.stage_on_device
    assert parallel.attention is (ranks.on_device or ranks.attention)
    watchdog = PeerWatchdog.of(MoeContext.single(torch.float32), ranks)
    assert watchdog.windows == tuple(found) and watchdog.nbytes == told
    # Each attention group by itself.
    whole = replace(ranks, mesh=replace(ranks.mesh, dense_tp=1))
    alone = whole.computing_on(CPU, shares_gpu=True)
    assert alone.stage_on_device is None and len(alone.device_collectives) == (dp < group.size)
    for collective in (*ranks.device_collectives, *alone.device_collectives):
        collective.close()
    return sizes


@pytest.mark.parametrize(("dp", "count"), [(2, 2), (4, 1)])
def test_windows_are_counted_and_watched(dp: int, count: int, pools: Pools) -> None:
    """Of the attention group, if it has several ranks, and of all groups."""
    sizes = pools(4).run(windows_of, dp)
    assert sizes == [sizes[0]] * 4 and len(sizes[0]) == count
