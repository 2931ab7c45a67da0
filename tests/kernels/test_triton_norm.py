"""Norms: the Triton kernels against their twins."""

from __future__ import annotations

import pytest
import torch

from moesaic.kernels import norm as twins
from moesaic.kernels.experts import PairSum, summed
from moesaic.kernels.triton import norm as kernels
from tests.kernels.triton_cases import DEVICE, FLOATS, GPU

# Half a unit in the last place of a number, relative to it, and a little for the order of sums.
ROUNDING = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).mul_(3).to(dtype)


def assert_near(out: torch.Tensor, twin: torch.Tensor) -> None:
    assert out.dtype == twin.dtype and out.shape == twin.shape
    bound = ROUNDING[twin.dtype] * twin.float().abs() + 1e-7
    assert bool(((out.float() - twin.float()).abs() <= 2 * bound).all())


def test_the_examples() -> None:
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    wanted = torch.tensor([[0.8485, 2.2627]])
    torch.testing.assert_close(twins.rms_norm(x, weight, 0.0), wanted, atol=1e-4, rtol=0)
    ones, rest = torch.ones(1, 2), torch.tensor([[2.0, 3.0]])
    normed, total = twins.add_rms_norm(ones, rest, weight, 0.0)
    assert torch.equal(total, x)
    torch.testing.assert_close(normed, wanted, atol=1e-4, rtol=0)
    rows, total = twins.add_rms_norm_fp8(ones, torch.tensor([[1.0, 3.0]]), ones[0], 0.0)
    assert total.tolist() == [[2, 4]] and rows.values.tolist() == [[224, 448]]
    torch.testing.assert_close(rows.scales, torch.tensor([[0.002823]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows, size", [(0, 8), (1, 96), (5, 200)])
def test_equals_its_twin(dtype: torch.dtype, rows: int, size: int) -> None:
    x, residual = draw(rows, size, dtype=dtype), draw(rows, size + 8, dtype=dtype)[:, :size]
    weight = draw(size, dtype=dtype)
    assert_near(kernels.rms_norm(x, weight, 1e-5), twins.rms_norm.twin(x, weight, 1e-5))
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    wanted, wanted_total = twins.add_rms_norm.twin(x, residual, weight, 1e-5)
    assert torch.equal(total, wanted_total)
    assert_near(normed, wanted)


def test_heads_inside_of_a_wider_matrix() -> None:
    qkv, weight = draw(3, 10 * 16, dtype=torch.float16), draw(16, dtype=torch.float16)
    heads = qkv[:, 16 : 7 * 16].unflatten(-1, (6, 16))
    wanted = twins.rms_norm.twin(heads, weight, 1e-6)
    qkv.view(3, 10, 16)[:, 7:] = torch.nan
    assert_near(kernels.rms_norm(heads, weight, 1e-6), wanted)


def test_a_row_of_nan_stays_alone() -> None:
    x, weight = draw(3, 32, dtype=torch.float32), draw(32, dtype=torch.float32)
    x[1, 7] = torch.nan
    out = kernels.rms_norm(x, weight, 1e-6)
    assert bool(out[1].isnan().all()) and not bool(out[[0, 2]].isnan().any())


def test_the_quantised_norm() -> None:
    dtype, size = torch.float16, 256 + 64
    x, residual, weight = (draw(n, size, dtype=dtype) for n in (2, 2, 1))
    normed, total = kernels.add_rms_norm(x, residual, weight[0], 1e-6)
    values, scales = twins.quantise_rows.twin(normed, "fp8")
    for by_column in (False, True):
        rows, again = kernels.add_rms_norm_fp8(x, residual, weight[0], 1e-6, by_column)
        assert torch.equal(total, again) and torch.equal(scales, rows.scales)
        assert rows.scales.stride() == ((1, 2) if by_column else (3, 1))
        # As numbers: the interpreter loses the sign of zero.
        assert torch.equal(values.float(), rows.values.float())
    twin, again = twins.add_rms_norm_fp8.twin(x, residual, weight[0], 1e-6)
    assert torch.equal(total, again)
    torch.testing.assert_close(twin.scales, scales, rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize(("rows", "top_k", "size"), [(0, 2, 128), (5, 3, 200)])
def test_pairs_are_summed_before_they_are_added(
    dtype: torch.dtype, rows: int, top_k: int, size: int
) -> None:
    """To the bit as `sum_pairs` and then the norm; rows that are nobody's are NaN."""
    ids = torch.randint(-1, 3, (rows, top_k), dtype=torch.int32, device=DEVICE)
    ids[:1] = -1
    y = draw(rows * top_k, size, dtype=dtype)
    y[ids.flatten() < 0] = torch.nan
    residual, weight = draw(rows, size, dtype=dtype), draw(size, dtype=dtype)
    pairs = PairSum(y, ids)
    x = summed(pairs)
    assert len(pairs) == len(x) == rows and not x[:1].any()
    normed, total = kernels.add_rms_norm(pairs, residual, weight, 1e-5)
    wanted, wanted_total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, wanted_total) and torch.equal(normed, wanted)
    assert torch.equal(twins.add_rms_norm.twin(pairs, residual, weight, 1e-5)[1], total)
    quantised, total = kernels.add_rms_norm_fp8(pairs, residual, weight, 1e-5)
    rows8, wanted_total = kernels.add_rms_norm_fp8(x, residual, weight, 1e-5)
    assert torch.equal(total, wanted_total) and torch.equal(quantised.scales, rows8.scales)
    assert torch.equal(quantised.values.float(), rows8.values.float())


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 32, 65])
@pytest.mark.parametrize(("top_k", "size"), [(8, 2048), (2, 4096), (4, 2880), (8, 7168)])
def test_pairs_of_real_sizes(rows: int, top_k: int, size: int) -> None:
    test_pairs_are_summed_before_they_are_added(torch.bfloat16, rows, top_k, size)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 33, 4097])
@pytest.mark.parametrize("size", [64, 128, 512, 1536, 2048, 2880, 4096, 7168])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_real_sizes(rows: int, size: int, dtype: torch.dtype) -> None:
    test_equals_its_twin(dtype, rows, size)
