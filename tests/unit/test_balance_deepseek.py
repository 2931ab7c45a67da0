"""DeepSeek's algorithm and its variants against plain implementations and published vectors."""

import numpy as np
import pytest
import torch

from moesaic.balance.algorithms import rebalance_experts
from moesaic.balance.deepseek import (
    deepseek,
    deepseek_hierarchical,
    deepseek_vec,
    deepseek_vec_hierarchical,
    elasticity_aware,
    elasticity_aware_hierarchical,
)
from moesaic.balance.problem import BalanceProblem, max_over_mean, rank_loads, replica_table

LOADS = (
    (90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86),
    (20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27),
)


def plain_pack(values: list[np.float32], packs: int) -> list[tuple[int, int]]:
    each = len(values) // packs
    if each == 1:
        return [(i, 0) for i in range(len(values))]
    sums, inside = [np.float32(0)] * packs, [0] * packs
    found: dict[int, tuple[int, int]] = {}
    for item in sorted(range(len(values)), key=lambda i: (-values[i], i)):
        pack = min((p for p in range(packs) if inside[p] < each), key=lambda p: (sums[p], p))
        found[item] = pack, inside[pack]
        inside[pack] += 1
        sums[pack] = np.float32(sums[pack] + values[item])
    return [found[i] for i in range(len(values))]


def plain_replicate(loads: list[np.float32], slots: int) -> tuple[list[tuple[int, int]], list[int]]:
    count, held = [1] * len(loads), [(e, 0) for e in range(len(loads))]
    for _ in range(slots - len(loads)):
        hot = max(
            range(len(loads)), key=lambda e: (np.float32(loads[e] / np.float32(count[e])), -e)
        )
        held.append((hot, count[hot]))
        count[hot] += 1
    return held, count


def plain_rebalance(
    loads: list[np.float32], slots: int, groups: int, nodes: int, gpus: int
) -> tuple[list[int], dict[tuple[int, int], int]]:
    """(expert of each slot, slot of each expert's replica)."""
    if groups % nodes:
        groups = nodes = 1
    experts, size = len(loads), len(loads) // groups
    sums = [np.float32(sum(map(float, loads[g * size : (g + 1) * size]))) for g in range(groups)]
    by_place = {place: g for g, place in enumerate(plain_pack(sums, nodes))}
    found, where = [0] * slots, {}
    for node in range(nodes):
        mine = [by_place[node, r] for r in range(groups // nodes)]
        local = [g * size + i for g in mine for i in range(size)]
        held, count = plain_replicate([loads[e] for e in local], slots // nodes)
        shares = [np.float32(loads[local[e]] / np.float32(count[e])) for e, _ in held]
        assert len(local) == experts // nodes
        for (e, nth), (pack, rank) in zip(held, plain_pack(shares, gpus // nodes), strict=True):
            position = node * (slots // nodes) + pack * (slots // gpus) + rank
            found[position] = local[e]
            where[local[e], nth] = position
    return found, where


def draw_loads(rng: np.random.Generator, layers: int, experts: int) -> np.ndarray:
    """Ties, zeros, one expert that takes all, whole numbers and fractions."""
    kinds = [
        rng.integers(0, 4, experts),
        rng.integers(0, 10_000, experts),
        np.zeros(experts),
        np.eye(experts)[rng.integers(experts)] * 4096,
        np.full(experts, 7),
        rng.random(experts),
        rng.permutation(np.arange(1, experts + 1) ** -0.9),
    ]
    return np.stack([kinds[rng.integers(len(kinds))] for _ in range(layers)]).astype(np.float32)


def draw_shape(rng: np.random.Generator) -> tuple[int, int, int, int, int]:
    """(experts, slots, groups, nodes, gpus)."""
    nodes = int(rng.choice([1, 1, 2, 3]))
    gpus = nodes * int(rng.integers(1, 4))
    groups = nodes * int(rng.integers(1, 3)) if rng.random() < 0.7 else int(rng.integers(1, 4))
    experts = groups * int(rng.integers(1, 6))
    slots = -(-experts // gpus) * gpus + gpus * int(rng.integers(0, 4))
    return experts, slots, groups, nodes, gpus


def test_vector_1_with_groups():
    weight = torch.tensor(LOADS)
    phy2log, log2phy, logcnt = rebalance_experts(weight, 16, 4, 2, 8)
    assert phy2log.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    doubled = {1: [15, 13], 4: [7, 5], 5: [0, 2], 10: [8, 10]}
    assert {e: slots for e, slots in enumerate(log2phy[0].tolist()) if -1 not in slots} == doubled
    assert logcnt[0].tolist() == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]
    loads = rank_loads(np.array([LOADS], np.float32), phy2log.numpy(), 8)
    assert max_over_mean(loads)[0] == pytest.approx([1.2081, 1.2422], abs=5e-5)


@pytest.mark.parametrize(("groups", "nodes"), [(1, 1), (3, 2)])
def test_vector_2_without_groups(groups: int, nodes: int):
    phy2log, _, _ = rebalance_experts(torch.tensor(LOADS), 16, groups, nodes, 8)
    assert phy2log.tolist() == [
        [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
        [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
    ]
    loads = rank_loads(np.array([LOADS], np.float32), phy2log.numpy(), 8)
    assert max_over_mean(loads)[0] == pytest.approx([1.0726, 1.1903], abs=5e-5)


def test_vector_3():
    load = torch.tensor([[600, 560, 120, 120, 20, 10, 10, 10]])
    phy2log, _, _ = rebalance_experts(load, 16, 1, 1, 8)
    assert rank_loads(load.numpy().astype(np.float32)[None], phy2log.numpy(), 8).max() == 232


def test_equals_the_plain_implementation():
    """3,000 layers of 100 shapes."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        experts, slots, groups, nodes, gpus = draw_shape(rng)
        load = draw_loads(rng, 30, experts)
        phy2log, log2phy, logcnt = rebalance_experts(
            torch.from_numpy(load), slots, groups, nodes, gpus
        )
        for layer in range(30):
            held, where = plain_rebalance(list(load[layer]), slots, groups, nodes, gpus)
            assert phy2log[layer].tolist() == held, (load[layer], slots, groups, nodes, gpus)
            count = [held.count(e) for e in range(experts)]
            assert logcnt[layer].tolist() == count
            for e, row in enumerate(log2phy[layer].tolist()):
                expected = [where[e, nth] for nth in range(count[e])]
                assert row == expected + [-1] * (len(row) - count[e])
            assert log2phy.shape[2] == logcnt.max()


def test_algorithms_are_the_function_with_and_without_groups():
    load = np.array([LOADS], np.float32)
    problem = BalanceProblem(load, 16, 8, 4, 2)
    weight = torch.tensor(LOADS)
    assert deepseek(problem).tolist() == rebalance_experts(weight, 16, 1, 1, 8)[0].tolist()
    grouped = rebalance_experts(weight, 16, 4, 2, 8)[0]
    assert deepseek_hierarchical(problem).tolist() == grouped.tolist()
    assert elasticity_aware_hierarchical(problem).tolist() == grouped.tolist()
    uneven = BalanceProblem(load, 16, 8, 3, 2)
    assert deepseek_hierarchical(uneven).tolist() == deepseek(problem).tolist()


def plain_vec(steps: np.ndarray, slots: int, gpus: int) -> list[int]:
    """One node: tries every expert for every further slot."""
    experts = steps.shape[1]
    tied = steps + np.float32(1e-4) * np.arange(experts, dtype=np.float32)
    count, held = np.ones(experts, np.float32), list(range(experts))

    def worst(e: int) -> float:
        with_e = count + (np.arange(experts) == e)
        return float((tied / with_e).max(1).astype(np.float64).sum())

    for _ in range(slots - experts):
        best = min(range(experts), key=worst)
        held.append(best)
        count[best] += 1
    share = steps.sum(0) / count
    order = sorted(range(slots), key=lambda s: (-share[held[s]], s))
    found = [0] * slots
    for i, item in enumerate(order):
        row, column = divmod(i, gpus)
        gpu = gpus - 1 - column if row % 2 else column
        found[gpu * (slots // gpus) + row] = held[item]
    return found


def test_vec_keeps_the_steps():
    rng = np.random.default_rng(1)
    for _ in range(40):
        gpus = int(rng.integers(1, 5))
        experts = gpus * int(rng.integers(1, 4))
        slots = experts + gpus * int(rng.integers(0, 3))
        load = (1000 * rng.random((3, 2, experts))).astype(np.float32)  # no ties
        found = deepseek_vec(BalanceProblem(load, slots, gpus))
        again = deepseek_vec_hierarchical(BalanceProblem(load, slots, gpus))
        assert found.tolist() == again.tolist()
        for layer in range(2):
            assert found[layer].tolist() == plain_vec(load[:, layer], slots, gpus), (load, slots)


def test_vec_replicates_what_peaks_in_some_step():
    """Expert 0 is hottest on average; 1 and 2 are, each in one step."""
    load = np.array([[[50, 90, 1, 1]], [[50, 1, 90, 1]]], np.float32)
    problem = BalanceProblem(load, 6, 2)
    assert np.bincount(deepseek_vec(problem)[0]).tolist() == [1, 2, 2, 1]
    assert np.bincount(deepseek(problem)[0]).tolist() == [2, 2, 1, 1]


def test_vec_hierarchical_keeps_groups_on_nodes():
    rng = np.random.default_rng(2)
    load = rng.integers(1, 1000, (4, 5, 16)).astype(np.float32)
    found = deepseek_vec_hierarchical(BalanceProblem(load, 24, 4, num_groups=4, num_nodes=2))
    for slots in found.reshape(5, 2, 12):
        groups = [set((node // 4).tolist()) for node in slots]
        assert [len(group) for group in groups] == [2, 2]
        assert not groups[0] & groups[1]


def test_dead_ranks_get_expert_0_and_are_not_counted():
    load = np.array([LOADS], np.float32)
    active = np.array([True, False, True, True, True, True, False, True])
    problem = BalanceProblem(load, 16, 8, active_D=active)
    found = elasticity_aware(problem)
    live = np.repeat(active, 2)
    small = deepseek(BalanceProblem(load, 12, 6))
    assert found[:, live].tolist() == small.tolist()
    assert not found[:, ~live].any()
    table, count = replica_table(found, 12, live_P=live)
    assert count.tolist() == [[1] * 12] * 2
    assert set(table[0, :, 0].tolist()) == set(np.flatnonzero(live).tolist())
    assert elasticity_aware_hierarchical(problem).tolist() == found.tolist()
