"""This machine, as plain data."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moesaic.comm.launch.mps import describe_daemon
from moesaic.config.devices import cuda_missing

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "msgspec",
    "pyzmq",
    "pyyaml",
    "tqdm",
)
# Instructions that the kernels and torch use.
INSTRUCTIONS = (
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx2",
    "sve",
)


@dataclass(frozen=True)
class VendorLibrary:
    """A vendor's library, and the backends that it implements elsewhere."""

    module: str
    backends: str


LIBRARIES = (
    VendorLibrary("deep_ep", "deepep"),
    VendorLibrary("mooncake", "mooncake"),
    VendorLibrary("mori", "mori"),
    VendorLibrary("flashinfer", "flashinfer, flashinfer_*"),
    VendorLibrary("torch_npu", "ascend_fuseep"),
    VendorLibrary("deep_gemm", "deep_gemm"),
    VendorLibrary("triton_kernels", "triton_kernel"),
    VendorLibrary("cutlass", "cutlass"),
)


def describe_machine() -> dict[str, Any]:
    from moesaic.engine.setup.device_memory import free_memory, total_memory

    command = (shlex.split(os.environ.get("CC") or "cc") or ["cc"])[0]
    return {
        "cpu": describe_cpu(),
        "memory": {"total_bytes": total_memory(), "free_bytes": free_memory()},
        "shared_memory": _shared_memory(),
        "gpus": list(_gpus()),
        "cuda_missing": cuda_missing() or None,
        "mps": describe_daemon(),
        "compiler": {"command": command, "path": shutil.which(command)},
        "versions": {"python": platform.python_version(), **dict(_versions())},
    }


def describe_libraries() -> list[dict[str, Any]]:
    return [
        {**asdict(library), "installed": find_spec(library.module) is not None}
        for library in LIBRARIES
    ]


def describe_cpu() -> dict[str, Any]:
    from moesaic.kernels.cpu.build import cpu_flags

    model = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "model": model,
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [name for name in INSTRUCTIONS if name in cpu_flags()],
    }


def _shared_memory() -> dict[str, int] | None:
    """The size of /dev/shm, which only other programs need."""
    with suppress(OSError):
        status = os.statvfs("/dev/shm")
        unit = status.f_frsize
        return {"total_bytes": unit * status.f_blocks, "free_bytes": unit * status.f_bavail}
    return None


def _gpus() -> Iterator[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return
    from moesaic.engine.setup.device_memory import describe_gpu

    yield from map(describe_gpu, range(torch.cuda.device_count()))


def _versions() -> Iterator[tuple[str, str | None]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, None
