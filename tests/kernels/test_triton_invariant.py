"""Deterministic mode's kernels: the bits of a row do not depend on what comes with it. On a GPU if
there is one, else in Triton's interpreter.

T rows · N query heads · M key/value heads · D head size · C = R + ROPE latent channels · V values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.kernels import experts as expert_twins
from moesaic.kernels import linear as twins
from moesaic.kernels import tuning
from moesaic.kernels.experts import Groups, Matrices
from moesaic.kernels.triton import attention_prefill, experts, linear_heads, pairs, rotary, sort
from moesaic.kernels.triton.attention_blocks import AttentionTile
from moesaic.kernels.tuning import ExpertsPlan
from moesaic.layers import gpu_attention
from moesaic.layers.context import CacheSpec, HeadSpec, LatentSpec
from moesaic.layers.gpu_attention import DecodeBuffers, GpuAttention
from moesaic.layers.norm import RMSNorm
from moesaic.layers.paged_cache import PagedCache, PageTable, SequenceSpan
from moesaic.layers.rotary import RopeConfig, RotaryTable
from moesaic.moe.dispatch import local
from moesaic.moe.formats import TopKOutput
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.runner.device import sorted_pairs as gpu
from tests.kernels.triton_cases import DEVICE, GPU, compile_apart, relative_error
from tests.unit.test_gpu_runner import forward, make_layer, routed, tokens

PAGE = 4
DTYPE = torch.bfloat16 if GPU else torch.float32
needs_gpu = (pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device"))


@dataclass(frozen=True)
class Heads:
    """A sequence of `length` tokens, cut into `chunks`, then decoded one by one. `dim`: of heads,
    or of latents without what is rotated of them."""

    heads: int
    kv_heads: int
    dim: int
    length: int
    chunks: tuple[int, ...]
    window: int | None = None
    rope: int = 0

    @property
    def cache(self) -> CacheSpec:
        if self.rope:
            return CacheSpec(1, 1, self.dim + self.rope, 0)
        return CacheSpec(1, self.kv_heads, self.dim, self.dim)


SMALL = Heads(4, 2, 16, 19, (7, 1, 9))
LATENT = Heads(3, 1, 32, 18, (5, 11), rope=16)
CASES = [
    pytest.param(SMALL, id="heads", marks=pytest.mark.slow),
    pytest.param(replace(SMALL, window=9), id="window"),
    pytest.param(LATENT, id="latents"),
    *(
        pytest.param(case, marks=needs_gpu, id=name)
        for name, case in {
            "qwen3": Heads(32, 4, 128, 700, (1, 130, 64, 500)),
            "gpt-oss": Heads(16, 2, 64, 400, (200, 190), window=128),
            "deepseek": Heads(16, 1, 512, 300, (129, 160), rope=64),
            "deepseek, 128 heads": Heads(128, 1, 512, 140, (129,), rope=64),
        }.items()
    ),
]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: Triton's, in its interpreter, in place of their twins."""
    if GPU:
        return
    monkeypatch.setattr(attention_prefill, "INVARIANT", ((1 << 30, AttentionTile(16, 8, 4, 2)),))
    for name, module in (
        ("invariant_attention", attention_prefill),
        ("enter_heads", rotary),
        ("enter_latent", rotary),
    ):
        monkeypatch.setattr(gpu_attention, name, getattr(module, name))
    for name in ("sort_pairs", "blocks"):
        monkeypatch.setattr(gpu, name, getattr(sort, name))
    for name in ("gate_up", "down", "gate_up_down"):
        monkeypatch.setattr(gpu, name, getattr(experts, name))
    quantise = import_module("moesaic.kernels.triton.quantise")
    monkeypatch.setattr(gpu, "quantise_rows", quantise.quantise_rows)
    monkeypatch.setattr(local, "weigh_pairs", pairs.weigh_pairs)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).to(DEVICE)


class Maps:
    """Up-projections by the kernel of deterministic mode."""

    def __init__(self, case: Heads) -> None:
        self.keys_NDR = drawn(case.heads, 16, case.dim, seed=5) / 4
        self.values_NVR = drawn(case.heads, 24, case.dim, seed=6) / 4

    def prefers_absorbed(self, queries: int, kv_len: int) -> bool:
        return queries < kv_len  # what is cheaper must not matter

    def absorb_nope(self, q_TND: Tensor) -> Tensor:
        turned_NRD = self.keys_NDR.transpose(1, 2)
        return linear_heads.heads_invariant(q_TND.transpose(0, 1), turned_NRD).transpose(0, 1)

    def up_project(self, mixed_TNR: Tensor) -> Tensor:
        found_NTV = linear_heads.heads_invariant(mixed_TNR.transpose(0, 1), self.values_NVR)
        return found_NTV.transpose(0, 1)


def attend(case: Heads, step: GpuAttention, rows: list[int], width: int) -> Tensor:
    """Of rows with these seeds: all that a token brings follows from its seed."""
    made = torch.stack([drawn(width, seed=seed) for seed in rows])
    rope = RotaryTable(RopeConfig(case.rope or case.dim), case.length + 1)
    cos, sin = (x.to(DEVICE) for x in rope.at(step.positions_T.cpu().long()))
    norm = RMSNorm(case.dim, 1e-6, DTYPE).to(DEVICE)
    torch.nn.init.ones_(norm.weight)
    if not case.rope:
        sinks_N = torch.linspace(-1, 1, case.heads, device=DEVICE)
        sizes = {"num_heads": case.heads, "num_kv_heads": case.kv_heads, "head_dim": case.dim}
        norms = {"q_norm": norm, "k_norm": norm}
        spec = HeadSpec(0, 0.3, case.window, sinks_N, rope=rope, **sizes, **norms)
        out = step.attend_heads(spec, made, (cos, sin))
        assert isinstance(out, Tensor)
        return out
    q_TX, latents_TC = made.split([width - case.dim - case.rope, case.dim + case.rope], dim=1)
    q_TND = q_TX.unflatten(1, (case.heads, -1)).contiguous()
    maps: Any = Maps(case)
    spec = LatentSpec(0, 0.1, rope_dim=case.rope, rope=rope, norm=norm, projections=maps)
    return step.attend_latents(spec, q_TND, latents_TC.contiguous(), (cos, sin))


def width_of(case: Heads) -> int:
    if case.rope:
        return case.heads * (16 + case.rope) + case.dim + case.rope
    return (case.heads + 2 * case.kv_heads) * case.dim


def compute(case: Heads, chunks: Sequence[int], beside: bool, graph: bool = False) -> Tensor:
    """All rows of the sequence, in these chunks, and then token by token."""
    pages_each = -(-case.length // PAGE)
    cache = PagedCache(case.cache, 2 * pages_each + 2, PAGE, DTYPE, DEVICE)
    cache.keys.fill_(math.nan)
    cache.values.fill_(math.nan)
    mine = list(range(2 * pages_each, pages_each, -1))
    other = list(range(1, pages_each + 1))
    table = PageTable(3, pages_each, DEVICE)
    buffers = DecodeBuffers(cache, 3, table, deterministic=True)
    found, done = [], 0
    for length in (*chunks, *[1] * (case.length - sum(chunks))):
        done += length
        rows = list(range(done - length, done))
        span = SequenceSpan(0, length, done, mine)
        if graph and length == 1:
            buffers.fill(table.put([span]))
            found.append(attend(case, buffers.attention, [*rows, 9999, 9998], width_of(case))[:1])
            continue
        spans = [span]
        if beside:
            others = min(3, case.length)
            spans = [
                SequenceSpan(0, others, others, other),
                SequenceSpan(others, length, done, mine),
            ]
            rows = [*range(5000, 5000 + others), *rows]
        step = GpuAttention.from_spans(cache, spans, deterministic=True)
        found.append(attend(case, step, rows, width_of(case))[spans[-1].start :])
    return torch.cat(found).cpu()


@pytest.mark.parametrize("case", CASES)
def test_a_row_of_attention_depends_on_its_sequence_alone(case: Heads) -> None:
    whole = compute(case, (case.length,), beside=False)
    assert whole.isfinite().all() and len(whole.unique(dim=0)) == case.length
    assert torch.equal(compute(case, case.chunks, beside=True), whole)
    assert torch.equal(compute(case, case.chunks, beside=False, graph=True), whole)


def test_sequences_without_tokens_become_zeros() -> None:
    cache = PagedCache(SMALL.cache, 4, PAGE, DTYPE, DEVICE)
    table = PageTable(2, 3, DEVICE)
    buffers = DecodeBuffers(cache, 2, table, deterministic=True)
    buffers.fill(table.put([SequenceSpan(0, 1, 1, [2])]))
    out_TND = attend(SMALL, buffers.attention, [1, 2], width_of(SMALL))
    assert out_TND[0].abs().sum() > 0 and not out_TND[1].any()


@pytest.mark.parametrize("turned", [False, True])
def test_products_of_heads(turned: bool) -> None:
    """Of more rows and outputs than a tile has, and of one row alone."""
    dtype = torch.bfloat16 if GPU else torch.float16
    x_NTI = drawn(70, 3, 40, dtype=dtype).transpose(0, 1)
    w_NOI = (
        drawn(3, 40, 66, dtype=dtype).transpose(1, 2) if turned else drawn(3, 66, 40, dtype=dtype)
    )
    y_NTO = linear_heads.heads_invariant(x_NTI, w_NOI)
    assert relative_error(y_NTO, twins.heads_invariant.twin(x_NTI, w_NOI)) < 1e-2
    exact = x_NTI.double() @ w_NOI.double().transpose(1, 2)
    assert relative_error(y_NTO, exact) < 5e-3
    assert torch.equal(linear_heads.heads_invariant(x_NTI[1:, 68:69], w_NOI[1:]), y_NTO[1:, 68:69])
    x, w = torch.tensor([[[1.0, 2]], [[3, 4]]]), torch.tensor([[[5.0, 6]], [[7, 8]]])
    for product in (linear_heads.heads_invariant, twins.heads_invariant):
        assert product(x.to(DEVICE), w.to(DEVICE)).tolist() == [[[17]], [[53]]]


def test_pairs_are_weighed_in_their_order() -> None:
    """With the bits of torch, which rounds each product."""
    y_NH, weights_RK = drawn(12, 600), drawn(4, 3, seed=1, dtype=torch.float32)
    ids_RK = torch.tensor([[0, 1, 2], [3, -1, 0], [-1, -1, -1], [2, 2, 1]], dtype=torch.int32)
    y_NH[4] = math.nan
    outs = [y_NH.new_empty(4, 600) for _ in range(2)]
    pairs.weigh_pairs(y_NH, ids_RK.to(DEVICE), weights_RK, outs[0])
    expert_twins.weigh_pairs.twin(y_NH, ids_RK.to(DEVICE), weights_RK, outs[1])
    assert torch.equal(*outs) and outs[0].isfinite().all() and not outs[0][2].any()
    example = torch.tensor([[1.0], [2], [4], [math.nan]])
    ids, weights = torch.tensor([[3, 0], [5, -1]]), torch.tensor([[10.0, 1], [0.5, 1]])
    for weigh in (pairs.weigh_pairs, expert_twins.weigh_pairs):
        out = torch.empty(2, 1, device=DEVICE)
        given = (example.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
        assert weigh(*given, out).tolist() == [[12], [2]]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans for that GPU, of which there are measured ones."""

    def forget() -> None:
        tuning._plan.cache_clear()
        tuning.plan_of_block.cache_clear()

    forget()
    facts = tuning.DeviceTuning("NVIDIA H200", 132, 224 * tuning.KIB)
    monkeypatch.setattr(tuning, "device_facts", lambda _: facts)
    yield
    forget()


@pytest.mark.parametrize("format", ["bf16", "fp8_block", "mxfp4"])
def test_fixed_plans_follow_from_the_block(h200: None, format: str) -> None:
    device = torch.device(DEVICE)

    def plan(num_experts: int, count: int, fixed: bool) -> ExpertsPlan:
        ids_RK = torch.zeros(count, 8, dtype=torch.int32, device=device)
        groups = expert_twins.sort_pairs.twin(ids_RK, num_experts, gpu.FIXED_BLOCK)
        matrices = Matrices(format, {}, (num_experts, 2048, 768), 1)
        groups = replace(groups, fixed=fixed)
        return experts.plan_of(matrices, groups, device, hidden=2048, inner=768)

    usual, same = (
        {plan(count, rows, fixed) for count in (8, 32, 128) for rows in (1, 3, 70)}
        for fixed in (False, True)
    )
    # Weights of four bits have one plan for a block anyhow.
    assert len(same) == 1 and (len(usual) > 1) == (format != "mxfp4")
    (chosen,) = same
    assert chosen.block == gpu.FIXED_BLOCK and not chosen.fused


def layer_of(format: str) -> Callable[[Tensor, TopKOutput], Tensor]:
    layer = make_layer(WEIGHT_FORMATS[format], deterministic=True)
    return lambda x_TH, topk: forward(layer, x_TH, topk, torch.int32)


@pytest.mark.parametrize(
    "format",
    [
        "bf16" if GPU else "fp32",
        *(
            pytest.param(name, marks=needs_gpu)
            for name in ("fp8_block", "fp8_channel", "int8_w8a8", "int4_w4a16", "mxfp4", "nvfp4")
        ),
    ],
)
def test_a_token_of_experts_depends_on_itself_alone(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among 40, alone, and among 3. The interpreter gives the same bits with other tiles, too: so
    what tiles were asked for is looked at."""
    tiles: set[tuple[int, bool]] = set()

    def spy(product: Callable[..., object], *given: Any) -> object:
        tiles.update((one.block, one.fixed) for one in given if isinstance(one, Groups))
        return product(*given)

    for name in ("gate_up", "gate_up_down"):
        monkeypatch.setattr(gpu, name, partial(spy, getattr(gpu, name)))
    run = layer_of(format)
    x_TH, topk = tokens(40), routed(40, "some are nobody's")
    together = run(x_TH, topk)
    for part in (slice(38, 39), slice(3, 4), slice(31, 34)):
        some = TopKOutput(topk.ids_TK[part], topk.weights_TK[part])
        assert torch.equal(run(x_TH[part], some), together[part])
    assert together.unique(dim=0).shape[0] > 30 and tiles == {(gpu.FIXED_BLOCK, True)}


@pytest.mark.slow
def test_other_meshes_get_the_same_instructions() -> None:
    assert compile_apart("aot_invariant").count("3 times the same") == 4
