"""Paged attention against float64 softmax over the real tokens, with every other byte poisoned."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moesaic.layers.context import AttentionSpec, CacheSpec, LatentSpec
from moesaic.layers.paged_cache import PagedCache, SequenceSpan
from moesaic.layers.torch_attention import TorchAttention

N, M, D = 6, 2, 8
LENGTHS = [(1, 1), (1, 37), (1, 16), (5, 5), (17, 40), (1, 3), (33, 33), (1, 200), (1, 17)]


def attend_slowly(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, first: int) -> Tensor:
    """q of one sequence's new tokens, k and v of all its tokens."""
    k, v = (x.double().repeat_interleave(N // x.shape[1], dim=1) for x in (k, v))
    out = torch.empty(q.shape[0], N, v.shape[-1], dtype=torch.float64)
    for row in range(q.shape[0]):
        last = first + row
        begin = 0 if spec.window is None else max(0, last - spec.window + 1)
        scores = torch.einsum("nd,lnd->nl", q[row].double(), k[begin : last + 1]) * spec.scale
        if spec.sinks_N is not None:
            scores = torch.cat([scores, spec.sinks_N.double()[:, None]], dim=1)
        weights = scores.softmax(-1)[:, : last + 1 - begin]
        out[row] = torch.einsum("nl,lnd->nd", weights, v[begin : last + 1])
    return out


class Identity:
    """Latents that already are every head's keys and values: both forms must agree."""

    def __init__(self, absorbed: bool) -> None:
        self.absorbed = absorbed

    def prefers_absorbed(self, queries: int, kv_len: int) -> bool:
        return self.absorbed

    def absorb(self, q: Tensor) -> Tensor:
        return q

    def up_project(self, mixed: Tensor) -> Tensor:
        return mixed[..., : D - 2]

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        heads = latents.unsqueeze(1).expand(-1, N, -1)
        return heads, heads[..., : D - 2]


@pytest.mark.parametrize(("latent", "absorbed"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 32, 500])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
def test_attention_equals_the_oracle(
    latent: bool,
    absorbed: bool,
    sinks: bool,
    window: int | None,
    page_size: int,
    dtype: torch.dtype,
    bound: float,
) -> None:
    torch.manual_seed(page_size)
    heads = 1 if latent else M
    pages_of = [math.ceil(kv / page_size) for _, kv in LENGTHS]
    total = sum(pages_of)
    cache = PagedCache(CacheSpec(2, heads, D, 0 if latent else D), total + 3, page_size, dtype)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    free = (torch.randperm(total + 3) + 1).tolist()
    spec = AttentionSpec(1, 0.3, window, torch.randn(N).to(dtype) if sinks else None)
    spans, start = [], 0
    for (length, kv_len), pages in zip(LENGTHS, pages_of, strict=True):
        spans.append(SequenceSpan(start, length, kv_len, [free.pop() for _ in range(pages)]))
        start += length
    cache.clear([0] + [page for span in spans for page in span.pages])

    history = [torch.randn(span.kv_len, heads, D).to(dtype) for span in spans]
    values = history if latent else [torch.randn(span.kv_len, heads, D).to(dtype) for span in spans]
    for span, k, v in zip(spans, history, values, strict=True):
        for position in range(span.kv_len - span.length):
            page, offset = span.pages[position // page_size], position % page_size
            cache.keys[1, page, offset] = k[position]
            if not latent:
                cache.values[1, page, offset] = v[position]
    q = torch.randn(start, N, D).to(dtype)
    new_k = torch.cat([k[-s.length :] for s, k in zip(spans, history, strict=True)])
    new_v = torch.cat([v[-s.length :] for s, v in zip(spans, values, strict=True)])
    step = TorchAttention(cache, spans)
    if latent:
        parts = {"rope_dim": 0, "rope": None, "norm": None, "projections": Identity(absorbed)}
        latent_spec = LatentSpec(spec.layer, spec.scale, window, spec.sinks_N, **parts)
        out = step.attend_latent(latent_spec, q, new_k.squeeze(1))
    else:
        out = step.attend(spec, q, new_k, new_v)
    for span, k, v in zip(spans, history, values, strict=True):
        rows = slice(span.start, span.start + span.length)
        expected = attend_slowly(q[rows], k, v, spec, span.kv_len - span.length)
        expected = expected[..., : D - 2] if latent else expected
        torch.testing.assert_close(out[rows].double(), expected, atol=bound, rtol=0)
    assert cache.keys[0].isnan().any(), "the other layer's pages were touched"
