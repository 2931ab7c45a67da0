"""The AMX kernel of the experts against its torch twin."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moesaic.kernels.cpu import build, experts
from moesaic.kernels.cpu.experts import ExpertRows, ExpertTensors, SwigluSpec

needs_kernel = pytest.mark.skipif(
    experts.library() is None, reason="this machine has no AMX or no C compiler"
)
GPT_OSS = SwigluSpec(alpha=1.702, limit=7.0)
COUNTS = [1, 17, 0, 33, 300, 16, 2]


def make_experts(hidden: int, inner: int, bias: bool, activation: SwigluSpec) -> ExpertTensors:
    generator = torch.Generator().manual_seed(hidden + inner)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    count = len(COUNTS)
    return ExpertTensors(
        draw(count, 2 * inner, hidden) * 3 * hidden**-0.5,
        draw(count, hidden, inner) * inner**-0.5,
        draw(count, 2 * inner) if bias else None,
        draw(count, hidden) if bias else None,
        activation,
    )


def make_jobs(counts: list[int]) -> list[ExpertRows]:
    """Experts in another order than their rows, with a gap of two rows behind each."""
    jobs, start = [], 0
    for slot, count in reversed(list(enumerate(counts))):
        jobs.append(ExpertRows(slot, start, count))
        start += count + 2
    return jobs


def run(
    function: object, x: torch.Tensor, jobs: list[ExpertRows], tensors: ExpertTensors
) -> torch.Tensor:
    y = torch.full_like(x, torch.nan)
    inner = tensors.w2_eHI.shape[2]
    h = torch.full((len(x), inner), torch.nan, dtype=x.dtype)
    function(x, y, h, jobs, tensors)  # type: ignore[operator]
    return y


@needs_kernel
@pytest.mark.parametrize("hidden, inner", [(64, 32), (96, 160), (512, 256), (32, 544)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [SwigluSpec(), GPT_OSS])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_equals_its_twin(
    hidden: int, inner: int, bias: bool, activation: SwigluSpec, threads: int
) -> None:
    tensors, jobs = make_experts(hidden, inner, bias, activation), make_jobs(COUNTS)
    rows = sum(COUNTS) + 2 * len(COUNTS)
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = run(experts.run, x, jobs, tensors)
    finally:
        torch.set_num_threads(before)
    expected = run(experts.reference, x, jobs, tensors)
    assert torch.equal(y.isnan(), expected.isnan())  # the gaps, and nothing else
    filled = ~expected.isnan()
    # Sums in another order may round to the neighbouring bfloat16, of h and then of y.
    error = (y[filled].float() - expected[filled].float()).abs()
    step = expected[filled].float().abs() * 2.0**-7
    assert bool((error <= step + 2.0**-6 * expected[filled].float().std()).all())
    assert float((error > 0).float().mean()) < 0.02


@needs_kernel
def test_bits_of_a_row_depend_on_that_row_alone() -> None:
    tensors = make_experts(64, 96, bias=False, activation=SwigluSpec())
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    together = run(experts.run, x, [ExpertRows(4, 0, 70)], tensors)
    for start, count in ((0, 1), (5, 16), (31, 33), (69, 1)):
        alone = run(
            experts.run, x[start : start + count].clone(), [ExpertRows(4, 0, count)], tensors
        )
        assert torch.equal(alone, together[start : start + count])


@needs_kernel
def test_a_nan_stays_in_its_row() -> None:
    tensors = make_experts(64, 32, bias=True, activation=GPT_OSS)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    clean = run(experts.run, x, [ExpertRows(0, 0, 20)], tensors)
    x[7, 3] = torch.nan
    y = run(experts.run, x, [ExpertRows(0, 0, 20)], tensors)
    assert bool(y[7].isnan().all())
    keep = [row for row in range(20) if row != 7]
    assert torch.equal(y[keep], clean[keep])


@needs_kernel
def test_extreme_gates() -> None:
    """silu goes to zero and to the identity; nothing overflows on the way."""
    tensors = make_experts(32, 32, bias=False, activation=SwigluSpec())
    gates = torch.tensor([-1e30, -200.0, -88.0, -1e-3, 0.0, 1e-3, 88.0, 200.0, 1e30]).bfloat16()
    w13 = torch.zeros(1, 64, 32, dtype=torch.bfloat16)
    w13[0, 0, 0] = w13[0, 32, 1] = 1.0
    w2 = torch.zeros(1, 32, 32, dtype=torch.bfloat16)
    w2[0, 0, 0] = 1.0
    one = replace(tensors, w13_eJH=w13, w2_eHI=w2)
    x = torch.zeros(len(gates), 32, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = gates, 1.0
    y = run(experts.run, x, [ExpertRows(0, 0, len(gates))], one)
    expected = torch.nn.functional.silu(gates.double())
    assert torch.allclose(y[:, 0].double(), expected, rtol=2.0**-7, atol=1e-30)


@needs_kernel
def test_no_jobs_and_no_rows() -> None:
    tensors = make_experts(32, 32, bias=False, activation=SwigluSpec())
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    assert bool(run(experts.run, x, [], tensors).isnan().all())
    assert bool(run(experts.run, x, [ExpertRows(1, 0, 0)], tensors).isnan().all())


def test_what_does_not_fit() -> None:
    assert not experts.fits(64, 32, torch.float32)
    assert not experts.fits(64, 48, torch.bfloat16)
    assert not experts.fits(40, 32, torch.bfloat16)


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    caplog.set_level(logging.INFO)
    assert build.load_library("experts", ()) is None
    assert "no C compiler" in caplog.text
    monkeypatch.setenv("CC", "false")
    assert build.load_library("experts", ()) is None
    assert "torch computes" in caplog.text
    assert not list(tmp_path.rglob("*.so"))
