"""What goes into attention: kernels against their torch twins and the layers' own code."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moesaic.kernels import attention
from moesaic.kernels.attention import HeadEntry, LatentEntry, LayerPages
from moesaic.kernels.triton import rotary
from tests.kernels.triton_cases import DEVICE, FLOATS, GPU, relative_error

BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# The interpreter loses the carry of a number that is rounded up to a power of two.
FP8_BOUND = 5e-2 if GPU else 0.15
TOKENS = 5
SLOTS = [3, -1, 11, 0, 7]
SIZES = (3, 4)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def slots() -> Tensor:
    return torch.tensor(SLOTS, dtype=torch.int32, device=DEVICE)


def empty_cache(heads: int, dim: int, dtype: torch.dtype, latent: bool = False) -> LayerPages:
    planes = [
        torch.full((*SIZES, heads, dim), math.nan).to(dtype).to(DEVICE)
        for _ in range(1 if latent else 2)
    ]
    scales = (0.5, 2.0) if dtype == attention.FP8 else (1.0, 1.0)
    return LayerPages(planes[0], None if latent else planes[1], dim, *scales)


def compare_caches(cache: LayerPages, want: LayerPages, bound: float) -> None:
    for have, expected in ((cache.keys, want.keys), (cache.values, want.values)):
        if have is None:
            continue
        have, expected = have.float().flatten(0, 1), expected.float().flatten(0, 1)
        used = [slot for slot in SLOTS if slot >= 0]
        assert relative_error(have[used], expected[used]) < bound
        others = [slot for slot in range(len(have)) if slot not in used]
        assert have[others].isnan().all(), "slots of nobody were written"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "norm", "interleaved", "fp8"),
    [
        (4, 2, 16, True, False, False),
        (3, 1, 24, False, True, False),
        (2, 2, 64, True, True, True),
    ],
)
def test_heads_enter_as_the_twin_says(
    heads: int, kv_heads: int, dim: int, norm: bool, interleaved: bool, fp8: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(dim)
    qkv = draw(TOKENS, (heads + 2 * kv_heads) * dim, dtype=dtype)
    weights = [draw(dim, dtype=dtype) if norm else None for _ in range(2)]
    turns = [draw(TOKENS, dim // 2) for _ in range(2)]
    entry = HeadEntry(heads, *turns, interleaved, *weights, eps=1e-6)
    cache_dtype = attention.FP8 if fp8 else dtype
    caches = [empty_cache(kv_heads, dim, cache_dtype) for _ in range(2)]
    out = rotary.enter_heads(qkv, entry, caches[0], slots())
    want = attention.enter_heads.twin(qkv, entry, caches[1], slots())
    assert relative_error(out, want) < BOUNDS[dtype]
    compare_caches(*caches, FP8_BOUND if fp8 else BOUNDS[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("heads", "plain", "rope", "interleaved", "fp8"),
    [(3, 32, 16, True, False), (40, 24, 8, False, True)],
)
def test_latents_enter_as_the_twin_says(
    heads: int, plain: int, rope: int, interleaved: bool, fp8: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(plain)
    q = draw(TOKENS, heads, 8 + rope, dtype=dtype)[..., 8:]
    latents = draw(TOKENS, 3 + plain + rope, dtype=dtype)[:, 3:]
    turns = [draw(TOKENS, rope // 2) for _ in range(2)]
    entry = LatentEntry(*turns, interleaved, draw(plain, dtype=dtype), 1e-6)
    cache_dtype = attention.FP8 if fp8 else dtype
    caches = [empty_cache(1, plain + rope, cache_dtype, latent=True) for _ in range(2)]
    out = rotary.enter_latent(q, latents, entry, caches[0], slots())
    want = attention.enter_latent.twin(q, latents, entry, caches[1], slots())
    assert relative_error(out, want) < BOUNDS[dtype]
    compare_caches(*caches, FP8_BOUND if fp8 else BOUNDS[dtype])


@pytest.mark.parametrize("enter", [attention.enter_heads.twin, rotary.enter_heads])
def test_example_of_enter_heads(enter) -> None:
    qkv = torch.tensor([[1.0, 2, 3, 4, 5, 6]], device=DEVICE)
    cache = empty_cache(1, 2, torch.float32)
    cos, sin = torch.zeros(1, 1, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    q = enter(qkv, HeadEntry(1, cos, sin), cache, zero)
    assert q.tolist() == [[[-2, 1]]]
    assert cache.keys[0, 0].tolist() == [[-4, 3]]
    assert cache.values[0, 0].tolist() == [[5, 6]]


@pytest.mark.parametrize("enter", [attention.enter_latent.twin, rotary.enter_latent])
def test_example_of_enter_latent(enter) -> None:
    q = torch.tensor([[[1.0, 2]]], device=DEVICE)
    latents = torch.tensor([[3.0, 4, 5, 6]], device=DEVICE)
    cos, sin = torch.zeros(1, 1, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    cache = empty_cache(1, 4, torch.float32, latent=True)
    entry = LatentEntry(cos, sin, False, torch.ones(2, device=DEVICE), 0.0)
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert enter(q, latents, entry, cache, zero).tolist() == [[[-2, 1]]]
    want = torch.tensor([0.8485, 1.1314, -6, 5])
    torch.testing.assert_close(cache.keys[0, 0, 0].cpu(), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tokens", [0])
def test_no_tokens(tokens: int) -> None:
    cache = empty_cache(2, 16, torch.float32)
    turn = draw(tokens, 8)
    none = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
    q = rotary.enter_heads(draw(tokens, 8 * 16), HeadEntry(4, turn, turn), cache, none)
    assert q.shape == (0, 4, 16) and cache.keys.isnan().all()
