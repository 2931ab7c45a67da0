"""What must be copied to get from one placement to another.

L layers · P slots · D ranks · C slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.balance.problem import Ints


@dataclass(frozen=True, slots=True)
class SlotMove:
    """A slot takes the expert that another slot has in the old placement."""

    slot: int
    source: int


def keep_slots(old_LP: Ints, new_LP: Ints, ranks: int) -> Ints:
    """The new placement with the slots of each rank reordered: experts that stay on a rank keep
    their slot, so that nothing is copied for them."""
    layers, slots = old_LP.shape
    kept = new_LP.copy().reshape(layers * ranks, -1)
    for old_C, new_C in zip(old_LP.reshape(kept.shape), kept, strict=True):
        if (old_C != new_C).any():
            new_C[:] = _reordered(old_C, new_C)
    return kept.reshape(layers, slots)


def _reordered(old_C: Ints, new_C: Ints) -> Ints:
    arriving = new_C.tolist()
    places: list[int] = []
    for place, expert in enumerate(old_C.tolist()):
        if expert in arriving:
            arriving.remove(expert)
        else:
            places.append(place)
    result = old_C.copy()
    result[places] = arriving
    return result


def moves_of_layer(old_P: Ints, new_P: Ints, ranks: int, nodes: tuple[int, ...]) -> list[SlotMove]:
    """One move for each slot that changes. The source is on the same rank if it can be, else on the
    same node, else anywhere; among equals the rank that has the fewest experts to send. `nodes`:
    the node of each rank."""
    per_rank, sent = len(old_P) // ranks, [0] * ranks
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(old_P.tolist()):
        holders.setdefault(expert, []).append(slot)
    moves = []
    for slot in np.flatnonzero(old_P != new_P).tolist():
        rank = slot // per_rank

        def price(source: int, rank: int = rank) -> tuple[bool, bool, int, int]:
            sender = source // per_rank
            return sender != rank, nodes[sender] != nodes[rank], sent[sender], source

        source = min(holders[int(new_P[slot])], key=price)
        sent[source // per_rank] += source // per_rank != rank
        moves.append(SlotMove(slot, source))
    return moves
