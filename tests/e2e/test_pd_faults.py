"""Instances and routers are killed and stopped while clients stream; bench/pd_faults.py does it for
longer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bench.pd_faults import Plan, measure

QUICK = Plan(24, 3, ranks=1, clients=6, calls=6, rounds=1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "plan",
    [
        QUICK,
        pytest.param(
            replace(QUICK, requests=300, faults=20, ranks=2, seed=1), marks=pytest.mark.slow
        ),
        pytest.param(
            replace(QUICK, requests=300, faults=20, ranks=2, seed=2, elastic=True),
            marks=pytest.mark.slow,
            id="elastic",
        ),
    ],
)
def test_no_answer_is_lost_or_changed(plan: Plan) -> None:
    found = asyncio.run(measure(plan))
    assert found["requests"] == plan.requests + plan.calls and found["faults"] >= 3
    assert (found["lost"], found["changed"], found["left"]) == (0, 0, []), found
