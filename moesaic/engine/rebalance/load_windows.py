"""The load of experts since the last rebalance, in windows of time.

A sum over all of it hides loads that alternate: experts that are hot one after the other look as
if they were hot together.

W windows · L layers · E experts.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from moesaic.balance.problem import Floats

MAX_WINDOWS: Final = 8
FIRST_STEPS: Final = 16
# Windows to plan with: more of them take longer, and chance decides what is hot in small ones.
MAX_PLANNED: Final = 4
LEAST_TOKENS: Final = 128
"""A window with fewer tokens for each expert, on average, is joined with its neighbour."""


class LoadWindows:
    """What this rank has computed. Windows are as long as each other: when there are too many, each
    two become one, and the next ones are twice as long."""

    def __init__(self, layers: int, experts: int) -> None:
        self.num_experts = experts
        self.restart(torch.zeros(layers, experts, dtype=torch.int64, device="cpu"))

    def restart(self, total_LE: Tensor) -> None:
        """`total_LE`: the tokens of each expert since the start of the service."""
        self._totals = [total_LE]
        """At the beginning of the first window and at the end of each that has ended."""
        self._length, self._num_steps = FIRST_STEPS, 0

    def count_step(self) -> bool:
        """Whether a window ends with this step; tell its end."""
        self._num_steps += 1
        return self._num_steps % self._length == 0

    def end_window(self, total_LE: Tensor) -> None:
        self._totals.append(total_LE)
        if len(self._totals) == MAX_WINDOWS + 1:
            self._totals = self._totals[::2]
            self._length *= 2

    def loads(self, total_LE: Tensor) -> Tensor:
        """[W, L, E] up to now, W = MAX_WINDOWS: what has not begun has no tokens."""
        ends_WLE = torch.stack([*self._totals[1:], total_LE])
        loads_WLE = torch.zeros(MAX_WINDOWS, *total_LE.shape, dtype=torch.int64, device="cpu")
        loads_WLE[: len(ends_WLE)] = ends_WLE - torch.stack(self._totals)
        return loads_WLE


def planned_windows(loads_WLE: Floats) -> Floats:
    """Joins windows until each has enough tokens: [S, L, E] with S from 1 to MAX_PLANNED."""
    experts, total = loads_WLE[0].size, loads_WLE.sum()
    least = max(LEAST_TOKENS * experts, total / MAX_PLANNED)
    joined: list[Floats] = []
    rest_LE = np.zeros_like(loads_WLE[0])
    for load_LE in loads_WLE:
        rest_LE = rest_LE + load_LE
        if rest_LE.sum() >= least:
            joined.append(rest_LE)
            rest_LE = np.zeros_like(rest_LE)
    if not joined:
        return rest_LE[None]
    joined[-1] = joined[-1] + rest_LE
    return np.stack(joined)
