"""Which replica of an expert a token takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.kernels.routing import fake_logits, replica_of_row
from moesaic.moe.placement import EpLayout, Placement, SlotMap
from moesaic.moe.replicas import (
    SourceRank,
    nearest_replicas,
    replica_choice,
    rotated_replicas,
)
from moesaic.moe.topk import TopK, TopKConfig


def source(rank: int, slots: int, ep: int, moe_tp: int = 1, nodes: tuple[int, ...] = ()):
    return SourceRank(EpLayout(slots, ep, moe_tp, rank), nodes)


def test_rows_take_replicas_evenly() -> None:
    assert replica_of_row(torch.arange(7), torch.tensor(2)).tolist() == [0, 1, 0, 1, 0, 0, 1]
    for count in (2, 3, 4, 7, 32):
        for stride in (1, 2, 3, 4, 8):
            rows = torch.arange(0, 960 * stride, stride)
            found = replica_of_row(rows, torch.tensor(count)).bincount(minlength=count)
            assert len(found) == count
            assert float(found.max()) <= 1.1 * 960 / count + 2, (count, stride)


def test_first_rows_of_ranks_take_different_replicas() -> None:
    placement = Placement(3, (0, 1, 2, 0, 0, 1))
    rows = [[0, 1, 2]]
    found = []
    for rank in range(3):
        choice = replica_choice("dynamic", source(rank, 6, 3), replicated=False)
        found.append(SlotMap(placement, 3, choice)(torch.tensor(rows)).tolist()[0])
    assert found == [[0, 1, 2], [3, 5, 2], [4, 1, 2]]
    alike = replica_choice("dynamic", source(2, 6, 3), replicated=True)
    assert SlotMap(placement, 3, alike)(torch.tensor(rows)).tolist() == [[0, 1, 2]]


def test_the_nearest_replica() -> None:
    """Expert 0 is on ranks 0 and 5, expert 1 on ranks 1 and 2; nodes have four ranks."""
    slots = [0, 2, 1, 3, 1, 4, 5, 6, 7, 8, 9, 0, 10, 11, 12, 13]
    placement, nodes = Placement(14, tuple(slots)), (0, 0, 0, 0, 1, 1, 1, 1)
    found = [nearest_replicas(placement, source(rank, 16, 8, 1, nodes)) for rank in range(8)]
    assert [choices[0] for choices in found] == [(0,)] * 4 + [(11,)] * 4
    ones = [choices[1] for choices in found]
    assert ones[1] == (2,) and ones[2] == (4,)
    # Ranks without one take the two in turn, on their node as well as on the other.
    assert Counter(ones[:4]) == Counter(ones[4:]) == {(2,): 2, (4,): 2}
    assert {choices[2] for choices in found} == {(1,)}


def test_ranks_that_share_experts_are_as_near() -> None:
    placement = Placement(2, (0, 1, 1, 0))
    found = [nearest_replicas(placement, source(rank, 4, 2, 2)) for rank in range(4)]
    assert found == [[(0,), (1,)]] * 2 + [[(3,), (2,)]] * 2


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_nobody_is_nearer_and_ties_are_even(data: st.DataObject) -> None:
    ep, each = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    experts = data.draw(st.integers(1, ep * each))
    more = st.integers(0, experts - 1)
    extra = data.draw(st.lists(more, min_size=ep * each - experts, max_size=ep * each - experts))
    slots = data.draw(st.permutations([*range(experts), *extra]))
    nodes = tuple(rank // 2 for rank in range(ep))
    placement = Placement(experts, tuple(slots))
    sources = [source(rank, ep * each, ep, 1, nodes) for rank in range(ep)]
    found = [nearest_replicas(placement, one) for one in sources]
    for expert, replicas in enumerate(placement.replicas):
        ranks = [slot // each for slot in replicas]
        far = Counter()
        for rank in range(ep):
            (slot,) = found[rank][expert]
            assert slot in replicas
            assert slot // each == rank or rank not in ranks
            on_node = {nodes[other] for other in ranks}
            assert nodes[slot // each] == nodes[rank] or nodes[rank] not in on_node
        if len(set(ranks)) == len(ranks):
            one_node = [nearest_replicas(placement, replace(s, nodes=())) for s in sources]
            far = Counter(choices[expert][0] for choices in one_node)
            counts = [far[slot] for slot in replicas]
            assert max(counts) - min(counts) <= 1


def test_tables_change_in_place() -> None:
    first, second = Placement(3, (0, 1, 2, 0)), Placement(3, (0, 1, 2, 1))
    for algorithm in ("static", "dynamic"):
        choice = replica_choice(algorithm, source(1, 4, 2), replicated=False)
        slot_map = SlotMap(first, 2, choice)
        table = slot_map.table_on(torch.device("cpu"))
        assert table is not None
        before = table.slots_EX.data_ptr()
        slot_map.update(second)
        assert slot_map.table_on(torch.device("cpu")) is table
        assert table.slots_EX.data_ptr() == before
        ids = torch.tensor([[0, 1], [1, 2], [-1, 1]])
        assert slot_map(ids).tolist() == SlotMap(second, 2, choice)(ids).tolist()
        if algorithm == "static":
            assert slot_map(ids).tolist() == [[0, 3], [3, 2], [-1, 3]]


def test_the_same_tokens_have_no_nearest_replica() -> None:
    with pytest.raises(ValueError, match=r"static: all ranks have the same tokens.*give dynamic"):
        replica_choice("static", source(0, 4, 2), replicated=True)


def test_rotation_keeps_all_replicas() -> None:
    placement = Placement(3, (0, 1, 2, 0, 0, 1))
    for by in range(5):
        rotated = rotated_replicas(placement, by)
        assert [sorted(slots) for slots in rotated] == [list(s) for s in placement.replicas]


def test_fake_logits_are_uniform() -> None:
    logits = torch.randn(2000, 16)
    fake = fake_logits(logits)
    assert float(fake.min()) >= 5 and float(fake.max()) < 10
    assert abs(float(fake.mean()) - 7.5) < 0.05
    assert torch.equal(fake, fake_logits(logits.clone()))
    assert not torch.equal(fake, fake_logits(logits + 1))
    skewed = torch.zeros(2000, 16)
    skewed[:, 3] = 9
    chosen = TopK(TopKConfig(4, fake=True))(skewed, torch.arange(16.0)).ids_TK
    counts = chosen.flatten().bincount(minlength=16)
    assert float(counts.max()) < 1.15 * 500 and float(counts.min()) > 0.85 * 500
