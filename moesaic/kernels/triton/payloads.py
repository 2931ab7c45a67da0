"""Encodes rows in registers for sending; twins in kernels/payloads.py.

A tile is [groups, channels of a group], padded with zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moesaic.kernels.triton.grid import nearest, round_e4m3
from moesaic.kernels.triton.quantise import absmax_scales, fp8_scales, to_fp8, to_int8

# 2 ** -9 and 448: the smallest and the largest scale of e4m3.
E4M3_LEAST, E4M3_MOST = tl.constexpr(0.001953125), tl.constexpr(448.0)
INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def encode_tile(x, scale, PAYLOAD: tl.constexpr, TYPE: tl.constexpr):
    """Values in TYPE, four-bit ones two to a byte, and a scale for each group: float32 or bytes;
    undefined for payloads without scales."""
    if PAYLOAD == "plain":
        return x.to(TYPE), 0
    else:
        x = x.to(tl.float32)
        # As an integer, NaN is the largest value.
        amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        if PAYLOAD == "nvfp4":
            return _nvfp4(x, amax, scale)
        elif PAYLOAD == "mxfp4":
            return _mxfp4(x, amax)
        elif PAYLOAD == "fp8":
            scales = fp8_scales(amax.to(tl.float32, bitcast=True), 1)
            return to_fp8(x, scales[:, None]), scales
        else:
            scales = absmax_scales(amax.to(tl.float32, bitcast=True), 1, 127.0)
            return to_int8(x, scales[:, None]), scales


@triton.jit
def _nvfp4(x, amax, scale):
    """Bytes, and e4m3 scales as bytes."""
    finite = amax < INFINITE
    largest = amax.to(tl.float32, bitcast=True)
    six = tl.full(amax.shape, 6.0, tl.float32) * scale
    wanted = tl.math.div_rn(tl.where(finite, largest, 0.0), six)
    wanted = tl.minimum(tl.maximum(wanted, E4M3_LEAST), E4M3_MOST)
    scales = round_e4m3(tl.where(amax == 0, 1.0, wanted))
    codes = scales.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    by = tl.broadcast_to((scales * scale)[:, None], x.shape)
    halves = _e2m1_codes(tl.math.div_rn(x, by), finite[:, None])
    return _pairs(halves), tl.where(finite, codes, 0x7F).to(tl.uint8)


@triton.jit
def _mxfp4(x, amax):
    """Bytes, and exponents plus 127; multiplying by an exact reciprocal equals dividing."""
    finite = amax < INFINITE
    exponents = tl.minimum(tl.maximum(((amax + (1 << 21)) >> 23) - 2, 0), 254)
    exponents = tl.where(amax == 0, 127, exponents)
    # 2 ** -127 is subnormal.
    inverse = tl.where(exponents == 254, 0x400000, (254 - exponents) << 23)
    halves = _e2m1_codes(x * inverse.to(tl.float32, bitcast=True)[:, None], finite[:, None])
    return _pairs(halves), tl.where(finite, exponents, 255).to(tl.uint8)


@triton.jit
def _e2m1_codes(x, finite):
    """Steps of the grid up to |x|, 0..2 by .5, 2..4 by 1, 4..6 by 2, and the sign above them; zero
    in groups that are not finite."""
    size = tl.where(finite, tl.abs(x), 0.0)
    codes = nearest(tl.minimum(size * 2.0, 4.0))
    codes += nearest(tl.minimum(tl.maximum(size - 2.0, 0.0), 2.0))
    codes += nearest(tl.minimum(tl.maximum((size - 4.0) * 0.5, 0.0), 1.0))
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return codes.to(tl.int32) | sign


@triton.jit
def _pairs(codes):
    """Packs four-bit numbers: [G, 2 * n] -> [G, n] bytes."""
    GROUPS: tl.constexpr = codes.shape[0]
    HALF: tl.constexpr = codes.shape[1] // 2
    low, high = tl.split(tl.reshape(codes, (GROUPS, HALF, 2)))
    return (low | (high << 4)).to(tl.uint8)
