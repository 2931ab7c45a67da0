"""Four bits to floats in registers, and the scales of their groups."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halves(pairs, DTYPE: tl.constexpr):
    """Two numbers of 16 bits that were read as one of 32: the first, the second."""
    low = pairs.to(tl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return low, high


@triton.jit
def decode_pairs(w, zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The low and the high halves of bytes as DTYPE: q - zero of int4, or e2m1."""
    low, high = w & 15, w >> 4
    if FORMAT == "int4_w4a16":
        return whole(low, zero, DTYPE), whole(high, zero, DTYPE)
    return e2m1(low, DTYPE), e2m1(high, DTYPE)


@triton.jit
def whole(q, zero, DTYPE: tl.constexpr):
    """q - zero. Bits of q below a large power of two are that number plus q."""
    if DTYPE.is_bf16():
        number = (q.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        return number - (zero.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    if DTYPE.is_fp16():
        number = (q.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        return number - (zero.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    return q.to(tl.float32) - zero.to(tl.float32)


@triton.jit
def e2m1(code, DTYPE: tl.constexpr):
    """Exponent and mantissa in their places are the number but for a power of two, zero and
    subnormals included."""
    if DTYPE.is_bf16():
        wide = code.to(tl.uint16)
        bits = ((wide & 8) << 12) | ((wide & 7) << 6)
        return bits.to(tl.bfloat16, bitcast=True) * tl.full((), 2.0**126, tl.bfloat16)
    wide = code.to(tl.uint32)
    bits = ((wide & 8) << 28) | ((wide & 7) << 22)
    return (bits.to(tl.float32, bitcast=True) * 2.0**126).to(DTYPE)


@triton.jit
def scale_of(code, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """e8m0 of mxfp4, e4m3 of nvfp4; scales of int4 as they are."""
    if FORMAT == "mxfp4":
        wide = code.to(tl.uint32)
        number = tl.where(wide == 0, 0x00400000, wide << 23).to(tl.float32, bitcast=True)
        return tl.where(wide == 255, float("nan"), number).to(DTYPE)
    if FORMAT == "nvfp4":
        wide = code.to(tl.uint32)
        number = ((wide & 127) << 20).to(tl.float32, bitcast=True) * 2.0**120
        return tl.where((wide & 127) == 127, float("nan"), number).to(DTYPE)
    return code.to(DTYPE)


@triton.jit
def group_scales(
    rows, n_ok, k, K,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[BN, BK / 2]: of the pair of columns in each byte. Groups that fill a tile are read once
    each; others, of any size, once for each byte."""
    BN: tl.constexpr = rows.shape[0]
    if BK % GROUP == 0:
        COUNT: tl.constexpr = BK // GROUP
        at = k // GROUP + tl.arange(0, COUNT)
        ok = n_ok[:, None] & (at < K // GROUP)[None, :]
        codes = tl.load(rows[:, None] + at[None, :], mask=ok, other=0)
        scales = scale_of(codes, FORMAT, DTYPE)
        spread = tl.broadcast_to(scales[:, :, None], (BN, COUNT, GROUP // 2))
        return tl.reshape(spread, (BN, BK // 2))
    columns = k + 2 * tl.arange(0, BK // 2)
    ok = n_ok[:, None] & (columns < K)[None, :]
    codes = tl.load(rows[:, None] + (columns // GROUP)[None, :], mask=ok, other=0)
    return scale_of(codes, FORMAT, DTYPE)
