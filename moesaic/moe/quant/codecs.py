"""A codec: which tensors ("planes") hold a matrix [N, K], and how to fill and read them.

N rows · K columns · any number of dimensions before them.
Codecs compute in float32. A block of zeros has scale 1. A block that holds a NaN or an infinity has
scale NaN: all of it decodes to NaN, its neighbours do not notice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.payloads import in_groups, pack_pairs
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


class Codec(ABC):
    grid: ClassVar[Grid]
    """The stored numbers, before their scale."""

    @property
    @abstractmethod
    def planes(self) -> tuple[Plane, ...]:
        """The first one holds the values, the second one the scales."""

    @abstractmethod
    def encode(self, w_NK: Tensor) -> tuple[Tensor, ...]:
        """A tensor for every plane, in their order."""

    def decode(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        """Into `out` [N, K] of any float type, rounded once; it may be part of a larger tensor."""
        values = tensors[0]
        shape = (*values.shape[:-1], values.shape[-1] * self.planes[0].cols)
        assert out.shape == shape, f"out is {tuple(out.shape)}, not {shape}"
        if out.dtype == torch.float32 and out.is_contiguous():
            return self._decode(tensors, out)
        work = torch.empty(shape, dtype=torch.float32, device=values.device)
        return out.copy_(self._decode(tensors, work))

    @abstractmethod
    def _decode(self, tensors: Sequence[Tensor], work: Tensor) -> Tensor:
        """Into `work`, contiguous float32."""

    def float_scales(self, tensors: Sequence[Tensor]) -> Tensor:
        """What stored numbers are multiplied with, in float32."""
        return tensors[1]

    def error_bound(self, w_NK: Tensor) -> Tensor:
        """float64 [N, K]: the most by which an element may change when it is encoded and decoded in
        float32, from the scales of `w_NK` and the spacing of the format's numbers; infinite in a
        block that is not finite."""
        scales, plane = self.float_scales(self.encode(w_NK)), self.planes[1]
        return self.grid.error_bound(w_NK, numerics.spread(scales, plane.rows, plane.cols, w_NK))


@dataclass(frozen=True)
class Plain(Codec):
    """The numbers themselves, in a float type. What is too large for it becomes infinite."""

    dtype: torch.dtype

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane("values", self.dtype),)

    def encode(self, w_NK: Tensor) -> tuple[Tensor, ...]:
        return (w_NK.to(self.dtype),)

    def decode(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        return self._decode(tensors, out)

    def _decode(self, tensors: Sequence[Tensor], work: Tensor) -> Tensor:
        return work.copy_(tensors[0])

    def error_bound(self, w_NK: Tensor) -> Tensor:
        info = torch.finfo(self.dtype)
        mantissa, exponent = torch.frexp(torch.tensor([info.eps, info.tiny], dtype=torch.float64))
        assert bool((mantissa == 0.5).all())
        grid = Grid(1 - int(exponent[0]), int(exponent[1]) - 1, info.max)
        size = w_NK.double().abs()
        return grid.half_step(size).masked_fill(~(size <= info.max), torch.inf)


@dataclass(frozen=True)
class Fp8(Codec):
    """e4m3 with a float32 scale per block, of which the last ones may be smaller; `cols` WHOLE: per
    row; `per_tensor`: one for all rows, repeated in every row so that rows can be cut.

    Example with blocks of (1, 2): [[448, 1, -4]] -> values [[448, 1, -448]] (bytes 7E 38 FE),
    scales [[1, 4 / 448]].
    """

    rows: int = 1
    cols: int = WHOLE
    per_tensor: bool = False
    grid = E4M3

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        scales = Plane("scales", torch.float32, self.rows, self.cols)
        return Plane("values", numerics.FP8), scales

    def encode(self, w_NK: Tensor) -> tuple[Tensor, ...]:
        size_N, size_K = w_NK.shape[-2:]
        rows, cols = size_N if self.per_tensor else self.rows, self.cols or size_K
        padding = (0, -size_K % cols, 0, -size_N % rows)
        padded = F.pad(w_NK.float(), padding) if any(padding) else w_NK.float()
        blocks = _blocks(padded, rows, cols)
        scales = numerics.absmax_scales(blocks.abs().amax((-3, -1)), numerics.FP8_MAX)
        scaled = blocks / scales[..., :, None, :, None]
        scaled = scaled.flatten(-2, -1).flatten(-3, -2)[..., :size_N, :size_K].contiguous()
        # Clamped first: what torch does beyond 448 depends on its version and device.
        values = scaled.clamp_(-numerics.FP8_MAX, numerics.FP8_MAX).to(numerics.FP8)
        return values, scales.repeat_interleave(size_N, -2) if self.per_tensor else scales

    def _decode(self, tensors: Sequence[Tensor], work: Tensor) -> Tensor:
        values, scales = tensors
        size_N, size_K = work.shape[-2:]
        rows, cols = self.rows, self.cols or size_K
        numerics.fp8_to_float(values, work)
        if size_N % rows or size_K % cols:
            return work.mul_(numerics.spread(scales, rows, cols, work))
        _blocks(work, rows, cols).mul_(scales[..., :, None, :, None])
        return work


def _blocks(w_NK: Tensor, rows: int, cols: int) -> Tensor:
    """[N, K] -> [N / rows, rows, K / cols, cols]."""
    return in_groups(w_NK, cols).unflatten(-3, (w_NK.shape[-2] // rows, rows))


@dataclass(frozen=True)
class Int8(Codec):
    """int8 in -127..127 with a float32 scale per row."""

    grid = WHOLE_NUMBERS
    planes = Plane("values", torch.int8), Plane("scales", torch.float32, cols=WHOLE)

    def encode(self, w_NK: Tensor) -> tuple[Tensor, ...]:
        w_NK, most = w_NK.float(), numerics.INT8_MAX
        scales = numerics.absmax_scales(w_NK.abs().amax(-1, keepdim=True), most)
        scaled = (w_NK / scales).round_().clamp_(-most, most)
        return scaled.nan_to_num_(0).to(torch.int8), scales

    def _decode(self, tensors: Sequence[Tensor], work: Tensor) -> Tensor:
        values, scales = tensors
        return work.copy_(values).mul_(scales)


@dataclass(frozen=True)
class Int4(Codec):
    """Four bits with a float32 scale and a uint8 zero per `group` columns: w = (q - zero) * scale.

    Symmetric groups have zero 8 and use q in 1..15; the others stretch from the smallest to the
    largest value (or to zero, which is always exact) over q in 0..15.
    Example with groups of 4: [[-7, 7, 1, 0]] -> q [1, 15, 9, 8], bytes F1 89, scale 1, zero 8.
    """

    group: int
    symmetric: bool = True
    grid = WHOLE_NUMBERS

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        return (
            Plane("values", torch.uint8, cols=2),
            Plane("scales", torch.float32, cols=self.group),
            Plane("zeros", torch.uint8, cols=self.group),
        )

    def encode(self, w_NK: Tensor) -> tuple[Tensor, ...]:
        grouped, most = in_groups(w_NK.float(), self.group), numerics.INT4_MAX
        if self.symmetric:
            scales = numerics.absmax_scales(grouped.abs().amax(-1), most - numerics.INT4_ZERO)
            zeros = torch.full_like(scales, numerics.INT4_ZERO)
        else:
            low, high = grouped.amin(-1).clamp_(max=0), grouped.amax(-1).clamp_(min=0)
            # Halved first: the difference of two huge numbers may be infinite.
            scales = numerics.absmax_scales(high * 0.5 - low * 0.5, most / 2)
            zeros = (-low / scales).round_().clamp_(0, most).nan_to_num_(0)
        q = (grouped / scales.unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1)).clamp_(0, most)
        packed = pack_pairs(q.nan_to_num_(0).to(torch.uint8).flatten(-2))
        return packed, scales, zeros.to(torch.uint8)

    def _decode(self, tensors: Sequence[Tensor], work: Tensor) -> Tensor:
        packed, scales, zeros = tensors
        # Differences are taken as bytes, a quarter of the traffic of floats.
        offsets = in_groups(numerics.unpack(packed).view(torch.int8), self.group)
        offsets.sub_(zeros.view(torch.int8).unsqueeze(-1))
        in_groups(work, self.group).copy_(offsets).mul_(scales.unsqueeze(-1))
        return work


NVFP4_PLANES = (
    Plane("values", torch.uint8, cols=2),
    Plane("scales", numerics.FP8, cols=numerics.NVFP4_GROUP),
    Plane("global", torch.float32, cols=WHOLE),
)


class Fp4(Codec):
    """e2m1, of which two share a byte, with a scale per group of columns."""

    grid = E2M1

    def _decode(self, tensors: Sequence[Tensor], work: Tensor) -> Tensor:
        scales = self.float_scales(tensors)
        numerics.fp4_to_float(tensors[0], work)
        in_groups(work, self.planes[1].cols).mul_(scales.unsqueeze(-1))
        return work


@dataclass(frozen=True)
class Nvfp4(Fp4):
    """Scales are e4m3 per 16 columns and a global one: a constant that both sides know, or (None)
    that of each matrix, in a third plane."""

    global_scale: float | None = None

    @property
    def planes(self) -> tuple[Plane, ...]:
        return NVFP4_PLANES if self.global_scale is None else NVFP4_PLANES[:2]

    def encode(self, w_NK: Tensor) -> tuple[Tensor, ...]:
        return numerics.encode_nvfp4(w_NK, self.global_scale)[: len(self.planes)]

    def float_scales(self, tensors: Sequence[Tensor]) -> Tensor:
        """Both scales in one, rounded."""
        scales = tensors[1]
        floats = torch.empty(scales.shape, dtype=torch.float32, device=scales.device)
        stored = tensors[2] if self.global_scale is None else self.global_scale
        return numerics.fp8_to_float(scales, floats).mul_(stored)


@dataclass(frozen=True)
class Mxfp4(Fp4):
    """Scales are powers of two (e8m0) per 32 columns."""

    planes = (
        Plane("values", torch.uint8, cols=2),
        Plane("scales", torch.uint8, cols=numerics.MXFP4_GROUP),
    )

    def encode(self, w_NK: Tensor) -> tuple[Tensor, ...]:
        return numerics.encode_mxfp4(w_NK)

    def float_scales(self, tensors: Sequence[Tensor]) -> Tensor:
        return numerics.mxfp4_scales(tensors[1])
