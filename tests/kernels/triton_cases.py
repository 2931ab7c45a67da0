"""Where Triton's kernels are tested: on the GPU if there is one, else under its interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# The interpreter computes bfloat16 wrongly.
FLOATS = (torch.float32, torch.float16, *((torch.bfloat16,) if GPU else ()))


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Of a whole tensor, by its norm; nan where anything is not finite."""
    out64, expected64 = out.double(), expected.double()
    return float((out64 - expected64).norm() / expected64.norm().clamp(min=1e-30))


def compile_apart(module: str, *arguments: str) -> str:
    """Runs one of the modules aot_*.py, which assert what kernels take of a GPU, in a process
    that is not in the interpreter's mode; what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", f"tests.kernels.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
