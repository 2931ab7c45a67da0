"""From logits to tokens without waiting for the device.

R rows · V vocabulary · D drafts behind a row. engine/sampling/sampler.py defines the draw: for the
same logits and parameters, both give the same token.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.core.sampling import GREEDY_BELOW
from moesaic.core.speculation import AcceptThresholds
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


@dataclass(frozen=True, slots=True)
class OfferedDrafts:
    """Drafts that rows may take by AcceptThresholds, instead of drawing a token."""

    tokens_RD: Tensor
    """int64: siblings in their order, and -1 behind them."""
    thresholds_2: Tensor
    """float64: single, acc."""

    @classmethod
    def of(
        cls, drafts: Sequence[Sequence[int]], thresholds: AcceptThresholds, device: torch.device
    ) -> OfferedDrafts:
        """`drafts`: of each row. As many columns as a power of two: kernels are compiled for it."""
        width = 1 << (max(map(len, drafts)) - 1).bit_length()
        tokens_RD = torch.tensor([[*some] + [-1] * (width - len(some)) for some in drafts])
        thresholds_2 = torch.tensor(thresholds, dtype=torch.float64)
        return cls(tokens_RD.to(device), thresholds_2.to(device))

    def rows(self, index: Tensor | slice) -> OfferedDrafts:
        return OfferedDrafts(self.tokens_RD[index], self.thresholds_2)


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
def sample_rows(
    logits_RV: Tensor, params: SampleParams, offered: OfferedDrafts | None = None
) -> Tensor:
    """As `greedy_rows`, with a token drawn by each row's `RowSampling`, or a draft that it takes.

    [[0, ln 3, 0]] at temperature 1: weights 1, 3, 1 of 5; seed 4, position 0 has the number 0.0686,
    so the first token is drawn. With top_k 1 or top_p 0.5 it is the second. A draft of token 2 is
    taken, as 0.0686 < 1/5; with seed 0, whose number is 0.8833, at acc 0.2 alone.
    """
    drawn_2R = greedy_rows.twin(logits_RV)
    for row, draw in enumerate(params.unpack()):
        greedy = draw.temperature < GREEDY_BELOW or draw.top_k == 1
        if not greedy and not drawn_2R[1, row]:
            of_row = None if offered is None else offered.rows(slice(row, row + 1))
            drawn_2R[0, row] = _draw(logits_RV[row].float(), draw, of_row)
    return drawn_2R


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a position: splitmix64 keyed by the mixed seed."""
    state = _mix(seed) + (position + 1) * 0x9E3779B97F4A7C15
    return float(_mix(state) >> 11) * 2.0**-53


def second_uniform(seed: int, position: int) -> float:
    """Another number, for rows that take none of their drafts."""
    return uniform(~seed, position)


def weight_scale(vocab: int) -> float:
    """The largest weight of a token: V of them add up to less than 2**53, exactly in float64."""
    return 2.0 ** (53 - vocab.bit_length())


def _mix(value: int) -> int:
    value &= MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def _draw(scores_V: Tensor, draw: RowSampling, offered: OfferedDrafts | None = None) -> int:
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
    weights_V, number = torch.where(kept_V, weights_V, 0.0), uniform(draw.seed, draw.position)
    if offered is not None and offered.tokens_RD[0, 0] >= 0:
        taken = _take_draft(weights_V, number, offered)
        if taken is not None:
            return taken
        number = second_uniform(draw.seed, draw.position)
    ends_V = weights_V.cumsum(0)
    total = ends_V[-1].item()
    mark = min(math.floor(number * total), total - 1)
    return int((ends_V > mark).int().argmax())


def _take_draft(weights_V: Tensor, number: float, offered: OfferedDrafts) -> int | None:
    """The draft that a row takes; if there is none, the weights of all become 0."""
    single, acc = offered.thresholds_2.tolist()
    total, reached = weights_V.sum().item(), 0.0
    for token in offered.tokens_RD[0].tolist():
        if token < 0:
            break
        weight = weights_V[token].item()
        reached += weight
        if weight > 0 and (number * total * acc < reached or weight >= single * total):
            return token
        weights_V[token] = 0.0
    return None


def _nan_highest(logits_RV: Tensor) -> Tensor:
    return logits_RV.float().masked_fill(logits_RV.isnan(), torch.inf)
