"""The planner's process: what it is asked for, and what it loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from moesaic.balance.problem import Floats, Ints
from moesaic.engine.rebalance.planner_child import PlannerProcess, PlanRequest, plan

CURRENT = np.array([[0, 1, 2, 3], [0, 1, 2, 3]], np.int32)
# Layer 0 is even; in layer 1 the two hot experts share a rank.
LOADS = np.array([[[5, 5, 5, 5], [9, 9, 1, 1]]], np.float32)


def request(loads_SLE: Floats = LOADS, current_LP: Ints = CURRENT, ranks: int = 2) -> PlanRequest:
    return PlanRequest(
        "incremental",
        loads_SLE.shape,
        current_LP.shape[1],
        ranks,
        1,
        1,
        loads_SLE.tobytes(),
        current_LP.tobytes(),
        slot_seconds=1e-6,
        layer_seconds=1e-3,
        horizon_steps=1000,
    )


@pytest.fixture(scope="module")
def planner() -> Iterator[PlannerProcess]:
    made = PlannerProcess()
    yield made
    made.close()


def test_it_starts_before_it_is_asked_and_loads_little(planner: PlannerProcess) -> None:
    assert planner.pid is None
    planner.start()
    pid = planner.pid
    assert pid is not None
    planner.start()
    assert planner.pid == pid, "it runs already"
    libraries = Path(f"/proc/{pid}/maps").read_text()
    assert "numpy" in libraries and "torch" not in libraries
    reply = planner.plan(request())
    assert planner.pid == pid, "the first plan needs no start"
    assert reply.before == pytest.approx((1 + 10 / 18) / 2) and reply.after == 1.0
    assert reply.fetched == 2 and reply == plan(request())


def test_what_cannot_be_planned_is_told(planner: PlannerProcess) -> None:
    with pytest.raises(ValueError, match="'unknown' is not known: choose one of auto, incremental"):
        planner.plan(msgspec.structs.replace(request(), algorithm="unknown"))


@pytest.mark.parametrize("algorithm", ["incremental", "deepseek", "deepseek_vec"])
def test_a_layer_without_tokens_stays_as_it_is(algorithm: str) -> None:
    """Such as that of a draft model that rests: all of its replicas would go to one expert."""
    current_LP = np.array([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]], np.int32)
    loads_SLE = np.array([[[100, 100, 9000, 100], [0, 0, 0, 0]]], np.float32)
    asked = msgspec.structs.replace(request(loads_SLE, current_LP), algorithm=algorithm)
    found_LP = np.frombuffer(plan(asked).slots, np.int32).reshape(current_LP.shape)
    assert (found_LP[0] != current_LP[0]).any()
    assert found_LP[1].tolist() == current_LP[1].tolist()
