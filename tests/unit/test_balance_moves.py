"""What must be copied between two placements: carrying it out gives the new one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from moesaic.balance.flips import flip_groups
from moesaic.balance.moves import SlotMove, keep_slots, moves_of_layer
from moesaic.balance.problem import Ints

CASES = ((1, 4, 4), (2, 4, 6), (4, 12, 16), (4, 12, 12), (8, 16, 40), (3, 2, 9))


def random_placement(generator: np.random.Generator, experts: int, slots: int) -> Ints:
    rest = generator.integers(0, experts, slots - experts)
    return generator.permutation(np.concatenate([np.arange(experts), rest]))


@pytest.mark.parametrize(("ranks", "experts", "slots"), CASES)
def test_moves_lead_to_the_new_placement(ranks: int, experts: int, slots: int) -> None:
    generator = np.random.default_rng(slots)
    nodes = tuple(rank // 2 for rank in range(ranks))
    per_rank = slots // ranks
    for _ in range(60):
        old_P, wanted_P = (random_placement(generator, experts, slots) for _ in range(2))
        (new_P,) = keep_slots(old_P[None], wanted_P[None], ranks)
        for rank in range(ranks):
            part = slice(rank * per_rank, (rank + 1) * per_rank)
            assert Counter(new_P[part].tolist()) == Counter(wanted_P[part].tolist())
            kept = int((new_P[part] == old_P[part]).sum())
            common = Counter(new_P[part].tolist()) & Counter(old_P[part].tolist())
            assert kept == common.total(), "what stays on the rank stays in its slot"
        moves = moves_of_layer(old_P, new_P, ranks, nodes)
        result_P = old_P.copy()
        for move in moves:
            result_P[move.slot] = old_P[move.source]
        assert (result_P == new_P).all()
        assert len(moves) == len({move.slot for move in moves}) == (old_P != new_P).sum()
        for move in moves:
            check_source(move, old_P, per_rank, nodes)


def check_source(move: SlotMove, old_P: Ints, per_rank: int, nodes: tuple[int, ...]) -> None:
    """No holder of the expert is nearer than the one that is chosen."""
    rank = move.slot // per_rank

    def distance(slot: int) -> int:
        return (slot // per_rank != rank) + (nodes[slot // per_rank] != nodes[rank])

    holders = np.flatnonzero(old_P == old_P[move.source]).tolist()
    assert distance(move.source) == min(map(distance, holders))


def test_senders_share_the_work() -> None:
    """Three ranks fetch expert 0, which two others hold: neither sends all three."""
    old_P = np.array([0, 0, 1, 2, 3])
    new_P = np.array([0, 0, 0, 0, 0])
    moves = moves_of_layer(old_P, new_P, 5, (0,) * 5)
    assert sorted(Counter(move.source for move in moves).values()) == [1, 2]


def test_the_worked_example_of_flips() -> None:
    old_P, new_P = np.array([0, 1, 1, 2]), np.array([2, 1, 0, 1])
    assert flip_groups(old_P, new_P, 2, 1) == [[2, 0], [3]]
    assert flip_groups(old_P, new_P, 2, 2) == [[2, 0, 3]]
    assert flip_groups(old_P, old_P, 2, 1) == []


@pytest.mark.parametrize(("ranks", "experts", "slots"), CASES)
@pytest.mark.parametrize("most", [1, 2])
def test_every_expert_has_a_slot_after_each_flip(
    ranks: int, experts: int, slots: int, most: int
) -> None:
    generator = np.random.default_rng(slots)
    per_rank = slots // ranks
    for _ in range(60):
        old_P, wanted_P = (random_placement(generator, experts, slots) for _ in range(2))
        (new_P,) = keep_slots(old_P[None], wanted_P[None], ranks)
        groups = flip_groups(old_P, new_P, ranks, most)
        assert (
            sorted(slot for group in groups for slot in group)
            == np.flatnonzero(old_P != new_P).tolist()
        )
        at_P = old_P.copy()
        for group in groups:
            held = Counter(at_P.tolist())
            at_P[group] = new_P[group]
            assert set(at_P.tolist()) == set(range(experts))
            largest = max(Counter(slot // per_rank for slot in group).values())
            if largest > most:  # only a cycle of experts that have no other slot
                assert all(held[old_P[slot]] == 1 for slot in group)


def test_swaps_flip_in_pairs() -> None:
    """Rank 0 trades three experts with rank 1, which have no other slot."""
    old_P, new_P = np.arange(8), np.array([4, 5, 6, 3, 0, 1, 2, 7])
    assert flip_groups(old_P, new_P, 2, 1) == [[0, 4], [1, 5], [2, 6]]
    assert flip_groups(old_P, new_P, 2, 2) == [[0, 4, 1, 5], [2, 6]]
