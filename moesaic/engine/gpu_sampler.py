"""Sampling that the host does not wait for: the tokens stay on the device until they are asked for.

R rows · V vocabulary. Rows that need more than their logits (penalties, biases, grammars, logprobs)
are left to engine/sampler.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.engine.sampler import SampleRow
from moesaic.kernels.sampling import (
    MASK,
    MAX_TEMPERATURE,
    Draw,
    SampleParams,
    greedy_rows,
    sample_rows,
)

GREEDY = Draw()


def can_sample_on_device(rows: Sequence[SampleRow]) -> bool:
    """Whether these rows of logits, as they are, are all that is needed."""
    return all(map(_is_plain, rows))


def _is_plain(row: SampleRow) -> bool:
    params = row.params
    return not (
        row.return_logprob
        or params.logit_bias
        or params.penalised
        or len(row.output_ids) < params.min_new_tokens
        or params.grammar is not None
    )


@dataclass(frozen=True, slots=True)
class Drawing:
    """Tokens under way: `tokens_R` (int64) is on the device and may be used there at once."""

    tokens_R: Tensor
    host_2R: Tensor
    arrived: torch.cuda.Event | None

    def wait(self) -> tuple[list[int], list[int]]:
        """The tokens, and the rows that have none, as sampler.NonFiniteLogits names them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens, broken = self.host_2R.tolist()
        return tokens, [row for row, flag in enumerate(broken) if flag]


class DeviceSampler:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def draw(self, logits_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """[2, R] on the device: tokens, and 1 for rows that have none. `rows` are such that
        `can_sample_on_device` is true."""
        assert len(logits_RV) == len(rows), (logits_RV.shape, len(rows))
        if all(row.params.greedy for row in rows):
            return greedy_rows(logits_RV)
        packed = _packed(rows)
        params = SampleParams(self._upload(packed.values), packed.any_top_p)
        return sample_rows(logits_RV, params)

    def begin(self, logits_RV: Tensor, rows: Sequence[SampleRow]) -> Drawing:
        """`draw`, and the way of the tokens to the host."""
        return self.send(self.draw(logits_RV, rows))

    def send(self, drawn_2R: Tensor) -> Drawing:
        """A copy of what `draw` gave, here or in a graph, which may run again at once."""
        if self.device.type != "cuda":
            return Drawing(drawn_2R[0], drawn_2R.clone(), None)
        host_2R = torch.empty(drawn_2R.shape, dtype=torch.int64, pin_memory=True)
        host_2R.copy_(drawn_2R, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Drawing(drawn_2R[0], host_2R, arrived)

    def _upload(self, values: Tensor) -> Tensor:
        if self.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)


class SampleBuffers:
    """The numbers of at most `size` rows at a fixed place, for graphs: `draw` is captured once,
    `fill` goes before each replay."""

    def __init__(self, sampler: DeviceSampler, size: int) -> None:
        self._sampler = sampler
        self.params = SampleParams(sampler._upload(SampleParams.pack([GREEDY] * size).values))

    def fill(self, rows: Sequence[SampleRow]) -> None:
        """Rows behind them keep what they had: somebody's numbers, which do no harm."""
        if rows:
            packed = _packed(rows).values
            packed = packed.pin_memory() if self._sampler.device.type == "cuda" else packed
            self.params.values[: len(rows)].copy_(packed, non_blocking=True)

    def draw(self, logits_RV: Tensor) -> Tensor:
        """As `DeviceSampler.draw`, of the rows filled in."""
        return sample_rows(logits_RV, SampleParams(self.params.values[: len(logits_RV)]))


def _packed(rows: Sequence[SampleRow]) -> SampleParams:
    """On the host."""
    return SampleParams.pack(map(_draw_of, rows))


def _draw_of(row: SampleRow) -> Draw:
    params = row.params
    if params.greedy:
        return GREEDY
    temperature = min(params.temperature, MAX_TEMPERATURE)
    numbers = (params.top_k, params.top_p, params.min_p)
    return Draw(temperature, *numbers, row.seed & MASK, row.position)
