"""Products with weights of eight and four bits: Triton against the torch twin and moe.quant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moesaic.kernels.cpu.experts import SwigluSpec
from moesaic.kernels.experts import Groups, Matrices, Rows, blocks, dense_matrix, down, gate_up
from moesaic.kernels.experts import sort_pairs as sort_pairs_twin
from moesaic.kernels.formats import FP4_GRID, nvfp4_grid, spread_groups, unpack
from moesaic.kernels.triton.experts_formats import down_formats, gate_up_formats
from moesaic.kernels.triton.grid import nvfp4_grid as nvfp4_grid_kernel
from moesaic.kernels.triton.nibbles import E2M1_ASM, WHOLE_ASM
from moesaic.moe.quant.codecs import Int8
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from moesaic.moe.quant.weights import WEIGHT_FORMATS, WeightFormat, int4_format
from moesaic.moe.runner.device.sorted_pairs import kernel_format
from tests.kernels import ptx
from tests.kernels.triton_cases import DEVICE, FLOATS, GPU, compile_apart, relative_error

gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
FORMATS: dict[str, WeightFormat] = {
    "int8_w8a8": WEIGHT_FORMATS["int8_w8a8"],
    "int8_w8a16": WEIGHT_FORMATS["int8_w8a16"],
    "int4 by 128": WEIGHT_FORMATS["int4_w4a16"],
    "int4 by 32": int4_format(32, symmetric=False),
    "int4 by 6": int4_format(6, symmetric=False),
    "mxfp4": WEIGHT_FORMATS["mxfp4"],
    "nvfp4": WEIGHT_FORMATS["nvfp4"],
    "fp8 rows, weights alone": replace(WEIGHT_FORMATS["fp8_channel"], activation=None),
    "fp8 blocks, weights alone": replace(WEIGHT_FORMATS["fp8_block"], activation=None),
}
SIZES = {
    "int4 by 128": (128, 128),
    "int4 by 32": (96, 96),
    "int4 by 6": (96, 96),
    "mxfp4": (96, 96),
    "fp8 blocks, weights alone": (144, 200),
}


def on_device(planes: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: plane.to(DEVICE) for name, plane in planes.items()}


def make_matrices(
    format: WeightFormat, experts: int, parts: int, rows: int, columns: int, bias: bool = False
) -> Matrices:
    dense = torch.randn(experts, parts, rows, columns) * columns**-0.5
    planes = on_device(format.encode(dense))
    bias_EN = torch.randn(experts, parts * rows, device=DEVICE) if bias else None
    shape = (experts, parts * rows, columns)
    return Matrices(kernel_format(format), planes, shape, parts, bias_EN, format.group_size)


def make_rows(count: int, columns: int, dtype: torch.dtype, format: WeightFormat) -> Rows:
    x = torch.randn(count, columns, device=DEVICE).to(dtype)
    if format.activation == "int8":
        return Rows(*Int8().encode(x), scale=0.5)
    if format.activation == "nvfp4":
        return Rows(nvfp4_grid.twin(x, 0.25), scale=0.25)
    return Rows(x)


def groups_of(ids: list[list[int]], experts: int, block: int) -> Groups:
    return sort_pairs_twin.twin(torch.tensor(ids, device=DEVICE), experts, block)


def both(
    x: Rows, w13: Matrices, w2: Matrices, groups: Groups, dtype: torch.dtype, weighted: bool
) -> tuple[float, float]:
    """How far both products are from their twins; what is nobody's must stay as it is."""
    inner, hidden = w2.shape[2], w2.shape[1]
    activation = SwigluSpec(1.702, 1.5) if w13.bias_EN is not None else SwigluSpec()
    outputs = []
    for first in (gate_up.twin, gate_up_formats):
        h = torch.full((groups.num_places, inner), torch.nan, dtype=dtype, device=DEVICE)
        outputs.append(first(x, w13, groups, activation, Rows(h)).values)
    weights = torch.rand(groups.num_places // groups.top_k, groups.top_k, device=DEVICE)
    h_rows = Rows(outputs[0])
    if w2.format == "int8_w8a8":
        h_rows = Rows(*Int8().encode(outputs[0].nan_to_num()))
    for second in (down.twin, down_formats):
        y = torch.full((groups.num_places, hidden), torch.nan, dtype=dtype, device=DEVICE)
        outputs.append(second(h_rows, w2, groups, weights if weighted else None, y))
    errors = []
    for want, got in (outputs[:2], outputs[2:]):
        assert torch.equal(want.isnan(), got.isnan())
        errors.append(relative_error(got.nan_to_num(), want.nan_to_num()))
    return errors[0], errors[1]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, d) for n in FORMATS for d in FLOATS if GPU or d == torch.float16 or n == "mxfp4"],
)
def test_products(name: str, dtype: torch.dtype) -> None:
    """Sizes that no tile divides, rows of nobody, an expert with most of the rows. Of sixteen bits
    pairs are read at once."""
    torch.manual_seed(0)
    format = FORMATS[name]
    hidden, inner = SIZES.get(name, (80, 80))
    w13 = make_matrices(format, 3, 2, inner, hidden)
    w2 = make_matrices(format, 3, 1, hidden, inner)
    ids = [[2], [2], [-1], [0], *([2] for _ in range(15))]
    x = make_rows(len(ids), hidden, dtype, format)
    errors = both(x, w13, w2, groups_of(ids, 3, 16), dtype, weighted=True)
    assert max(errors) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("int4 by 128", 64),
        *(
            pytest.param(name, block, marks=pytest.mark.slow)
            for name in FORMATS
            if name not in ("int4 by 32", "int4 by 6")
            for block in (32, 64, 128)
        ),
    ],
)
def test_large_tiles_with_bias_and_limit(name: str, block: int) -> None:
    torch.manual_seed(1)
    format = FORMATS[name]
    w13 = make_matrices(format, 2, 2, 128, 128, bias=True)
    w2 = make_matrices(format, 2, 1, 128, 128, bias=True)
    x = make_rows(70, 128, torch.float16, format)
    groups = groups_of([[1]] * 66 + [[0]] * 4, 2, block)
    assert max(both(x, w13, w2, groups, torch.float16, weighted=False)) < BOUNDS[torch.float16]


@pytest.mark.parametrize("counts", [[3, 0, 20], [0, 0, 0]])
def test_blocks_of_rows(counts: list[int]) -> None:
    """Rows are places: some in every block are nobody's."""
    torch.manual_seed(2)
    format = FORMATS["nvfp4"]
    w13, w2 = make_matrices(format, 3, 2, 64, 64), make_matrices(format, 3, 1, 64, 64)
    count_E = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    groups = blocks.twin(count_E, 20, 16)
    x = make_rows(60, 64, torch.float32, format)
    errors = both(x, w13, w2, groups, torch.float32, weighted=False)
    assert max(errors) < BOUNDS[torch.float32]


def test_rows_and_scales_that_are_not_finite_spoil_only_themselves() -> None:
    torch.manual_seed(3)
    format = FORMATS["mxfp4"]
    w13 = make_matrices(format, 2, 2, 32, 64)
    w13.planes["scales"][1, 0, 5, 1] = 255  # NaN: row 5 of the gate of expert 1
    w13.planes["scales"][0, 1, :, :] = 0  # 2 ** -127
    x = make_rows(4, 64, torch.float32, format)
    x.values[2, 7] = torch.nan
    groups = groups_of([[0], [1], [1], [0]], 2, 16)
    h = Rows(torch.zeros(4, 32, device=DEVICE))
    gate_up_formats(x, w13, groups, SwigluSpec(), h)
    assert groups.order_P is not None
    by_row = torch.empty_like(h.values)
    by_row[groups.order_P.long()] = h.values
    spoilt = by_row.isnan()
    assert spoilt[2].all() and spoilt[1].nonzero().flatten().tolist() == [5]
    assert not spoilt[0].any() and not spoilt[3].any() and by_row[0].abs().max() < 1e-30


@pytest.mark.parametrize("name", FORMATS)
def test_twins_decode_as_the_loader_encodes(name: str) -> None:
    torch.manual_seed(4)
    format = FORMATS[name]
    columns = 384
    matrices = make_matrices(format, 2, 2, 5, columns)
    for expert in range(2):
        planes = {key: plane[expert] for key, plane in matrices.planes.items()}
        want = format.decode(planes, torch.empty(2, 5, columns, device=DEVICE)).flatten(0, 1)
        assert torch.equal(dense_matrix(matrices, expert), want)


@pytest.mark.parametrize("name", ["e2m1", "int4"])
def test_assembly_by_hand(name: str) -> None:
    """What a GPU is to do with four bytes, step by step: all values of each, the others random."""
    numbers = [q + 128.0 for q in range(16)]
    if name == "e2m1":
        numbers = [x * 2.0**-126 for x in (*FP4_GRID, *(-x for x in FP4_GRID))]
    code = (E2M1_ASM if name == "e2m1" else WHOLE_ASM).value
    others = torch.randint(0, 256, (256, 4), generator=torch.Generator().manual_seed(0))
    for value in range(256):
        four = others[value].tolist()
        four[value % 4] = value
        found = ptx.run(code, {"$4": int.from_bytes(bytes(four), "little")})
        words = torch.tensor([found[f"${i}"] for i in range(4)]).to(torch.uint32)
        floats = words.view(torch.int32).view(torch.bfloat16).float().tolist()
        low, high = [numbers[b & 15] for b in four], [numbers[b >> 4] for b in four]
        assert floats == low + high


def test_nibbles_of_the_docstring() -> None:
    packed = torch.tensor([[0x21, 0x83]], dtype=torch.uint8)
    assert unpack(packed).tolist() == [[1, 2, 3, 8]]
    assert spread_groups(torch.tensor([[1.0, 2.0]]), 4).tolist() == [[1, 1, 2, 2]]


def test_grid_of_the_docstring() -> None:
    x = torch.zeros(1, 16, device=DEVICE)
    x[0, :4] = torch.tensor([24.0, -11, 7, 1])
    for grid in (nvfp4_grid.twin, nvfp4_grid_kernel):
        assert grid(x, 1.0)[0, :5].tolist() == [24, -12, 8, 0, 0]


@pytest.mark.parametrize("dtype", FLOATS[1:])
@pytest.mark.parametrize("scale", [1.0, 0.003])
def test_grid_is_that_of_the_payload(dtype: torch.dtype, scale: float) -> None:
    """Rows of all sizes, zeros, and numbers half-way between two of the grid's."""
    torch.manual_seed(5)
    x = torch.randn(25, 80, device=DEVICE) * torch.logspace(-4, 4, 25, device=DEVICE)[:, None]
    x[3], x[4, :16] = 0, torch.tensor([12.0, 0.5, 1.5, 2.5, 3.5, 5, 7, 10] * 2, device=DEVICE)
    x = x.to(dtype)
    want = PAYLOAD_FORMATS["nvfp4"].encode(x, scale).dense(torch.float32)
    for grid in (nvfp4_grid.twin, nvfp4_grid_kernel):
        got = grid(x, scale)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float() * scale, want, rtol=3e-7, atol=0)


def test_grid_of_what_is_not_finite() -> None:
    x = torch.randn(3, 48, device=DEVICE)
    x[0, 1], x[1, 20], x[2, 40] = torch.nan, torch.inf, -torch.inf
    want = torch.zeros(3, 3, dtype=torch.bool, device=DEVICE).fill_diagonal_(True)
    for grid in (nvfp4_grid.twin, nvfp4_grid_kernel):
        assert torch.equal(grid(x, 1.0).isnan(), want.repeat_interleave(16, 1))
    assert nvfp4_grid_kernel(x[:0], 1.0).shape == (0, 48)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 32, 1000])
def test_real_sizes(name: str, tokens: int) -> None:
    """Of Qwen3-30B-A3B, with fewer experts: all blocks, uneven routing."""
    torch.manual_seed(tokens)
    format, experts, top_k = FORMATS[name], 16, 4
    hidden, inner = (2304, 768) if name == "int4 by 6" else (2048, 768)
    w13 = make_matrices(format, experts, 2, inner, hidden)
    w2 = make_matrices(format, experts, 1, hidden, inner)
    scores = torch.rand(tokens, experts) + torch.linspace(0, 0.5, experts)
    ids = scores.topk(top_k).indices.tolist()
    x = make_rows(tokens, hidden, torch.bfloat16, format)
    for block in (16, 32, 64, 128):
        groups = groups_of(ids, experts, block)
        errors = both(x, w13, w2, groups, torch.bfloat16, weighted=True)
        assert max(errors) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_resources_on_hopper(which: str) -> None:
    """Compiled for a GPU that need not be there; not in the mode of the interpreter."""
    compile_apart("aot_formats", which)
