"""Matrix products whose rows do not depend on each other: by AVX-512 and AMX, and in torch.

T tokens · I inputs · O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from itertools import repeat
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.cpu.build import cpu_flags, load_library
from moesaic.kernels.cpu.threads import threads

FLOAT_FLAGS = {"avx512f"}
TILE_FLAGS = {"amx_tile", "amx_bf16", "avx512f", "avx512bw", "avx512vl", "avx512_bf16"}
TILE_OPTIONS = ("-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
# Outputs that tiles compute at a time.
TILE_OUTPUTS = 16
# A product with fewer multiplications than this is done before a second thread has started.
SMALL_WORK = 1 << 20

Call = Callable[[object, int, int], int]


class _LinearStruct(ctypes.Structure):
    """struct linear of linear.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("x", "w", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs")),
    ]


@cache
def library() -> dict[torch.dtype, Call]:
    """The compiled kernel of each type that this machine can compute."""
    flags = cpu_flags()
    if not flags >= FLOAT_FLAGS:
        return {}
    tiles = flags >= TILE_FLAGS
    loaded = load_library("linear", ("-mavx512f", *(TILE_OPTIONS if tiles else ())))
    if loaded is None:
        return {}
    calls = {torch.float32: loaded.linear_floats}
    if tiles and loaded.linear_enable_tiles() == 0:
        calls[torch.bfloat16] = loaded.linear_tiles
    for call in calls.values():
        call.argtypes = [ctypes.POINTER(_LinearStruct), ctypes.c_int64, ctypes.c_int64]
        call.restype = ctypes.c_int
    return calls


def fits(weight_OI: Tensor) -> bool:
    """Whether `run` can multiply with this matrix here."""
    inputs = weight_OI.shape[1]
    if weight_OI.dtype not in library() or not weight_OI.is_contiguous():
        return False
    return weight_OI.dtype == torch.float32 or (inputs % 32 == 0 and inputs > 0)


def run(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + bias. Threads take shares of the outputs: their number does not change the bits."""
    assert x_TI.dim() == 2 and x_TI.shape[1] == weight_OI.shape[1], (x_TI.shape, weight_OI.shape)
    assert fits(weight_OI) and x_TI.dtype == weight_OI.dtype
    assert bias_O is None or (bias_O.shape == weight_OI.shape[:1] and bias_O.dtype == x_TI.dtype)
    outputs = len(weight_OI)
    if outputs < TILE_OUTPUTS and weight_OI.dtype == torch.bfloat16:
        # A cut over many ranks may be so narrow: its bits are those of the whole matrix.
        missing = TILE_OUTPUTS - outputs
        bias_O = None if bias_O is None else F.pad(bias_O, (0, missing))
        return run(x_TI, F.pad(weight_OI, (0, 0, 0, missing)), bias_O)[:, :outputs]
    x_TI, bias_O = x_TI.contiguous(), None if bias_O is None else bias_O.contiguous()
    y_TO = x_TI.new_empty(len(x_TI), len(weight_OI))
    arguments = ctypes.pointer(
        _LinearStruct(
            x=x_TI.data_ptr(),
            w=weight_OI.data_ptr(),
            bias=None if bias_O is None else bias_O.data_ptr(),
            y=y_TO.data_ptr(),
            rows=len(x_TI),
            inputs=x_TI.shape[1],
            outputs=len(weight_OI),
        )
    )
    _call(library()[x_TI.dtype], arguments, len(x_TI) * weight_OI.numel())
    return y_TO


def _call(kernel: Call, arguments: object, work: int) -> None:
    parts = torch.get_num_threads() if work > SMALL_WORK else 1
    if parts == 1:
        failed = kernel(arguments, 0, 1)
    else:
        calls = threads(parts).map(kernel, repeat(arguments), range(parts), repeat(parts))
        failed = max(list(calls))
    if failed:
        raise MemoryError("no memory to pack rows for a matrix product")


def reference(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """What `run` computes, in torch: sums in float32, rounded once."""
    bias = None if bias_O is None else bias_O.float()
    return F.linear(x_TI.float(), weight_OI.float(), bias).to(x_TI.dtype)
