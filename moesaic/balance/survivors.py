"""Where experts reside while ranks are lost: pure functions.

L layers · P slots · E experts · D ranks · C slots of a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Adoption(NamedTuple):
    """A slot of a live rank that takes an expert which no live rank holds."""

    slot: int
    expert: int


def adoptions(held_P: Sequence[int], experts: int, per_rank: int) -> list[Adoption]:
    """The slots that take the experts which are in no slot, in the place of replicas; slots of lost
    ranks hold -1. No expert gives up its last slot, and ranks adopt about equally many. ValueError
    if the live ranks have too few slots. All ranks compute the same from the same table.

    Three ranks had two slots each for 4 experts, and the last one is lost. Expert 3 takes a slot of
    expert 0, which has two; of ranks that have adopted equally many it is the first:

    >>> adoptions([0, 1, 2, 0, -1, -1], 4, 2)
    [Adoption(slot=0, expert=3)]
    """
    now = list(held_P)
    copies = Counter(expert for expert in now if expert >= 0)
    if copies.total() < experts:
        raise ValueError(f"{experts} experts do not fit into {copies.total()} slots of live ranks")
    taken: Counter[int] = Counter()
    found = []
    for expert in range(experts):
        if copies[expert]:
            continue
        spare = [slot for slot, held in enumerate(now) if held >= 0 and copies[held] > 1]
        slot = min(spare, key=lambda s: (taken[s // per_rank], -copies[now[s]], s))
        copies[now[slot]] -= 1
        copies[expert] += 1
        taken[slot // per_rank] += 1
        now[slot] = expert
        found.append(Adoption(slot, expert))
    return found
