"""Weights and sums pairs; the twin is in kernels/experts.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next

CHANNELS = 512


def weigh_pairs(y_NH: Tensor, ids_RK: Tensor, weights_RK: Tensor, out_RH: Tensor) -> Tensor:
    (rows, top_k), hidden = ids_RK.shape, y_NH.shape[1]
    assert y_NH.is_contiguous() and out_RH.is_contiguous(), (y_NH.stride(), out_RH.stride())
    if not rows:
        return out_RH
    pdl = dependent_launch(y_NH)
    weigh_kernel[(rows, -(-hidden // CHANNELS))](
        y_NH, ids_RK.contiguous(), weights_RK.contiguous(), out_RH,
        H=hidden, K=top_k, BLOCK=CHANNELS, PDL=pdl.on,
        num_warps=2, enable_fp_fusion=False, **pdl.options,
    )  # fmt: skip
    return out_RH


@triton.jit
def weigh_kernel(
    y, ids, weights, out, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Launched without fusion: products are rounded before they are added."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    release_next(PDL)
    await_inputs(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        pair = row * K + k
        known = tl.load(ids + pair) >= 0
        part = tl.load(y + pair * H + channel, mask=known & (channel < H), other=0.0)
        total += tl.where(known, part.to(tl.float32) * tl.load(weights + pair), 0.0)
    tl.store(out + row * H + channel, total.to(out.dtype.element_ty), mask=channel < H)
