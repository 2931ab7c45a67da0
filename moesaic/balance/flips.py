"""The order in which the slots of a layer take their new experts, a few at a time.

Between two flips the layer computes with what it has, so every expert must keep a slot. An expert
that has two may leave one of them. Where each has one, slots exchange their experts in cycles, and
those of a cycle flip together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from moesaic.balance.problem import Ints


def flip_groups(old_P: Ints, new_P: Ints, ranks: int, most: int) -> list[list[int]]:
    """The slots that change, in groups with at most `most` of a rank, unless a cycle has more.
    After each group every expert has a slot.

    Two ranks have the experts 0 1 | 1 2 and shall have 2 1 | 0 1. Expert 1 is there twice, so slot
    2 takes expert 0. Now 0 is there twice, and slot 0 takes expert 2, then slot 3 takes expert 1.
    With one slot of a rank at a time the groups are [2, 0] and [3].
    """
    per_rank = len(old_P) // ranks
    groups: list[list[int]] = []
    used: Counter[int] = Counter()
    for unit in _units(old_P.tolist(), new_P.tolist(), per_rank):
        more = Counter(slot // per_rank for slot in unit)
        if not groups or any(used[rank] + count > most for rank, count in more.items()):
            groups.append([])
            used.clear()
        groups[-1] += unit
        used += more
    return groups


def _units(old: list[int], new: list[int], per_rank: int) -> Iterator[list[int]]:
    """Slots that flip together: single ones while experts have two slots, then cycles."""
    left = {slot for slot, expert in enumerate(old) if expert != new[slot]}
    for slot in _singles(old, new, left, per_rank):
        left.remove(slot)
        yield [slot]
    # Each expert that leaves a slot has no other, so exactly one slot gets it.
    getter = {new[slot]: slot for slot in left}
    while left:
        slot, cycle = min(left), []
        while slot in left:
            left.remove(slot)
            cycle.append(slot)
            slot = getter[old[slot]]
        yield cycle


def _singles(old: list[int], new: list[int], left: set[int], per_rank: int) -> Iterator[int]:
    """Slots whose expert has another slot when they flip; ranks take turns."""
    count = Counter(old)
    holders: dict[int, list[int]] = {}
    for slot in sorted(left):
        holders.setdefault(old[slot], []).append(slot)
    ready: list[deque[int]] = [deque() for _ in range(0, len(old), per_rank)]

    def release(expert: int) -> None:
        for slot in holders.get(expert, ()):
            ready[slot // per_rank].append(slot)

    for expert in holders:
        if count[expert] > 1:
            release(expert)
    turns = deque(ready)
    while any(ready):
        while not turns[0]:
            turns.rotate(-1)
        slot = turns[0].popleft()
        turns.rotate(-1)
        if slot not in left or count[old[slot]] == 1:
            continue
        count[old[slot]] -= 1
        count[new[slot]] += 1
        if count[new[slot]] == 2:
            release(new[slot])
        yield slot
