"""Few rows of dense products on Hopper, against their twins; how they are shared, anywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moesaic.kernels import linear as twins
from moesaic.kernels.experts import Rows
from moesaic.kernels.linear import Fp8Matrix, quantise_groups
from moesaic.kernels.triton import linear as kernels
from moesaic.kernels.triton import linear_hopper as hopper
from moesaic.kernels.triton.linear_hopper import LinearConstants, plan_for
from tests.kernels.triton_cases import DEVICE, GPU, compile_apart, relative_error

ABLE = GPU and torch.cuda.get_device_capability()[0] == 9
ERROR = {torch.float16: 1e-3, torch.bfloat16: 6e-3, torch.float32: 1e-4}
# Qwen3's; an end inside of a unit; one whose inputs want four warps; a step for each warp
# alone.
SHAPES = [(5120, 2048), (2048, 4096), (1061, 1024), (2200, 1280), (1056, 512)]


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def planned(x: Tensor, weight: Tensor, blocked: bool = True) -> LinearConstants:
    """Also for numbers of rows that other kernels get: any plan does for any rows."""
    plan = hopper.choose(x[:1].expand(8, -1).contiguous(), weight, blocked)
    assert plan is not None, f"no plan for {tuple(weight.shape)}"
    return plan


def test_shares_of_lines() -> None:
    """Of qkv and o of Qwen3 on 132 processors: 40 and 16 lines, of 128 programs each."""
    qkv, o = plan_for(8, (5120, 2048), 2, 132), plan_for(8, (2048, 4096), 2, 132)
    assert qkv is not None and qkv == LinearConstants(2048, UNITS=5, ROWS=16, WARPS=8, PART=4)
    assert o == LinearConstants(4096, UNITS=2, ROWS=16, WARPS=8, PART=8)
    assert (qkv.steps, qkv.slab, qkv.shared) == (4, 512, 40 * 4096 + 5 * 8 * 16 * 8 * 4)
    fp8 = plan_for(32, (5120, 2048), 1, 132)
    assert fp8 is not None and fp8 == LinearConstants(
        2048, UNITS=5, ROWS=16, WARPS=8, PART=1, SIZE=1
    )
    assert (fp8.steps, fp8.chunk, fp8.groups) == (2, 128, 16)
    assert plan_for(2, (2048, 1280), 2, 132) == LinearConstants(
        1280, UNITS=2, ROWS=16, WARPS=4, PART=5
    )


@pytest.mark.parametrize(
    "rows, outputs, inputs",
    [(1, 5120, 2048), (17, 2048, 4096), (8, 128, 2048), (8, 151_936, 2048),
     (8, 2048, 2880), (8, 4096, 7168)],
)  # fmt: skip
def test_left_to_others(rows: int, outputs: int, inputs: int) -> None:
    """One row, rows that are too much to read for all, a router, matrices that do not fit."""
    assert plan_for(rows, (outputs, inputs), 2, 132) is None


def test_no_numbers_of_four_bytes() -> None:
    assert plan_for(8, (5120, 2048), 4, 132) is None
    assert hopper.choose(torch.ones(8, 2048), torch.ones(5120, 2048)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not ABLE, reason="no Hopper GPU")
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_shapes(shape: tuple[int, int]) -> None:
    weight, bias = drawn(*shape) / 8, drawn(shape[0])
    for rows in (1, 2, 7, 16, 17, 33, 64):
        # A slice of wider rows, as projections of latents get.
        x = drawn(rows, shape[1] + 16)[:, : shape[1]]
        wanted = x.double() @ weight.double().T + bias.double()
        y = poisoned(rows, shape[0])
        assert hopper.multiply(Rows(x), weight, None, bias, y, planned(x, weight)) is y
        assert relative_error(y, wanted) < ERROR[y.dtype], rows


@pytest.mark.gpu
@pytest.mark.skipif(not ABLE, reason="no Hopper GPU")
@pytest.mark.parametrize(
    "change",
    [{"UNITS": 1}, {"PART": 2}, {"ROWS": 32}, {"WARPS": 4}, {"UNITS": 3, "WARPS": 4, "PART": 1}],
)
def test_plans_and_types(change: dict[str, int]) -> None:
    """Any plan gives the same product."""
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = drawn(21, 1024, dtype=dtype), drawn(1061, 1024, dtype=dtype) / 8
        plan = replace(LinearConstants(1024, UNITS=2, ROWS=16, WARPS=8, PART=1), **change)
        y = poisoned(21, 1061, dtype=torch.float32)
        hopper.multiply(Rows(x), weight, None, None, y, plan)
        assert relative_error(y, x.double() @ weight.double().T) < ERROR[torch.float32]


@pytest.mark.gpu
@pytest.mark.skipif(not ABLE, reason="no Hopper GPU")
@pytest.mark.parametrize("block", [128, 1])
@pytest.mark.parametrize("shape", [(5120, 2048), (2048, 4096), (1061, 1024)])
def test_fp8(shape: tuple[int, int], block: int) -> None:
    """Blocks of different sizes: a scale in the wrong place shows."""
    weight = drawn(*shape, dtype=torch.float32)
    weight *= torch.logspace(-1, 1, shape[0], device=DEVICE)[:, None]
    weight *= torch.logspace(-1, 1, shape[1], device=DEVICE)[None, :]
    matrix, bias = Fp8Matrix.of(weight, block), drawn(shape[0])
    for rows in (1, 3, 16, 31, 64, 128):
        x = quantise_groups(
            drawn(rows, shape[1]) * torch.logspace(-1, 1, rows, device=DEVICE)[:, None]
        )
        wanted = twins.linear_fp8.twin(x, matrix, bias, torch.float32)
        plan = planned(x.values, matrix.values, block > 1)
        y = poisoned(rows, shape[0], dtype=torch.float32)
        hopper.multiply(x, matrix.values, matrix.scales, bias, y, plan)
        assert relative_error(y, wanted) < 1e-4, rows


@pytest.mark.gpu
@pytest.mark.skipif(not ABLE, reason="no Hopper GPU")
def test_rows_do_not_meet() -> None:
    """What is not finite stays in its row; a row's bits do not depend on the others."""
    x, weight = drawn(16, 2048), drawn(5120, 2048)
    whole = kernels.linear(x, weight)
    assert torch.equal(kernels.linear(x[:5], weight), whole[:5])
    x[3, 700] = torch.nan
    y = kernels.linear(x, weight)
    assert y[3].isnan().all() and torch.equal(y[4:], whole[4:])


@pytest.mark.gpu
@pytest.mark.skipif(not ABLE, reason="no Hopper GPU")
@pytest.mark.parametrize("rows", [2, 8, 16, 32])
def test_behind_other_kernels_in_a_graph(rows: int) -> None:
    """The weights are asked for early, the rows not before they are there."""
    first, second = drawn(4096, 2048) / 32, drawn(2048, 4096) / 32

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            x = kernels.linear(kernels.linear(x, first), second)
        return x

    x = drawn(rows, 2048)
    eager, wanted = chain(x), x
    for _ in range(4):
        wanted = (wanted.float() @ first.float().T).bfloat16().float() @ second.float().T
        wanted = wanted.bfloat16()
    assert relative_error(eager, wanted) < 2e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
    for _ in range(20):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, eager)


@pytest.mark.parametrize("which", ["main", pytest.param("all", marks=pytest.mark.slow)])
def test_compiles_for_hopper(which: str) -> None:
    """What the kernel takes of a GPU; see aot_linear_hopper.py."""
    compile_apart("aot_linear_hopper", which)
