"""Routing: the Triton kernels against their twins, and these against moe.topk."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moesaic.kernels import routing as twins
from moesaic.kernels.norm import SumToNorm
from moesaic.kernels.routing import RouterWeights, TopKInputs
from moesaic.kernels.triton import routing as kernels
from moesaic.moe.placement import Placement, SlotMap
from moesaic.moe.topk import TopK, TopKConfig
from tests.kernels.triton_cases import DEVICE, GPU

V3 = TopKConfig(3, "sigmoid", True, 2.5, num_groups=4, topk_groups=2, group_score="top2")
SPECS = {
    "qwen3": (12, TopKConfig(4, renormalize=True), False),
    "mixtral": (8, TopKConfig(2, renormalize=True), False),
    "deepseek_v2": (20, TopKConfig(3, "softmax", False, 16.0, 4, 2), False),
    "deepseek_v3": (40, V3, True),
    "all": (5, TopKConfig(5, "sigmoid"), True),
}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def biases(experts: int, wanted: bool) -> torch.Tensor | None:
    return draw(experts) if wanted else None


def assert_same(
    out: tuple[torch.Tensor, torch.Tensor], twin: tuple[torch.Tensor, torch.Tensor]
) -> None:
    assert out[0].dtype == torch.int32 and out[1].dtype == torch.float32
    assert out[0].tolist() == twin[0].tolist()
    torch.testing.assert_close(out[1], twin[1], rtol=2e-6, atol=1e-7, equal_nan=True)


def test_the_examples() -> None:
    spec = TopKConfig(2, renormalize=True)
    ids, weights = twins.route(torch.tensor([[0.0, math.log(3), 0.0]]), TopKInputs(spec))
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.75, 0.25]]))
    router = RouterWeights(torch.tensor([[0.0, 5], [2, 0]]), None, True, torch.zeros(1).int())
    ids, weights = twins.route_rows(torch.tensor([[1.0, 0.0]]), router, TopKInputs(TopKConfig(1)))
    assert ids.tolist() == [[1]] and weights.item() == pytest.approx(0.8808, abs=1e-4)
    rows = SumToNorm(torch.tensor([[1.0, 0]]), torch.tensor([[0.0, 1]]), torch.ones(2), 0.0)
    router = RouterWeights(torch.tensor([[0.0, 1], [2, 0]]), None, True, torch.zeros(1).int())
    normed, total, ids, weights = twins.norm_route_rows(rows, router, TopKInputs(TopKConfig(1)))
    assert normed.tolist() == total.tolist() == [[1, 1]]
    assert ids.tolist() == [[1]] and weights.item() == pytest.approx(0.7311, abs=1e-4)


@pytest.mark.parametrize("name", SPECS)
def test_equals_its_twin(name: str) -> None:
    experts, spec, biased = SPECS[name]
    logits, bias = draw(5, experts + 3)[:, :experts], biases(experts, biased)
    given = TopKInputs(spec, bias)
    assert_same(kernels.route(logits, given), twins.route.twin(logits, given))
    # A few distinct values: ties everywhere, zeros of both signs among them.
    tied = (logits * 1.5).round() / 2
    bias = None if bias is None else (bias * 2).round() / 4
    coarse = replace(spec, scoring="softmax") if bias is None else spec
    given = TopKInputs(coarse, bias)
    assert_same(kernels.route(tied, given), twins.route.twin(tied, given))
    assert kernels.route(logits[:0], TopKInputs(spec))[0].shape == (0, spec.top_k)


@pytest.mark.parametrize("name", SPECS)
def test_the_twin_is_what_the_engine_has_on_cpu(name: str) -> None:
    experts, spec, biased = SPECS[name]
    logits = torch.randn(40, experts)
    bias = torch.randn(experts) if biased else None
    wanted = TopK(spec)(logits, bias)
    ids, weights = twins.route(logits, TopKInputs(spec, bias))
    assert ids.tolist() == wanted.ids_TK.tolist()
    torch.testing.assert_close(weights, wanted.weights_TK)


def test_slots_and_padding() -> None:
    placement = Placement(6, (0, 1, 2, 3, 4, 5, 1, 1, 4))
    slot_map = SlotMap(placement)
    spec, logits = TopKConfig(3), draw(7, 6)
    num_tokens = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    slots = slot_map.table_on(logits.device)
    assert slots is not None and slots.slots_EX.dtype == torch.int32
    given = TopKInputs(spec, None, num_tokens, slots)
    ids, weights = kernels.route(logits, given)
    assert_same((ids, weights), twins.route.twin(logits, given))
    experts = kernels.route(logits, TopKInputs(spec))[0].cpu()
    assert ids[:5].tolist() == slot_map(experts.long())[:5].tolist()
    assert set(ids[5:].flatten().tolist()) == {-1} and weights[5:].abs().sum() == 0


@pytest.mark.parametrize("name", SPECS)
def test_fake_choices(name: str) -> None:
    """Any logits give some experts, the same ones in kernels, twins and on CPU; biases take no
    part. Another row, or other logits, gives others. The seed is fixed: sigmoid scores of such
    logits are close to 1, and some pairs differ by less than its rounding."""
    torch.manual_seed(1)
    experts, spec, biased = SPECS[name]
    spec = replace(spec, fake=True)
    logits, bias = draw(5, experts), biases(experts, biased)
    logits[1] = logits[0]
    logits[3, 1:3] = torch.nan
    given = TopKInputs(spec, bias)
    ids, weights = kernels.route(logits, given)
    assert_same((ids, weights), twins.route.twin(logits, given))
    assert bool(weights.isfinite().all())
    on_cpu = TopK(spec)(logits.cpu(), None)
    assert on_cpu.ids_TK.tolist() == ids.tolist()
    if spec.top_k < experts:
        assert ids[0].tolist() != ids[1].tolist()
    router = RouterWeights(draw(experts, 8), None, False, torch.zeros(1, device=DEVICE).int())
    x = draw(2, 8)
    x[1] = 0
    ids, _ = kernels.route_rows(x, router, given)
    zeros = logits.new_zeros(2, experts)
    assert ids[1].tolist() == twins.route.twin(zeros, given)[0][1].tolist()


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_what_is_no_number_still_has_slots(name: str) -> None:
    experts, spec, biased = SPECS[name]
    logits, bias = draw(5, experts), biases(experts, biased)
    logits[0] = torch.nan
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 1:] = -torch.inf
    logits[4, 2] = torch.inf
    ids, weights = kernels.route(logits, TopKInputs(spec, bias))
    assert_same((ids, weights), twins.route.twin(logits, TopKInputs(spec, bias)))
    for row in ids.tolist():
        assert len(set(row)) == spec.top_k and set(row) <= set(range(experts))
    assert bool(weights[0].isnan().all()) and bool(weights[1].isnan().any())


def make_router(experts: int, hidden: int, dtype: torch.dtype, bias: bool) -> RouterWeights:
    weight = (draw(experts, hidden) * 2 * hidden**-0.5).to(dtype)
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    return RouterWeights(weight, draw(experts).to(dtype) if bias else None, bias, counter)


def check_router(rows: int, hidden: int, name: str, dtype: torch.dtype, bias: bool) -> None:
    experts, spec, biased = SPECS[name]
    router, correction = make_router(experts, hidden, dtype, bias), biases(experts, biased)
    num_tokens = torch.tensor([max(1, rows - 1)], dtype=torch.int32, device=DEVICE)
    for _ in range(2):  # the counter must be left as it was found
        x = draw(rows, hidden + 8).to(dtype)[:, :hidden]
        ids, weights = kernels.route_rows(x, router, TopKInputs(spec, correction, num_tokens))
        assert router.counter_1.item() == 0
        logits = x.double() @ router.weight_EH.double().T
        if router.bias_E is not None:
            logits += router.bias_E.double()
        wanted = twins.route_rows.twin(x, router, TopKInputs(spec, correction, num_tokens))
        # Experts whose scores differ by rounding alone may change places.
        torch.testing.assert_close(weights, wanted[1], rtol=5e-3, atol=1e-5)
        same = (ids == wanted[0]).float().mean().item() if rows else 1.0
        assert same > 0.9 and ids.shape == (rows, spec.top_k)


def check_normed_router(rows: int, hidden: int, name: str, dtype: torch.dtype) -> None:
    experts, spec, biased = SPECS[name]
    router, correction = make_router(experts, hidden, dtype, False), biases(experts, biased)
    num_tokens = torch.tensor([max(1, rows - 1)], dtype=torch.int32, device=DEVICE)
    wide = draw(rows, 2 * hidden).to(dtype)
    to_norm = SumToNorm(
        wide[:, hidden:], draw(rows, hidden).to(dtype), draw(hidden).to(dtype) + 2, 1e-3
    )
    for _ in range(2):
        made = kernels.norm_route_rows(to_norm, router, TopKInputs(spec, correction, num_tokens))
        wanted = twins.norm_route_rows.twin(
            to_norm, router, TopKInputs(spec, correction, num_tokens)
        )
        assert router.counter_1.item() == 0
        assert torch.equal(made[1], wanted[1])
        torch.testing.assert_close(made[0], wanted[0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(made[3], wanted[3], rtol=2e-2, atol=1e-4)
        assert not rows or (made[2] == wanted[2]).float().mean().item() > 0.9


def test_the_norm_before_the_router() -> None:
    check_normed_router(0, 64, "qwen3", torch.float32)
    check_normed_router(1, 300, "qwen3", torch.float32)
    check_normed_router(3, 260, "mixtral", torch.float16)


@pytest.mark.parametrize("rows, hidden, name", [(0, 64, "qwen3"), (1, 300, "qwen3")])
def test_the_router_equals_its_twin(rows: int, hidden: int, name: str) -> None:
    check_router(rows, hidden, name, torch.float32, bias=False)


def test_the_router_with_several_rows_and_a_bias() -> None:
    check_router(3, 260, "mixtral", torch.float16, bias=True)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 64, 3000])
def test_real_sizes(rows: int) -> None:
    cases = (
        (128, TopKConfig(8, renormalize=True), False),
        (256, replace(V3, top_k=8, num_groups=8, topk_groups=4), True),
        (512, TopKConfig(10), False),
        (160, TopKConfig(6, "softmax", False, 16.0, 8, 3), False),
    )
    for experts, spec, biased in cases:
        logits, bias = draw(rows, experts).bfloat16(), biases(experts, biased)
        ids, weights = kernels.route(logits, TopKInputs(spec, bias))
        wanted = twins.route.twin(logits, TopKInputs(spec, bias))
        torch.testing.assert_close(weights, wanted[1], rtol=1e-5, atol=1e-7)
        assert (ids == wanted[0]).float().mean() > (0.999 if biased else 0.9999999)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "mixtral"])
def test_the_router_at_real_sizes(rows: int, name: str) -> None:
    for _ in range(20):
        check_router(rows, 2048, name, torch.bfloat16, bias=name == "mixtral")
    check_router(rows, 7168, name, torch.bfloat16, bias=False)
    check_normed_router(rows, 2048, name, torch.bfloat16)
    check_normed_router(rows, 7168, name, torch.bfloat16)
