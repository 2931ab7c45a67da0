"""Experts in slots, slots on ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.moe.placement import EpLayout, Placement, SlotMap, redundant_slots


def test_ranks_of_a_hybrid_layout() -> None:
    """12 slots over 2 groups of 3 ranks: a group's ranks hold the same slots."""
    layouts = [EpLayout(12, ep_size=2, moe_tp_size=3, rank=rank) for rank in range(6)]
    assert {layout.size for layout in layouts} == {6}
    assert {layout.slots_per_rank for layout in layouts} == {6}
    assert [layout.ep_rank for layout in layouts] == [0, 0, 0, 1, 1, 1]
    assert [layout.moe_tp_rank for layout in layouts] == [0, 1, 2, 0, 1, 2]
    assert [layout.first_slot for layout in layouts] == [0, 0, 0, 6, 6, 6]


def test_local_numbers_and_owners() -> None:
    layout = EpLayout(8, ep_size=4, rank=2)
    ids = torch.tensor([[0, 4], [5, -1], [3, 7]])
    assert layout.local(ids).tolist() == [[-1, 0], [1, -1], [-1, -1]]
    assert layout.owner(ids).tolist() == [[0, 2], [2, -1], [1, 3]]
    empty = torch.empty(0, 2, dtype=torch.int64)
    assert layout.local(empty).shape == layout.owner(empty).shape == (0, 2)


@given(ep=st.integers(1, 6), each=st.integers(1, 5), width=st.integers(1, 3))
@settings(deadline=None, max_examples=50)
def test_every_slot_is_local_to_exactly_one_group(ep: int, each: int, width: int) -> None:
    ids = torch.arange(-1, ep * each)
    locals_ = torch.stack(
        [EpLayout(ep * each, ep, width, rank).local(ids) for rank in range(ep * width)]
    )
    owner = EpLayout(ep * each, ep, width).owner(ids)
    assert (locals_ >= 0).sum(0).tolist() == [0] + [width] * (ep * each)
    for rank in range(ep * width):
        assert ((locals_[rank] >= 0) == (owner == rank // width)).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EpLayout(10, ep_size=4),
            "10 expert slots cannot be laid evenly over ep 4: add 2 redundant slots "
            r"\(--ep-num-redundant-experts\) or change --ep-size",
        ),
        (lambda: EpLayout(8, ep_size=4, rank=4), "rank 4 is not one of 0..3"),
        (lambda: EpLayout(8, ep_size=2, moe_tp_size=2, rank=-1), "rank -1 is not one of 0..3"),
        (
            lambda: Placement(4, (0, 1, 1, 3)),
            r"a placement of 4 experts must hold each of them: missing \[2\], unknown \[\]",
        ),
        (lambda: Placement(2, (0, 1, 2)), r"missing \[\], unknown \[2\]"),
        (lambda: Placement(2, (0, 1, -2)), r"missing \[\], unknown \[-2\]"),
        (lambda: Placement(2, (0, -1, 0)), r"missing \[1\], unknown \[\]"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_redundant_slots_are_rounded_up() -> None:
    assert [redundant_slots(8, asked, 3) for asked in range(5)] == [1, 1, 4, 4, 4]
    assert redundant_slots(256, 0, 32) == 0 and redundant_slots(256, 33, 32) == 64
    assert redundant_slots(8, 0, 16) == 8


def test_trivial_placement() -> None:
    assert Placement.trivial(3).slots == (0, 1, 2)
    assert Placement.trivial(3).is_identity
    assert Placement.trivial(3, 5).slots == (0, 1, 2, 0, 1, 2, 0, 1)
    assert not Placement.trivial(3, 1).is_identity
    assert not Placement(3, (0, 2, 1)).is_identity


def test_table_of_replicas() -> None:
    slots_EX, count_E = Placement(3, (1, 0, 2, 2, 0, 2)).table()
    assert slots_EX.tolist() == [[1, 4, 1], [0, 0, 0], [2, 3, 5]]
    assert count_E.tolist() == [2, 1, 3]


def test_the_row_decides_the_replica() -> None:
    slot_map = SlotMap(Placement(3, (1, 0, 2, 2, 0, 2)))
    ids = torch.tensor([[0, 2], [0, 2], [2, -1], [-1, 2], [1, 0]])
    assert slot_map(ids).tolist() == [[1, 2], [4, 3], [2, -1], [-1, 5], [0, 1]]


def test_identity_changes_nothing() -> None:
    ids = torch.tensor([[1, -1], [0, 2]])
    assert SlotMap(Placement.trivial(3))(ids) is ids
    assert SlotMap(Placement(2, (1, 0)))(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3)


@given(st.data())
@settings(deadline=None, max_examples=50)
def test_a_slot_holds_the_expert_that_was_chosen(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 6))
    more = data.draw(st.lists(st.integers(0, experts - 1), max_size=6))
    slots = data.draw(st.permutations([*range(experts), *more]))
    rows = data.draw(st.integers(0, 9))
    seed = data.draw(st.integers(0, 99))
    placement = Placement(experts, tuple(slots))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts, (rows, 3), generator=generator)
    found = SlotMap(placement)(ids)
    holds = torch.tensor([*placement.slots, -1])
    assert torch.equal(holds[found], ids)
