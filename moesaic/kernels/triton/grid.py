"""Rounds activations to nvfp4."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next

GROUP = 16
BLOCK = 64  # groups of a program


@triton.jit
def nearest(x):
    """Rounds to whole numbers, ties to even, for |x| < 2 ** 22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def round_e4m3(x):
    """Rounds 2 ** -9 .. 448 or NaN to three bits after the leading one, or to steps of 2 ** -9."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = bits + 0x7FFFF + ((bits >> 20) & 1)
    normal = (bits & 0xFFF00000).to(tl.float32, bitcast=True)
    return tl.where(x < 0.015625, nearest(x * 512.0) * 0.001953125, normal)


@triton.jit
def _round_e2m1(x):
    size = tl.abs(x)
    by_half = nearest(size * 2.0) * 0.5
    by_two = nearest(tl.minimum(size, 6.0) * 0.5) * 2.0
    rounded = tl.where(size < 2.0, by_half, tl.where(size < 4.0, nearest(size), by_two))
    return tl.where(x < 0.0, -rounded, rounded)


@triton.jit
def nvfp4_grid_kernel(
    x, out, groups, scale, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Rounds BLOCK groups of 16."""
    release_next(PDL)
    await_inputs(PDL)
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    ok = (group < groups)[:, None]
    values = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    size = tl.abs(values)
    amax = tl.max(size, 1)
    # The maximum ignores NaN; infinity minus itself is NaN.
    spoilt = tl.sum(size - size, 1)
    wanted = tl.minimum(tl.maximum(tl.div_rn(amax, scale * 6.0), 0.001953125), 448.0)
    scales = tl.where(amax == 0.0, 1.0, round_e4m3(wanted))
    numbers = _round_e2m1(tl.div_rn(values, (scales * scale)[:, None])) * scales[:, None]
    tl.store(out + at, (numbers + spoilt[:, None]).to(out.dtype.element_ty), mask=ok)


def nvfp4_grid(x_TK: Tensor, scale: float) -> Tensor:
    x_TK = x_TK.contiguous()
    out_TK = torch.empty_like(x_TK)
    groups = x_TK.numel() // GROUP
    if groups:
        pdl = dependent_launch(x_TK)
        nvfp4_grid_kernel[(triton.cdiv(groups, BLOCK),)](
            x_TK, out_TK, groups, scale, GROUP, BLOCK, num_warps=4, PDL=pdl.on, **pdl.options
        )
    return out_TK
