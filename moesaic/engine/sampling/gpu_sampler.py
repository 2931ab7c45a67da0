"""Sampling without the host: tokens stay on the device.

R rows · V vocabulary · S rows of the page table · N numbers of a `RowSampling`. Rows that need more
than their logits (penalties, biases, grammars, logprobs) go through engine/sampling/sampler.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moesaic.engine.sampling.sampler import SampleRow
from moesaic.kernels.sampling import (
    MASK,
    MAX_TEMPERATURE,
    PACKED,
    OfferedDrafts,
    RowSampling,
    SampleParams,
    greedy_rows,
    sample_rows,
)
from moesaic.layers.paged_cache import to_device

GREEDY = RowSampling()
POSITION = RowSampling._fields.index("position")
Ints = npt.NDArray[np.int64]


class DrawTable:
    """How the tokens of requests are drawn, by row of the page table."""

    def __init__(self, rows: int) -> None:
        self._values_SN = np.zeros((rows, len(RowSampling._fields)), np.int64)
        self._is_greedy, self._has_top_p = np.ones(rows, bool), np.zeros(rows, bool)

    def set(self, number: int, row: SampleRow) -> None:
        sampling = _row_sampling(row)
        self._values_SN[number] = np.frombuffer(PACKED.pack(*sampling), np.int64)
        self._is_greedy[number], self._has_top_p[number] = row.params.greedy, sampling.is_nucleus

    def draw(
        self,
        logits_RV: Tensor,
        numbers_R: Ints,
        positions_R: Ints,
        offered: OfferedDrafts | None = None,
    ) -> Tensor:
        """[2, R] on the device: tokens, and 1 for rows that have none. `numbers_R`: rows of the
        page table; `positions_R`: numbers of the tokens before the drawn ones; `offered`: drafts
        that rows may take."""
        if self._is_greedy[numbers_R].all():
            return greedy_rows(logits_RV)
        values = self._values_SN[numbers_R]
        values[:, POSITION] = positions_R
        has_top_p = bool(self._has_top_p[numbers_R].any())
        params = SampleParams(to_device(values, logits_RV.device), has_top_p)
        return sample_rows(logits_RV, params, offered)


def draw_rows(
    logits_RV: Tensor, rows: Sequence[SampleRow], offered: OfferedDrafts | None = None
) -> Tensor:
    """Draws a token for each row, as DrawTable does."""
    assert len(logits_RV) == len(rows), (logits_RV.shape, len(rows))
    table = DrawTable(len(rows))
    for number, row in enumerate(rows):
        table.set(number, row)
    positions = np.array([row.position for row in rows])
    return table.draw(logits_RV, np.arange(len(rows)), positions, offered)


def _row_sampling(row: SampleRow) -> RowSampling:
    params = row.params
    if params.greedy:
        return GREEDY
    temperature = min(params.temperature, MAX_TEMPERATURE)
    numbers = (params.top_k, params.top_p, params.min_p)
    return RowSampling(temperature, *numbers, row.seed & MASK, row.position)
