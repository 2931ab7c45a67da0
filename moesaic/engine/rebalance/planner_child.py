"""Plans a placement in a process of its own: the interpreter's lock would hold up steps."""

from __future__ import annotations

import os
from typing import Final

import msgspec
import numpy as np

from moesaic.balance.algorithms import make_plan
from moesaic.balance.moves import keep_slots
from moesaic.balance.problem import (
    BalanceProblem,
    Floats,
    Ints,
    MoveCost,
    fetched_slots,
    max_over_mean,
    rank_loads,
)
from moesaic.engine.text.limited_child import (
    ANSWER_SECONDS,
    Allowance,
    Answer,
    LimitedChild,
    serve,
)

MODULE: Final = "moesaic.engine.rebalance.planner_child"
ALLOWANCE: Final = Allowance(seconds=ANSWER_SECONDS, room=4 << 30)


class PlanRequest(msgspec.Struct, array_like=True):
    """`loads` are float32 [windows, layers, experts], `current` int32 [layers, slots]."""

    algorithm: str
    shape: tuple[int, int, int]
    num_slots: int
    num_ranks: int
    num_groups: int
    num_nodes: int
    loads: bytes
    current: bytes
    slot_seconds: float
    layer_seconds: float
    horizon_steps: int


class PlanReply(msgspec.Struct, array_like=True):
    """`slots` are int32 [layers, slots]. Balancedness is the mean over ranks divided by the largest
    of them, averaged over windows and layers, with the old and the new placement."""

    algorithm: str
    reason: str
    slots: bytes
    before: float
    after: float
    fetched: int
    """Slots whose expert comes from another rank."""
    error: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(PlanRequest).decode
_decode_reply = msgspec.msgpack.Decoder(PlanReply).decode


class PlannerProcess:
    """One thread asks at a time."""

    def __init__(self) -> None:
        self._child = LimitedChild(MODULE, b"", ALLOWANCE)

    @property
    def pid(self) -> int | None:
        return self._child.pid

    def start(self) -> None:
        """Starts the process before the first plan needs it. ValueError if it cannot start."""
        self._child.start()

    def plan(self, request: PlanRequest) -> PlanReply:
        """ValueError if there is no such plan; what LimitedChild raises if its process fails."""
        reply = _decode_reply(self._child.ask(_encode(request)))
        if reply.error:
            raise ValueError(reply.error)
        return reply

    def close(self) -> None:
        self._child.close()


def balancedness(loads_SLE: Floats, slots_LP: Ints, ranks: int) -> float:
    """1 is perfect."""
    return float((1 / max_over_mean(rank_loads(loads_SLE, slots_LP, ranks))).mean())


def plan(request: PlanRequest) -> PlanReply:
    loads_SLE = np.frombuffer(request.loads, np.float32).reshape(request.shape)
    layers, ranks = request.shape[1], request.num_ranks
    current_LP = np.frombuffer(request.current, np.int32).reshape(layers, -1).astype(np.int64)
    problem = BalanceProblem(
        loads_SLE,
        request.num_slots,
        ranks,
        request.num_groups,
        request.num_nodes,
        current_LP,
        cost=MoveCost(request.slot_seconds, request.layer_seconds, request.horizon_steps),
        worst_window=True,
    )
    found = make_plan(request.algorithm, problem)
    slots_LP = keep_slots(current_LP, found.slots_LP, ranks)
    # Without a token no placement is better: those of a draft model that rests stay.
    idle_L = ~loads_SLE.any((0, 2))
    slots_LP[idle_L] = current_LP[idle_L]
    return PlanReply(
        found.algorithm,
        found.reason,
        slots_LP.astype(np.int32).tobytes(),
        balancedness(loads_SLE, current_LP, ranks),
        balancedness(loads_SLE, slots_LP, ranks),
        int(fetched_slots(current_LP, slots_LP, ranks, request.shape[2]).sum()),
    )


def _answer(data: bytes) -> bytes:
    try:
        return _encode(plan(_decode_request(data)))
    except ValueError as error:
        return _encode(PlanReply("", "", b"", 0.0, 0.0, 0, str(error)))


def _begin(_: bytes) -> Answer:
    os.nice(19)  # ranks that compute on this machine come first
    return _answer


if __name__ == "__main__":
    serve(_begin)
