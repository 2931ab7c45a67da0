"""Rotary position embedding: frequency tables of the served families, and rotation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotates `dim` channels of a head; `interleaved` pairs channel 2i with 2i+1 (DeepSeek) instead
    of i with i + dim/2."""

    dim: int
    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    truncate: bool = True
    interleaved: bool = False


def yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _default(rope: RopeConfig) -> tuple[Tensor, float]:
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    return 1.0 / rope.theta**exponents, 1.0


def _linear(rope: RopeConfig) -> tuple[Tensor, float]:
    return _default(rope)[0] / rope.factor, 1.0


def _yarn(rope: RopeConfig) -> tuple[Tensor, float]:
    def rotations_to_channel(rotations: float) -> float:
        wavelength = rope.original_max_positions / (rotations * 2 * math.pi)
        return rope.dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = rotations_to_channel(rope.beta_fast), rotations_to_channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    plain = _default(rope)[0]
    frequencies = plain / rope.factor * ramp + plain * (1 - ramp)
    scale = rope.attention_factor
    if scale is None and rope.mscale and rope.mscale_all_dim:
        scale = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(
            rope.factor, rope.mscale_all_dim
        )
    return frequencies, yarn_mscale(rope.factor) if scale is None else scale


def _llama3(rope: RopeConfig) -> tuple[Tensor, float]:
    plain = _default(rope)[0]
    wavelength = 2 * math.pi / plain
    turns = rope.original_max_positions / wavelength
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * plain / rope.factor + smooth * plain, 1.0


ROPE_TYPES: dict[str, Callable[[RopeConfig], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
}


class RotaryTable:
    """cos and sin of every position in float32, half of `dim` wide, shared by all layers."""

    def __init__(self, rope: RopeConfig, positions: int) -> None:
        self.interleaved = rope.interleaved
        device = torch.get_default_device()
        with torch.device("cpu"):  # the same numbers on every device
            frequencies, scale = ROPE_TYPES[rope.type](rope)
            angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
            self.cos = (angles.cos() * scale).to(device)
            self.sin = (angles.sin() * scale).to(device)

    @property
    def nbytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, dim / 2] of each token; moves the table to their device."""
        if self.cos.device != positions_T.device:
            self.cos, self.sin = (x.to(positions_T.device) for x in (self.cos, self.sin))
        return self.cos[positions_T].unsqueeze(1), self.sin[positions_T].unsqueeze(1)

    def rotate(self, x_TND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates T tokens of N heads. Interleaved pairs come out as two halves, which does not
        change products of queries and keys."""
        if self.interleaved:
            a, b = x_TND[..., 0::2].float(), x_TND[..., 1::2].float()
        else:
            a, b = x_TND.float().chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return rotated.to(x_TND.dtype)
