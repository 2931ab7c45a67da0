"""Splitting pairs between replicas: the kernels against their twins, and these against what they
promise."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moesaic.kernels import split as twins
from moesaic.kernels.split import PairCounts, ReplicaTable, fill
from moesaic.kernels.triton import sort
from moesaic.kernels.triton import split as kernels
from moesaic.moe.placement import EpLayout, Placement
from moesaic.moe.step_split import replica_rows
from tests.kernels.triton_cases import DEVICE, GPU


def table_of(placement: Placement, ranks: int) -> ReplicaTable:
    rows = replica_rows(placement, EpLayout(len(placement.slots), ranks))
    return ReplicaTable(*(torch.tensor(r, dtype=torch.int32, device=DEVICE) for r in rows))


def draw_placement(experts: int, ranks: int, each: int, seed: int) -> Placement:
    """Some experts have many replicas, some of them twice on a rank."""
    generator = random.Random(seed)
    extra = generator.choices(range(min(4, experts)), k=ranks * each - experts)
    slots = [*range(experts), *extra]
    generator.shuffle(slots)
    return Placement(experts, tuple(slots))


def draw_ids(rows: int, experts: int, top_k: int, seed: int) -> Tensor:
    """One expert is popular, some pairs have none, and some rows are padding."""
    hot = min(1, experts - 1)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, experts, generator=generator).argsort(1)[:, :top_k]
    ids[(torch.rand(rows, generator=generator) < 0.6) & (ids != hot).all(1), 0] = hot
    ids[torch.rand(rows, top_k, generator=generator) < 0.1] = -1
    ids[rows - rows // 5 :] = -1
    return ids.int()


def split_all(ids: list[Tensor], table: ReplicaTable, experts: int, module) -> list[Tensor]:
    """The slots of all ranks, by a module's functions."""
    count, fill_of, take = (
        getattr(function, "twin", function)
        for function in (module.count_pairs, module.fill_replicas, module.take_replicas)
    )
    counts = [count(one.to(DEVICE), experts) for one in ids]
    counts_PE = torch.stack([one.count_E for one in counts])
    return [
        take(one.to(DEVICE), counted, fill_of(counts_PE, table, rank), table)
        for rank, (one, counted) in enumerate(zip(ids, counts, strict=True))
    ]


@pytest.mark.parametrize("module", [twins, kernels], ids=["twins", "kernels"])
def test_the_examples(module) -> None:
    count, fill_of, take = (
        getattr(function, "twin", function)
        for function in (module.count_pairs, module.fill_replicas, module.take_replicas)
    )
    ids = torch.tensor([[1, 0], [1, -1]], dtype=torch.int32, device=DEVICE)
    assert count(ids, 3).count_E.tolist() == [1, 2, 0]
    table = table_of(Placement(2, (0, 1, 1, 1)), 2)
    assert table.slots_ED.tolist() == [[0, -1], [1, 2]]
    assert table.single_E.tolist() == [0, -1] and table.several_R.tolist() == [1, -1]
    one, two = (torch.tensor(c, dtype=torch.int32, device=DEVICE) for c in (
        [[4, 6]], [[2, 4], [2, 2]],
    ))  # fmt: skip
    assert fill_of(one, table, 0)[1].tolist() == [1, 6]
    assert fill_of(two, table, 1)[1].tolist() == [-3, 2]
    ids = torch.tensor([[1], [1], [0], [1]], dtype=torch.int32, device=DEVICE)
    ends = torch.tensor([[0, 0], [1, 3]], dtype=torch.int32, device=DEVICE)
    assert take(ids, count(ids, 2), ends, table).tolist() == [[1], [2], [0], [2]]


def test_an_amount_is_poured_over_the_lowest() -> None:
    assert fill([1, 3, 9], 5) == [4, 1, 0]
    assert fill([1, 3, 9], 0) == [0, 0, 0]
    assert fill([0], 7) == [7]
    assert fill([5, 5, 5], 4) == [2, 1, 1]
    generator = random.Random(0)
    for _ in range(300):
        levels = [generator.randrange(50) for _ in range(generator.randrange(1, 9))]
        amount = generator.randrange(120)
        given = fill(levels, amount)
        assert sum(given) == amount and min(given) >= 0
        filled = [level + more for level, more in zip(levels, given, strict=True) if more]
        assert not filled or max(filled) - min(filled) <= 1
        # A vessel that got nothing is at least as full.
        empty = [level for level, more in zip(levels, given, strict=True) if not more]
        assert not filled or not empty or min(empty) >= max(filled) - 1


SHAPES = {
    "one expert": (1, 3, 1, (9, 4, 0), 1),
    "odd": (13, 5, 4, (31, 1, 0, 17), 3),
    "nobody has tokens": (8, 4, 3, (0, 0), 2),
    "several chunks": (40, 8, 7, (400, 3), 4),
}


@pytest.mark.parametrize("name", SHAPES)
def test_equals_its_twin(name: str) -> None:
    experts, ranks, each, rows, top_k = SHAPES[name]
    placement = draw_placement(experts, ranks, each, seed=1)
    table = table_of(placement, ranks)
    ids = [draw_ids(count, experts, top_k, seed) for seed, count in enumerate(rows)]
    found = split_all(ids, table, experts, kernels)
    wanted = split_all(ids, table, experts, twins)
    assert [one.tolist() for one in found] == [one.tolist() for one in wanted]
    holds = torch.tensor([*placement.slots, -1])
    for one, slots in zip(ids, found, strict=True):
        assert slots.dtype == one.dtype and torch.equal(holds[slots.cpu().long()].int(), one)
    for sources in ([[0] * experts], [[7] * experts, [1000] + [0] * (experts - 1)]):
        counts = torch.tensor(sources, dtype=torch.int32, device=DEVICE)
        several = [e for e in table.several_R.tolist() if e >= 0]
        for rank in range(len(sources)):
            ends = kernels.fill_replicas(counts, table, rank)[several]
            assert torch.equal(ends, twins.fill_replicas.twin(counts, table, rank)[several])


def test_the_fullest_rank_is_spared() -> None:
    """Experts 0 and 1 are hot, and their replicas are on ranks of unlike load."""
    placement = Placement(8, (0, 1, 2, 0, 3, 4, 1, 5, 6, 0, 7, 1))
    table = table_of(placement, 4)
    generator = torch.Generator().manual_seed(0)
    ids = torch.multinomial(
        torch.tensor([9.0, 8, 1, 4, 1, 1, 1, 3]), 900, True, generator=generator
    )
    ranks = [part.int()[:, None] for part in ids.split([100, 0, 350, 450])]
    slots = torch.cat(split_all(ranks, table, 8, twins)).flatten()
    loads = (slots // 3).bincount(minlength=4)
    assert int(loads.max() - loads.min()) <= 1
    assert int(loads.sum()) == 900


def test_counts_of_a_failed_exchange_address_nothing() -> None:
    """They are zeros; what comes of them is discarded."""
    table = table_of(Placement(3, (0, 1, 2, 2)), 2)
    ids = torch.tensor([[2, 0], [-1, 2]], dtype=torch.int32, device=DEVICE)
    counts = kernels.count_pairs(ids, 3)
    ends = kernels.fill_replicas(torch.zeros_like(counts.count_E)[None], table, 0)
    slots = kernels.take_replicas(ids, counts, ends, table)
    assert int(slots.min()) >= -1 and int(slots.max()) < 4


def test_ids_of_64_bits() -> None:
    table = table_of(Placement(3, (0, 1, 2, 1)), 2)
    ids = torch.tensor([[1, 0], [-1, 1]], device=DEVICE)
    counts = kernels.count_pairs(ids, 3)
    ends = kernels.fill_replicas(counts.count_E[None], table, 0)
    assert kernels.take_replicas(ids, counts, ends, table).dtype == torch.int64


def test_chunks_of_many_experts() -> None:
    """The padded numbers of experts that sorting takes are those of splitting."""
    counts = kernels.count_pairs(torch.tensor([[300]], device=DEVICE).int(), 301)
    assert isinstance(counts, PairCounts) and counts.count_E.tolist() == [0] * 300 + [1]
    assert counts.before_CSE is not None
    assert counts.before_CSE.shape == (1, sort.chunk_parts(512), 512)


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "ranks", "each"), [(256, 32, 9), (128, 8, 18), (64, 61, 2)])
@pytest.mark.parametrize("rows", [1, 63, 4096])
def test_large_shapes_on_the_gpu(experts: int, ranks: int, each: int, rows: int) -> None:
    table = table_of(draw_placement(experts, ranks, each, 2), ranks)
    ids = [draw_ids(rows, experts, 8, 0), draw_ids(rows // 2, experts, 8, 1)]
    found, wanted = (split_all(ids, table, experts, module) for module in (kernels, twins))
    assert [one.tolist() for one in found] == [one.tolist() for one in wanted]
