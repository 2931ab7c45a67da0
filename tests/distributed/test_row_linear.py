"""A projection whose inputs are cut over ranks: in deterministic mode the bits of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from moesaic.comm.collectives.collective import WindowCollective
from moesaic.comm.collectives.group import RankGroup
from moesaic.kernels.linear import quantise_groups
from moesaic.layers.linear import Linear, LinearConfig, RowLinear
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from tests.distributed.moe_ranks import Pools

ROWS, OUTPUTS, SECONDS = 37, 48, 30.0


def differing(group: RankGroup, widths: Sequence[int], name: str, deterministic: bool) -> int:
    """Elements that are not those of one rank, for each choice of rows, in small pieces."""
    dtype: torch.dtype = getattr(torch, name)
    torch.manual_seed(len(widths))
    config = LinearConfig(sum(widths), OUTPUTS, dtype, bias=True, deterministic=deterministic)
    parts = [range(sum(widths[:rank]), sum(widths[: rank + 1])) for rank in range(len(widths))]
    comm = WindowCollective(group, 1 << 10, SECONDS)
    alone, ours = Linear(config), RowLinear(config, parts, comm, "test")
    whole, mine = torch.randn(OUTPUTS, sum(widths)).to(dtype), parts[group.rank]
    held = whole if deterministic else whole[:, mine.start : mine.stop]
    alone.weight.copy_(whole)
    ours.weight.copy_(held)
    for layer in (alone, ours):
        assert layer.bias is not None
        layer.bias.copy_(torch.arange(OUTPUTS))
    x_TI = torch.randn(ROWS, sum(widths)).to(dtype)
    part_TI = x_TI[:, mine.start : mine.stop]
    found = 0
    for rows in (None, slice(3, 20), slice(group.rank, group.rank + 1), slice(5, 5)):
        expected = alone(x_TI[slice(None) if rows is None else rows])
        found += int((ours(part_TI, rows) != expected).sum())
    assert ours(part_TI[:0]).shape == (0, OUTPUTS)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("widths", [(64, 64), (96, 0, 32), (1, 30, 19), (0, 0, 5, 59)], ids=str)
def test_the_bits_of_one_rank(widths: tuple[int, ...], dtype: str, pools: Pools):
    size = len(widths)
    assert pools(size).run(differing, widths, dtype, True) == [0] * size


def test_a_sum_over_ranks_has_others(pools: Pools):
    assert min(pools(2).run(differing, (64, 64), "float32", False)) > 100


def quantised_rows_differ(group: RankGroup) -> bool:
    """From those that the layer quantises itself."""
    torch.manual_seed(group.rank)
    config = LinearConfig(256, OUTPUTS, torch.float32, bias=True)
    comm = WindowCollective(group, 1 << 10, SECONDS)
    layer = RowLinear(config, [range(128), range(128, 256)], comm, "test")
    x_TI = torch.randn(ROWS, 128)
    assert layer.quantised_input(x_TI) is None and layer.bias is not None
    format = WEIGHT_FORMATS["fp8_block"]
    layer.use_format(format)
    for name, plane in format.encode(torch.randn(OUTPUTS, 128)).items():
        getattr(layer, name).copy_(plane)
    layer.bias.copy_(torch.arange(OUTPUTS))
    room, rows = layer.quantised_input(x_TI), quantise_groups(x_TI)
    assert room is not None and room.scales is not None and rows.scales is not None
    room.values.copy_(rows.values)
    room.scales.copy_(rows.scales)
    same = torch.equal(layer(room), layer(x_TI))
    return not same


def test_ranks_may_bring_quantised_rows(pools: Pools):
    assert pools(2).run(quantised_rows_differ) == [False, False]
