"""Which device a command line means, and which GPU each rank, found out without torch.

Asking torch would start CUDA in this process, and ranks are forked from processes like it.
"""

from __future__ import annotations

import ctypes
import os
import re
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from moesaic.config.args import ServerArgs
from moesaic.config.gpus import count_gpus, share_gpus

DEVICE_VARIABLE = "MOESAIC_DEVICE"
KINDS = ("auto", "cpu", "cuda")
NVML = "libnvidia-ml.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def device_of(args: ServerArgs) -> str:
    """cpu or cuda: what the flag says, what MOESAIC_DEVICE says where that leaves it open, else
    cuda where torch can use a GPU for each rank, and what is asked for can be done there."""
    return _chosen(args)[0]


def device_reason(args: ServerArgs) -> str:
    return _chosen(args)[1]


def _chosen(args: ServerArgs) -> tuple[str, str]:
    if args.device != "auto":
        return args.device, "--device says so"
    told = os.environ.get(DEVICE_VARIABLE, "auto")
    if told not in KINDS:
        raise ValueError(f"{DEVICE_VARIABLE} is {told!r}: give {', '.join(KINDS)}")
    if told != "auto":
        return told, f"{DEVICE_VARIABLE} says so"
    missing = cuda_missing() or unsupported_on_cuda(args) or _too_few(args)
    if missing:
        return "cpu", missing
    return "cuda", "there is a GPU" if num_ranks(args) == 1 else "there is a GPU for each rank"


def num_ranks(args: ServerArgs) -> int:
    return args.tp_size * args.pp_size * (1 if args.enable_dp_attention else args.dp_size)


def _too_few(args: ServerArgs) -> str:
    """Ranks share a GPU only if that is asked for: a server would not be fast so."""
    ranks, gpus = num_ranks(args), num_gpus() - args.base_gpu_id
    if ranks <= gpus:
        return ""
    return f"{ranks} ranks would have to share {count_gpus(gpus)}: --device cuda does so"


def unsupported_on_cuda(args: ServerArgs) -> str:
    """Which flags ask for what CUDA does not do here; empty: none."""
    tp, dp = args.tp_size, args.dp_size if args.enable_dp_attention else 1
    gpus = num_gpus()
    if args.base_gpu_id >= max(1, gpus):  # that there is none is said elsewhere
        counted = f"there {'is' if gpus == 1 else 'are'} {count_gpus(gpus)}"
        return f"--base-gpu-id {args.base_gpu_id}: {counted}, numbered from 0"
    if args.pp_size > 1:
        return f"--pp-size {args.pp_size}: pipeline stages are built for cpu only"
    if args.nnodes > 1:
        return f"--nnodes {args.nnodes}: several nodes are built for cpu only"
    if dp > 1 and args.moe_dense_tp_size not in (None, 1):
        return (
            f"--moe-dense-tp-size {args.moe_dense_tp_size} with --enable-dp-attention cuts dense "
            "layers over attention groups, which is built for cpu only (1 is for both)"
        )
    copies = num_ranks(args) // (tp * args.pp_size)
    if copies > 1 and num_ranks(args) > gpus - args.base_gpu_id:
        groups = "" if tp % copies == 0 else f"--tp-size {tp * copies} "
        return (
            f"--dp-size {copies} means {copies} copies of the model, and these cannot share a GPU, "
            "as nobody settles how much of its memory each takes (attention groups of one copy "
            f"can: {groups}--enable-dp-attention)"
        )
    return ""


def gpus_of(args: ServerArgs) -> tuple[int, ...]:
    """The GPU of each rank of this node, of arguments that `unsupported_on_cuda` lets pass."""
    first, ranks = args.base_gpu_id, num_ranks(args) // args.nnodes
    return tuple(first + number for number in share_gpus(ranks, num_gpus() - first))


def cuda_missing() -> str:
    """Why CUDA cannot be used here; empty where it can."""
    version = _torch_cuda()
    if version is None:
        return "torch is built without CUDA"
    if not _num_gpus():
        return "there is no NVIDIA GPU, or no driver for it"
    return "" if num_gpus() else f"{VISIBLE} is {os.environ[VISIBLE]!r} and hides every GPU"


@cache
def _torch_cuda() -> str | None:
    """The CUDA version that torch is built for, from the file that says so; None: it is not."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return None if found is None else found[1]


def num_gpus() -> int:
    """Those that this process may use."""
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return _num_gpus()
    # CUDA takes them in order, up to the first that it does not know, and none if one comes twice.
    names = list(takewhile(_is_gpu, (name.strip() for name in visible.split(","))))
    return len(names) if len(set(names)) == len(names) else 0


def _is_gpu(name: str) -> bool:
    """A number, or what a GPU or a part of one is known by everywhere."""
    return int(name) < _num_gpus() if name.isdecimal() else name.startswith(("GPU-", "MIG-"))


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
