"""From logits to tokens without waiting for the device.

R rows · V vocabulary. engine/sampling/sampler.py defines the draw: for the same logits and
parameters, both give the same token.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.core.sampling import GREEDY_BELOW
from moesaic.kernels.native import native

SAMPLING = "moesaic.kernels.triton.sampling"
# The highest temperature: -inf / inf is NaN, and beyond this bound a draw is uniform anyway.
MAX_TEMPERATURE = 1e30
MASK = 2**64 - 1
PACKED = struct.Struct("=dqddQq")


class RowSampling(NamedTuple):
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = -1
    """-1 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """64 bits."""
    position: int = 0

    @property
    def is_nucleus(self) -> bool:
        """Whether it takes the kernels for top-p without top-k."""
        return self.top_p < 1 and self.top_k == -1


@dataclass(frozen=True, slots=True)
class SampleParams:
    """`RowSampling` of each row, on the device of the logits."""

    values: Tensor
    """int64 [R, 6]; temperature, top_p and min_p are the bits of float64 numbers."""
    any_top_p: bool = True
    """Whether any row may use top-p without top-k. False skips the kernels for such rows; they
    still get correct tokens, but slowly."""

    @classmethod
    def pack(cls, draws: Iterable[RowSampling]) -> SampleParams:
        """Packs on the CPU; copy `values` to the device."""
        draws = list(draws)
        data = bytearray(b"".join(PACKED.pack(*draw) for draw in draws))
        flat = (
            torch.frombuffer(data, dtype=torch.int64) if data else torch.empty(0, dtype=torch.int64)
        )
        return cls(flat.view(-1, 6), any(draw.is_nucleus for draw in draws))

    def unpack(self) -> list[RowSampling]:
        data = self.values.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return [RowSampling(*fields) for fields in PACKED.iter_unpack(data)]


@native(SAMPLING)
def greedy_rows(logits_RV: Tensor) -> Tensor:
    """int64 [2, R]: the first token with the highest logit; and 1 for a row that cannot be sampled
    as it holds NaN or +inf or only -inf (its token is valid but meaningless).

    [[1, 3, 3], [0, nan, 0]] -> [[1, 1], [0, 1]].
    """
    scores_RV = _nan_highest(logits_RV)
    best_R = scores_RV.amax(-1)
    token_R = (scores_RV == best_R[:, None]).int().argmax(-1)
    return torch.stack((token_R, (~best_R.isfinite()).long()))


@native(SAMPLING)
def sample_rows(logits_RV: Tensor, params: SampleParams) -> Tensor:
    """As `greedy_rows`, with a token drawn by each row's `RowSampling`.

    [[0, ln 3, 0]] at temperature 1: weights 1, 3, 1 of 5; seed 4, position 0 has the number 0.0686,
    so the first token is drawn. With top_k 1 or top_p 0.5 it is the second.
    """
    drawn_2R = greedy_rows.twin(logits_RV)
    for row, draw in enumerate(params.unpack()):
        greedy = draw.temperature < GREEDY_BELOW or draw.top_k == 1
        if not greedy and not drawn_2R[1, row]:
            drawn_2R[0, row] = _draw(logits_RV[row].float(), draw)
    return drawn_2R


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a position: splitmix64 keyed by the mixed seed."""
    state = _mix(seed) + (position + 1) * 0x9E3779B97F4A7C15
    return float(_mix(state) >> 11) * 2.0**-53


def weight_scale(vocab: int) -> float:
    """The largest weight of a token: V of them add up to less than 2**53, exactly in float64."""
    return 2.0 ** (53 - vocab.bit_length())


def _mix(value: int) -> int:
    value &= MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def _draw(scores_V: Tensor, draw: RowSampling) -> int:
    temperature = torch.tensor(draw.temperature, device=scores_V.device).float()
    share_V = (scores_V - scores_V.max()).div(temperature).clamp(min=-80.0).exp()
    weights_V = (share_V * weight_scale(len(scores_V))).round().double()
    order_V = scores_V.argsort(descending=True)
    kept_V = torch.ones_like(scores_V, dtype=torch.bool)
    if draw.top_k != -1:
        kept_V = scores_V >= scores_V[order_V[min(draw.top_k, len(scores_V)) - 1]]
    if draw.top_p < 1:
        falling_V = torch.where(kept_V, weights_V, 0.0)[order_V].cumsum(0)
        enough = int((falling_V >= draw.top_p * falling_V[-1]).int().argmax())
        kept_V &= scores_V >= scores_V[order_V[enough]]
    kept_V &= share_V >= torch.tensor(draw.min_p).float()
    ends_V = torch.where(kept_V, weights_V, 0.0).cumsum(0)
    total = ends_V[-1].item()
    mark = min(math.floor(uniform(draw.seed, draw.position) * total), total - 1)
    return int((ends_V > mark).int().argmax())


def _nan_highest(logits_RV: Tensor) -> Tensor:
    return logits_RV.float().masked_fill(logits_RV.isnan(), torch.inf)
