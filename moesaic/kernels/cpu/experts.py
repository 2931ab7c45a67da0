"""Experts' feed-forward networks in bfloat16 with AMX tiles, and their torch reference.

e experts · H hidden · I intermediate · J = 2 * I · Y rows of all experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.cpu.build import TILE_FLAGS, TILE_OPTIONS, cpu_flags, load_library
from moesaic.kernels.cpu.threads import Call, call_in_parts


@dataclass(frozen=True, slots=True)
class SwigluSpec:
    """silu(gate) * up; with a limit, gate * sigmoid(alpha * gate) * (up + 1) of clamped values."""

    alpha: float = 1.0
    limit: float | None = None

    def reference(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is None:
            return gate * torch.sigmoid(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit) + 1
        return gate * torch.sigmoid(self.alpha * gate) * up


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


@cache
def library() -> tuple[Call, Call] | None:
    """The two compiled products; None if the CPU or the compiler does not support them."""
    if not cpu_flags() >= TILE_FLAGS:
        return None
    loaded = load_library("experts", ("-mavx512f", *TILE_OPTIONS))
    if loaded is None or loaded.experts_enable() != 0:
        return None
    arguments = [ctypes.POINTER(_ExpertsStruct), ctypes.c_int64, ctypes.c_int64]
    products = (loaded.experts_inward, loaded.experts_outward)
    for function in products:
        function.argtypes, function.restype = arguments, ctypes.c_int
    return products


def fits(hidden: int, inner: int, dtype: torch.dtype) -> bool:
    """Whether `run` supports layers of this shape on this machine."""
    whole = hidden % 32 == 0 and inner % 32 == 0
    return dtype == torch.bfloat16 and whole and library() is not None


def run(
    x_YH: Tensor, y_YH: Tensor, h_YI: Tensor, jobs: Sequence[ExpertRows], experts: ExpertTensors
) -> None:
    """Writes the rows of the jobs to y; h is workspace. Runs on all of torch's threads, each with a
    share of every expert's weights."""
    products = library()
    assert products is not None
    weights = (experts.w13_eJH, experts.w2_eHI, experts.b13_eJ, experts.b2_eH)
    for tensor in (x_YH, y_YH, h_YI, *weights):
        assert tensor is None or (tensor.is_contiguous() and tensor.dtype == torch.bfloat16)
    assert len(x_YH) == len(y_YH) == len(h_YI)
    assert all(job.start >= 0 and job.start + job.rows <= len(x_YH) for job in jobs)
    if not jobs:
        return
    arguments = _arguments(x_YH, y_YH, h_YI, jobs, experts)
    for product in products:
        call_in_parts(product, arguments, torch.get_num_threads())


def _arguments(
    x_YH: Tensor, y_YH: Tensor, h_YI: Tensor, jobs: Sequence[ExpertRows], experts: ExpertTensors
) -> object:
    """A pointer to the kernel's arguments; it keeps them alive."""
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
    """Computes the same in torch: sums in float32, h and y rounded once."""
    for job in jobs:
        rows = slice(job.start, job.start + job.rows)
        gate_up = F.linear(x_YH[rows].float(), experts.w13_eJH[job.slot].float())
        if experts.b13_eJ is not None:
            gate_up += experts.b13_eJ[job.slot].float()
        h_YI[rows] = experts.activation.reference(*gate_up.chunk(2, dim=1)).to(h_YI.dtype)
        y = F.linear(h_YI[rows].float(), experts.w2_eHI[job.slot].float())
        if experts.b2_eH is not None:
            y += experts.b2_eH[job.slot].float()
        y_YH[rows] = y.to(y_YH.dtype)
