"""Dense projections: the Triton kernels against their twins, these against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels import linear as twins
from moesaic.kernels.experts import Rows
from moesaic.kernels.linear import Fp8Matrix, quantise_groups
from moesaic.kernels.norm import add_rms_norm, add_rms_norm_fp8
from moesaic.kernels.triton import linear as kernels
from moesaic.kernels.triton import linear_fp8 as fp8_kernels
from moesaic.kernels.triton.linear import LinearLaunch, LinearTile
from moesaic.moe.quant.codecs import Fp8
from tests.kernels.triton_cases import DEVICE, GPU, compile_apart, relative_error

SHORT = (torch.float16, *((torch.bfloat16,) if GPU else ()))
ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool = False) -> Tensor:
    y = x.double() @ weight.double().T
    y = y if bias is None else y + bias.double()
    if not gated:
        return y
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def test_the_examples() -> None:
    weight = torch.tensor([[3.0, 4], [5, 6], [0, 1]])
    y = twins.linear(torch.tensor([[1.0, 2]]), weight, torch.tensor([0.0, 0, 7]))
    assert y.tolist() == [[11, 17, 9]]
    x, ones = torch.tensor([[1, 2.0**-8]]).bfloat16(), torch.ones(1, 2).bfloat16()
    assert twins.linear_float32(x, ones).tolist() == [[1.00390625]]
    assert twins.linear(x, ones).tolist() == twins.logits(x, ones).tolist() == [[1.0]]
    y = twins.gate_up_silu(torch.ones(1, 1), torch.tensor([[0.0], [2], [5], [3]]))
    torch.testing.assert_close(y, torch.tensor([[0, 5.2848]]), atol=1e-4, rtol=0)
    row = Rows(torch.tensor([[448.0, 1]]).to(torch.float8_e4m3fn), torch.tensor([[0.5]]))
    matrix = Fp8Matrix(torch.tensor([[2.0, 0]]).to(torch.float8_e4m3fn), torch.tensor([[3.0]]))
    assert twins.linear_fp8(row, matrix, None, torch.float32).tolist() == [[1344]]
    rows = quantise_groups(torch.tensor([[-4.0, 1]]))
    assert rows.values.tolist() == [[-448, 112]] and rows.scales is not None
    assert rows.scales.item() == pytest.approx(4 / 448)
    assert Fp8Matrix.of(torch.tensor([[448.0, 2], [1, 0]])).scales.tolist() == [[1]]


@pytest.mark.parametrize("shape", [(3, 200), (140, 300)])
def test_quantised_as_checkpoints_are(shape: tuple[int, int]) -> None:
    w = torch.randn(shape)
    rows, matrix = quantise_groups(w), Fp8Matrix.of(w)
    for made, wanted in ((rows, Fp8(1, 128).encode(w)), (matrix, Fp8(128, 128).encode(w))):
        assert torch.equal(made.values.float(), wanted[0].float())
        assert torch.equal(made.scales, wanted[1])
    assert relative_error(matrix.dense(), w) < 0.04


def check(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    gated: bool,
    plan: LinearLaunch | None = None,
) -> Tensor:
    # A slice of wider rows, as projections of latents get.
    x = drawn(rows, inputs + 8, dtype=dtype)[:, :inputs]
    weight, bias = drawn(outputs, inputs, dtype=dtype) / 8, drawn(outputs, dtype=dtype)
    y = poisoned(rows, outputs // (2 if gated else 1), dtype=dtype)
    assert kernels.multiply(x, weight, bias, y, gated, plan) is y
    assert relative_error(y, exact_product(x, weight, bias, gated)) < ERROR[dtype]
    return y


@pytest.mark.parametrize(
    "rows, gated", [(1, False), (3, False), (17, False), (64, False), (1, True), (17, True)]
)
def test_few_rows(rows: int, gated: bool) -> None:
    for dtype in SHORT:
        check(rows, 38, 200, dtype, gated)


def test_float32_and_whole_blocks() -> None:
    check(1, 8, 2048, torch.float32, False)
    check(5, 64, 256, torch.float32, False)
    check(1, 2, 16, torch.float32, True)


def test_nothing_to_multiply() -> None:
    x, weight = drawn(2, 16, dtype=torch.float16), drawn(8, 16, dtype=torch.float16)
    assert kernels.linear(x[:0], weight).shape == (0, 8)
    assert kernels.gate_up_silu(x[:0], weight).shape == (0, 4)
    assert kernels.linear(x, weight[:0]).shape == (2, 0)
    matrix = Fp8Matrix.of(weight)
    assert fp8_kernels.linear_fp8(Rows(x[:0]), matrix, None, torch.float16).shape == (0, 8)


@pytest.mark.parametrize("splits, turned", [(1, False), (2, True), (5, False)])
def test_splits_are_added_in_order(splits: int, turned: bool) -> None:
    """And leave the counters as they were."""
    x, weight = drawn(9, 160, dtype=torch.float16), drawn(40, 160, dtype=torch.float16)
    tile = LinearTile(16, 16, 32, 4, 2, turned=turned)
    plan = LinearLaunch(tile, tiles=3, splits=splits, prefetch=True)
    runs = [
        kernels.multiply(x, weight, None, poisoned(9, 40, dtype=torch.float16), False, plan)
        for _ in range(2)
    ]
    assert torch.equal(*runs)
    assert relative_error(runs[0], exact_product(x, weight, None)) < 1e-3
    assert not kernels.counters(x.device).any()


def test_splits_follow_from_the_shape() -> None:
    """About a program for each of 132 processors; no split of less than two blocks."""

    def splits(rows: int, outputs: int, inputs: int) -> tuple[int, int]:
        plan = kernels.plan_for(rows, outputs, inputs, 132)
        return plan.tiles, plan.splits

    assert splits(1, 2048, 4096) == (1024, 1)
    assert splits(16, 2048, 4096) == (32, 4)
    assert splits(16, 5120, 2048) == (80, 2)
    assert splits(16, 128, 2048) == (2, 8)
    assert splits(16, 151_936, 2048) == (2374, 1)
    assert splits(2, 128, 128) == (2, 1)


def test_rows_are_loaded_whole_where_that_wastes_little() -> None:
    def inputs(size: int, outputs: int = 4096) -> int:
        return kernels.plan_for(1, outputs, size, 132).tile.inputs

    assert [inputs(size) for size in (768, 1536, 1600, 2048, 2880, 4096, 7168)] == [
        1024, 1024, 2048, 2048, 1024, 4096, 1024,
    ]  # fmt: skip


def test_tiles_of_one_row_of_fp8() -> None:
    """By outputs and inputs: qkv and o of Qwen3, q_a of DeepSeek, a narrow one, a head."""
    shapes = ((5120, 2048), (2048, 4096), (1536, 7168), (576, 7168), (151_936, 2048))
    tiles = [fp8_kernels.plan_for(1, *shape, 132).tile for shape in shapes]
    assert [(tile.outputs, tile.inputs, tile.warps) for tile in tiles] == [
        (8, 2048, 4), (8, 2048, 4), (4, 1024, 2), (2, 1024, 2), (8, 2048, 4),
    ]  # fmt: skip


def test_one_row_in_one_block_or_more() -> None:
    for dtype in SHORT:
        check(1, 6, 2000, dtype, True)
        check(1, 6, 24, dtype, False, LinearLaunch(LinearTile(1, 4, 16, 1), 2, 1, prefetch=True))
        check(1, 5, 4096, dtype, False)


def test_rows_do_not_know_each_other() -> None:
    """In deterministic mode: alone, among others, and with fewer outputs beside."""
    dtype = torch.bfloat16 if GPU else torch.float16
    x, weight = drawn(70, 136, dtype=dtype), drawn(80, 136, dtype=dtype)
    y = kernels.linear_invariant(x, weight)
    assert relative_error(y, exact_product(x, weight, None)) < ERROR[dtype]
    assert torch.equal(kernels.linear_invariant(x[66:67], weight), y[66:67])
    assert torch.equal(kernels.linear_invariant(x[:3], weight[:5]), y[:3, :5])
    example = twins.linear_invariant(torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[5.0, 6]]))
    assert example.tolist() == [[17], [39]]


def test_float32_results_are_not_rounded() -> None:
    x = torch.tensor([[1, 2.0**-12]] * 2, dtype=torch.float16, device=DEVICE)
    ones = torch.ones(3, 2, dtype=torch.float16, device=DEVICE)
    for rows in (1, 2):
        assert kernels.logits(x[:rows], ones).tolist() == [[1 + 2.0**-12] * 3] * rows


def exactly_quantised(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Rows whose groups of 128 are float8 numbers times a power of two, which no scale that is off
    by its last bit changes: the interpreter rounds wrongly where a number rounds up to the next
    power of two, and kernels that quantise for themselves take such scales."""
    x = (drawn(rows, inputs) * 128).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    x[:, ::128] = -448
    return (x * 2.0**-7).to(dtype)


def check_fp8(rows: int, shape: tuple[int, int], block: int, gated: bool, own: bool) -> None:
    """`own`: rows come as they are."""
    outputs, inputs = shape
    weight = Fp8Matrix.of(drawn(outputs, inputs) / 8, block)
    for dtype in SHORT:
        bias = drawn(outputs, dtype=dtype)
        x = exactly_quantised(rows, inputs, dtype)
        wanted = exact_product(x, weight.dense(), bias, gated)
        if own:
            product = fp8_kernels.gate_up_silu_fp8 if gated else fp8_kernels.linear_fp8
            assert relative_error(product(Rows(x), weight, bias, dtype), wanted) < ERROR[dtype]
            continue
        for multiply in (fp8_kernels.multiply_few, fp8_kernels.multiply_many):
            y = poisoned(rows, outputs // (2 if gated else 1), dtype=dtype)
            multiply(quantise_groups(x), weight, bias, y, gated)
            assert relative_error(y, wanted) < ERROR[dtype]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("block", [128, 1])
@pytest.mark.parametrize("rows", [1, 17])
def test_few_rows_of_fp8(rows: int, block: int, own: bool) -> None:
    check_fp8(rows, (19, 200), block, False, own)


def test_gated_fp8() -> None:
    check_fp8(1, (8, 256), 1, True, own=True)
    check_fp8(5, (256, 256), 128, True, own=False)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 16, 64, 130])
@pytest.mark.parametrize("gated", [True, False])
def test_fp8_over_many_blocks(rows: int, gated: bool) -> None:
    check_fp8(min(rows, 128), (256, 640), 128, gated, True)
    check_fp8(min(rows, 128), (256, 640), 128, gated, False)
    x, weight = quantise_groups(drawn(rows, 640)), Fp8Matrix.of(drawn(384, 640))
    y = fp8_kernels.linear_fp8(x, weight, None, torch.float32)
    assert relative_error(y, twins.linear_fp8.twin(x, weight, None, torch.float32)) < 1e-5


def test_up_must_begin_a_block() -> None:
    weight = Fp8Matrix.of(drawn(200, 128))
    with pytest.raises(AssertionError, match="up begins inside a block of scales: 200 rows"):
        fp8_kernels.gate_up_silu_fp8(Rows(drawn(1, 128)), weight, None, torch.float32)


def test_what_is_not_finite_stays_so_in_fp8() -> None:
    x = drawn(3, 256)
    x[0, 3], x[1, 200] = torch.nan if GPU else torch.inf, -torch.inf  # it loses NaN, too
    y = fp8_kernels.linear_fp8(Rows(x), Fp8Matrix.of(drawn(8, 256)), None, torch.float32)
    assert y.isfinite().all(1).tolist() == [False, False, True]
    y = fp8_kernels.linear_fp8(Rows(x[:1]), Fp8Matrix.of(drawn(8, 256)), None, torch.float32)
    assert y.isnan().all()


def test_a_wrong_product_is_noticed() -> None:
    """What decides whether torch's own product is taken."""
    device = torch.device(DEVICE)
    assert fp8_kernels._problem_with(twins.multiplied_fp8, device) == ""

    def swapped(x: Rows, weight: Fp8Matrix) -> Tensor:
        flipped = Fp8Matrix(weight.values, weight.scales.flip(0), weight.rows)
        return twins.multiplied_fp8(x, flipped)

    def missing(x: Rows, weight: Fp8Matrix) -> Tensor:
        raise RuntimeError("not on this GPU")

    assert fp8_kernels._problem_with(swapped, device).startswith("relative error ")
    assert fp8_kernels._problem_with(missing, device) == "RuntimeError: not on this GPU"


SHAPES = {
    "qkv": (5120, 2048),
    "o": (2048, 4096),
    "router": (128, 2048),
    "head": (151_936, 2048),
    "q_a": (1536, 7168),
    "kv_a": (576, 7168),
    "shared": (4096, 7168),
}


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("name", SHAPES)
def test_real_shapes(name: str) -> None:
    outputs, inputs = SHAPES[name]
    weight = drawn(outputs, inputs, dtype=torch.bfloat16) / 32
    matrix = Fp8Matrix.of(weight)
    for rows in (1, 2, 16, 33, 64, 65, 200):
        x = drawn(rows, inputs, dtype=torch.bfloat16)
        wanted = x.float() @ weight.float().T
        assert relative_error(kernels.linear(x, weight), wanted) < 6e-3
        assert relative_error(kernels.logits(x, weight), wanted) < 1e-4
        # Rows that a kernel quantises are on the grid here: a scale of another last bit breaks ties
        # of others, up to 8 in 1000 numbers become the next float8, and that makes 1.1 %.
        for given in (Rows(exactly_quantised(rows, inputs, torch.bfloat16)), quantise_groups(x)):
            y = fp8_kernels.linear_fp8(given, matrix, None, torch.bfloat16)
            exact = twins.linear_fp8.twin(given, matrix, None, torch.float32)
            assert relative_error(y, exact) < 6e-3, rows
        if name != "kv_a":
            gate, up = wanted.chunk(2, dim=-1)
            assert relative_error(kernels.gate_up_silu(x, weight), F.silu(gate) * up) < 6e-3


def replays_as(work: Callable[[], Tensor], eager: Tensor, times: int) -> None:
    """Captured, it gives the same bits every time."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = work()
    for _ in range(times):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, eager)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no GPU")
def test_in_a_graph() -> None:
    """The same bits in every replay, whoever ends last."""
    x, weight = drawn(16, 4096, dtype=torch.bfloat16), drawn(2048, 4096, dtype=torch.bfloat16)
    replays_as(lambda: kernels.linear(x, weight), kernels.linear(x, weight), 20)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 32, 50, 128])
def test_fp8_in_a_graph(rows: int) -> None:
    """By whichever way so many rows are multiplied; run once before, as the engine does."""
    x, weight = drawn(rows, 2048, dtype=torch.bfloat16), Fp8Matrix.of(drawn(640, 2048))
    eager = fp8_kernels.linear_fp8(Rows(x), weight, None, torch.bfloat16)
    wanted = twins.linear_fp8.twin(quantise_groups(x), weight, None, torch.float32)
    assert relative_error(eager, wanted) < 6e-3
    replays_as(lambda: fp8_kernels.linear_fp8(Rows(x), weight, None, torch.bfloat16), eager, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("rows", [1, 8, 17, 32, 50, 256, 1000])
def test_fp8_of_quantised_norms(rows: int) -> None:
    """Scales lie as the product wants them: the same bits as when it quantises."""
    x, residual = (drawn(rows, 2048, dtype=torch.bfloat16) for _ in range(2))
    norm, weight = drawn(2048, dtype=torch.bfloat16), Fp8Matrix.of(drawn(640, 2048))
    normed, total = add_rms_norm(x, residual, norm, 1e-6)
    wanted = twins.linear_fp8(Rows(normed), weight, None, torch.bfloat16)
    by_column = twins.scales_by_column(x, weight, None, torch.bfloat16)
    assert not by_column or (rows > 16 and rows % 4 == 0)
    quantised, again = add_rms_norm_fp8(x, residual, norm, 1e-6, by_column)
    assert torch.equal(again, total)
    assert torch.equal(twins.linear_fp8(quantised, weight, None, torch.bfloat16), wanted)


@pytest.mark.parametrize("which", ["main", pytest.param("all", marks=pytest.mark.slow)])
def test_compiles_for_hopper(which: str) -> None:
    """What the kernels take of a GPU; see aot_linear.py."""
    compile_apart("aot_linear", which)
