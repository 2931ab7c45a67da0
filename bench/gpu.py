"""Time on a GPU, and what the GPU itself can do: shared by the benchmarks of kernels.

    gpu.require()                       # SystemExit without one
    us = gpu.measure(lambda: kernel(x))
    limit_us = max(num_bytes / gpu.copy_bandwidth(), operations / gpu.matrix_rate(torch.bfloat16))

How `measure` does it: moesaic/kernels/timing.py.
"""

from __future__ import annotations

import re
from functools import cache

import torch
from torch import Tensor

from moesaic.kernels.timing import measure

__all__ = ["copy_bandwidth", "device_facts", "matrix_rate", "measure", "named", "require"]


def require() -> torch.device:
    if not torch.cuda.is_available():
        raise SystemExit(
            "this benchmark needs a CUDA device, and torch finds none: run it where there is an "
            "NVIDIA GPU, with torch built for CUDA"
        )
    return torch.device("cuda", torch.cuda.current_device())


def device_facts() -> dict[str, str | int]:
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": found.name,
        "processors": found.multi_processor_count,
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
    }


def named(benchmark: str, gpu: str | None = None) -> str:
    """Of a file of results: "h200_linear" on an NVIDIA H200, which is there unless told."""
    name = gpu or torch.cuda.get_device_properties(torch.cuda.current_device()).name
    words = re.findall("[a-z0-9]+", name.lower().removeprefix("nvidia"))
    return "_".join([*words, benchmark])


@cache
def copy_bandwidth() -> float:
    """Bytes a microsecond, read and written, of a large copy; by a kernel, since a graph gives
    `copy_` to the copy engine, which is slower."""
    source = torch.randint(0, 255, (1 << 28,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    took = measure(lambda: torch.bitwise_not(source, out=target), flush=False)
    return 2 * source.nbytes / took


@cache
def matrix_rate(dtype: torch.dtype) -> float:
    """Operations a microsecond of a large matrix product in `dtype`, bfloat16 or float8_e4m3fn."""
    size = 8192
    a, b = (_random(size, dtype) for _ in range(2))
    one = torch.ones((), dtype=torch.float32, device="cuda")
    if dtype.itemsize == 1:
        took = measure(
            lambda: torch._scaled_mm(
                a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            ),
            flush=False,
        )
    else:
        took = measure(lambda: a @ b.T, flush=False)
    return 2 * size**3 / took


def _random(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, size, device="cuda").to(dtype)
