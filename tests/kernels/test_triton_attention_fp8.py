"""Decode attention that writes what a float8 projection takes: the bits of quantising its rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moesaic.comm.collectives.collective import ShapeOnlyCollective
from moesaic.kernels import attention
from moesaic.kernels.attention import FP8, Softmax, Splits
from moesaic.kernels.experts import Rows, dense
from moesaic.kernels.linear import quantise_groups
from moesaic.kernels.triton import attention_decode, quantise
from moesaic.layers.context import CacheSpec, HeadSpec
from moesaic.layers.gpu_attention import DecodeBuffers, GpuAttention
from moesaic.layers.linear import LinearConfig, RowLinear
from moesaic.layers.paged_cache import PagedCache, PageTable, SequenceSpan
from moesaic.layers.rotary import RopeConfig, RotaryTable
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from tests.kernels.test_triton_attention import (
    BOUNDS,
    REAL,
    Case,
    Shape,
    make_case,
    needs_gpu,
    small_blocks,
    softmax_of,
)
from tests.kernels.triton_cases import DEVICE, relative_error

BLOCK = WEIGHT_FORMATS["fp8_block"]


def poisoned_rows(case: Case, by_column: bool) -> Rows:
    rows, width = case.rows + 2, case.shape.heads * case.shape.values
    values = torch.full((rows, width), math.nan, device=DEVICE).to(FP8)
    shape = (rows, width // 128)
    scales = torch.full(shape[::-1] if by_column else shape, math.nan, device=DEVICE)
    return Rows(values, scales.t() if by_column else scales)


def same_bits(out: Rows, want: Rows) -> bool:
    assert out.scales is not None and want.scales is not None
    values = (x.values.view(torch.uint8) for x in (out, want))
    return torch.equal(*values) and torch.equal(out.scales, want.scales)


def check_bits(case: Case, softmax: Softmax, splits: Splits, by_column: bool) -> None:
    """Against the kernels that mix and quantise one after the other, and against the twin."""
    batch, out = case.decode(splits), poisoned_rows(case, by_column)
    arguments = (case.q, case.cache, batch, softmax)
    mixed = attention_decode.decode_attention(*arguments, case.poisoned())[1:-1]
    want = Rows(*quantise.quantise_rows(mixed.flatten(1), "fp8"))
    for _ in range(2):
        assert attention_decode.decode_attention(*arguments, out) is out
        assert out.scales is not None
        assert same_bits(Rows(out.values[1:-1], out.scales[1:-1]), want)
    for end in (0, -1):
        assert out.values[end].float().isnan().all() and out.scales[end].isnan().all()
    for number, (_, kv_len) in enumerate(case.lengths):
        if not kv_len:
            assert not out.values[1 + number].float().any()
            assert (out.scales[1 + number] == 1).all()
    assert not batch.counters.any(), "counters must be zeros again"
    twin = attention.decode_attention.twin(*arguments, poisoned_rows(case, by_column))
    assert relative_error(dense(out)[1:-1], dense(twin)[1:-1]) < 6 * BOUNDS[torch.bfloat16]
    assert twin.values[0].float().isnan().all() and twin.scales[-1].isnan().all()


@pytest.mark.parametrize(
    ("shape", "splits", "dtype", "by_column"),
    [
        (Shape(3, 1, 16, 128), Splits(3, 16), torch.float32, False),
        (Shape(2, 1, 16, 256), Splits(2, 32), torch.float16, True),
        (Shape(2, 1, 16, 384), Splits(1, 64), torch.float32, False),
    ],
)
def test_bits_are_those_of_quantising(
    shape: Shape,
    splits: Splits,
    dtype: torch.dtype,
    by_column: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_blocks(monkeypatch)
    case = make_case(shape, [(1, 37), (1, 0), (1, 5)], dtype)
    check_bits(case, softmax_of(case, None, True), splits, by_column)


def test_heads_that_are_no_whole_groups_are_refused() -> None:
    case = make_case(Shape(2, 1, 16, 64), [(1, 5)], torch.float32)
    arguments = (case.q, case.cache, case.decode(Splits(1, 64)), softmax_of(case))
    with pytest.raises(AssertionError):
        attention_decode.decode_attention(*arguments, poisoned_rows(case, False))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["qwen3_30b", "mixtral", "deepseek_v2_lite", "expanded latents"])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("splits", [*(Splits(n, 64) for n in (1, 7, 66)), Splits(1, 64, lone=True)])
def test_real_sizes(name: str, fp8: bool, splits: Splits) -> None:
    shape, _, _ = REAL[name]
    lengths = [(1, n) for n in (1088, 1, 0, 4097, 777, 64)]
    case = make_case(shape, lengths, torch.bfloat16, FP8 if fp8 else None)
    softmax = replace(softmax_of(case), scale=shape.dim**-0.5)
    for by_column in (False, True):
        check_bits(case, softmax, splits, by_column)


HEADS, DIM, PAGE = 2, 128, 4


def output_projection(quantised: bool) -> RowLinear:
    config = LinearConfig(HEADS * DIM, 128, torch.float32)
    layer = RowLinear(config, [range(HEADS * DIM)], ShapeOnlyCollective(0, 1), "test")
    weight = torch.randn(128, HEADS * DIM)
    if quantised:
        layer.use_format(BLOCK)
        for name, plane in BLOCK.encode(weight).items():
            getattr(layer, name).copy_(plane)
    else:
        layer.weight.copy_(weight)
    return layer.to(DEVICE)


def attended(
    step: GpuAttention, qkv: torch.Tensor, output: RowLinear | None
) -> torch.Tensor | Rows:
    rope = RotaryTable(RopeConfig(DIM), 64)
    angles = tuple(x.to(DEVICE) for x in rope.at(step.positions_T.cpu()))
    spec = HeadSpec(0, 0.1, num_heads=HEADS, num_kv_heads=1, head_dim=DIM, rope=rope, output=output)
    return step.attend_heads(spec, qkv, angles)


def test_a_step_that_only_decodes_gives_what_the_projection_takes() -> None:
    """With a chunk in it, or for a projection in another type, it gives a tensor. The fourth row of
    the buffers has no sequence."""
    cache = PagedCache(CacheSpec(1, 1, DIM, DIM), 20, PAGE, torch.float32, DEVICE)
    cache.keys.normal_()
    cache.values.normal_()
    spans = [
        SequenceSpan(n, 1, length, [6 * n + i for i in range(6)])
        for n, length in enumerate((1, 9, 5))
    ]
    table = PageTable(4, 10, DEVICE)
    buffers = DecodeBuffers(cache, 4, table)
    buffers.fill(table.put(spans))
    chunk = GpuAttention.from_spans(cache, [*spans[:2], SequenceSpan(2, 2, 5, spans[2].pages)])
    o_proj, plain = output_projection(True), output_projection(False)
    qkv = torch.randn(4, (HEADS + 2) * DIM, device=DEVICE)
    for step in (buffers.attention, GpuAttention.from_spans(cache, spans)):
        rows = qkv[: len(step.positions_T)]
        mixed, tensor = (attended(step, rows, output) for output in (o_proj, plain))
        assert isinstance(mixed, Rows) and isinstance(tensor, torch.Tensor)
        assert same_bits(mixed, quantise_groups(tensor.flatten(1)))
        assert torch.equal(o_proj(mixed), o_proj(tensor.flatten(1)))
        assert o_proj(mixed)[:3].abs().min() > 0 and not o_proj(mixed)[3:].any()
    assert isinstance(attended(chunk, qkv, o_proj), torch.Tensor)
