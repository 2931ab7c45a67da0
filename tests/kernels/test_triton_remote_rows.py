"""Experts whose rows lie in the memory of several ranks: against torch.

P ranks · C rows of each · K chosen · H hidden · I intermediate · N pairs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moesaic.comm.windows.shared_memory import round_up
from moesaic.kernels import experts as contract
from moesaic.kernels.a2a import SignalPlanes
from moesaic.kernels.experts import Groups, RemoteRows, Rows
from moesaic.kernels.triton import experts, experts_remote_rows, experts_small, sort
from moesaic.kernels.tuning import TileConfig
from tests.kernels.test_triton_experts import (
    BOUNDS,
    FP8_BOUND,
    NAMES,
    Layer,
    compare,
    draw_ids,
    poisoned,
    twin,
    written,
)
from tests.kernels.triton_cases import DEVICE, FLOATS

FRONT = 512
"""Bytes of a region before the rows; regions and planes begin at multiples of it."""
RANKS = 3


def spread_out(x: Rows, count: int, ranks: int = RANKS) -> Rows:
    """Rows, `count` of each rank, in as many regions, where all else is NaN in any type."""
    value_bytes = count * x.values.shape[1] * x.values.element_size()
    scales = FRONT + round_up(value_bytes, FRONT)
    size = scales + round_up(0 if x.scales is None else x.scales[:count].numel() * 4, FRONT)
    regions = torch.full((ranks, size), 0xFF, dtype=torch.uint8, device=DEVICE).unbind(0)
    bases = torch.tensor([region.data_ptr() for region in regions], device=DEVICE)
    state = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    signals = SignalPlanes(0, ranks, regions, bases, 0, state, state)
    for offset, plane in ((FRONT, x.values), (scales, x.scales)):
        for rank in range(ranks if plane is not None else 0):
            part = plane[rank * count : (rank + 1) * count]
            signals.plane(rank, offset, tuple(part.shape), part.dtype).copy_(part)
    own = None if x.scales is None else x.scales[:count]
    return Rows(x.values[:count], own, x.scale, RemoteRows(signals, count, FRONT, scales))


def poison_unused(x: Rows, ids_RK: Tensor) -> Rows:
    """Rows that no pair here needs may hold anything."""
    unused_R = (ids_RK < 0).all(1)
    values = x.values.clone()
    values.view(torch.uint8)[unused_R] = 0xFF
    scales = None if x.scales is None else x.scales.masked_fill(unused_R[:, None], torch.nan)
    return replace(x, values=values, scales=scales)


def check(layer: Layer, ids_RK: Tensor, h_scales: bool = False, block: int = 16) -> Groups:
    """Against the twin of the same remote rows; the same bits as of rows that are here."""
    groups = sort.sort_pairs(ids_RK, layer.shape[0], block)
    here = poison_unused(layer.rows(len(ids_RK)), ids_RK)
    x = spread_out(here, len(ids_RK) // RANKS)
    step = 128 if "scales" in layer.w13.planes else 32
    config = TileConfig(block, 128 if h_scales else 32, step)
    h, expected, near = (poisoned(layer, groups.num_places, h_scales) for _ in range(3))
    args = (layer.w13, groups, layer.activation)
    experts_remote_rows.gate_up_remote(x, *args, h, config)
    twin("gate_up")(x, *args, expected)
    experts_small.gate_up_small(here, *args, near, config)
    bound = FP8_BOUND if "scales" in layer.w13.planes else BOUNDS[layer.dtype]
    compare(contract.dense(h), contract.dense(expected), written(groups), bound)
    places = written(groups)
    assert torch.equal(contract.dense(h)[places], contract.dense(near)[places])
    return groups


def test_rows_are_copied_from_where_they_lie() -> None:
    """Two ranks with 3 rows each: row 4 is the second one's row 1."""
    x = Rows(torch.arange(24.0, device=DEVICE).view(6, 4))
    remote = spread_out(x, 3, ranks=2)
    assert torch.equal(remote.values, x.values[:3])
    assert contract.gather_remote(remote).values[4].tolist() == [16.0, 17.0, 18.0, 19.0]
    assert torch.equal(contract.gather_remote(remote).values, x.values)
    assert contract.gather_remote(x) is x


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [1, 5])
def test_floats(dtype: torch.dtype, count: int) -> None:
    """Odd sizes: columns that fill no tile and no step."""
    layer = Layer.random(3, 72, 40, NAMES[dtype], dtype, bias=count == 5)
    check(layer, draw_ids(RANKS * count, 3, 2, missing=0.4))


@pytest.mark.parametrize("format, h_scales", [("fp8_block", True), ("fp8_channel", False)])
def test_fp8(format: str, h_scales: bool) -> None:
    layer = Layer.random(3, 256, 128, format, torch.float16)
    check(layer, draw_ids(RANKS * 3, 3, 2, missing=0.4), h_scales)


def test_one_expert_takes_all() -> None:
    """More than one tile of it, over the borders between ranks."""
    layer = Layer.random(2, 64, 32, "fp16", torch.float16)
    ids_RK = torch.full((RANKS * 7, 1), 1, dtype=torch.int32, device=DEVICE)
    assert check(layer, ids_RK).num_tiles_1.item() == 2
    assert check(layer, ids_RK, block=32).num_tiles_1.item() == 1


def test_nobody_has_tokens() -> None:
    """Rows of all ranks are there, none of them is anybody's."""
    layer = Layer.random(2, 64, 32, "fp16", torch.float16)
    ids_RK = torch.full((RANKS * 2, 2), -1, dtype=torch.int32, device=DEVICE)
    assert check(layer, ids_RK).num_tiles_1.item() == 0


def test_both_products_take_far_rows() -> None:
    """As the runner calls them: where plans would have both in one kernel, too."""
    layer = Layer.random(3, 64, 32, "fp16", torch.float16)
    ids_RK = draw_ids(RANKS * 4, 3, 2)
    groups = sort.group_pairs(ids_RK, layer.w2)
    here = layer.rows(len(ids_RK))
    outs = []
    for x in (here, spread_out(here, 4)):
        h = poisoned(layer, groups.num_places, False)
        y_NH = torch.full((len(ids_RK) * 2, 64), torch.nan, device=DEVICE, dtype=torch.float16)
        experts.gate_up_down(x, layer.feed_forward, groups, None, h, y_NH)
        outs.append(y_NH)
    chosen_N = ids_RK.flatten() >= 0
    assert chosen_N.any() and torch.equal(outs[0][chosen_N], outs[1][chosen_N])
    assert bool(outs[1][~chosen_N].isnan().all())
