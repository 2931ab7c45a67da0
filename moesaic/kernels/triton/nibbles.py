"""Four bits to floats in registers, and the scales of their groups."""

from __future__ import annotations

import triton
import triton.language as tl

# Four bytes in $4; the low halves go to $0 and $1, the high ones to $2 and $3, two bfloat16 in
# each. The compiler's own code for the same takes several times as many instructions, more than
# there is time for while the bytes come in.
# 128 + q: the last four bits of a bfloat16 between 128 and 256.
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
# e2m1 less 126 powers of two: a byte with its sign in all bits above it (prmt repeats that), moved
# by two, has sign, exponent and mantissa of its upper half where bfloat16 has them.
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
# With that, weights are smaller by so many powers of two, which results are multiplied with: the
# scales make good for the rest, and none that a model has becomes too large for a bfloat16.
UNIT = tl.constexpr(32)
RAISED = 2.0**UNIT.value


@triton.jit
def halves(pairs, DTYPE: tl.constexpr):
    """Two numbers of 16 bits that were read as one of 32: the first, the second."""
    low = pairs.to(tl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return low, high


@triton.jit
def decode_pairs(w, zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The low and the high halves of bytes as DTYPE: q - zero of int4, or e2m1 (with ASM 2 ** 126
    times too small)."""
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
    """q - zero. Bits of q below a large power of two are that number plus q."""
    if DTYPE.is_fp32():
        difference = q.to(tl.float32) - zero.to(tl.float32)
    else:
        base: tl.constexpr = 0x4300 if DTYPE.is_bf16() else 0x6400
        number = (q.to(tl.uint16) | base).to(DTYPE, bitcast=True)
        difference = number - (zero.to(tl.uint16) | base).to(DTYPE, bitcast=True)
    return difference


@triton.jit
def e2m1(code, DTYPE: tl.constexpr):
    """Exponent and mantissa in their places are the number but for a power of two, zero and
    subnormals included."""
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
    """e8m0 of mxfp4, e4m3 of nvfp4; scales of int4 as they are. With ASM and in bfloat16, what
    makes weights of what `decode_pairs` gives, in units of 2 ** -UNIT."""
    RAISE: tl.constexpr = 126 - UNIT if ASM and DTYPE.is_bf16() else 0
    if FORMAT == "mxfp4":
        # 2 ** -127 is subnormal, and 255 is NaN, as is all that is too large.
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
    """What is stored for the groups of a tile of BK columns: [BN, groups]; for groups that do not
    fill it evenly, of each byte."""
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
    """[BN, BK / 2] of [BN, groups], or [BN, 1]."""
    if GROUP % BK != 0 and BK % GROUP == 0:
        BN: tl.constexpr = codes.shape[0]
        spread = tl.broadcast_to(codes[:, :, None], (BN, BK // GROUP, GROUP // 2))
        codes = tl.reshape(spread, (BN, BK // 2))
    return codes
