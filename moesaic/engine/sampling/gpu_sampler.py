"""Sampling without the host: tokens stay on the device.

R rows · V vocabulary. Rows that need more than their logits (penalties, biases, grammars, logprobs)
go through engine/sampling/sampler.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moesaic.engine.sampling.sampler import SampleRow
from moesaic.kernels.sampling import (
    MASK,
    MAX_TEMPERATURE,
    RowSampling,
    SampleParams,
    greedy_rows,
    sample_rows,
)

GREEDY = RowSampling()


def draw_rows(logits_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """[2, R] on the device: tokens, and 1 for rows that have none."""
    assert len(logits_RV) == len(rows), (logits_RV.shape, len(rows))
    if all(row.params.greedy for row in rows):
        return greedy_rows(logits_RV)
    params, device = pack_rows(rows), logits_RV.device
    values = params.values.pin_memory() if device.type == "cuda" else params.values
    values = values.to(device, non_blocking=True)
    return sample_rows(logits_RV, SampleParams(values, params.any_top_p))


def pack_rows(rows: Sequence[SampleRow]) -> SampleParams:
    """On the host."""
    return SampleParams.pack(map(_row_sampling, rows))


def _row_sampling(row: SampleRow) -> RowSampling:
    params = row.params
    if params.greedy:
        return GREEDY
    temperature = min(params.temperature, MAX_TEMPERATURE)
    numbers = (params.top_k, params.top_p, params.min_p)
    return RowSampling(temperature, *numbers, row.seed & MASK, row.position)
