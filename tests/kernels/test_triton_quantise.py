"""Quantised activations: the Triton kernels against their twins, these against the encoders."""

from __future__ import annotations

import pytest
import torch

from moesaic.kernels import quantise as twins
from moesaic.kernels.triton import quantise as kernels
from moesaic.kernels.triton.quantise import QuantiseTile
from moesaic.moe.quant.codecs import Fp8, Int8
from tests.kernels.triton_cases import DEVICE, FLOATS, GPU

Quantised = tuple[torch.Tensor, torch.Tensor]


def rows_of(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows and groups of very different sizes, one of zeros, one of the smallest numbers."""
    x = torch.randn(rows, size, device=DEVICE)
    x *= torch.logspace(-3, 3, rows, device=DEVICE)[:, None]
    x[:, ::3] *= 0.01
    if rows > 3:
        x[1] = 0
        x[2] = torch.finfo(dtype).tiny
        x[3, :] = 1.0
    return x.to(dtype)


def assert_same(out: Quantised, wanted: Quantised) -> None:
    for one, other in zip(out, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.float().nan_to_num(12345.0), other.float().nan_to_num(12345.0))


def encoded(x: torch.Tensor, format: twins.RowFormat) -> Quantised:
    values, scales = (Int8() if format == "int8" else Fp8(1, 128)).encode(x)
    return values, scales


def test_the_examples() -> None:
    values, scales = twins.quantise_rows(torch.tensor([[1.0, -0.5, 0.25]]), "int8")
    assert values.tolist() == [[127, -64, 32]] and scales.item() == pytest.approx(1 / 127)
    y = twins.silu_mul(torch.tensor([[0.0, 1.0, 5.0, 2.0]]))
    torch.testing.assert_close(y, torch.tensor([[0.0, 1.4621]]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows, size", [(0, 128), (5, 300)])
@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_the_same_bits(rows: int, size: int, dtype: torch.dtype, format: twins.RowFormat) -> None:
    x = rows_of(rows, size + 8, dtype)[:, :size]
    wanted = encoded(x, format)
    assert_same(twins.quantise_rows.twin(x, format), wanted)
    assert_same(kernels.quantise_rows(x, format), wanted)
    if format == "fp8":
        check_by_column(x, wanted)


def check_by_column(x: torch.Tensor, wanted: Quantised) -> None:
    """The same, but for where scales lie."""
    for quantise in (kernels.quantise_rows, twins.quantise_rows.twin):
        values, scales = quantise(x, "fp8", by_column=True)
        assert_same((values, scales), wanted)
        assert scales.t().is_contiguous() and (len(x) < 2 or scales.stride() == (1, len(x)))


def test_tiles_of_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a last tile that is not full, down and across."""
    monkeypatch.setattr(kernels, "MANY_ROWS", 2)
    for rows, size in ((5, 300), (3, 7 * 256)):
        x = rows_of(rows, size + 8, torch.float16)[:, :size]
        assert_same(kernels.quantise_rows(x, "fp8"), encoded(x, "fp8"))
        check_by_column(x, encoded(x, "fp8"))


def test_tiles_come_out_even() -> None:
    """As (rows, groups of 128 channels, warps)."""
    few = [kernels.fp8_tile(1, groups) for groups in (1, 6, 16, 56)]
    assert few == [
        QuantiseTile(1, 1, 1),
        QuantiseTile(1, 8, 4),
        QuantiseTile(1, 16, 8),
        QuantiseTile(1, 8, 4),
    ]
    many = [kernels.fp8_tile(8192, groups) for groups in (1, 16, 56)]
    assert many == [QuantiseTile(32, 1, 4), QuantiseTile(2, 16, 4), QuantiseTile(4, 8, 4)]


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_what_is_not_finite(format: twins.RowFormat) -> None:
    x = rows_of(5, 256, torch.float32)
    x[0, 3], x[3, 200], x[4, 0] = torch.nan, torch.inf, -torch.inf
    values, scales = kernels.quantise_rows(x, format)
    wanted, wanted_scales = encoded(x, format)
    # The interpreter makes numbers of what is not one; the scales undo that.
    spread = scales.repeat_interleave(256 // scales.shape[1], 1)
    assert_same((values.float() * spread, scales), (wanted.float() * spread, wanted_scales))
    if GPU:
        assert_same((values, scales), (wanted, wanted_scales))


@pytest.mark.parametrize("dtype", FLOATS)
def test_silu_mul(dtype: torch.dtype) -> None:
    for rows, size in ((0, 16), (3, 200)):
        x = torch.randn(rows, 2 * size, device=DEVICE).mul_(4).to(dtype)
        gate, up = x.double().chunk(2, -1)
        out = kernels.silu_mul(x)
        assert out.dtype == dtype
        torch.testing.assert_close(out, (gate * gate.sigmoid() * up).to(dtype))
        torch.testing.assert_close(out, twins.silu_mul.twin(x))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 64, 4097])
@pytest.mark.parametrize("size", [768, 2048, 2880, 7168])
@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_real_sizes(rows: int, size: int, format: twins.RowFormat) -> None:
    test_the_same_bits(rows, size, torch.bfloat16, format)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_every_size_a_number_has(dtype: torch.dtype) -> None:
    """What a quotient leaves over must not underflow; only a GPU computes it."""
    sizes = torch.logspace(-38, 37, 400, device=DEVICE)[:, None]
    x = (torch.randn(400, 1024, device=DEVICE) * sizes).to(dtype)
    assert_same(kernels.quantise_rows(x, "fp8"), encoded(x, "fp8"))
