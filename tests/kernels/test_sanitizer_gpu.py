"""Kernels between ranks under NVIDIA's compute-sanitizer: no stray access, no race in shared
memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.kernels.sanitizer_cases import FINE
from tests.kernels.triton_cases import GPU, ROOT

PROGRAM = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path="/usr/local/cuda/bin"
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not GPU or PROGRAM is None, reason="needs a GPU and compute-sanitizer"),
]
# Each tensor is an allocation of its own, so that what lies behind it is nobody's.
APART = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# torch asks what a GPU can do by calls that may fail.
OPTIONS = ("--error-exitcode", "1", "--report-api-errors", "no")


def run(words: tuple[str, ...], *cases: str) -> subprocess.CompletedProcess[str]:
    command = [*words, sys.executable, "-m", "tests.kernels.sanitizer_cases", *cases]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **APART}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def _compiled() -> None:
    """What the sanitizer then finds on disk."""
    done = run(())
    assert FINE in done.stdout, done.stdout + done.stderr


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize(
    ("tool", "summary"),
    [
        ("memcheck", "ERROR SUMMARY: 0 errors"),
        ("racecheck", "RACECHECK SUMMARY: 0 hazards"),
    ],
)
def test_kernels_between_ranks(tool: str, summary: str) -> None:
    assert PROGRAM is not None
    done = run((PROGRAM, "--tool", tool, *OPTIONS))
    told = done.stdout + done.stderr
    assert summary in told and FINE in told and done.returncode == 0, told[-4000:]


def test_a_write_behind_a_tensor_is_found() -> None:
    assert PROGRAM is not None
    done = run((PROGRAM, "--tool", "memcheck", *OPTIONS), "overrun")
    told = done.stdout + done.stderr
    assert done.returncode == 1 and "Invalid __global__ write" in told, told[-4000:]
