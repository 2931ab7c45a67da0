"""How many redundant slots each layer needs.

L layers · E experts · R redundant slots of a rank.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.incremental import LEAST_GAIN, incremental
from moesaic.balance.problem import (
    BalanceProblem,
    Floats,
    Ints,
    max_over_mean,
    rank_loads,
)


def predicted_balance(load_LE: Floats, ranks: int, most: int) -> Floats:
    """[R, L]: max/mean of each layer with 0..most redundant slots on each rank."""
    experts = load_LE.shape[1]
    first = -experts % ranks
    found = []
    for each in range(most + 1):
        problem = BalanceProblem(load_LE[None], experts + first + each * ranks, ranks)
        found.append(max_over_mean(rank_loads(load_LE[None], incremental(problem), ranks))[0])
    # More slots are never worse: they may be left unused.
    return np.minimum.accumulate(np.stack(found), 0)


def replica_budget(load_LE: Floats, ranks: int, total: int) -> tuple[Ints, Floats]:
    """(redundant slots of each rank in each layer, the max/mean that this gives): `total` of them
    over all layers, each where it lowers the step time the most. A layer that gains only from
    several slots at once gets them together. Layers count by their tokens."""
    layers = len(load_LE)
    balance_RL = predicted_balance(load_LE, ranks, min(total, 4))
    weight_L = load_LE.sum(1) / max(float(load_LE.sum()), 1e-9)
    given_L, left = np.zeros(layers, np.int64), total
    while left:
        steps = np.arange(1, min(left, len(balance_RL) - 1) + 1)
        to_SL = np.minimum(given_L + steps[:, None], len(balance_RL) - 1)
        now_L = balance_RL[given_L, np.arange(layers)]
        gain_SL = weight_L * (now_L - balance_RL[to_SL, np.arange(layers)]) / steps[:, None]
        if gain_SL.size == 0 or gain_SL.max() * layers < LEAST_GAIN:
            break
        step, layer = np.unravel_index(gain_SL.argmax(), gain_SL.shape)
        given_L[layer] = to_SL[step, layer]
        left = total - int(given_L.sum())
    return given_L, balance_RL[given_L, np.arange(layers)]
