"""How the tokens of an expert are split between its replicas, step by step.

S steps · L layers · E experts · P slots · D ranks · X replicas.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from moesaic.balance.problem import Floats, Ints, counts_of

SWEEPS: Final = 8


def split_by_step(loads_SLE: Floats, slots_LP: Ints, ranks: int, sweeps: int = SWEEPS) -> Floats:
    """[S, L, D]: tokens of ranks where every step splits the tokens of replicated experts so that
    the fullest rank gets little. Expert after expert fills its ranks from the emptiest up."""
    found = [
        _split_layer(loads_SLE[:, layer], slots_P, ranks, sweeps)
        for layer, slots_P in enumerate(slots_LP)
    ]
    return np.stack(found, 1).astype(np.float32)


def _split_layer(loads_SE: Floats, slots_P: Ints, ranks: int, sweeps: int) -> Floats:
    count_E = counts_of(slots_P[None], loads_SE.shape[1])[0]
    rank_P = np.arange(len(slots_P)) // (len(slots_P) // ranks)
    share_SE = loads_SE.astype(np.float64) / count_E
    total_SD = np.zeros((len(loads_SE), ranks))
    for slot, expert in enumerate(slots_P):
        total_SD[:, rank_P[slot]] += share_SE[:, expert]
    several = np.flatnonzero(count_E > 1)
    where = {int(e): rank_P[slots_P == e] for e in several}
    part = {e: np.repeat(share_SE[:, [e]], len(at), 1) for e, at in where.items()}
    for _ in range(sweeps):
        for e, at in where.items():
            rest_SX = total_SD[:, at] - part[e]
            part[e] = fill(rest_SX, loads_SE[:, e])
            total_SD[:, at] = rest_SX + part[e]
    return np.asarray(total_SD)


def fill(level_SX: Floats, amount_S: Floats) -> Floats:
    """[S, X]: what each vessel gets if an amount is poured over vessels of these levels, so that
    the lowest rise to one height: levels 1, 3, 9 and an amount of 4 get 3, 1, 0."""
    sorted_SX = np.sort(level_SX, axis=1)
    count_X = np.arange(1, level_SX.shape[1] + 1)
    height_SX = (np.cumsum(sorted_SX, 1) + amount_S[:, None]) / count_X
    # The height over the first vessels holds if it does not reach the next one.
    next_SX = np.concatenate([sorted_SX[:, 1:], np.full((len(sorted_SX), 1), np.inf)], 1)
    chosen_S = (height_SX <= next_SX).argmax(1)
    height_S = height_SX[np.arange(len(height_SX)), chosen_S]
    return np.maximum(height_S[:, None] - level_SX, 0)
