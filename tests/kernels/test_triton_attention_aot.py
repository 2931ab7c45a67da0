"""Attention's kernels as a GPU would get them, compiled without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "which",
    [(), pytest.param(("all",), marks=slow), pytest.param(("specialised",), marks=slow)],
)
def test_kernels_fit_a_hopper_gpu(which: tuple[str, ...]) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot_attention", *which]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 bytes spilled" in done.stdout
