"""The GPU's MoE layer, on a GPU if there is one, else with the torch twins of its kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moesaic.core.step import PREFILL
from moesaic.kernels.experts import PairSum, summed
from moesaic.kernels.tuning import block_for, quantises_inner
from moesaic.layers.module import MatrixSlot
from moesaic.moe.activations import Swiglu
from moesaic.moe.backends import load_backends
from moesaic.moe.context import DTYPE_NAMES, MoeContext
from moesaic.moe.expert_load import DeviceCounters, SlotLoad
from moesaic.moe.formats import (
    LowLatencyCombineInput,
    LowLatencyDispatchOutput,
    NormalDispatchOutput,
    RowsCombineInput,
    StandardDispatchOutput,
    TopKOutput,
)
from moesaic.moe.layer import MAX_DEFERRED_ROWS, FusedMoE
from moesaic.moe.permute import POOL
from moesaic.moe.placement import EpLayout, Placement, SlotMap
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from moesaic.moe.quant.weights import WEIGHT_FORMATS, ExpertMatrix, WeightFormat, int4_format
from moesaic.moe.registry import (
    A2A_REGISTRY,
    RUNNER_REGISTRY,
    MoeProblem,
    provider_name,
    resolve,
    supports,
)
from moesaic.moe.runner.base import (
    ExpertWeights,
    MoeRunner,
    MoeRunnerConfig,
    RunContext,
    Workspace,
)
from moesaic.moe.runner.device.sorted_pairs import (
    SortedPairsCore,
    kernel_format,
    post_permute_pairs,
    pre_permute_pairs,
)
from moesaic.moe.runner.device.torch_grouped import TorchGroupedCore, fits
from moesaic.observe.spans import Spans
from tests.kernels.triton_cases import DEVICE, GPU, relative_error
from tests.moe_bounds import Numerics, expected, held
from tests.moe_oracle import Experts, config_of, random_topk

load_backends()
E, H, INNER, K = 5, 256, 128, 2
DTYPE = torch.bfloat16 if GPU else torch.float32
EXPERTS = Experts.random(E, H, INNER)
CASES = [
    (runner.name, weights)
    for runner in RUNNER_REGISTRY.values()
    for weights in runner.weights
    if weights not in ("bf16", "fp16", "fp32") or weights == DTYPE_NAMES[DTYPE]
]


def numerics_of(format: WeightFormat, pairs: int, payload: str | None = None) -> Numerics:
    """The rounding of a GPU: rows are rounded once, to the activation type of the weights.
    Between the products they are rounded to the layer's type, unless the first product quantises
    its sums."""
    activation = None if format.activation is None else PAYLOAD_FORMATS[format.activation]
    sent = PAYLOAD_FORMATS[payload or format.activation or DTYPE_NAMES[DTYPE]]
    at_once = quantises_inner(kernel_format(format), E, H, INNER, pairs, torch.device(DEVICE))
    inner = None if at_once else DTYPE
    return Numerics(format, sent, activation, DTYPE, ep=1, moe_tp=1, inner=inner)


def make_layer(
    weights: WeightFormat, runner: str = "auto", payload: str = "auto", **options: bool | int
) -> FusedMoE:
    name = DTYPE_NAMES[DTYPE]
    problem = MoeProblem(runner=runner, payload=payload, weights=weights, dtype=name, device="cuda")
    context = MoeContext.make(problem, DTYPE, **options)
    context = replace(context, workspace=Workspace(DEVICE))
    with torch.device(DEVICE):
        layer = FusedMoE(config_of(EXPERTS, K), context)
    for slot in layer.slots(""):
        assert isinstance(slot, MatrixSlot)
        for plane, values in slot.format.encode(EXPERTS.matrix(slot.name)).items():
            slot.into[plane].copy_(values)
    return layer


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def forward(layer: FusedMoE, x_TH: Tensor, topk: TopKOutput, ids: torch.dtype) -> Tensor:
    there = TopKOutput(topk.ids_TK.to(DEVICE, ids), topk.weights_TK.to(DEVICE))
    y_TH = layer(x_TH.to(DEVICE), there)
    assert y_TH.dtype == DTYPE and y_TH.shape == x_TH.shape
    return y_TH.cpu()


def routed(count: int, how: str) -> TopKOutput:
    topk = random_topk(count, E, K, seed=count)
    if how == "one takes all":
        topk.ids_TK[:, 0] = 3
        topk.ids_TK[:, 1] = -1
    if how == "some are nobody's":
        topk.ids_TK[::2, 1] = -1
        topk.ids_TK[5 % count] = -1
    return topk


def distance(y_TH: Tensor, x_TH: Tensor, topk: TopKOutput, numerics: Numerics) -> float:
    """The distance from an oracle that rounds where the layer does. The layer multiplies quantised
    values and scales and never writes their products in its own type."""
    exact = replace(numerics, on_grid=True, dtype=torch.float32)
    return relative_error(y_TH, expected(held(EXPERTS, exact), x_TH, topk, exact).exact)


def agrees(y_TH: Tensor, x_TH: Tensor, topk: TopKOutput, numerics: Numerics) -> None:
    """Asserts that each number is within the bound of its formats, and all together are near the
    oracle that rounds where the layer does."""
    truth = expected(held(EXPERTS, numerics), x_TH, topk, numerics)
    assert ((y_TH.double() - truth.exact).abs() <= truth.bound).all()
    assert distance(y_TH, x_TH, topk, numerics) < (1e-2 if GPU else 1e-6)


@pytest.mark.parametrize(("runner", "weights"), CASES)
def test_every_runner_and_format(runner: str, weights: str) -> None:
    format = WEIGHT_FORMATS[weights]
    layer = make_layer(format, runner)
    assert isinstance(layer.runner.core, SortedPairsCore) and layer.runner.device == "cuda"
    x_TH, topk = tokens(9), routed(9, "some are nobody's")
    agrees(
        forward(layer, x_TH, topk, torch.int64),
        x_TH,
        topk,
        numerics_of(format, topk.ids_TK.numel()),
    )


@pytest.mark.parametrize("count", [1, 9, 300])
@pytest.mark.parametrize("weights", ["fp8_block", "fp8_channel", "fp8_tensor", "nvfp4"])
def test_weights_alone(weights: str, count: int) -> None:
    """Weight-only formats round neither the rows nor the numbers between the products."""
    format = replace(WEIGHT_FORMATS[weights], activation=None)
    layer = make_layer(format)
    assert layer.dispatcher.config.payload.name == DTYPE_NAMES[DTYPE]
    x_TH, topk = tokens(count), routed(count, "spread")
    y_TH = forward(layer, x_TH, topk, torch.int64)
    agrees(y_TH, x_TH, topk, numerics_of(format, topk.ids_TK.numel()))
    rounded = numerics_of(WEIGHT_FORMATS[weights], topk.ids_TK.numel())
    assert distance(y_TH, x_TH, topk, rounded) > 1.5e-2


@pytest.mark.parametrize("weights", ["fp8_block", "fp8_channel", "int8_w8a8", "nvfp4"])
def test_neighbouring_scales_that_change_places_show(weights: str) -> None:
    """Swapped scales exceed the tolerance of `agrees` by far, although all scales are similar."""
    format = WEIGHT_FORMATS[weights]
    layer = make_layer(format)
    x_TH, topk = tokens(9), routed(9, "spread")
    for matrix in (layer.weights.w13_eJH, layer.weights.w2_eHI):
        scales = matrix.planes["scales"]
        bits = scales.view(torch.uint8 if scales.element_size() == 1 else torch.int32)
        right = bits.clone()
        bits.copy_(right.flip(-2 if bits.shape[-1] == 1 else -1))
        y_TH = forward(layer, x_TH, topk, torch.int64)
        assert distance(y_TH, x_TH, topk, numerics_of(format, 9 * K)) > 2e-2
        bits.copy_(right)
    agrees(forward(layer, x_TH, topk, torch.int64), x_TH, topk, numerics_of(format, 9 * K))


@pytest.mark.parametrize("how", ["spread", "one takes all", "some are nobody's"])
@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("deterministic", [False, True])
def test_routing(how: str, count: int, deterministic: bool) -> None:
    format = int4_format(32, symmetric=False)
    layer = make_layer(format, deterministic=deterministic)
    x_TH, topk = tokens(count), routed(count, how)
    y_TH = forward(layer, x_TH, topk, torch.int32)
    agrees(y_TH, x_TH, topk, numerics_of(format, topk.ids_TK.numel()))
    nobody = (topk.ids_TK < 0).all(1)
    assert y_TH[nobody].eq(0).all()
    count_E = [int((topk.ids_TK == e).sum()) for e in range(E)]
    assert layer.load.tokens == count_E
    forward(layer, x_TH, topk, torch.int32)
    assert layer.load.tokens == [2 * n for n in count_E]


@pytest.mark.parametrize("weights", ["fp8_block", "int8_w8a8", "nvfp4", DTYPE_NAMES[DTYPE]])
def test_no_tokens(weights: str) -> None:
    layer = make_layer(WEIGHT_FORMATS[weights])
    y_TH = forward(layer, tokens(0), random_topk(0, E, K, 0), torch.int64)
    assert y_TH.shape == (0, H) and layer.load.tokens == [0] * E


@pytest.mark.parametrize(
    ("weights", "payload"),
    [
        ("fp8_block", "fp8"),
        ("int8_w8a8", "int8"),
        ("nvfp4", "nvfp4"),
        ("mxfp4", "mxfp4"),
        ("int8_w8a16", "fp8"),
    ],
)
def test_payloads_that_were_asked_for(weights: str, payload: str) -> None:
    """A payload is multiplied as it arrives if the weights support that, else decoded."""
    format = WEIGHT_FORMATS[weights]
    layer = make_layer(format, payload=payload)
    assert layer.dispatcher.config.payload.name == payload
    x_TH, topk = tokens(7), routed(7, "spread")
    agrees(forward(layer, x_TH, topk, torch.int64), x_TH, topk, numerics_of(format, 7 * K, payload))


def test_calibrated_scales_of_nvfp4() -> None:
    """A power of two that keeps all group scales normal changes nothing; a scale that clips large
    rows does."""
    layer = make_layer(WEIGHT_FORMATS["nvfp4"])
    x_TH, topk = tokens(12), routed(12, "spread")
    found = []
    for scales in ([1 / 256, 1 / 64], [1 / 128, 1 / 32], [1 / 16384, 1 / 64]):
        layer.store.input_scales_e2.copy_(torch.tensor(scales))
        layer.sync_input_scales()
        found.append(forward(layer, x_TH, topk, torch.int64))
    assert torch.equal(found[0], found[1])
    assert relative_error(found[2], found[0]) > 0.5


def test_gpt_oss_biases_and_limit() -> None:
    """Compares with float64; the biases are large enough to be clamped."""
    torch.manual_seed(0)
    layer = make_layer(WEIGHT_FORMATS[DTYPE_NAMES[DTYPE]])
    b13, b2 = torch.randn(E, 2 * INNER).to(DTYPE) * 4, torch.randn(E, H).to(DTYPE)
    layer.store.weights = replace(layer.weights, b13_eJ=b13.to(DEVICE), b2_eH=b2.to(DEVICE))
    config = replace(layer.runner.config, activation=Swiglu(1.702, 7.0))
    layer.runner = MoeRunner("none", "triton", config, "cuda")
    x_TH, topk = tokens(9), routed(9, "spread")
    y_TH = forward(layer, x_TH, topk, torch.int64)
    (stored,) = held(EXPERTS, numerics_of(WEIGHT_FORMATS[DTYPE_NAMES[DTYPE]], 9 * K))
    truth = torch.zeros(9, H, dtype=torch.float64)
    for t, k in ((t, k) for t in range(9) for k in range(K)):
        e = int(topk.ids_TK[t, k])
        x = x_TH[t].double()
        gate = (stored.gate_EIH[e] @ x + b13[e, :INNER].double()).clamp(max=7.0)
        up = (stored.up_EIH[e] @ x + b13[e, INNER:].double()).clamp(-7.0, 7.0) + 1
        y = stored.down_EHI[e] @ (gate * torch.sigmoid(1.702 * gate) * up) + b2[e].double()
        truth[t] += topk.weights_TK[t, k].double() * y
    assert relative_error(y_TH, truth) < (1e-2 if GPU else 1e-5)


def test_rows_of_other_ranks() -> None:
    """`deepep_normal`: results are written to the given buffer."""
    layer = make_layer(WEIGHT_FORMATS["fp8_block"], "deep_gemm")
    x_TH, topk = tokens(11), routed(11, "some are nobody's")
    want = forward(layer, x_TH, topk, torch.int64)
    payload = PAYLOAD_FORMATS["fp8"].encode(x_TH.to(DEVICE))
    ids, weights = topk.ids_TK.to(DEVICE), topk.weights_TK.to(DEVICE)
    out = torch.full((20, H), torch.nan, dtype=DTYPE, device=DEVICE)
    rows = NormalDispatchOutput("handle", payload, ids, weights, [], y_OH=out)
    result = layer.runner.run(rows, layer.weights, layer.context.workspace)
    assert isinstance(result, RowsCombineInput) and result.handle == "handle"
    assert torch.equal(result.y_RH.cpu(), want)
    assert torch.equal(out[:11].cpu(), want) and out[11:].isnan().all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_sums_that_are_left_to_the_norm(deterministic: bool) -> None:
    """The norm sums the pairs of few rows if no hook reads the results; the bits are those of
    `forward`."""
    layer = make_layer(WEIGHT_FORMATS[DTYPE_NAMES[DTYPE]], deterministic=deterministic)
    for count, left in ((0, True), (7, True), (MAX_DEFERRED_ROWS + 1, False)):
        topk = routed(count, "some are nobody's") if count else random_topk(0, E, K, seed=0)
        there = TopKOutput(topk.ids_TK.to(DEVICE), topk.weights_TK.to(DEVICE))
        x_TH = tokens(count).to(DEVICE)
        y = layer(x_TH, there, PREFILL, defer_reduce=True)
        assert isinstance(y, PairSum) == (left and not deterministic) and len(y) == count
        assert torch.equal(summed(y), layer(x_TH, there))
    few = TopKOutput(there.ids_TK[:7], there.weights_TK[:7])
    handle = layer.dispatcher.register_hook("post_combine", lambda dispatcher, y_TH: None)
    assert isinstance(layer(x_TH[:7], few, PREFILL, defer_reduce=True), Tensor)
    handle.remove()


@pytest.mark.parametrize("count", [1, 11])
def test_one_expert_a_token(count: int) -> None:
    """The last product writes to the given buffer; rows without an expert become zeros."""
    format = WEIGHT_FORMATS[DTYPE_NAMES[DTYPE]]
    layer, x_TH, both = make_layer(format), tokens(count), routed(count, "spread")
    both.ids_TK[2::3] = -1
    topk = TopKOutput(both.ids_TK[:, :1].contiguous(), both.weights_TK[:, :1].contiguous())
    payload = PAYLOAD_FORMATS[DTYPE_NAMES[DTYPE]].encode(x_TH.to(DEVICE))
    out = torch.full((20, H), torch.nan, dtype=DTYPE, device=DEVICE)
    ids, weights = topk.ids_TK.to(DEVICE), topk.weights_TK.to(DEVICE)
    rows = StandardDispatchOutput("handle", payload, ids, weights, y_OH=out)
    result = layer.runner.run(rows, layer.weights, layer.context.workspace)
    assert isinstance(result, RowsCombineInput) and result.y_RH.data_ptr() == out.data_ptr()
    assert out[count:].isnan().all() and (out[2:count:3] == 0).all()
    agrees(out[:count].cpu(), x_TH, topk, numerics_of(format, count))


@pytest.mark.parametrize("counts", [[0] * E, [3, 0, 24, 1, 17]])
@pytest.mark.parametrize(
    ("runner", "weights", "payload"),
    [
        ("deep_gemm", "fp8_block", "fp8"),
        ("flashinfer_cutedsl", "nvfp4", "nvfp4"),
        ("triton", "int8_w8a8", DTYPE_NAMES[DTYPE]),
    ],
)
def test_blocks(counts: list[int], runner: str, weights: str, payload: str) -> None:
    """`deepep_ll`: rows behind the filled ones are neither read nor written."""
    format = WEIGHT_FORMATS[weights]
    layer = make_layer(format, runner)
    x_eMH = torch.full((E, 24, H), 1e4, dtype=DTYPE)
    for slot, count in enumerate(counts):
        x_eMH[slot, :count] = tokens(count, seed=slot)
    y_eMH = torch.full_like(x_eMH, torch.nan, device=DEVICE)
    sent = PAYLOAD_FORMATS[payload].encode(x_eMH.to(DEVICE))
    count_e = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    rows = LowLatencyDispatchOutput("handle", sent, [], y_eMH, count_e=count_e)
    result = layer.runner.run(rows, layer.weights, layer.context.workspace)
    assert isinstance(result, LowLatencyCombineInput) and result.handle == "handle"
    assert result.count_e is not None and result.count_e.tolist() == counts
    assert rows.slot_rows(E) is None
    for slot, count in enumerate(counts):
        assert y_eMH[slot, count:].isnan().all()
        one = TopKOutput(torch.full((count, 1), slot), torch.ones(count, 1))
        y_MH = result.y_eMH[slot, :count].cpu()
        agrees(y_MH, x_eMH[slot, :count], one, numerics_of(format, E * 24)) if count else None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_products_of_torch(bias: bool, deterministic: bool) -> None:
    """Torch's grouped product of bfloat16 pairs equals ours; rows without an expert are
    poisoned."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    weights = ExpertWeights(
        ExpertMatrix(WEIGHT_FORMATS["bf16"], E, 2, INNER, H, dtype),
        ExpertMatrix(WEIGHT_FORMATS["bf16"], E, 1, H, INNER, dtype),
        torch.randn(E, 2 * INNER, device=DEVICE).to(dtype) if bias else None,
        torch.randn(E, H, device=DEVICE).to(dtype) if bias else None,
    )
    for matrix in (weights.w13_eJH, weights.w2_eHI):
        matrix.planes["values"].normal_().mul_(matrix.shape[2] ** -0.5)
        matrix.planes["values"] = matrix.planes["values"].to(DEVICE)
        matrix.plain = matrix.planes["values"].flatten(1, 2)
    topk = routed(23, "some are nobody's")
    topk.ids_TK[topk.ids_TK == 2] = 1  # expert 2 takes none
    x = PAYLOAD_FORMATS["bf16"].encode(torch.randn(23, H, device=DEVICE).to(dtype))
    ids, weights_RK = topk.ids_TK.to(DEVICE), topk.weights_TK.to(DEVICE)
    rows = StandardDispatchOutput("handle", x, ids, weights_RK)
    config = MoeRunnerConfig(E, H, INNER, K, dtype, deterministic=deterministic)
    found = []
    for core in (SortedPairsCore(config), TorchGroupedCore(config)):
        context = RunContext(config, core, weights, Workspace(DEVICE))
        inputs = pre_permute_pairs(rows, context)
        inputs.y_NH.fill_(torch.nan)
        outputs = core.run(inputs, weights, context.workspace)
        result = post_permute_pairs(outputs, inputs, rows, context)
        assert isinstance(result, RowsCombineInput) and result.pairs == deterministic
        valid = ids.flatten() >= 0 if deterministic else torch.ones(23, dtype=torch.bool)
        found.append(result.y_RH[valid.to(DEVICE)])
    assert relative_error(found[1], found[0]) < 1e-2


def test_cutlass_says_whose_products_it_takes() -> None:
    assert provider_name(RUNNER_REGISTRY["cutlass"].providers["cuda"]) == (
        "torch._grouped_mm for bf16, native for the rest"
    )
    assert provider_name(RUNNER_REGISTRY["cutlass"].providers["cpu"]) == "native"
    assert provider_name(RUNNER_REGISTRY["triton"].providers["cuda"]) == "native"
    w13, w2 = torch.empty(1, 8, 16).bfloat16(), torch.empty(1, 16, 4).bfloat16()
    assert not fits(w13, w2, 8) and fits(w13, w13, 8) and not fits(w13, w13, 0)


def test_an_activation_without_a_kernel_is_refused() -> None:
    config = MoeRunnerConfig(E, H, INNER, K, DTYPE, activation=lambda gate, up: gate * up)
    with pytest.raises(ValueError, match="has no kernel on a GPU"):
        SortedPairsCore(config)


def test_all_runners_take_what_comes_on_a_gpu() -> None:
    for runner in RUNNER_REGISTRY.values():
        assert set(POOL.formats_of(runner.name, "cuda")) == {*runner.layouts} - {"fused"}
        for weights in runner.weights:
            dtype = weights if weights in ("fp16", "fp32") else "bf16"
            problem = MoeProblem(
                runner=runner.name, weights=WEIGHT_FORMATS[weights], dtype=dtype, device="cuda"
            )
            assert supports(problem).ok
    for name, backend in A2A_REGISTRY.items():
        assert "cuda" in backend.providers
        assert all(supports(MoeProblem(a2a=name, device="cuda", ep=n, tp=n)).ok for n in (1, 4))


@pytest.mark.parametrize("deterministic", [False, True])
def test_pairs_that_others_will_sum(deterministic: bool) -> None:
    """Pairs stay unweighted in the given buffer; blocks are sized for the expected pairs."""
    layer = make_layer(WEIGHT_FORMATS[DTYPE_NAMES[DTYPE]], deterministic=deterministic)
    count, ep = 100, 4
    x_TH, topk = tokens(count).to(DEVICE), routed(count, "some are nobody's")
    ids = topk.ids_TK.to(DEVICE)
    y_NH = torch.full((count * K, H), torch.nan, dtype=DTYPE, device=DEVICE)
    x = PAYLOAD_FORMATS[DTYPE_NAMES[DTYPE]].encode(x_TH)
    all_pairs, expected = count * K, count * K // ep
    rows = StandardDispatchOutput("handle", x, ids, None, y_NH=y_NH, expected_pairs=expected)
    runner = layer.runner
    context = RunContext(runner.config, runner.core, layer.weights, Workspace(DEVICE))
    groups = pre_permute_pairs(rows, context).groups
    here = torch.device(DEVICE)
    if not deterministic:
        sizes = (DTYPE_NAMES[DTYPE], E, H, INNER)
        assert groups.block == block_for(*sizes, expected, here)
        assert groups.block < block_for(*sizes, all_pairs, here)
        assert groups.planned_places == expected and groups.num_places == all_pairs
    result = runner.run(rows, layer.weights, context.workspace)
    assert isinstance(result, RowsCombineInput) and result.pairs
    assert result.y_RH.data_ptr() == y_NH.data_ptr()
    weights_TK1 = topk.weights_TK.to(DEVICE).unsqueeze(2)
    weighted_TKH = result.y_RH.view(count, K, H).float() * weights_TK1
    total_TH = torch.where((ids >= 0).unsqueeze(2), weighted_TKH, 0.0).sum(1)
    plain_TH = forward(layer, tokens(count), topk, torch.int64)
    assert relative_error(total_TH.cpu(), plain_TH) < (1e-2 if GPU else 1e-6)


def test_nothing_is_encoded_to_travel_nowhere() -> None:
    choice = resolve(MoeProblem(weights=WEIGHT_FORMATS["fp8_block"], device="cuda"))
    assert choice.problem.payload == "bf16"
    assert "payload bf16: nothing travels: the runner makes fp8 of it" in choice.reasons
    assert resolve(MoeProblem(weights=WEIGHT_FORMATS["fp8_block"])).problem.payload == "fp8"


def test_load_is_counted_where_it_is_known() -> None:
    layer = make_layer(WEIGHT_FORMATS[DTYPE_NAMES[DTYPE]])
    accumulator = layer.load.on_device
    assert accumulator is not None and accumulator.device.type == DEVICE
    forward(layer, tokens(3), routed(3, "one takes all"), torch.int64)
    assert layer.load.tokens == [0, 0, 0, 3, 0] and layer.load.on_device is accumulator
    spans = layer.context.comm.spans
    spans.start()
    forward(layer, tokens(3), routed(3, "one takes all"), torch.int64)
    assert spans.count == 5 and layer.load.tokens == [0, 0, 0, 6, 0]
    forward(layer, tokens(1), routed(1, "one takes all"), torch.int32)  # a single row is not sorted
    assert layer.load.tokens == [0, 0, 0, 7, 0]
    layout = EpLayout(4, moe_tp_size=2, rank=1)
    other = SlotLoad(0, layout, Spans(), DeviceCounters())
    assert not other.counts and other.on_device is None


def test_replicas_where_the_ids_are() -> None:
    with torch.device(DEVICE):
        slot_map = SlotMap(Placement(4, (3, 2, 1, 0, 3)))
    ids = torch.tensor([[3, 0], [3, -1]], dtype=torch.int32, device=DEVICE)
    assert slot_map(ids).tolist() == [[0, 3], [4, -1]]


def test_workspaces_of_a_gpu_do_not_dangle() -> None:
    """A graph may hold an earlier buffer, so no other call gets it while it lives."""
    workspace = Workspace("meta")
    first = workspace.borrow("x", (2, 3), torch.float16)
    second = workspace.borrow("x", (2, 3), torch.float16)
    assert first.device.type == "meta" and first.shape == (2, 3) and first is not second
    assert workspace.nbytes == 0
    kept = Workspace()
    assert kept.borrow("x", (4,), DTYPE).data_ptr() == kept.borrow("x", (2,), DTYPE).data_ptr()
