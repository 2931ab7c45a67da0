"""The experts' products in every layout against a float64 einsum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from moesaic.kernels.cpu.rows import rank_within
from moesaic.moe.activations import Swiglu, silu_and_mul
from moesaic.moe.formats import (
    LowLatencyCombineInput,
    LowLatencyDispatchOutput,
    RowsCombineInput,
    StandardDispatchOutput,
    TopKOutput,
)
from moesaic.moe.quant.payload import PAYLOAD_FORMATS, Payload
from moesaic.moe.quant.weights import WEIGHT_FORMATS, ExpertMatrix
from moesaic.moe.runner.base import ExpertWeights, MoeRunnerConfig, RunContext, Workspace
from moesaic.moe.runner.host.grouped import SMALL_ROWS, SlotGroup, in_pieces, round_up, runs
from moesaic.moe.runner.host.layouts import (
    GroupedCore,
    LayoutPlan,
    pair_up,
    place_pairs,
    plan_standard,
    post_permute_blocks,
    post_permute_masked,
    post_permute_rows,
    pre_permute_blocks,
    pre_permute_masked,
    pre_permute_rows,
    weighted_sum,
)
from moesaic.moe.runner.native import LAYOUTS

E, H, INNER = 7, 24, 10
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def oracle(x: Tensor, topk: TopKOutput, weights: ExpertWeights, clamped: bool) -> Tensor:
    """Computes every expert on every token in float64, then the weighted sum of the chosen ones."""
    x = x.double()
    w13, w2 = weights.w13_eJH.plain, weights.w2_eHI.plain
    assert w13 is not None and w2 is not None
    gate_up = torch.einsum("th,ejh->tej", x, w13.double())
    if weights.b13_eJ is not None:
        gate_up = gate_up + weights.b13_eJ.double()
    gate, up = gate_up[..., :INNER], gate_up[..., INNER:]
    if clamped:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        hidden = gate * torch.sigmoid(1.702 * gate) * up
    else:
        hidden = gate * torch.sigmoid(gate) * up
    y = torch.einsum("tei,ehi->teh", hidden, w2.double())
    if weights.b2_eH is not None:
        y = y + weights.b2_eH.double()
    chosen = torch.zeros(len(x), E, dtype=torch.float64)
    known = topk.ids_TK >= 0
    rows = torch.arange(len(x)).unsqueeze(1).expand_as(topk.ids_TK)[known]
    chosen.index_put_((rows, topk.ids_TK[known]), topk.weights_TK[known].double(), accumulate=True)
    return torch.einsum("te,teh->th", chosen, y)


def noise(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def matrix(values_ENK: Tensor, parts: int) -> ExpertMatrix:
    count, rows, cols = values_ENK.shape
    dtype = values_ENK.dtype
    made = ExpertMatrix(WEIGHT_FORMATS[NAMES[dtype]], count, parts, rows // parts, cols, dtype)
    made.planes["values"].copy_(values_ENK.unflatten(1, (parts, -1)))
    return made


def make_weights(dtype: torch.dtype, clamped: bool) -> ExpertWeights:
    return ExpertWeights(
        matrix(noise(E, 2 * INNER, H, dtype=dtype) * H**-0.5, 2),
        matrix(noise(E, H, INNER, dtype=dtype) * INNER**-0.5, 1),
        noise(E, 2 * INNER, dtype=dtype) * 4 if clamped else None,
        noise(E, H, dtype=dtype) if clamped else None,
    )


def context_of(
    weights: ExpertWeights, top_k: int, clamped: bool = False, deterministic: bool = False
) -> RunContext:
    config = MoeRunnerConfig(
        num_experts=E,
        hidden_size=H,
        intermediate_size=INNER,
        top_k=top_k,
        dtype=weights.w13_eJH.dtype,
        activation=Swiglu(1.702, 7.0) if clamped else silu_and_mul,
        deterministic=deterministic,
    )
    return RunContext(config, GroupedCore(config), weights, Workspace())


def run_experts(x: Tensor, topk: TopKOutput, context: RunContext, layout: str) -> Tensor:
    """Computes the sum over k of weight * expert(x) in a layout; sums pairs itself."""
    payload = PAYLOAD_FORMATS[NAMES[x.dtype]].encode(x)
    rows = StandardDispatchOutput("handle", payload, topk.ids_TK, topk.weights_TK)
    inputs = pre_permute_rows(LAYOUTS[layout], rows, context)
    counts = [int((topk.ids_TK == slot).sum()) for slot in range(E)]
    assert inputs.groups == LAYOUTS[layout](counts, context.config.rounding).groups
    outputs = context.core.run(inputs, context.weights, context.workspace)
    result = post_permute_rows(outputs, inputs, rows, context)
    assert isinstance(result, RowsCombineInput) and result.handle == "handle"
    assert result.pairs == context.config.deterministic
    if not result.pairs:
        return result.y_RH
    places = torch.arange(len(result.y_RH))
    return weighted_sum(result.y_RH, places, topk.weights_TK, topk.ids_TK >= 0)


def route(tokens: int, top_k: int, how: str) -> TopKOutput:
    scores = torch.rand(tokens, E)
    if how == "one takes all":
        scores[:, 3] = 2.0
    if how == "one takes none":
        scores[:, 0] = -1.0
    ids = scores.topk(top_k).indices
    return TopKOutput(ids, torch.rand(tokens, top_k))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("how", ["spread", "one takes all", "one takes none"])
@pytest.mark.parametrize("top_k", [1, 3, E])
@pytest.mark.parametrize(
    "tokens", [0, 1, 63, 200, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 31))]
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_experts_equal_the_oracle(
    tokens: int,
    top_k: int,
    how: str,
    clamped: bool,
    dtype: torch.dtype,
    bound: float,
    layout: str,
) -> None:
    torch.manual_seed(tokens * 100 + top_k)
    if how == "one takes none" and top_k == E:
        pytest.skip("with all experts chosen nobody is left out")
    weights, topk = make_weights(dtype, clamped), route(tokens, top_k, how)
    x = torch.randn(tokens, H).to(dtype)
    expected = oracle(x, topk, weights, clamped)
    scale = expected.abs().max().item() if tokens else 1.0
    for deterministic in (False, True):
        context = context_of(weights, top_k, clamped, deterministic)
        out = run_experts(x, topk, context, layout)
        assert out.dtype == dtype and out.shape == (tokens, H)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=bound * scale)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_pairs_of_nobody_add_nothing(layout: str, deterministic: bool) -> None:
    """Covers rows with no id, rows with some ids, and a batch without any id."""
    torch.manual_seed(3)
    weights, topk = make_weights(torch.float32, clamped=True), route(70, 3, "spread")
    topk.ids_TK[::2, 1] = -1
    topk.ids_TK[5] = -1
    x = torch.randn(70, H)
    x[5] = torch.nan  # it has no expert, so nothing reads it
    context = context_of(weights, 3, clamped=True, deterministic=deterministic)
    out = run_experts(x, topk, context, layout)
    x[5] = 0.0
    expected = oracle(x, topk, weights, clamped=True)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)
    assert out[5].eq(0).all()
    topk.ids_TK.fill_(-1)
    assert run_experts(x, topk, context, layout).eq(0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_idle_experts_are_not_read(layout: str) -> None:
    weights = make_weights(torch.float32, clamped=False)
    topk = TopKOutput(torch.tensor([[1, 5], [5, 2]]), torch.rand(2, 2))
    x = torch.randn(2, H)
    expected = oracle(x, topk, weights, clamped=False)
    for idle in (0, 3, 4, 6):
        weights.w13_eJH.planes["values"][idle] = torch.nan
        weights.w2_eHI.planes["values"][idle] = torch.nan
    out = run_experts(x, topk, context_of(weights, 2), layout)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_that_is_not_finite_spoils_no_other(layout: str) -> None:
    weights, topk = make_weights(torch.float32, clamped=False), route(40, 2, "one takes all")
    context = context_of(weights, 2)
    x = torch.randn(40, H)
    clean = run_experts(x, topk, context, layout).clone()
    x[7] = torch.nan
    dirty = run_experts(x, topk, context, layout)
    others = torch.arange(40) != 7
    assert dirty[7].isnan().all()
    torch.testing.assert_close(dirty[others], clean[others], atol=0, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_bits_do_not_depend_on_the_batch(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(11)
    weights, topk = make_weights(dtype, clamped=False), route(150, 3, "one takes all")
    context = context_of(weights, 3, deterministic=True)
    x = torch.randn(150, H).to(dtype)
    together = run_experts(x, topk, context, layout).clone()
    for part in (slice(0, 1), slice(9, 50), slice(50, 150)):
        some = TopKOutput(topk.ids_TK[part], topk.weights_TK[part])
        assert torch.equal(run_experts(x[part], some, context, layout), together[part])


@dataclass(frozen=True)
class Block:
    """Rows in blocks of fixed size, with garbage behind the filled ones."""

    rows: LowLatencyDispatchOutput
    expected_eMH: Tensor


def make_block(counts: list[int], context: RunContext) -> Block:
    dtype = context.config.dtype
    x_eMH = torch.randn(E, 2 * SMALL_ROWS, H).to(dtype)
    y_eMH = torch.full_like(x_eMH, torch.nan)
    expected_eMH = torch.zeros(x_eMH.shape, dtype=torch.float64)
    for slot, count in enumerate(counts):
        one = TopKOutput(torch.full((count, 1), slot), torch.ones(count, 1))
        expected_eMH[slot, :count] = oracle(x_eMH[slot, :count], one, context.weights, False)
        x_eMH[slot, count:] = torch.nan
    payload = Payload(x_eMH, None, PAYLOAD_FORMATS[NAMES[dtype]])
    return Block(LowLatencyDispatchOutput("handle", payload, counts, y_eMH), expected_eMH)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("layout", ["as they came", *LAYOUTS])
@pytest.mark.parametrize(
    "counts", [[0] * E, [1] + [0] * (E - 1), [3, 0, 64, 33, 32, 0, 1], [64] * E]
)
def test_blocks_equal_the_oracle(counts: list[int], layout: str, deterministic: bool) -> None:
    torch.manual_seed(5)
    context = context_of(make_weights(torch.float32, clamped=False), 1, False, deterministic)
    block = make_block(counts, context)
    pre, post = pre_permute_masked, post_permute_masked
    if layout != "as they came":
        pre, post = partial(pre_permute_blocks, LAYOUTS[layout]), post_permute_blocks
    inputs = pre(block.rows, context)
    outputs = context.core.run(inputs, context.weights, context.workspace)
    result = post(outputs, inputs, block.rows, context)
    assert isinstance(result, LowLatencyCombineInput) and result.handle == "handle"
    for slot, count in enumerate(counts):
        torch.testing.assert_close(
            result.y_eMH[slot, :count].double(),
            block.expected_eMH[slot, :count],
            rtol=0,
            atol=1e-5,
        )


def test_places_of_the_docstring() -> None:
    """The docstring's example and its rows: rows 3 and 5 are padding, which repeats row 0."""
    slots_N, rows_N, valid = pair_up(torch.tensor([[0, 2], [0, 1]]))
    assert (slots_N.tolist(), rows_N.tolist(), valid) == ([0, 2, 0, 1], [0, 0, 1, 1], None)
    places_N, places = place_pairs(slots_N, 3, plan_standard, False)
    assert places_N.tolist() == [0, 4, 1, 2]
    groups = [SlotGroup(range(2), 0, 2, 2), SlotGroup(range(2, 3), 4, 2, 2)]
    assert places == LayoutPlan([0, 2, 4], 6, groups)

    x = torch.arange(2.0).unsqueeze(1).expand(2, H).contiguous()
    rows = StandardDispatchOutput(
        None, PAYLOAD_FORMATS["fp32"].encode(x), torch.tensor([[0, 2], [0, 1]]), torch.ones(2, 2)
    )
    context = context_of(make_weights(torch.float32, clamped=False), 2)
    inputs = pre_permute_rows(LAYOUTS["standard"], rows, context)
    assert inputs.x_YH[:, 0].tolist() == [0, 1, 1, 0, 0, 0]


def test_pairs_without_those_of_nobody() -> None:
    slots_N, rows_N, valid_RK = pair_up(torch.tensor([[4, -1], [-1, -1], [2, 4]]))
    assert (slots_N.tolist(), rows_N.tolist()) == ([4, 2, 4], [0, 2, 2])
    assert valid_RK is not None
    assert valid_RK.tolist() == [[True, False], [False, False], [True, True]]


def test_runs_of_the_docstring() -> None:
    assert runs([1, 2, 3, 7, 8]) == [range(1, 3), range(3, 4), range(7, 9)]
    assert runs([]) == []


def test_rank_within_of_the_docstring() -> None:
    assert rank_within(torch.tensor([5, 3, 5, 5])).tolist() == [0, 0, 1, 2]
    assert rank_within(torch.empty(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize(
    ("rows", "rounded"),
    [(0, 0), (1, 2), (2, 2), (3, 4), (17, 32), (32, 32), (33, 64), (64, 64), (65, 96)],
)
def test_rounding_of_rows(rows: int, rounded: int) -> None:
    assert round_up(rows) == rounded


def test_pieces_cover_the_rows_of_their_groups() -> None:
    groups = [SlotGroup(range(2, 4), 0, 32, 64), SlotGroup(range(5, 6), 128, 96, 96)]
    assert list(in_pieces(groups)) == [
        groups[0],
        SlotGroup(range(5, 6), 128, 32, 32),
        SlotGroup(range(5, 6), 160, 32, 32),
        SlotGroup(range(5, 6), 192, 32, 32),
    ]


def test_few_shapes_occur() -> None:
    """Any routing gives runs and rows that are powers of two or multiples of 32."""
    torch.manual_seed(0)
    shapes, rows = set(), set()
    for tokens in range(1, 400, 3):
        ids = torch.rand(tokens, 64).topk(4).indices
        slots_N, rows_N, _ = pair_up(ids)
        places_N, places = place_pairs(slots_N, 64, plan_standard, False)
        small = [group for group in places.groups if group.rows <= SMALL_ROWS]
        shapes |= {(len(group.slots), group.rows) for group in small}
        assert len({group.rows for group in small}) <= 1
        rows |= {group.rows for group in places.groups if group.rows > SMALL_ROWS}
        assert rows_N.tolist() == torch.arange(tokens).repeat_interleave(4).tolist()
        assert len(set(places_N.tolist())) == tokens * 4
        computed = slots_of_rows(places)
        assert [computed[place] for place in places_N.tolist()] == slots_N.tolist()
    assert {n & (n - 1) for shape in shapes for n in shape} == {0} and len(shapes) <= 7 * 6
    assert rows == {64}


def slots_of_rows(places: LayoutPlan) -> dict[int, int]:
    """The slot whose weights compute each row; asserts that no row has two."""
    found: dict[int, int] = {}
    for group in places.groups:
        for number, slot in enumerate(group.slots):
            start = group.start + number * group.stride
            for row in range(start, start + group.rows):
                assert row not in found and row < places.total
                found[row] = slot
    return found


def test_weighted_sum_by_its_definition() -> None:
    y = torch.tensor([[1.0], [10.0], [100.0]])
    weights = torch.tensor([[2.0, 3.0], [5.0, 7.0], [11.0, 13.0]])
    valid = torch.tensor([[True, True], [False, False], [False, True]])
    assert weighted_sum(y, torch.tensor([2, 0, 1]), weights, valid).tolist() == [[203], [0], [130]]
    all_pairs = torch.tensor([0, 1, 2, 0, 1, 2])
    assert weighted_sum(y, all_pairs, weights).tolist() == [[32], [507], [1410]]


def test_sixteen_bit_sums_keep_the_precision_of_the_weights() -> None:
    """1/3 in bfloat16 has an error of 1e-3; the second term brings the product within half a
    step."""
    y = torch.full((1, 4), 3.0, dtype=torch.bfloat16)
    third = torch.tensor([[1 / 3]])
    assert weighted_sum(y, torch.tensor([0]), third).tolist() == [[1.0] * 4]
