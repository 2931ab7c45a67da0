"""Products of 16-bit numbers, with and without the detour through float32 that some CPUs need."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moesaic.kernels.cpu import widened

HALF_STEP = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
each_type = pytest.mark.parametrize("dtype", HALF_STEP)


@pytest.fixture(params=[True, False], ids=["widened", "as torch does"])
def lacks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(
        widened, "lacks_fast_products", lambda dtype: request.param and dtype in HALF_STEP
    )
    return bool(request.param)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@each_type
@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_products(lacks: bool, dtype: torch.dtype, rows: int, bias: bool) -> None:
    """Float32 sums are rounded once, so the result is within one rounding of the exact one."""
    x, w = numbers(rows, 64, dtype=dtype), numbers(24, 64, dtype=dtype)
    bias_O = numbers(24, dtype=dtype) if bias else None
    exact = F.linear(x.double(), w.double(), None if bias_O is None else bias_O.double())
    found = [widened.linear(x, w, bias_O)]
    if not bias:
        found.append(widened.mm(x, w.t()))
        found.append(widened.bmm(x.expand(3, -1, -1), w.t().expand(3, -1, -1))[2])
    for y in found:
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact, atol=1e-4, rtol=HALF_STEP[dtype])


@each_type
@pytest.mark.parametrize("masked", [False, True])
def test_attention(lacks: bool, dtype: torch.dtype, masked: bool) -> None:
    q, k, v = (numbers(1, 2, length, 16, dtype=dtype) for length in (6, 9, 9))
    mask = torch.ones(6, 9, dtype=torch.bool).tril(3)
    scores = q.double() @ k.double().transpose(2, 3) * 0.25
    if masked:
        scores = scores.masked_fill(~mask, -torch.inf)
    added = torch.zeros(1, 1, 6, 9).masked_fill(~mask, -torch.inf).to(dtype) if masked else None
    out, lse = widened.flash(q, k, v, False, added, 0.25)
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-4, rtol=0)
    exact = scores.softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=0)


def test_other_types_are_left_alone(lacks: bool) -> None:
    x, w = numbers(20, 64), numbers(24, 64)
    assert torch.equal(widened.linear(x, w), F.linear(x, w))
    assert torch.equal(widened.mm(x, w.t()), torch.mm(x, w.t()))
