"""Experts with few rows each, by Triton: against torch, and against the truth in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moesaic.kernels import experts as contract
from moesaic.kernels import tuning
from moesaic.kernels.cpu.experts import SwigluSpec
from moesaic.kernels.experts import FeedForward, Groups, Matrices, Rows
from moesaic.kernels.triton import experts, experts_small, sort
from moesaic.kernels.tuning import ExpertsPlan, ExpertsShape, TileConfig
from moesaic.moe.formats import TopKOutput
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from tests import moe_oracle
from tests.kernels.triton_cases import DEVICE, FLOATS, GPU, relative_error

needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")
GPT_OSS = SwigluSpec(alpha=1.702, limit=7.0)
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
FP8 = ("fp8_block", "fp8_channel", "fp8_tensor")
# Twice the rounding of what is stored; of fp8, a value at the edge between two may go either way.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
FP8_BOUND = 1.5e-2


@dataclass(frozen=True)
class Layer:
    """Experts in a weight format, and the float32 numbers they were made from."""

    truth: moe_oracle.Experts
    w13: Matrices
    w2: Matrices
    activation: SwigluSpec
    dtype: torch.dtype

    @classmethod
    def random(
        cls,
        num_experts: int,
        hidden: int,
        inner: int,
        format: str,
        dtype: torch.dtype,
        bias: bool = False,
    ) -> Layer:
        truth = moe_oracle.Experts.random(num_experts, hidden, inner, int(torch.randint(999, ())))
        w13 = torch.stack((truth.gate_EIH, truth.up_EIH), 1)
        w2 = truth.down_EHI.unsqueeze(1)
        return cls(
            truth,
            _matrices(format, w13, dtype, bias),
            _matrices(format, w2, dtype, bias),
            GPT_OSS if bias else SwigluSpec(),
            dtype,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, H, I."""
        return self.w2.shape

    @property
    def feed_forward(self) -> FeedForward:
        return FeedForward(self.w13, self.w2, self.activation)

    def rows(self, count: int) -> Rows:
        x = torch.randn(count, self.shape[1], device=DEVICE).to(self.dtype)
        return contract.operand(Rows(x), self.w13)


def _matrices(format: str, w: Tensor, dtype: torch.dtype, bias: bool) -> Matrices:
    planes = WEIGHT_FORMATS[format].encode(w.to(dtype).float())
    experts, parts, rows, columns = w.shape
    return Matrices(
        format,
        {name: plane.contiguous().to(DEVICE) for name, plane in planes.items()},
        (experts, parts * rows, columns),
        parts,
        torch.randn(experts, parts * rows, device=DEVICE).to(dtype) if bias else None,
    )


def poisoned(layer: Layer, places: int, scales: bool) -> Rows:
    inner = layer.shape[2]
    values = torch.full((places, inner), torch.nan, device=DEVICE)
    if not scales:
        return Rows(values.to(layer.dtype))
    shape = (places, -(-inner // 128))
    return Rows(values.to(torch.float8_e4m3fn), torch.full(shape, torch.nan, device=DEVICE))


def draw_ids(rows: int, num_experts: int, top_k: int, missing: float = 0.15) -> Tensor:
    ids = torch.rand(rows, num_experts).argsort(1)[:, :top_k].int()
    return ids.masked_fill(torch.rand(rows, top_k) < missing, -1).to(DEVICE)


def twin(name: str):  # type: ignore[no-untyped-def]
    return getattr(contract, name).twin


def written(groups: Groups) -> Tensor:
    """Places that are somebody's."""
    found = [places for _, places in contract.expert_places(groups)]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.long, device=DEVICE)


def check(layer: Layer, x: Rows, groups: Groups, weights_RK: Tensor | None, h_scales: bool,
          configs: tuple[TileConfig, TileConfig] | None = None) -> None:  # fmt: skip
    """Both products against their twins, each from the same inputs; nothing else is written."""
    _, hidden, _ = layer.shape
    h, expected_h = (poisoned(layer, groups.num_places, h_scales) for _ in range(2))
    args = (x, layer.w13, groups, layer.activation)
    if configs is None:
        experts.gate_up(*args, h)
    else:
        experts_small.gate_up_small(*args, h, configs[0])
    twin("gate_up")(*args, expected_h)
    y = torch.full((groups.num_places, hidden), torch.nan, device=DEVICE).to(layer.dtype)
    expected_y = y.clone()
    down_args = (expected_h, layer.w2, groups, weights_RK)
    if configs is None:
        experts.down(*down_args, y)
    else:
        experts_small.down_small(*down_args, y, configs[1])
    twin("down")(*down_args, expected_y)
    quantised = layer.w13.format in FP8
    bound = FP8_BOUND if quantised else BOUNDS[layer.dtype]
    places = written(groups)
    to = places if groups.order_P is None else groups.order_P[places].long()
    compare(contract.dense(h), contract.dense(expected_h), places, bound)
    # Hopper's products of fp8 keep 14 bits of their sums.
    compare(y, expected_y, to, BOUNDS[layer.dtype] + 2e-3 * quantised)


def compare(out: Tensor, expected: Tensor, rows: Tensor, bound: float) -> None:
    mask = torch.zeros(len(out), dtype=torch.bool, device=out.device)
    mask[rows] = True
    assert bool(out[~mask].float().isnan().all())
    if len(rows):
        assert relative_error(out[mask], expected[mask]) < bound


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [False, True])
def test_floats(dtype: torch.dtype, bias: bool) -> None:
    """Odd sizes: columns that fill no tile and no step."""
    layer = Layer.random(3, 72, 40, NAMES[dtype], dtype, bias)
    ids = draw_ids(12, 3, 2)
    groups = sort.sort_pairs(ids, 3, 16)
    weights = torch.rand(12, 2, device=DEVICE)
    configs = TileConfig(16, 32, 32), TileConfig(16, 32, 32)
    check(layer, layer.rows(12), groups, weights, False, configs)


@pytest.mark.parametrize(
    "format, h_scales",
    [("fp8_block", False), ("fp8_block", True), ("fp8_channel", True), ("fp8_tensor", False)],
)
def test_fp8(format: str, h_scales: bool) -> None:
    layer = Layer.random(3, 256, 128, format, torch.float16)
    ids = draw_ids(9, 3, 2)
    groups = sort.sort_pairs(ids, 3, 16)
    configs = TileConfig(16, 64, 128), TileConfig(16, 128, 128)
    x = layer.rows(9)
    check(layer, x, groups, torch.rand(9, 2, device=DEVICE), h_scales, configs)


def test_fp8_blocks_that_are_not_whole() -> None:
    layer = Layer.random(2, 200, 72, "fp8_block", torch.float16)
    groups = sort.sort_pairs(draw_ids(5, 2, 1), 2, 16)
    configs = TileConfig(16, 32, 128), TileConfig(16, 32, 128)
    check(layer, layer.rows(5), groups, None, False, configs)


def test_groups_that_are_not_whole_get_no_scales() -> None:
    layer = Layer.random(2, 128, 72, "fp8_block", torch.float16)
    groups = sort.sort_pairs(draw_ids(5, 2, 1), 2, 16)
    with pytest.raises(ValueError, match="h of 72 channels cannot be quantised by 128"):
        check(layer, layer.rows(5), groups, None, True, (TileConfig(16, 32, 128),) * 2)


def test_rows_in_a_float_type_are_quantised_first() -> None:
    """The same bits, whoever quantises."""
    layer = Layer.random(2, 256, 128, "fp8_block", torch.float16)
    groups = sort.sort_pairs(draw_ids(6, 2, 2), 2, 16)
    x = Rows(torch.randn(6, 256, device=DEVICE).half())
    outs = []
    for rows in (x, contract.operand(x, layer.w13)):
        h = poisoned(layer, groups.num_places, False)
        args = (rows, layer.w13, groups, layer.activation, h, TileConfig(16, 32, 128))
        h = experts_small.gate_up_small(*args)
        y = torch.full((12, 256), torch.nan, device=DEVICE, dtype=torch.float16)
        h = contract.operand(h, layer.w2) if rows is not x else h
        y = experts_small.down_small(h, layer.w2, groups, None, y, TileConfig(16, 64, 128))
        outs.append(y.nan_to_num(7.0))
    assert torch.equal(*outs)


def test_a_layer_in_one_kernel_needs_h_finished() -> None:
    """Where h is still to be quantised, the products are kernels of their own."""
    layer = Layer.random(2, 128, 128, "fp8_block", torch.float16)
    groups = sort.sort_pairs(draw_ids(6, 2, 2), 2, 16)
    configs, shape = (
        (TileConfig(16, 64, 128), TileConfig(16, 64, 128)),
        ExpertsShape("fp8_block", *layer.shape),
    )
    x, weights = layer.rows(6), torch.rand(6, 2, device=DEVICE)
    outs = []
    for fused in (False, True):
        h = poisoned(layer, groups.num_places, False)
        y = torch.full((12, 128), torch.nan, device=DEVICE, dtype=torch.float16)
        with tuning.override_plan(shape, ExpertsPlan("small", 16, *configs, fused=fused)):
            experts.gate_up_down(x, layer.feed_forward, groups, weights, h, y)
        outs.append(y)
    assert torch.equal(outs[0].nan_to_num(7.0), outs[1].nan_to_num(7.0))
    with pytest.raises(AssertionError, match="h must be quantised by gate_up"):
        plan = ExpertsPlan("small", 16, *configs, fused=True)
        experts_small.gate_up_down_small(x, layer.feed_forward, groups, weights, h, y, plan)


def test_blocks_of_rows() -> None:
    """Rows are places: nothing is looked up, y stays at places."""
    layer = Layer.random(4, 64, 32, "fp32", torch.float32)
    counts = torch.tensor([0, 17, 3, 20], device=DEVICE)
    groups = sort.blocks(counts, 20, 16)
    x = layer.rows(80)
    x.values[written(groups).new_tensor([0, 19, 37, 45])] = torch.nan
    check(layer, x, groups, None, False, (TileConfig(16, 32, 32), TileConfig(16, 64, 32)))


def test_one_expert_takes_all_and_scale() -> None:
    layer = Layer.random(3, 64, 32, "fp32", torch.float32)
    ids = torch.full((35, 1), 2, dtype=torch.int32, device=DEVICE)
    groups = sort.sort_pairs(ids, 3, 32)
    x = replace(layer.rows(35), scale=0.25)
    check(layer, x, groups, None, False, (TileConfig(32, 16, 32), TileConfig(32, 32, 32)))


@pytest.mark.parametrize("rows, missing", [(0, 0.0), (3, 1.0)])
def test_nobody(rows: int, missing: float) -> None:
    layer = Layer.random(3, 64, 32, "fp32", torch.float32)
    groups = sort.sort_pairs(draw_ids(rows, 3, 2, missing), 3, 16)
    check(layer, layer.rows(rows), groups, None, False)


def run_layer(layer: Layer, x_TH: Tensor, topk: TopKOutput, h_scales: bool) -> Tensor:
    """A layer after its routing, as runners compute it."""
    num_experts, hidden, inner = layer.shape
    ids, weights = topk.ids_TK.int().to(DEVICE), topk.weights_TK.float().to(DEVICE)
    block = tuning.block_for(layer.w2.format, num_experts, hidden, inner, ids.numel())
    groups = sort.sort_pairs(ids, num_experts, block)
    h = poisoned(layer, groups.num_places, h_scales)
    y = torch.full((ids.numel(), hidden), torch.nan, device=DEVICE).to(layer.dtype)
    experts.gate_up_down(Rows(x_TH), layer.feed_forward, groups, weights, h, y)
    return sort.sum_pairs(y, ids, torch.empty_like(x_TH))


@pytest.mark.parametrize(
    "format, dtype, h_scales, bound",
    [
        ("fp32", torch.float32, False, 1e-5),
        ("fp16", torch.float16, False, 2e-3),
        ("fp8_block", torch.float16, True, 0.08),
        ("fp8_channel", torch.float16, False, 0.08),
    ],
)
def test_a_layer_is_near_the_truth(
    format: str, dtype: torch.dtype, h_scales: bool, bound: float
) -> None:
    layer = Layer.random(3, 128, 128, format, dtype)
    x = torch.randn(5, 128).to(dtype)
    topk = moe_oracle.random_topk(5, 3, 2, seed=3)
    topk.ids_TK[1, 0] = topk.ids_TK[4] = -1
    truth = moe_oracle.reference(layer.truth, x.float(), topk)
    out = run_layer(layer, x.to(DEVICE), topk, h_scales)
    assert relative_error(out.cpu(), truth) < bound
    assert bool((out[4] == 0).all())


@pytest.mark.parametrize("missing", [0.1, 1.0])
def test_one_row_needs_no_sorting(missing: float) -> None:
    """Results as of sorted pairs, and the lists too, once gate_up has run."""
    layer = Layer.random(4, 64, 32, "fp32", torch.float32)
    ids, weights = draw_ids(1, 9, 7, missing), torch.rand(1, 7, device=DEVICE)
    ids = ids.masked_fill(ids >= 4, -1)  # of experts elsewhere
    load = torch.ones(4, dtype=torch.int64, device=DEVICE)
    groups = sort.group_pairs(ids, layer.w2, load)
    assert groups.ids_K is not None
    x = layer.rows(1)
    y = torch.full((7, 64), torch.nan, device=DEVICE)
    h = poisoned(layer, 7, False)
    experts.gate_up_down(x, layer.feed_forward, groups, weights, h, y)
    sorted_groups = sort.sort_pairs(ids, 4, groups.block)
    expected = twin("gate_up_down")(
        x, layer.feed_forward, sorted_groups, weights, h, torch.full_like(y, torch.nan)
    )
    known = (ids.flatten() >= 0).nonzero().flatten()
    compare(y, expected, known, 1e-5)
    assert load.tolist() == (sorted_groups.count_E + 1).tolist()
    used = int(sorted_groups.num_tiles_1)
    for name in ("order_P", "first_E", "count_E", "num_tiles_1", "counters"):
        assert torch.equal(getattr(groups, name), getattr(sorted_groups, name)), name
    for name in ("tile_expert_X", "tile_place_X"):
        assert torch.equal(getattr(groups, name)[:used], getattr(sorted_groups, name)[:used]), name


def test_more_rows_are_sorted() -> None:
    layer = Layer.random(4, 64, 32, "fp32", torch.float32)
    ids = draw_ids(2, 4, 2)
    groups = sort.group_pairs(ids, layer.w2)
    assert groups.ids_K is None and groups.block == 16
    expected = twin("group_pairs")(ids, layer.w2)
    assert torch.equal(groups.count_E, expected.count_E)


@pytest.mark.parametrize("format, dtype", [("fp32", torch.float32), ("fp8_block", torch.float16)])
def test_both_products_in_one_kernel(format: str, dtype: torch.dtype) -> None:
    """The same bits as two kernels give, twice: the counters are zeros again."""
    layer = Layer.random(3, 128, 128, format, dtype)
    quantised = format in FP8
    block_k = 128 if quantised else 64
    groups = sort.sort_pairs(draw_ids(11, 3, 2), 3, 16)
    weights = torch.rand(11, 2, device=DEVICE)
    x = layer.rows(11)
    configs = TileConfig(16, 128, block_k), TileConfig(16, 64, 128)
    h = poisoned(layer, groups.num_places, quantised)
    y = torch.full((22, 128), torch.nan, device=DEVICE, dtype=dtype)
    experts_small.gate_up_small(x, layer.w13, groups, layer.activation, h, configs[0])
    expected = experts_small.down_small(h, layer.w2, groups, weights, y.clone(), configs[1])
    for _ in range(2):
        h = poisoned(layer, groups.num_places, quantised)
        args = (x, layer.feed_forward, groups, weights, h, y.clone())
        out = experts_small.gate_up_down_small(
            *args, ExpertsPlan("small", 16, *configs, fused=True)
        )
        assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert groups.counters is not None and not bool(groups.counters.any())


SHAPES = {"qwen3_30b": (128, 8, 2048, 768), "dsv3_ep8": (32, 1, 7168, 2048), "odd": (5, 3, 200, 72)}
CASES = [
    *((format, shape, rows, False) for format in ("bf16", "fp8_block") for shape in SHAPES
      for rows in (1, 33, 512)),
    *((format, shape, rows, True) for format in ("bf16", "fp8_block") for shape in SHAPES
      for rows in (1, 33)),
    *((format, "odd", 33, False) for format in FP8),
]  # fmt: skip


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("format, shape, rows, fused", CASES)
def test_realistic_sizes(
    format: str, shape: str, rows: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the configurations guessed for them; with all rows on the same experts too."""
    num_experts, top_k, hidden, inner = SHAPES[shape]
    layer = gpu_layer(num_experts, hidden, inner, format)
    device = layer.w2.planes["values"].device
    sizes = (format, num_experts, hidden, inner, rows * top_k)
    quantised = tuning.quantises_inner(*sizes, device)
    plan = tuning.guess(
        tuning.device_facts(device), ExpertsShape(*sizes[:4]), tuning.bucket(sizes[4])
    )
    monkeypatch.setattr(tuning, "plan_for", lambda *_: replace(plan, fused=fused))
    if plan.implementation != "small":
        pytest.skip("many rows")
    for ids in (draw_ids(rows, num_experts, top_k), one_for_all(rows, num_experts, top_k)):
        x = torch.randn(rows, hidden, device=DEVICE).bfloat16()
        weights = torch.rand(rows, top_k, device=DEVICE)
        rows_x = contract.operand(Rows(x), layer.w13) if quantised else Rows(x)
        groups = sort.sort_pairs(ids, num_experts, plan.block)
        h = poisoned(layer, groups.num_places, quantised)
        y = torch.full((ids.numel(), hidden), torch.nan, device=DEVICE, dtype=torch.bfloat16)
        args = (rows_x, layer.feed_forward, groups, weights)
        experts.gate_up_down(*args, h, y)
        expected_h = poisoned(layer, groups.num_places, quantised)
        expected = twin("gate_up_down")(*args, expected_h, torch.full_like(y, torch.nan))
        places = written(groups)
        compare(y, expected, groups.order_P[places].long(), 3e-2 if format in FP8 else 1e-2)
        assert groups.counters is not None and not bool(groups.counters.any())


def one_for_all(rows: int, num_experts: int, top_k: int) -> Tensor:
    ids = draw_ids(rows, num_experts, top_k, missing=0.0)
    return ids[:1].expand(rows, top_k).contiguous()


def gpu_layer(num_experts: int, hidden: int, inner: int, format: str) -> Layer:
    """Made on the GPU: a CPU takes minutes to draw and encode so many numbers. Every expert is the
    first one with its bytes shifted and its scales changed."""

    def plane_of_all(name: str, plane: Tensor) -> Tensor:
        if name == "scales":
            return torch.stack([plane * (1 + 0.1 * (e % 7)) for e in range(num_experts)])
        whole = plane.view(torch.uint8 if plane.element_size() == 1 else torch.int16)
        return torch.stack([whole.roll(e, -1) for e in range(num_experts)]).view(plane.dtype)

    def matrices(parts: int, rows: int, columns: int) -> Matrices:
        one = torch.randn(parts, rows, columns, device=DEVICE) * columns**-0.5
        planes = WEIGHT_FORMATS[format].encode(one).items()
        return Matrices(
            format,
            {name: plane_of_all(name, plane) for name, plane in planes},
            (num_experts, parts * rows, columns),
            parts,
        )

    w13, w2 = matrices(2, inner, hidden), matrices(1, hidden, inner)
    truth = moe_oracle.Experts(*(torch.empty(0) for _ in range(3)))
    return Layer(truth, w13, w2, SwigluSpec(), torch.bfloat16)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("fused", [False, True])
def test_a_captured_layer_follows_its_inputs(
    format: str, rows: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other rows and experts in the same graph; many layers behind each other, as kernels that
    start early could overtake each other, give the same bits as one by itself."""
    num_experts, top_k, hidden, inner = SHAPES["qwen3_30b"]
    layer = gpu_layer(num_experts, hidden, inner, format)
    device = layer.w2.planes["values"].device
    shape = ExpertsShape(format, num_experts, hidden, inner)
    plan = tuning.guess(tuning.device_facts(device), shape, tuning.bucket(rows * top_k))
    for module in (tuning, sort):
        monkeypatch.setattr(module, "plan_for", lambda *_: replace(plan, fused=fused))
    x = torch.empty(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.zeros(rows, top_k, device=DEVICE, dtype=torch.int32)
    # A layer's answers grow with the square of its rows: of eight layers none may overflow.
    weights = torch.rand(rows, top_k, device=DEVICE) / 32

    def once(x_RH: Tensor) -> Tensor:
        groups = sort.group_pairs(ids, layer.w2)
        h = Rows(torch.empty(ids.numel(), inner, device=DEVICE, dtype=torch.bfloat16))
        y = torch.empty(ids.numel(), hidden, device=DEVICE, dtype=torch.bfloat16)
        experts.gate_up_down(Rows(x_RH), layer.feed_forward, groups, weights, h, y)
        return sort.sum_pairs(y, ids, torch.empty_like(x_RH), x_RH)

    def draw() -> None:
        x.normal_()
        ids.copy_(draw_ids(rows, num_experts, top_k))

    draw()
    once(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x
        for _ in range(8):
            out = once(out)
    for _ in range(5):
        draw()
        graph.replay()
        expected = x
        for _ in range(8):
            expected = once(expected)
            torch.cuda.synchronize()
        assert bool(out.isfinite().all())
        assert torch.equal(out, expected)
