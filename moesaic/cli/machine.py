"""This machine, as plain data."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moesaic.comm.launch.mps import describe_daemon
from moesaic.config.devices import cuda_missing

PACKAGES = (
    "torch triton numpy safetensors tokenizers jinja2 msgspec pyzmq pyyaml tqdm cryptography"
).split()
# Instructions that the kernels and torch use.
INSTRUCTIONS = "amx_tile amx_bf16 amx_int8 avx512f avx512_bf16 avx512_vnni avx2 sve".split()
# Modules of vendors, and the backends that they implement elsewhere.
LIBRARIES = {
    "deep_ep": "deepep",
    "mooncake": "mooncake",
    "mori": "mori",
    "flashinfer": "flashinfer, flashinfer_*",
    "torch_npu": "ascend_fuseep",
    "deep_gemm": "deep_gemm",
    "triton_kernels": "triton_kernel",
    "cutlass": "cutlass",
}


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
        "versions": {"python": platform.python_version(), **dict(package_versions())},
    }


def describe_libraries() -> list[dict[str, Any]]:
    return [
        {"module": module, "backends": backends, "installed": find_spec(module) is not None}
        for module, backends in LIBRARIES.items()
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


def package_versions() -> Iterator[tuple[str, str | None]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, None
