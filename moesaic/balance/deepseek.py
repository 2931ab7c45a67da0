"""DeepSeek's published balancing and its variants, for all layers at once.

Ties go to the lower index everywhere, and loads are float32: the results are exact.
N rows (layers, or layers × nodes) · I items · E experts · P slots · D ranks.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.problem import BalanceProblem, Bools, Floats, Ints


def pack(value_NI: Floats, packs: int) -> tuple[Ints, Ints]:
    """(pack, place in it) of each item: items by descending value, each to the pack of the least
    sum that is not full. Packs get the same number of items."""
    rows, items = value_NI.shape
    if items == packs:
        return np.tile(np.arange(items), (rows, 1)), np.zeros((rows, items), np.int64)
    order_NI = np.argsort(-value_NI, axis=1, kind="stable")
    value_IN = np.take_along_axis(value_NI, order_NI, 1).T.copy()
    sums, counts = np.zeros((rows, packs), np.float32), np.zeros(rows * packs, np.int64)
    flat, first_N = sums.reshape(-1), np.arange(rows) * packs
    pack_IN, place_IN = np.empty((items, rows), np.int64), np.empty((items, rows), np.int64)
    for i in range(items):
        sums.argmin(1, out=pack_IN[i])
        chosen_N = pack_IN[i] + first_N
        place_N = counts[chosen_N]
        place_IN[i] = place_N
        counts[chosen_N] = place_N + 1
        flat[chosen_N] += value_IN[i]
        flat[chosen_N[place_N == items // packs - 1]] = np.inf  # full
    packed, placed = np.empty((rows, items), np.int64), np.empty((rows, items), np.int64)
    np.put_along_axis(packed, order_NI, pack_IN.T, 1)
    np.put_along_axis(placed, order_NI, place_IN.T, 1)
    return packed, placed


def replicate(load_NE: Floats, slots: int) -> tuple[Ints, Ints, Ints]:
    """(expert of each slot [N, P], its number among the replicas [N, P], replicas [N, E]): one slot
    each, and each further slot to the expert of the greatest load per replica."""
    rows, experts = load_NE.shape
    expert_NP, nth_NP = np.tile(np.arange(slots), (rows, 1)), np.zeros((rows, slots), np.int64)
    count_NE = np.ones((rows, experts), np.int64)
    share_NE, row_N = load_NE.copy(), np.arange(rows)
    for slot in range(experts, slots):
        hottest_N = share_NE.argmax(1)
        count_N = count_NE[row_N, hottest_N]
        expert_NP[:, slot], nth_NP[:, slot] = hottest_N, count_N
        count_NE[row_N, hottest_N] = count_N + 1
        load_N = load_NE[row_N, hottest_N]
        share_NE[row_N, hottest_N] = load_N / (count_N + 1).astype(np.float32)
    return expert_NP, nth_NP, count_NE


def group_order(load_LE: Floats, groups: int, nodes: int) -> Ints:
    """[L, E]: experts in the order in which nodes get them, whole groups packed on nodes."""
    layers, experts = load_LE.shape
    size = experts // groups
    load_LG = load_LE.reshape(layers, groups, size).sum(-1, dtype=np.float64).astype(np.float32)
    node_LG, place_LG = pack(load_LG, nodes)
    start_LG = (node_LG * (groups // nodes) + place_LG) * size
    middle_LE = (start_LG[:, :, None] + np.arange(size)).reshape(layers, experts)
    return np.argsort(middle_LE, axis=1)


def hierarchical(problem: BalanceProblem, groups: int, nodes: int) -> tuple[Ints, Ints]:
    """(expert of each slot, its number among the replicas) by DeepSeek's three steps: groups to
    nodes, replicas inside of a node, slots to its ranks."""
    load_LE, layers = problem.total_LE, problem.num_layers
    expert_LE = group_order(load_LE, groups, nodes)
    load_NE = np.take_along_axis(load_LE, expert_LE, 1).reshape(layers * nodes, -1)
    middle_NP, nth_NP, count_NE = replicate(load_NE, problem.num_slots // nodes)
    share_NE: Floats = np.divide(load_NE, count_NE, dtype=np.float32)
    rank_NP, place_NP = pack(np.take_along_axis(share_NE, middle_NP, 1), problem.num_ranks // nodes)
    at_NP = rank_NP * problem.slots_per_rank + place_NP
    replica_NP = np.empty_like(nth_NP)
    np.put_along_axis(replica_NP, at_NP, nth_NP, 1)
    return _to_experts(middle_NP, at_NP, expert_LE), replica_NP.reshape(layers, -1)


def _to_experts(middle_NP: Ints, at_NP: Ints, expert_LE: Ints) -> Ints:
    """[L, P] from experts by their number on a node and slots of that node."""
    layers, experts = expert_LE.shape
    slots_NP = np.empty_like(middle_NP)
    np.put_along_axis(slots_NP, at_NP, middle_NP, 1)
    nodes = len(middle_NP) // layers
    expert_NE = expert_LE.reshape(layers * nodes, experts // nodes)
    return np.take_along_axis(expert_NE, slots_NP, 1).reshape(layers, -1)


def deepseek(problem: BalanceProblem) -> Ints:
    return hierarchical(problem, 1, 1)[0]


def deepseek_hierarchical(problem: BalanceProblem) -> Ints:
    """Where groups cannot be laid evenly over nodes, without them, as DeepSeek's own."""
    groups, nodes = problem.num_groups, problem.num_nodes
    return deepseek(problem) if groups % nodes else hierarchical(problem, groups, nodes)[0]


def replicate_by_steps(load_NSE: Floats, slots: int) -> tuple[Ints, Ints]:
    """As `replicate`, but each further slot goes to the expert that lowers the sum over steps of
    the step's greatest load per replica the most. Only a step's greatest can lower it."""
    rows, _, experts = load_NSE.shape
    tied_NSE = load_NSE + np.float32(1e-4) * np.arange(experts, dtype=np.float32)
    expert_NP = np.tile(np.arange(slots), (rows, 1))
    count_NE = np.ones((rows, experts), np.int64)
    share_NSE, row_N = tied_NSE.copy(), np.arange(rows)
    for slot in range(experts, slots):
        top_NS, saved_NS = _savings(tied_NSE, share_NSE, count_NE)
        saved_NE = np.zeros((rows, experts), np.float32)
        np.add.at(saved_NE, (row_N[:, None], top_NS), saved_NS)
        chosen_N = saved_NE.argmax(1)
        expert_NP[:, slot] = chosen_N
        count_NE[row_N, chosen_N] += 1
        count_N1 = count_NE[row_N, chosen_N].astype(np.float32)[:, None]
        share_NSE[row_N, :, chosen_N] = tied_NSE[row_N, :, chosen_N] / count_N1
    return expert_NP, count_NE


def _savings(load_NSE: Floats, share_NSE: Floats, count_NE: Ints) -> tuple[Ints, Floats]:
    """(expert of the greatest share of each step, by how much one more replica lowers the step)."""
    rows, steps, experts = share_NSE.shape
    if experts == 1:
        return np.zeros((rows, steps), np.int64), np.ones((rows, steps), np.float32)
    top_NS = share_NSE.argmax(2)
    at = (np.arange(rows)[:, None], np.arange(steps), top_NS)
    most_NS = share_NSE[at]
    share_NSE[at] = -np.inf
    second_NS = share_NSE.max(2)
    share_NSE[at] = most_NS
    after_NS = load_NSE[at] / (count_NE[at[0], top_NS] + 1).astype(np.float32)
    return top_NS, most_NS - np.maximum(second_NS, after_NS)


def snake(value_NP: Floats, ranks: int) -> Ints:
    """[N, P]: the slot of each item, dealt over ranks by descending value, back and forth."""
    rows, items = value_NP.shape
    row, column = np.divmod(np.arange(items), ranks)
    rank = np.where(row % 2, ranks - 1 - column, column)
    at_NP = np.empty((rows, items), np.int64)
    order_NP = np.argsort(-value_NP, axis=1, kind="stable")
    np.put_along_axis(at_NP, order_NP, (rank * (items // ranks) + row)[None], 1)
    return at_NP


def by_steps(problem: BalanceProblem, groups: int, nodes: int) -> Ints:
    steps, layers, _ = problem.loads_SLE.shape
    expert_LE = group_order(problem.total_LE, groups, nodes)
    load_LSE = np.take_along_axis(problem.loads_SLE, expert_LE[None], 2).transpose(1, 0, 2)
    load_NSE = np.ascontiguousarray(
        load_LSE.reshape(layers, steps, nodes, -1).swapaxes(1, 2)
    ).reshape(layers * nodes, steps, -1)
    middle_NP, count_NE = replicate_by_steps(load_NSE, problem.num_slots // nodes)
    share_NE = load_NSE.sum(1) / count_NE.astype(np.float32)
    ranks = problem.num_ranks // nodes
    at_NP = snake(np.take_along_axis(share_NE, middle_NP, 1), ranks)
    return _to_experts(middle_NP, at_NP, expert_LE)


def deepseek_vec(problem: BalanceProblem) -> Ints:
    return by_steps(problem, 1, 1)


def deepseek_vec_hierarchical(problem: BalanceProblem) -> Ints:
    groups, nodes = problem.num_groups, problem.num_nodes
    return deepseek_vec(problem) if groups % nodes else by_steps(problem, groups, nodes)


def elasticity_aware(problem: BalanceProblem) -> Ints:
    """DeepSeek's over the live ranks; slots of dead ranks hold expert 0 and get no tokens."""
    return _on_live_ranks(problem, 1, 1)


def elasticity_aware_hierarchical(problem: BalanceProblem) -> Ints:
    """By groups and nodes while all ranks live."""
    whole = problem.active.all() and problem.num_groups % problem.num_nodes == 0
    return (
        _on_live_ranks(problem, problem.num_groups, problem.num_nodes)
        if whole
        else (elasticity_aware(problem))
    )


def _on_live_ranks(problem: BalanceProblem, groups: int, nodes: int) -> Ints:
    live_P = live_slots(problem)
    live = BalanceProblem(
        problem.loads_SLE, int(live_P.sum()), int(problem.active.sum()), groups, nodes
    )
    slots_LP = np.zeros((problem.num_layers, problem.num_slots), np.int64)
    slots_LP[:, live_P] = hierarchical(live, groups, nodes)[0]
    return slots_LP


def live_slots(problem: BalanceProblem) -> Bools:
    return np.repeat(problem.active, problem.slots_per_rank)
