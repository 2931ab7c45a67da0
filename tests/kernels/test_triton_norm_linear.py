"""The norm and product of one row in one kernel, against the twins and against the two kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesaic.kernels import linear as twins
from moesaic.kernels.experts import PairSum
from moesaic.kernels.norm import SumToNorm
from moesaic.kernels.triton import linear, norm
from moesaic.kernels.triton import norm_linear as kernels
from moesaic.kernels.triton.linear import LinearLaunch, LinearTile
from tests.kernels.triton_cases import DEVICE, GPU, relative_error

DTYPE = torch.bfloat16 if GPU else torch.float16
ERROR = 6e-3 if GPU else 1e-3
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def row_of(inputs: int) -> SumToNorm:
    residual = drawn(1, inputs + 8)[:, :inputs] * 3
    return SumToNorm(drawn(1, inputs), residual, drawn(inputs), 1e-6)


def picks(outputs: int, inputs: int) -> Tensor:
    """Each output is one of the inputs: in whatever order sums are made, their bits show."""
    matrix = torch.zeros(outputs, inputs, dtype=DTYPE, device=DEVICE)
    o = torch.arange(outputs, device=DEVICE)
    matrix[o, o * 7 % inputs] = 1.0
    return matrix


def test_the_examples() -> None:
    rows = SumToNorm(torch.tensor([[1.0, 0]]), torch.tensor([[0.0, 1]]), torch.ones(2), 0.0)
    y, total = twins.norm_linear(rows, torch.tensor([[3.0, 4], [5, 6]]))
    torch.testing.assert_close(y, torch.tensor([[7.0, 11]]))
    assert total.tolist() == [[1, 1]]


CASES = [(20, 256, True), (9, 200, False), (5, 511, True), (16, 1024, False)]


@pytest.mark.parametrize(("outputs", "inputs", "biased"), CASES)
def test_equals_the_twin(outputs: int, inputs: int, biased: bool) -> None:
    rows, weight = row_of(inputs), drawn(outputs, inputs) / 8
    bias = drawn(outputs) if biased else None
    tile = LinearTile(1, 8, norm.tiling(inputs)["BLOCK_H"], 1)
    before = rows.residual_TH.clone()
    y, total = kernels.multiply(rows, weight, bias, tile)
    wanted, wanted_total = twins.norm_linear.twin(rows, weight, bias)
    assert torch.equal(total, wanted_total) and y.dtype == DTYPE
    assert torch.equal(rows.residual_TH, before)
    assert relative_error(y, wanted) < ERROR


def test_who_takes_one_kernel() -> None:
    weight = torch.empty(16, 2048, dtype=DTYPE)
    row = SumToNorm(drawn(1, 2048), drawn(1, 2048), drawn(2048), 1e-6)
    pairs = SumToNorm(PairSum(drawn(2, 2048), torch.zeros(1, 2).int()), *_rest(row))
    two = SumToNorm(drawn(2, 2048), drawn(2, 2048), drawn(2048), 1e-6)
    assert kernels.tile_for(row, weight) == kernels.TILES[2048]
    others = ((two, weight), (row, weight[:, :1000]), (row, weight.float()), (pairs, weight))
    assert [kernels.tile_for(rows, matrix) for rows, matrix in others] == [None] * 4


def _rest(row: SumToNorm) -> tuple[Tensor, Tensor, float]:
    return row.residual_TH, row.weight_H, row.eps


def test_several_rows_take_two_kernels() -> None:
    rows = SumToNorm(drawn(2, 136), drawn(2, 136), drawn(136), 1e-6)
    weight = drawn(24, 136) / 8
    y, total = kernels.norm_linear(rows, weight)
    wanted, wanted_total = twins.norm_linear.twin(rows, weight)
    assert torch.equal(total, wanted_total) and relative_error(y, wanted) < ERROR


# Outputs, inputs, tile.
REAL = [
    (5120, 2048, kernels.TILES[2048]),
    (6144, 4096, LinearTile(1, 4, 4096, 8)),
    (767, 2001, LinearTile(1, 8, 2048, 4)),
]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("outputs", "inputs", "tile"), REAL)
def test_bits_are_those_of_two_kernels(outputs: int, inputs: int, tile: LinearTile) -> None:
    rows, bias = row_of(inputs), drawn(outputs)
    plan = LinearLaunch(tile, -(-outputs // tile.outputs), 1, prefetch=False)
    normed, total = norm.add_rms_norm(rows.values, *_rest(rows))
    for weight in (drawn(outputs, inputs) / 32, picks(outputs, inputs)):
        y, mine = kernels.multiply(rows, weight, bias, tile)
        wanted = linear.multiply(normed, weight, bias, torch.empty_like(y), False, plan)
        assert torch.equal(total, mine) and torch.equal(y, wanted)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("inputs", [2048, 2880, 7168])
def test_as_it_is_called(inputs: int) -> None:
    rows, weight = row_of(inputs), drawn(512, inputs) / 32
    normed, total = norm.add_rms_norm(rows.values, *_rest(rows))
    y, mine = kernels.norm_linear(rows, weight)
    assert torch.equal(total, mine)
    assert relative_error(y, linear.linear(normed, weight)) < (2e-3 if inputs == 2048 else 1e-9)
