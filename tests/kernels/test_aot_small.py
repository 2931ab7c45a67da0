"""The small kernels compiled for a Hopper GPU, in a process without the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compile_small(*arguments: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot_small", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kernels_of_a_decode_step() -> None:
    compile_small()


@pytest.mark.slow
def test_all_of_them() -> None:
    compile_small("all")
