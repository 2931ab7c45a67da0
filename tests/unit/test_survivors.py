"""Which slots take the experts of lost ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.balance.survivors import Adoption, adoptions


def test_the_documented_example() -> None:
    assert adoptions([0, 1, 2, 0, -1, -1], 4, 2) == [Adoption(0, 3)]


def test_nothing_moves_while_every_expert_has_a_slot() -> None:
    assert adoptions([0, 1, 2, 0, 1, 2], 3, 2) == []
    assert adoptions([-1, -1, 2, 0, 1, 2], 3, 2) == []


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="4 experts do not fit into 3 slots of live ranks"):
        adoptions([0, 1, 2, -1], 4, 1)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_expert_has_a_slot_afterwards(data: st.DataObject) -> None:
    per_rank, ranks = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 6))
    lost = data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    room = per_rank * (ranks - len(lost))
    experts = data.draw(st.integers(1, room))
    held = [
        -1 if slot // per_rank in lost else data.draw(st.integers(0, experts - 1))
        for slot in range(per_rank * ranks)
    ]
    before = Counter(expert for expert in held if expert >= 0)
    found = adoptions(held, experts, per_rank)
    # No more is read than must be.
    assert sorted(one.expert for one in found) == [e for e in range(experts) if not before[e]]
    assert len({one.slot for one in found}) == len(found)
    for one in found:
        assert held[one.slot] >= 0
        held[one.slot] = one.expert
    assert {expert for expert in held if expert >= 0} == set(range(experts))
    # Where the lost ranks held nothing that others lack, ranks adopt about equally many.
    if not before:
        return
    taken = Counter(one.slot // per_rank for one in found)
    assert sum(taken.values()) == len(found)
