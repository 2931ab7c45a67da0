"""Attention of drafts that are trees: the decode kernel against a float64 softmax over what each
row sees, with NaN everywhere else; and whole steps against one chain for each path."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.core.draft_tree import depths, path_to, row_masks
from moesaic.kernels import attention
from moesaic.kernels.attention import Softmax, Splits, seen_keys
from moesaic.kernels.triton import attention_decode
from moesaic.layers.context import CacheSpec
from moesaic.layers.deterministic_attention import DeterministicAttention
from moesaic.layers.gpu_attention import DecodeBuffers, GpuAttention
from moesaic.layers.padded_attention import PaddedAttention
from moesaic.layers.paged_cache import PagedCache, PageTable, SequenceSpan
from moesaic.layers.rotary import RopeConfig, RotaryTable
from moesaic.layers.torch_attention import TorchAttention
from tests.kernels.test_triton_attention import (
    BOUNDS,
    GQA,
    LATENT,
    Case,
    Shape,
    check,
    make_case,
    small_blocks,
    softmax_of,
)
from tests.kernels.test_triton_attention_steps import (
    BOUND,
    PAGE,
    PLAIN,
    RANK,
    ROPE,
    D,
    M,
    Maps,
    N,
    heads_of,
    kernels,  # noqa: F401
    latents_of,
    make_caches,
    make_spans,
    rows_of,
)
from tests.kernels.triton_cases import DEVICE, relative_error


def test_the_example_of_seen_keys() -> None:
    masks = torch.tensor([-1, -1, -3])
    assert seen_keys(masks, 4, None).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert seen_keys(masks, 4, 2)[2].int().tolist() == [0, 1, 0, 1]


def seen(kv: int, mask: int, window: int | None) -> list[int]:
    """The tokens that a query sees which is the last of `kv`."""
    kept = [n for n in range(kv) if kv - 1 - n > 63 or mask >> (kv - 1 - n) & 1]
    return kept if window is None else kept[-window:]


def oracle(case: Case, masks: list[int], softmax: Softmax) -> Tensor:
    out = torch.full((case.rows + 2, case.shape.heads, case.shape.values), math.nan).double()
    q, pages = case.q.whole().cpu().double() * softmax.scale, case.pages.tolist()
    group, page = case.shape.heads // case.shape.kv_heads, case.shape.page
    keys = case.cache.keys.cpu().double() * case.cache.k_scale
    values = keys[..., : case.shape.values]
    if case.cache.values is not None:
        values = case.cache.values.cpu().double() * case.cache.v_scale
    for n, ((_, kv), row, first) in enumerate(
        zip(case.lengths, case.starts, case.first, strict=True)
    ):
        places = [(pages[first + t // page], t % page) for t in seen(kv, masks[n], softmax.window)]
        k, v = (torch.stack([plane[place] for place in places]) for plane in (keys, values))
        for head in range(case.shape.heads):
            logits = k[:, head // group] @ q[row, head]
            if softmax.sinks_N is not None:
                logits = torch.cat((logits, softmax.sinks_N[head : head + 1].cpu().double()))
            out[row, head] = logits.softmax(0)[: len(k)] @ v[:, head // group]
    return out


@pytest.mark.parametrize(
    ("shape", "window", "sinks", "splits"),
    [
        (GQA, None, True, Splits(3, 16)),
        (GQA, 5, True, Splits(3, 16)),
        (Shape(3, 3, 24, page=1), 40, False, Splits(1, 64)),
        pytest.param(GQA, 70, False, Splits(2, 16), marks=pytest.mark.slow),
        (LATENT, None, False, Splits(3, 32)),
    ],
)
def test_decoding_by_masks(
    shape: Shape, window: int | None, sinks: bool, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(shape.dim)
    chance = random.Random(shape.dim)
    small_blocks(monkeypatch)
    lengths = [1, 2, 12, 37, 63, 64, 65, 130]
    case = make_case(shape, [(1, kv) for kv in lengths], torch.float32)
    masks = [-1, -3, *(chance.getrandbits(64) - (1 << 63) | 1 for _ in lengths[2:])]
    # The softmax of a token that is hidden must not even be NaN.
    hidden = [
        (n, t) for n, kv in enumerate(lengths) for t in {*range(kv)} - {*seen(kv, masks[n], None)}
    ]
    for n, token in hidden:
        page = int(case.pages[case.first[n] + token // shape.page])
        case.cache.keys[page, token % shape.page] = 1e30
    softmax = softmax_of(case, window, sinks)
    batch = replace(case.decode(splits), masks_B=torch.tensor(masks, device=DEVICE))
    want = oracle(case, masks, softmax)
    out = attention_decode.decode_attention(case.q, case.cache, batch, softmax, case.poisoned())
    check(out, want, BOUNDS[torch.float32])
    assert not batch.counters.any(), "counters must be zeros again"
    twin = attention.decode_attention.twin(case.q, case.cache, batch, softmax, case.poisoned())
    check(twin, want, BOUNDS[torch.float32])


# Two trees, a single token, a prompt's chunk, and a chain.
TREES = ([0, 0, 1, 1, 2, 5, 4, 0, 3], [0, 0, 2])
LENGTHS = [(10, 33), (1, 9), (4, 6), (5, 5), (3, 12)]


def tree_spans() -> list[SequenceSpan]:
    spans = make_spans(LENGTHS)
    for n, parents in zip((0, 2), TREES, strict=True):
        spans[n] = spans[n]._replace(masks=np.array(row_masks(parents), np.int64))
    return spans


def tree_positions(spans: list[SequenceSpan]) -> Tensor:
    found = []
    for n, span in enumerate(spans):
        first = span.kv_len - span.length
        own = depths(TREES[n // 2]) if n in (0, 2) else range(span.length)
        found += [first + depth for depth in own]
    return torch.tensor(found)


def paths(span: SequenceSpan, parents: list[int]) -> list[list[int]]:
    """The rows of the step on the path to each row of a tree."""
    return [
        [span.start, *(span.start + n for n in path_to(parents, row))]
        for row in range(len(parents) + 1)
    ]


def by_paths(cpu: PagedCache, spans: list[SequenceSpan], attend, *inputs: Tensor) -> Tensor:
    """Each row of a tree as the last one of a chain, in a copy of the cache."""
    want = torch.empty(0)
    for n, span in enumerate(spans):
        rows = range(span.start, span.start + span.length)
        chains = paths(span, TREES[n // 2]) if n in (0, 2) else [[*rows]]
        for chain in chains:
            copy = PagedCache.__new__(PagedCache)
            copy.__dict__.update(cpu.__dict__)
            copy.keys, copy.values = cpu.keys.clone(), cpu.values.clone()
            copy.layers = list(zip(copy.keys.unbind(), copy.values.unbind(), strict=True))
            first = span.kv_len - span.length
            alone = SequenceSpan(0, len(chain), first + len(chain), span.pages)
            positions = torch.arange(first, first + len(chain))
            out = attend(TorchAttention(copy, [alone]), positions, *(x[chain] for x in inputs))
            if not want.numel():
                want = torch.full((rows_of(spans), *out.shape[1:]), math.nan)
            want[chain[-1] if n in (0, 2) else chain] = out[-1] if n in (0, 2) else out
    return want


def cpu_steps(cpu: PagedCache, spans: list[SequenceSpan]) -> list[TorchAttention]:
    table = PageTable(len(spans), 12)
    padded = PaddedAttention(cpu, table)
    padded.fill(table.put(spans))
    return [TorchAttention(cpu, spans), DeterministicAttention(cpu, spans), padded]


def test_trees_equal_their_paths(kernels: None) -> None:  # noqa: F811
    torch.manual_seed(1)
    spans = tree_spans()
    cpu, gpu = make_caches(CacheSpec(2, M, D, D), spans)
    qkv, rope = torch.randn(rows_of(spans), (N + 2 * M) * D), RotaryTable(RopeConfig(D), 64)
    positions = tree_positions(spans)
    want = by_paths(cpu, spans, lambda step, at, x: heads_of(step, x, rope, at), qkv)
    for step in cpu_steps(cpu, spans):
        assert relative_error(heads_of(step, qkv, rope, positions), want) < BOUND
    step = GpuAttention.from_spans(gpu, spans)
    assert not step.fused and step.decode is not None and len(step.decode.rows_B) == 10 + 1 + 4
    out = heads_of(step, qkv.to(DEVICE), rope, positions)
    assert relative_error(out.cpu(), want) < BOUND


def test_trees_of_latents_equal_their_paths(kernels: None) -> None:  # noqa: F811
    torch.manual_seed(2)
    spans, maps = tree_spans(), Maps(absorbed=True)
    cpu, gpu = make_caches(CacheSpec(2, 1, RANK + ROPE, 0), spans)
    q, latents = (
        torch.randn(rows_of(spans), N, PLAIN + ROPE),
        torch.randn(rows_of(spans), RANK + ROPE),
    )
    positions = tree_positions(spans)
    want = by_paths(cpu, spans, lambda step, at, a, b: latents_of(step, a, b, at, maps), q, latents)
    for step in cpu_steps(cpu, spans):
        assert relative_error(latents_of(step, q, latents, positions, maps), want) < BOUND
    out = latents_of(
        GpuAttention.from_spans(gpu, spans), q.to(DEVICE), latents.to(DEVICE), positions, maps
    )
    assert relative_error(out.cpu(), want) < BOUND


def test_buffers_of_trees(kernels: None) -> None:  # noqa: F811
    """Filled with trees, then with chains; padding stays zero."""
    torch.manual_seed(3)
    cache = PagedCache(CacheSpec(2, M, D, D), 60, PAGE, torch.float32, DEVICE)
    table, rope = PageTable(5, 12, DEVICE), RotaryTable(RopeConfig(D), 64)
    buffers = DecodeBuffers(cache, 28, table, shares=True, trees=True)
    for spans in (tree_spans(), make_spans(LENGTHS)):
        cpu, gpu = make_caches(CacheSpec(2, M, D, D), spans)
        has_trees = spans[0].masks is not None
        cache.keys.fill_(math.nan)
        cache.values.fill_(math.nan)
        cache.keys[:, : gpu.keys.shape[1]] = gpu.keys
        cache.values[:, : gpu.values.shape[1]] = gpu.values
        count = rows_of(spans)
        positions = (
            tree_positions(spans)
            if has_trees
            else torch.cat([torch.arange(s.kv_len - s.length, s.kv_len) for s in spans])
        )
        qkv = torch.randn(28, (N + 2 * M) * D)
        buffers.fill(table.put(spans))
        padded = torch.cat((positions, torch.zeros(28 - count, dtype=torch.int64)))
        out = heads_of(buffers.attention, qkv.to(DEVICE), rope, padded)
        want = heads_of(TorchAttention(cpu, spans), qkv[:count], rope, positions)
        assert relative_error(out.cpu()[:count], want) < BOUND
        assert not out[count:].any()


def test_entries_move_as_if_at_once() -> None:
    cache = PagedCache(CacheSpec(3, M, D, D), 8, PAGE, torch.float16)
    cache.keys.normal_()
    cache.values.normal_()
    before = [part.flatten(1, 2).clone() for part in (cache.keys, cache.values)]
    cache.move([])
    cache.move([(9, 5), (10, 9), (31, 10)])
    for part, old in zip((cache.keys, cache.values), before, strict=True):
        want = old.clone()
        want[:, [5, 9, 10]] = old[:, [9, 10, 31]]
        assert torch.equal(part.flatten(1, 2), want)
    latents = PagedCache(CacheSpec(1, 1, D, 0), 8, PAGE, torch.float32)
    latents.keys.normal_()
    kept = latents.keys.flatten(1, 2)[:, 7].clone()
    latents.move([(7, 4)])
    assert torch.equal(latents.keys.flatten(1, 2)[:, 4], kept)
