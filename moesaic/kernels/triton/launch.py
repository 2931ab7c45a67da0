"""Kernels that start while the one before them still runs (programmatic dependent launch, Hopper).

A kernel with `PDL` may begin before its predecessor has ended. Until `await_inputs` it must not
touch what other kernels of the step write or still read; weights, which nobody writes, it may fetch
before. `release_next` lets the successor begin, once all programs have come to it. Small kernels do
so at once, even before they wait: whoever is behind them waits for them, and they for whoever is in
front; and the weights of a large product come while several small kernels run. All of this holds
only if every kernel waits: one that ended before the kernel in front would let those behind it go
on too early. Who reads before it waits what a kernel of the step wrote says which kernel in front
of it must therefore have waited before it released it (experts_small.py, experts_row.py). With PDL
off both are nothing, as in the interpreter. Every launch passes `PDL=pdl.on` and `**pdl.options`:

    pdl = dependent_launch(x)
    kernel[grid](…, PDL=pdl.on, **pdl.options)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HOPPER = 9
# What the interpreter has not, or does otherwise than a GPU, asks this.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Launch:
    on: bool
    options: dict[str, Any]


OFF = Launch(False, {})
ON = Launch(True, {"launch_pdl": True})


def dependent_launch(x: Tensor) -> Launch:
    """MOESAIC_PDL=0 turns it off, to see what it brings or whether it is to blame."""
    return _launch_on(x.device.index) if x.is_cuda else OFF


@cache
def _launch_on(device: int | None) -> Launch:
    able = torch.cuda.get_device_capability(device)[0] >= HOPPER
    return ON if able and os.environ.get("MOESAIC_PDL", "1") != "0" else OFF


@cache
def is_hopper(device: int | None) -> bool:
    """Of that generation and no later one: its matrix units are programmed by hand."""
    return torch.cuda.get_device_capability(device)[0] == HOPPER


@cache
def num_processors(device: int | None) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def await_inputs(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_next(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_lines(pointers):
    """Asks for the 128-byte line behind each pointer to come into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_rows(first, stride, rows, size):
    """Asks for `size` bytes of each of some rows to come into the L2 cache. They lie `stride` bytes
    apart, all of it multiples of 16 bytes; no more rows than threads, and the warps share them, as
    each can only ask for one after the other. Hopper and later."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred mine;
        .reg .u32 row, warp, warps;
        .reg .u64 at;
        mov.u32 row, %tid.x;
        mov.u32 warps, %ntid.x;
        shr.u32 warp, row, 5;
        shr.u32 warps, warps, 5;
        and.b32 row, row, 31;
        mad.lo.u32 row, row, warps, warp;
        setp.lt.u32 mine, row, $3;
        mad.wide.u32 at, row, $2, $1;
        @mine cp.async.bulk.prefetch.L2.global [at], $4;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r,r",
        [first, stride, rows, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
