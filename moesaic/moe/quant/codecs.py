"""A codec: which tensors ("planes") hold a matrix [N, K], and how to fill and read them.

N rows · K columns · any number of dimensions before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from moesaic.moe.quant import numerics

WHOLE = 0


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a format, with an entry per block of (rows, cols) of the matrix.

    `cols` WHOLE: one entry for all columns of a row.
    """

    name: str
    dtype: torch.dtype
    rows: int = 1
    cols: int = 1

    def width(self, size_K: int) -> int:
        return 1 if self.cols == WHOLE else -(-size_K // self.cols)

    def shape(self, size_N: int, size_K: int) -> tuple[int, int]:
        return -(-size_N // self.rows), self.width(size_K)


class Codec(Protocol):
    @property
    def planes(self) -> tuple[Plane, ...]:
        """The first one holds the values."""

    def encode(self, w_NK: Tensor) -> tuple[Tensor, ...]:
        """A tensor for every plane, in their order."""

    def decode(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        """Into `out` [N, K], of any float type."""

    def error_bound(self, w_NK: Tensor) -> Tensor:
        """float64 [N, K]: the most by which an element may change when it is encoded and decoded in
        float32, from the scales of `w_NK` and the spacing of the format's numbers; infinite in a
        block that is not finite."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers of a type: `mantissa` bits after the leading one, equally spaced below
    2 ** min_exponent."""

    mantissa: int
    min_exponent: int
    largest: float

    def half_step(self, size: Tensor) -> Tensor:
        """Half the distance between neighbours around `size` (float64), as an exact power of 2."""
        exponents = torch.frexp(size).exponent.long() - 1
        exponents = exponents.masked_fill(size == 0, self.min_exponent)
        halves = exponents.clamp(min=self.min_exponent) - self.mantissa - 1
        return (halves + 1023 << 52).view(torch.float64)

    def error_bound(self, x: Tensor, scales: Tensor) -> Tensor:
        """Half a step or what is cut off; and what float32 loses in scaling both ways."""
        size, scales = x.double().abs(), scales.double()
        scaled = size / scales
        off = torch.maximum(self.half_step(scaled), scaled - self.largest) * scales
        bound = off + (size + scales) * 2.0**-22 + 2.0**-149
        return bound.masked_fill(~(size / scales).isfinite(), torch.inf)


E4M3 = Grid(mantissa=3, min_exponent=-6, largest=numerics.FP8_MAX)
E2M1 = Grid(mantissa=1, min_exponent=0, largest=numerics.FP4_MAX)
WHOLE_NUMBERS = Grid(mantissa=8, min_exponent=8, largest=numerics.INT8_MAX)


@cache
def _values(dtype: torch.dtype) -> tuple[Plane, ...]:
    """Asked for by every step of every layer."""
    return (Plane("values", dtype),)


@dataclass(frozen=True, slots=True)
class Plain:
    """The numbers themselves, in a float type. What is too large for it becomes infinite."""

    dtype: torch.dtype

    @property
    def planes(self) -> tuple[Plane, ...]:
        return _values(self.dtype)

    def encode(self, w_NK: Tensor) -> tuple[Tensor, ...]:
        return (w_NK.to(self.dtype),)

    def decode(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        return out.copy_(tensors[0])

    def error_bound(self, w_NK: Tensor) -> Tensor:
        info = torch.finfo(self.dtype)
        mantissa, exponent = torch.frexp(torch.tensor([info.eps, info.tiny], dtype=torch.float64))
        assert bool((mantissa == 0.5).all())
        grid = Grid(1 - int(exponent[0]), int(exponent[1]) - 1, info.max)
        size = w_NK.double().abs()
        return grid.half_step(size).masked_fill(~(size <= info.max), torch.inf)


@dataclass(frozen=True, slots=True)
class Fp8:
    """e4m3 with a float32 scale per block; `cols` WHOLE: per row; `per_tensor`: one for all rows,
    repeated in every row so that rows can be cut."""

    rows: int = 1
    cols: int = WHOLE
    per_tensor: bool = False

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (
            Plane("values", numerics.FP8),
            Plane("scales", torch.float32, self.rows, self.cols),
        )

    def encode(self, w_NK: Tensor) -> tuple[Tensor, ...]:
        size_N, size_K = w_NK.shape[-2:]
        if not self.per_tensor:
            return numerics.encode_fp8(w_NK, self.rows, self.cols or size_K)
        values, scales = numerics.encode_fp8(w_NK, size_N, size_K)
        return values, scales.repeat_interleave(size_N, -2)

    def decode(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        values, scales = tensors
        return numerics.decode_fp8(values, scales, self.rows, self.cols or out.shape[-1], out)

    def error_bound(self, w_NK: Tensor) -> Tensor:
        size_N, size_K = w_NK.shape[-2:]
        _, scales = self.encode(w_NK)
        spread = numerics.spread(scales, self.rows, self.cols or size_K, size_N, size_K)
        return E4M3.error_bound(w_NK, spread)


@dataclass(frozen=True, slots=True)
class Int8:
    """int8 with a float32 scale per row."""

    @property
    def planes(self) -> tuple[Plane, ...]:
        return Plane("values", torch.int8), Plane("scales", torch.float32, cols=WHOLE)

    def encode(self, w_NK: Tensor) -> tuple[Tensor, ...]:
        return numerics.encode_int8(w_NK)

    def decode(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        values, scales = tensors
        return numerics.decode_int8(values, scales, out)

    def error_bound(self, w_NK: Tensor) -> Tensor:
        _, scales = self.encode(w_NK)
        return WHOLE_NUMBERS.error_bound(w_NK, scales)


@dataclass(frozen=True, slots=True)
class Int4:
    """Four bits with a float32 scale and a zero point per `group` columns."""

    group: int
    symmetric: bool = True

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (
            Plane("values", torch.uint8, cols=2),
            Plane("scales", torch.float32, cols=self.group),
            Plane("zeros", torch.uint8, cols=self.group),
        )

    def encode(self, w_NK: Tensor) -> tuple[Tensor, ...]:
        return numerics.encode_int4(w_NK, self.group, self.symmetric)

    def decode(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        values, scales, zeros = tensors
        return numerics.decode_int4(values, scales, zeros, out)

    def error_bound(self, w_NK: Tensor) -> Tensor:
        _, scales, _ = self.encode(w_NK)
        return WHOLE_NUMBERS.error_bound(w_NK, scales.repeat_interleave(self.group, -1))


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """e2m1 with an e4m3 scale per 16 columns and a global one: a constant that both sides know, or
    (None) that of each matrix, in a third plane."""

    global_scale: float | None = None

    @property
    def planes(self) -> tuple[Plane, ...]:
        planes = (
            Plane("values", torch.uint8, cols=2),
            Plane("scales", numerics.FP8, cols=numerics.NVFP4_GROUP),
        )
        stored = Plane("global", torch.float32, cols=WHOLE)
        return planes if self.global_scale is not None else (*planes, stored)

    def encode(self, w_NK: Tensor) -> tuple[Tensor, ...]:
        tensors = numerics.encode_nvfp4(w_NK, self.global_scale)
        return tensors[: len(self.planes)]

    def decode(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        values, scales, *stored = tensors
        return numerics.decode_nvfp4(values, scales, self._global(stored), out)

    def error_bound(self, w_NK: Tensor) -> Tensor:
        _, scales, *stored = self.encode(w_NK)
        combined = numerics.nvfp4_scales(scales, self._global(stored))
        return E2M1.error_bound(w_NK, combined.repeat_interleave(numerics.NVFP4_GROUP, -1))

    def _global(self, stored: Sequence[Tensor]) -> Tensor | float:
        return stored[0] if self.global_scale is None else self.global_scale


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """e2m1 with a power of two (e8m0) per 32 columns."""

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (
            Plane("values", torch.uint8, cols=2),
            Plane("scales", torch.uint8, cols=numerics.MXFP4_GROUP),
        )

    def encode(self, w_NK: Tensor) -> tuple[Tensor, ...]:
        return numerics.encode_mxfp4(w_NK)

    def decode(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        values, scales = tensors
        return numerics.decode_mxfp4(values, scales, out)

    def error_bound(self, w_NK: Tensor) -> Tensor:
        _, scales = self.encode(w_NK)
        floats = numerics.mxfp4_scales(scales)
        return E2M1.error_bound(w_NK, floats.repeat_interleave(numerics.MXFP4_GROUP, -1))
