"""Which device a command line means, found out without torch.

Asking torch would start CUDA in this process, and ranks are forked from processes like it.
"""

from __future__ import annotations

import ctypes
import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from moesaic.config.args import ServerArgs

VARIABLE = "MOESAIC_DEVICE"
KINDS = ("auto", "cpu", "cuda")
NVML = "libnvidia-ml.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def device_of(args: ServerArgs) -> str:
    """cpu or cuda: what the flag says, what MOESAIC_DEVICE says where that leaves it open, else
    cuda where there is a GPU that torch can use, and it can do what is asked for."""
    return _chosen(args)[0]


def why_device(args: ServerArgs) -> str:
    return _chosen(args)[1]


def _chosen(args: ServerArgs) -> tuple[str, str]:
    if args.device != "auto":
        return args.device, "--device says so"
    told = os.environ.get(VARIABLE, "auto")
    if told not in KINDS:
        raise ValueError(f"{VARIABLE} is {told!r}: give {', '.join(KINDS)}")
    if told != "auto":
        return told, f"{VARIABLE} says so"
    missing = cuda_missing() or beyond_cuda(args)
    return ("cpu", missing) if missing else ("cuda", "there is a GPU")


def beyond_cuda(args: ServerArgs) -> str:
    """Which flags ask for what is not built on CUDA; empty: none."""
    ranks = args.tp_size * args.pp_size * (1 if args.enable_dp_attention else args.dp_size)
    if ranks > 1:
        return f"{ranks} ranks (--tp-size, --pp-size, --dp-size) are not built for CUDA yet"
    if args.enable_deterministic_inference:
        return "--enable-deterministic-inference is built for --device cpu only"
    return ""


def cuda_missing() -> str:
    """Why CUDA cannot be used here; empty where it can."""
    version = _torch_cuda()
    if version is None:
        return "torch is built without CUDA"
    visible = os.environ.get(VISIBLE)
    if visible is not None and visible.strip() in ("", "-1"):
        return f"{VISIBLE} is {visible!r} and hides every GPU"
    return "" if _num_gpus() else "there is no NVIDIA GPU, or no driver for it"


@cache
def _torch_cuda() -> str | None:
    """The CUDA version that torch is built for, from the file that says so; None: it is not."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return None if found is None else found[1]


@cache
def _num_gpus() -> int:
    """By the driver's library for management, which starts nothing on a GPU, or by device files:
    containers may have one without the other."""
    return _managed_gpus() or len(list(Path("/dev").glob("nvidia[0-9]*")))


def _managed_gpus() -> int:
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0
    nvml.nvmlShutdown()
    return 0 if failed else count.value
