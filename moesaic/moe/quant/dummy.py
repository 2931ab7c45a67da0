"""Random matrices straight in a weight format, for measurements: nothing is encoded.

N rows · K columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Generator, Tensor

from moesaic.moe.quant import numerics
from moesaic.moe.quant.codecs import Codec, Fp8, Int4, Int8, Mxfp4, Nvfp4, Plain
from moesaic.moe.quant.weights import WeightFormat

# How far stored numbers spread before their scale: well inside the range of their type.
FP8_SPREAD = 64.0
INT8_SPREAD = 32.0
# Of all sixteen codes alike.
INT4_SPREAD = math.sqrt(sum((q - numerics.INT4_ZERO) ** 2 for q in range(16)) / 16)
FP4_SPREAD = math.sqrt(sum(x * x for x in numerics.FP4_GRID) / len(numerics.FP4_GRID))
E8M0_BIAS = 127

Planes = Mapping[str, Tensor]


def fill_planes(format: WeightFormat, planes: Planes, spread: float, noise: Generator) -> None:
    """Numbers around zero whose standard deviation is `spread`, nearly so for powers of two as
    scales."""
    FILLS[type(format.codec)](planes, spread, noise)


def _plain(planes: Planes, spread: float, noise: Generator) -> None:
    planes["values"].normal_(0.0, spread, generator=noise)


def _fp8(planes: Planes, spread: float, noise: Generator) -> None:
    values = _normal(planes["values"], FP8_SPREAD, noise)
    planes["values"].copy_(values.clamp_(-numerics.FP8_MAX, numerics.FP8_MAX))
    planes["scales"].fill_(spread / FP8_SPREAD)


def _int8(planes: Planes, spread: float, noise: Generator) -> None:
    values = _normal(planes["values"], INT8_SPREAD, noise).round_()
    planes["values"].copy_(values.clamp_(-numerics.INT8_MAX, numerics.INT8_MAX))
    planes["scales"].fill_(spread / INT8_SPREAD)


def _int4(planes: Planes, spread: float, noise: Generator) -> None:
    planes["values"].random_(0, 256, generator=noise)
    planes["scales"].fill_(spread / INT4_SPREAD)
    planes["zeros"].fill_(numerics.INT4_ZERO)


def _nvfp4(planes: Planes, spread: float, noise: Generator) -> None:
    planes["values"].random_(0, 256, generator=noise)
    planes["scales"].copy_(torch.ones(planes["scales"].shape, device=planes["scales"].device))
    planes["global"].fill_(spread / FP4_SPREAD)


def _mxfp4(planes: Planes, spread: float, noise: Generator) -> None:
    planes["values"].random_(0, 256, generator=noise)
    planes["scales"].fill_(E8M0_BIAS + round(math.log2(spread / FP4_SPREAD)))


def _normal(like: Tensor, spread: float, noise: Generator) -> Tensor:
    wide = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    return wide.normal_(0.0, spread, generator=noise)


FILLS: dict[type[Codec], Callable[[Planes, float, Generator], None]] = {
    Plain: _plain,
    Fp8: _fp8,
    Int8: _int8,
    Int4: _int4,
    Nvfp4: _nvfp4,
    Mxfp4: _mxfp4,
}
