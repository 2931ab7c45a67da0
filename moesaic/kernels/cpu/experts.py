"""Feed-forward networks of experts in bfloat16 by AMX tiles, and the same in torch.

e experts · H hidden · I intermediate · J = 2 * I · Y rows of all experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.cpu.build import cpu_flags, load_library
from moesaic.kernels.cpu.threads import threads

NEEDED_FLAGS = {"amx_tile", "amx_bf16", "avx512f", "avx512bw", "avx512vl", "avx512_bf16"}
OPTIONS = (
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512bf16",
    "-mamx-tile",
    "-mamx-bf16",
)
Call = Callable[[object, int, int], int]


@dataclass(frozen=True, slots=True)
class SwigluSpec:
    """silu(gate) * up; or, with a limit, gate * sigmoid(alpha * gate) * (up + 1) of clamped
    values."""

    alpha: float = 1.0
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    w13_eJH: Tensor
    w2_eHI: Tensor
    b13_eJ: Tensor | None
    b2_eH: Tensor | None
    activation: SwigluSpec


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows start .. start + rows of x go through expert `slot`."""

    slot: int
    start: int
    rows: int


class _ExpertsStruct(ctypes.Structure):
    """struct experts of experts.c."""

    _fields_: ClassVar = [
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("slots", "starts", "rows")),
        ("jobs", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("w13", "w2", "b13", "b2", "x", "h", "y")),
        ("hidden", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("activation", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True)
class ExpertsLibrary:
    inward: Call
    outward: Call


@cache
def library() -> ExpertsLibrary | None:
    """The compiled kernel; None where the machine or the compiler does not allow it."""
    if not cpu_flags() >= NEEDED_FLAGS:
        return None
    loaded = load_library("experts", OPTIONS)
    if loaded is None or loaded.experts_enable() != 0:
        return None
    arguments = [ctypes.POINTER(_ExpertsStruct), ctypes.c_int64, ctypes.c_int64]
    for function in (loaded.experts_inward, loaded.experts_outward):
        function.argtypes, function.restype = arguments, ctypes.c_int
    return ExpertsLibrary(loaded.experts_inward, loaded.experts_outward)


def fits(hidden: int, inner: int, dtype: torch.dtype) -> bool:
    """Whether `run` can compute layers of this shape here."""
    whole = hidden % 32 == 0 and inner % 32 == 0
    return dtype == torch.bfloat16 and whole and library() is not None


def run(
    x_YH: Tensor, y_YH: Tensor, h_YI: Tensor, jobs: Sequence[ExpertRows], experts: ExpertTensors
) -> None:
    """Writes the rows of the jobs to y; h is room for what lies between. On all of torch's threads,
    each with a share of every expert's weights."""
    kernel = library()
    assert kernel is not None
    for tensor in (
        x_YH,
        y_YH,
        h_YI,
        experts.w13_eJH,
        experts.w2_eHI,
        experts.b13_eJ,
        experts.b2_eH,
    ):
        assert tensor is None or (tensor.is_contiguous() and tensor.dtype == torch.bfloat16)
    assert len(x_YH) == len(y_YH) == len(h_YI)
    assert all(job.start >= 0 and job.start + job.rows <= len(x_YH) for job in jobs)
    arguments = _arguments(x_YH, y_YH, h_YI, jobs, experts)
    parts = torch.get_num_threads() if jobs else 0
    for stage in (kernel.inward, kernel.outward):
        if parts == 1:
            _check(stage(arguments, 0, 1))
        elif parts:
            calls = threads(parts).map(stage, repeat(arguments), range(parts), repeat(parts))
            for failed in calls:
                _check(failed)


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("no memory to pack rows for the experts")


def _arguments(
    x_YH: Tensor, y_YH: Tensor, h_YI: Tensor, jobs: Sequence[ExpertRows], experts: ExpertTensors
) -> object:
    """A pointer to the kernel's arguments; it keeps what it points to alive."""
    array = ctypes.c_int64 * len(jobs)
    activation = experts.activation
    return ctypes.pointer(
        _ExpertsStruct(
            slots=array(*(job.slot for job in jobs)),
            starts=array(*(job.start for job in jobs)),
            rows=array(*(job.rows for job in jobs)),
            jobs=len(jobs),
            w13=experts.w13_eJH.data_ptr(),
            w2=experts.w2_eHI.data_ptr(),
            b13=None if experts.b13_eJ is None else experts.b13_eJ.data_ptr(),
            b2=None if experts.b2_eH is None else experts.b2_eH.data_ptr(),
            x=x_YH.data_ptr(),
            h=h_YI.data_ptr(),
            y=y_YH.data_ptr(),
            hidden=x_YH.shape[1],
            inner=h_YI.shape[1],
            activation=0 if activation.limit is None else 1,
            alpha=activation.alpha,
            limit=activation.limit or 0.0,
        )
    )


def reference(
    x_YH: Tensor, y_YH: Tensor, h_YI: Tensor, jobs: Sequence[ExpertRows], experts: ExpertTensors
) -> None:
    """What `run` computes, in torch: sums in float32, h and y rounded once."""
    for job in jobs:
        rows = slice(job.start, job.start + job.rows)
        gate_up = F.linear(x_YH[rows].float(), experts.w13_eJH[job.slot].float())
        if experts.b13_eJ is not None:
            gate_up += experts.b13_eJ[job.slot].float()
        gate, up = gate_up.chunk(2, dim=1)
        limit = experts.activation.limit
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
        h_YI[rows] = (gate * torch.sigmoid(experts.activation.alpha * gate) * up).to(h_YI.dtype)
        y = F.linear(h_YI[rows].float(), experts.w2_eHI[job.slot].float())
        if experts.b2_eH is not None:
            y += experts.b2_eH[job.slot].float()
        y_YH[rows] = y.to(y_YH.dtype)
