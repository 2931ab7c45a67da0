"""The device of a command line and the GPU of each rank, without torch.

Torch would initialise CUDA in this process, from which ranks are forked.
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
DEVICE_NAMES = ("auto", "cpu", "cuda")
NVML = "libnvidia-ml.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def device_of(args: ServerArgs) -> str:
    """cpu or cuda: by flag, else by MOESAIC_DEVICE, else cuda if torch can use a GPU for each rank
    and CUDA supports all flags given."""
    return _chosen(args)[0]


def device_reason(args: ServerArgs) -> str:
    return _chosen(args)[1]


def _chosen(args: ServerArgs) -> tuple[str, str]:
    if args.device != "auto":
        return args.device, "--device says so"
    value = os.environ.get(DEVICE_VARIABLE, "auto")
    if value not in DEVICE_NAMES:
        raise ValueError(f"{DEVICE_VARIABLE} is {value!r}: give {', '.join(DEVICE_NAMES)}")
    if value != "auto":
        return value, f"{DEVICE_VARIABLE} says so"
    missing = cuda_missing() or unsupported_on_cuda(args) or _too_few(args)
    if missing:
        return "cpu", missing
    return "cuda", "there is a GPU" if num_ranks(args) == 1 else "there is a GPU for each rank"


def num_ranks(args: ServerArgs) -> int:
    return args.tp_size * args.pp_size * (1 if args.enable_dp_attention else args.dp_size)


def ranks_here(args: ServerArgs) -> int:
    """The ranks of each node."""
    return num_ranks(args) // args.nnodes


def _too_few(args: ServerArgs) -> str:
    """Why ranks would share a GPU: that is slow, so it must be asked for."""
    ranks, gpus = ranks_here(args), num_gpus() - args.base_gpu_id
    if ranks <= gpus:
        return ""
    return f"{ranks} ranks would have to share {count_gpus(gpus)}: --device cuda does so"


def unsupported_on_cuda(args: ServerArgs) -> str:
    """The first flag that CUDA does not support, and why; empty: none."""
    tp, gpus = args.tp_size, num_gpus()
    if args.base_gpu_id >= max(1, gpus):  # `cuda_missing` reports that there is none
        counted = f"there {'is' if gpus == 1 else 'are'} {count_gpus(gpus)}"
        return f"--base-gpu-id {args.base_gpu_id}: {counted}, numbered from 0"
    copies = num_ranks(args) // (tp * args.pp_size)
    if copies > 1 and ranks_here(args) > gpus - args.base_gpu_id:
        groups = "" if tp % copies == 0 else f"--tp-size {tp * copies} "
        return (
            f"--dp-size {copies} means {copies} replicas of the model, which cannot share a GPU: "
            "nothing divides its memory between them (attention groups of one replica can share: "
            f"{groups}--enable-dp-attention)"
        )
    return ""


def gpus_of(args: ServerArgs) -> tuple[int, ...]:
    """The GPU of each rank of this node, for arguments that CUDA supports."""
    first = args.base_gpu_id
    return tuple(first + number for number in share_gpus(ranks_here(args), num_gpus() - first))


def cuda_missing() -> str:
    """Why CUDA cannot be used here; empty if it can."""
    version = _torch_cuda()
    if version is None:
        return "torch is built without CUDA"
    if not _num_gpus():
        return "there is no NVIDIA GPU, or no driver for it"
    return "" if num_gpus() else f"{VISIBLE} is {os.environ[VISIBLE]!r} and hides every GPU"


@cache
def _torch_cuda() -> str | None:
    """The CUDA version that torch is built for, from its version file; None: without CUDA."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return None if found is None else found[1]


def num_gpus() -> int:
    """GPUs visible to this process."""
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return _num_gpus()
    # CUDA uses them up to the first unknown one, and none if one is repeated.
    names = list(takewhile(_is_gpu, (name.strip() for name in visible.split(","))))
    return len(names) if len(set(names)) == len(names) else 0


def _is_gpu(name: str) -> bool:
    """Whether this is the index of a GPU, or the UUID of one or of a MIG slice."""
    return int(name) < _num_gpus() if name.isdecimal() else name.startswith(("GPU-", "MIG-"))


@cache
def _num_gpus() -> int:
    """Counted by NVML, which starts nothing on a GPU, or by device files: containers may have one
    without the other."""
    return _nvml_gpus() or len(list(Path("/dev").glob("nvidia[0-9]*")))


def _nvml_gpus() -> int:
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


def expert_ranks(args: ServerArgs) -> int:
    """Ranks that share the experts: an all-to-all backend without --ep-size means all."""
    if args.ep_size == 1 and args.moe_a2a_backend != "none":
        return args.tp_size
    return args.ep_size
