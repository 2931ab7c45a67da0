"""Converts four-bit numbers to floats in registers, and the scales of their groups."""

from __future__ import annotations

import triton
import triton.language as tl

# Four bytes in $4; the low halves go to $0 and $1, the high ones to $2 and $3, two bfloat16 in
# each. The compiler's code for this takes several times as many instructions, too many to hide
# behind the loads. 128 + q: the last four bits of a bfloat16 between 128 and 256.
WHOLE_ASM = tl.constexpr("""
{
    .reg .b32 s, t;
    prmt.b32 t, $4, 0, 0x4140;
    lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA;
    shr.b32 s, t, 4;
    lop3.b32 $2, s, 0x000F000F, 0x43004300, 0xEA;
    prmt.b32 t, $4, 0, 0x4342;
    lop3.b32 $1, t, 0x000F000F, 0x43004300, 0xEA;
    shr.b32 s, t, 4;
    lop3.b32 $3, s, 0x000F000F, 0x43004300, 0xEA;
}
""")
# e2m1 times 2 ** -126: a byte with its sign extended above it (by prmt), shifted by two, has the
# sign, exponent and mantissa of its upper half where bfloat16 has them.
E2M1_ASM = tl.constexpr("""
{
    .reg .b32 s, t;
    shl.b32 s, $4, 4;
    prmt.b32 t, s, 0, 0x9180;
    shl.b32 t, t, 2;
    and.b32 $0, t, 0x81C081C0;
    prmt.b32 t, s, 0, 0xB3A2;
    shl.b32 t, t, 2;
    and.b32 $1, t, 0x81C081C0;
    prmt.b32 t, $4, 0, 0x9180;
    shl.b32 t, t, 2;
    and.b32 $2, t, 0x81C081C0;
    prmt.b32 t, $4, 0, 0xB3A2;
    shl.b32 t, t, 2;
    and.b32 $3, t, 0x81C081C0;
}
""")
# That makes weights smaller by 2 ** UNIT, which multiplies the results; the scales contain the
# rest, and no scale that occurs in models exceeds bfloat16.
UNIT = tl.constexpr(32)
RAISED = 2.0**UNIT.value


@triton.jit
def halves(pairs, DTYPE: tl.constexpr):
    """Splits 32 bits into two 16-bit numbers: the first, the second."""
    low = pairs.to(tl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return low, high


@triton.jit
def decode_pairs(w, zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Decodes both halves of bytes to DTYPE: q - zero, or e2m1 (with ASM times 2 ** -126)."""
    if ASM and DTYPE.is_bf16():
        code: tl.constexpr = WHOLE_ASM if FORMAT == "int4_w4a16" else E2M1_ASM
        low, high = tl.inline_asm_elementwise(
            code, "=&r,=&r,=&r,=&r,r", [w], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        if FORMAT == "int4_w4a16":
            shift = (zero.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
            low, high = low - shift, high - shift
    elif FORMAT == "int4_w4a16":
        low, high = whole(w & 15, zero, DTYPE), whole(w >> 4, zero, DTYPE)
    else:
        low, high = e2m1(w & 15, DTYPE), e2m1(w >> 4, DTYPE)
    return low, high


@triton.jit
def whole(q, zero, DTYPE: tl.constexpr):
    """q - zero. The bits of q below a large power of two encode their sum."""
    if DTYPE.is_fp32():
        difference = q.to(tl.float32) - zero.to(tl.float32)
    else:
        base: tl.constexpr = 0x4300 if DTYPE.is_bf16() else 0x6400
        number = (q.to(tl.uint16) | base).to(DTYPE, bitcast=True)
        difference = number - (zero.to(tl.uint16) | base).to(DTYPE, bitcast=True)
    return difference


@triton.jit
def e2m1(code, DTYPE: tl.constexpr):
    """Shifted into position, exponent and mantissa encode the number except for a power of two,
    zero and subnormals included."""
    if DTYPE.is_bf16():
        wide = code.to(tl.uint16)
        bits = ((wide & 8) << 12) | ((wide & 7) << 6)
        number = bits.to(tl.bfloat16, bitcast=True) * tl.full((), 2.0**126, tl.bfloat16)
    else:
        wide = code.to(tl.uint32)
        bits = ((wide & 8) << 28) | ((wide & 7) << 22)
        number = (bits.to(tl.float32, bitcast=True) * 2.0**126).to(DTYPE)
    return number


@triton.jit
def scale_of(code, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """e8m0 of mxfp4, e4m3 of nvfp4, or the stored scales of int4. With ASM and bfloat16, the factor
    that turns results of `decode_pairs` into weights, in units of 2 ** -UNIT."""
    RAISE: tl.constexpr = 126 - UNIT if ASM and DTYPE.is_bf16() else 0
    if FORMAT == "mxfp4":
        # 2 ** -127 is subnormal; 255 and all larger values are NaN.
        wide = code.to(tl.uint32) + RAISE
        bits = tl.maximum(wide << 7, 0x40)
        if RAISE:
            bits = tl.minimum(bits, 0x7FC0)
        else:
            bits += (wide + 1) >> 8 << 6
        if DTYPE.is_bf16():
            scale = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            scale = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(DTYPE)
    elif FORMAT == "nvfp4":
        wide = code.to(tl.uint32) & 127
        if DTYPE.is_bf16():
            number = (wide << 4).to(tl.uint16).to(tl.bfloat16, bitcast=True)
            number = number * tl.full((), 2.0**120, tl.bfloat16)
            number = number * tl.full((), 2.0**RAISE, tl.bfloat16)
        else:
            number = (wide << 20).to(tl.float32, bitcast=True) * 2.0**120
        scale = tl.where(wide == 127, float("nan"), number).to(DTYPE)
    else:
        scale = code.to(DTYPE)
    return scale


@triton.jit
def load_codes(rows, n_ok, k, K, GROUP: tl.constexpr, BK: tl.constexpr):
    """Loads the stored codes of the groups of a tile of BK columns: [BN, groups]; if groups do not
    divide the tile evenly, one for each byte."""
    if GROUP % BK == 0:
        ok = (n_ok & (k < K))[:, None]
        codes = tl.load(rows[:, None] + k // GROUP, mask=ok, other=0)
    elif BK % GROUP == 0:
        at = k // GROUP + tl.arange(0, BK // GROUP)
        ok = n_ok[:, None] & (at < K // GROUP)[None, :]
        codes = tl.load(rows[:, None] + at[None, :], mask=ok, other=0)
    else:
        columns = k + 2 * tl.arange(0, BK // 2)
        ok = n_ok[:, None] & (columns < K)[None, :]
        codes = tl.load(rows[:, None] + (columns // GROUP)[None, :], mask=ok, other=0)
    return codes


@triton.jit
def spread_codes(codes, GROUP: tl.constexpr, BK: tl.constexpr):
    """Repeats codes [BN, groups] to [BN, BK / 2]; keeps [BN, 1]."""
    if GROUP % BK != 0 and BK % GROUP == 0:
        BN: tl.constexpr = codes.shape[0]
        spread = tl.broadcast_to(codes[:, :, None], (BN, BK // GROUP, GROUP // 2))
        codes = tl.reshape(spread, (BN, BK // 2))
    return codes
