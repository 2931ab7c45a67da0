"""Windows of load: what a rank records, what is planned with, and what that protects against."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moesaic.balance.problem import Floats, Ints, max_over_mean, rank_loads
from moesaic.engine.rebalance.load_windows import (
    FIRST_STEPS,
    LEAST_TOKENS,
    MAX_WINDOWS,
    LoadWindows,
    planned_windows,
)
from moesaic.engine.rebalance.planner_child import plan
from tests.unit.test_planner_child import request


def test_windows_grow_and_lose_no_token() -> None:
    windows = LoadWindows(1, 2)
    total = torch.zeros(1, 2, dtype=torch.int64)
    for step in range(1, 1001):
        total = total + torch.tensor([[1, step % 2]])
        if windows.count_step():
            windows.end_window(total)
        if step == 3 * FIRST_STEPS + 5:
            found = windows.loads(total)[:, 0]
            assert found.tolist() == [[16, 8]] * 3 + [[5, 3]] + [[0, 0]] * (MAX_WINDOWS - 4)
    found = windows.loads(total)
    assert found.shape == (MAX_WINDOWS, 1, 2)
    assert found[:, 0, 0].tolist() == [128] * 7 + [104] and found.sum(0).tolist() == [[1000, 500]]
    windows.restart(total)
    assert int(windows.loads(total).sum()) == 0


def test_small_windows_are_joined() -> None:
    one = np.full((2, 4), LEAST_TOKENS, np.float32)
    none = np.zeros_like(one)
    assert planned_windows(np.stack([one / 2, one / 4, one / 8])).sum((1, 2)).tolist() == [
        0.875 * one.sum()
    ]
    found = planned_windows(np.stack([one, one / 2, one / 2, one / 8, none, none]))
    assert found.sum((1, 2)).tolist() == [one.sum(), 1.125 * one.sum()]
    assert len(planned_windows(np.stack([one] * 8))) == 4


def worst_peaks(loads_SLE: Floats, current_LP: Ints, judged_SLE: Floats) -> float:
    """Max/mean of ranks in the worst window with the plan for some loads."""
    reply = plan(request(loads_SLE, current_LP, ranks=8))
    slots_LP = np.frombuffer(reply.slots, np.int32).reshape(current_LP.shape).astype(np.int64)
    return float(max_over_mean(rank_loads(judged_SLE, slots_LP, 8)).mean(1).max())


@pytest.mark.parametrize(
    ("pattern", "by_sum", "by_windows"), [("ABAB", 1.15, 1.06), ("AAAB", 1.5, 1.25)]
)
def test_a_load_that_alternates_is_balanced_in_every_window(
    pattern: str, by_sum: float, by_windows: float
) -> None:
    """Two tasks with hot experts of their own: the sum looks even, but no window is."""
    generator, layers, experts = np.random.default_rng(5), 4, 64
    popular = {
        task: np.stack([generator.permutation(np.arange(1, experts + 1) ** -0.7) for _ in range(4)])
        for task in "AB"
    }
    loads_SLE = np.stack([2000 * popular[task] for task in pattern]).astype(np.float32)
    current_LP = np.tile(np.arange(experts + 8) % experts, (layers, 1)).astype(np.int32)
    summed = worst_peaks(loads_SLE.sum(0)[None], current_LP, loads_SLE)
    in_windows = worst_peaks(loads_SLE, current_LP, loads_SLE)
    assert summed > by_sum and in_windows < by_windows
