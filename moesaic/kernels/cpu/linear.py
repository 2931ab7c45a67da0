"""Matrix products whose rows are independent, with AVX-512 and AMX, and their torch reference.

T tokens · I inputs · O outputs.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.cpu.build import TILE_FLAGS, TILE_OPTIONS, cpu_flags, load_library
from moesaic.kernels.cpu.threads import Call, call_in_parts

FLOAT_FLAGS = {"avx512f"}
# Outputs of a tile.
TILE_OUTPUTS = 16
# Products with fewer multiplications finish before a second thread starts.
SMALL_WORK = 1 << 20


class _LinearStruct(ctypes.Structure):
    """struct linear of linear.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("x", "w", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs")),
    ]


@cache
def library() -> dict[torch.dtype, Call]:
    """The compiled kernels by type, for the types that this CPU supports."""
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
    """Whether `run` supports this matrix on this machine."""
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
        # A shard of many ranks may be this narrow. Its bits equal those of the whole matrix.
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
    large = len(x_TI) * weight_OI.numel() > SMALL_WORK
    call_in_parts(library()[x_TI.dtype], arguments, torch.get_num_threads() if large else 1)
    return y_TO


def reference(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Computes the same in torch: sums in float32, rounded once."""
    bias = None if bias_O is None else bias_O.float()
    return F.linear(x_TI.float(), weight_OI.float(), bias).to(x_TI.dtype)
