"""Attention's kernels as a GPU would get them, compiled without one."""

import pytest

from tests.kernels.triton_cases import compile_apart

slow = pytest.mark.slow


@pytest.mark.parametrize(
    "which",
    [()] + [pytest.param((name,), marks=slow) for name in ("all", "specialised", "entering")],
)
def test_kernels_fit_a_hopper_gpu(which: tuple[str, ...]) -> None:
    assert "0 bytes spilled" in compile_apart("aot_attention", *which)
