"""Products in bfloat16 by way of float32, as on CPUs that have no bfloat16, and without."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moesaic.kernels.cpu import widened

HALF_STEP = 2**-8


@pytest.fixture(params=[True, False], ids=["widened", "as torch does"])
def lacks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(widened, "lacks_bfloat16", lambda: request.param)
    return bool(request.param)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


@pytest.mark.parametrize("bias", [False, True])
def test_products(lacks: bool, bias: bool) -> None:
    """Of float32 sums that are rounded once: as near to what is exact as a rounding."""
    x, w, bias_O = numbers(5, 64), numbers(7, 64), numbers(7) if bias else None
    exact = F.linear(x.double(), w.double(), None if bias_O is None else bias_O.double())
    found = [widened.linear(x, w, bias_O)]
    if not bias:
        found.append(widened.mm(x, w.t()))
        found.append(widened.bmm(x.expand(3, -1, -1), w.t().expand(3, -1, -1))[2])
    for y in found:
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), exact, atol=1e-5, rtol=HALF_STEP)


@pytest.mark.parametrize("masked", [False, True])
def test_attention(lacks: bool, masked: bool) -> None:
    q, k, v = (numbers(1, 2, length, 16) for length in (6, 9, 9))
    mask = torch.ones(6, 9, dtype=torch.bool).tril(3)
    scores = q.double() @ k.double().transpose(2, 3) * 0.25
    if masked:
        scores = scores.masked_fill(~mask, -torch.inf)
    added = torch.zeros(1, 1, 6, 9).masked_fill(~mask, -torch.inf).bfloat16() if masked else None
    out, lse = widened.flash(q, k, v, False, added, 0.25)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-4, rtol=0)
    exact = scores.softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=0)


def test_other_types_are_left_alone(lacks: bool) -> None:
    x, w = numbers(5, 64).float(), numbers(7, 64).float()
    assert torch.equal(widened.linear(x, w), F.linear(x, w))
    assert torch.equal(widened.mm(x, w.t()), torch.mm(x, w.t()))
