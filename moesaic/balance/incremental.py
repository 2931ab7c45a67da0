"""Our own planner: from the current placement, with few moves, for all layers at once.

The hottest experts take slots of replicas that are needed least. Then passes pair the hottest ranks
of a layer with its coldest and swap one expert of each pair. Of all states seen, each layer keeps
the one whose gain pays best for what must be fetched.

L layers · W windows · E experts · D ranks · C slots of a rank · P slots · K pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from moesaic.balance.deepseek import deepseek, live_slots
from moesaic.balance.problem import (
    BalanceProblem,
    Bools,
    Floats,
    Ints,
    counts_of,
    experts_of_ranks,
)

MAX_PASSES: Final = 24
MOST_STUCK: Final = 8
"""Passes without a swap, each with other pairs, after which a layer is left as it is."""
MAX_KICKS: Final = 60
KICK_ABOVE: Final = 1.02
KICK_SLACK: Final = 0.05
ROOM_SHARE: Final = 0.6
"""An expert gets another replica if it takes this part of what small experts leave of a rank."""
LEAST_GAIN: Final = 1e-4
BOUND_SLACK: Final = 1.005
"""How near to the least possible peak is near enough."""


def _rows(load_LWE: Floats, count_LE: Ints) -> Floats:
    return load_LWE / np.maximum(count_LE, 1).astype(np.float32)[:, None]


def _reads(load_LWE: Floats, count_LE: Ints) -> Floats:
    """The chance that a replica gets a token at all and must be read."""
    return -np.expm1(-_rows(load_LWE, count_LE))


@dataclass(frozen=True)
class Objective:
    """`cost` says what one replica of each expert costs its rank. `change_replicas(state, target,
    most)` replaces up to `most` replicas of a layer before experts are swapped."""

    cost: Callable[[Floats, Ints], Floats]
    change_replicas: Callable[[SearchState, float, int], None]


@dataclass
class SearchState:
    """Placements of all layers and the cost of each slot to its rank, in units of the mean over
    ranks at the start."""

    slots_LDC: Ints
    load_LWE: Floats
    objective: Objective
    unit_LW1: Floats | None = None
    """None: the mean over ranks of these placements."""
    worst_window: bool = False
    count_LE: Ints = field(init=False)
    value_LWE: Floats = field(init=False)
    """Cost of one replica of each expert."""
    held_LDE: Bools = field(init=False)
    cost_LWD: Floats = field(init=False)

    def __post_init__(self) -> None:
        layers, ranks, _ = self.slots_LDC.shape
        slots_LP = self.slots_LDC.reshape(layers, -1)
        self.count_LE = counts_of(slots_LP, self.load_LWE.shape[2])
        self.held_LDE = experts_of_ranks(slots_LP, ranks, self.load_LWE.shape[2])
        value_LWE = self.objective.cost(self.load_LWE, self.count_LE)
        if self.unit_LW1 is None:
            total_LW1 = (value_LWE * self.count_LE[:, None]).sum(2, keepdims=True) / ranks
            self.unit_LW1 = np.where(total_LW1 > 0, total_LW1, 1).astype(np.float32)
        self.value_LWE = value_LWE / self.unit_LW1
        self.cost_LWD = self.slot_values(slice(None)).sum(-1)

    def slot_values(self, layers: slice | Ints) -> Floats:
        """[L, W, D, C]"""
        slots_LDC = self.slots_LDC[layers]
        count, ranks, each = slots_LDC.shape
        found = np.take_along_axis(
            self.value_LWE[layers], slots_LDC.reshape(count, 1, ranks * each), 2
        )
        return found.reshape(count, self.value_LWE.shape[1], ranks, each)

    def revalue(self, layers: Ints) -> None:
        """After the numbers of replicas of these layers have changed."""
        assert self.unit_LW1 is not None
        value_LWE = self.objective.cost(self.load_LWE[layers], self.count_LE[layers])
        self.value_LWE[layers] = value_LWE / self.unit_LW1[layers]
        self.cost_LWD[layers] = self.slot_values(layers).sum(-1)

    def put(self, layers: Ints, rank_l: Ints, place_l: Ints, new_l: Ints) -> None:
        """Puts an expert into one slot of each of these layers."""
        gone_l = self.slots_LDC[layers, rank_l, place_l]
        self.slots_LDC[layers, rank_l, place_l] = new_l
        self._hold(layers, rank_l, gone_l, new_l)
        self.count_LE[layers, gone_l] -= 1
        self.count_LE[layers, new_l] += 1
        self.revalue(layers)

    def swap(self, layers: Ints, one: tuple[Ints, Ints], two: tuple[Ints, Ints]) -> None:
        """Exchanges slots, each a rank and a place in it, of different ranks."""
        (rank, place), (other, there) = one, two
        expert = self.slots_LDC[layers, rank, place]
        instead = self.slots_LDC[layers, other, there]
        self.slots_LDC[layers, rank, place] = instead
        self.slots_LDC[layers, other, there] = expert
        self._hold(layers, rank, expert, instead)
        self._hold(layers, other, instead, expert)
        moved = self.value_LWE[layers, :, expert] - self.value_LWE[layers, :, instead]
        self.cost_LWD[layers, :, rank] -= moved
        self.cost_LWD[layers, :, other] += moved

    def _hold(self, layers: Ints, rank: Ints, gone: Ints, new: Ints) -> None:
        left = (self.slots_LDC[layers, rank] == gone[:, None]).any(1)
        self.held_LDE[layers, rank, gone] = left
        self.held_LDE[layers, rank, new] = True

    def peak(self) -> Floats:
        """[L]: the hottest rank, averaged over windows or in the worst of them."""
        peak_LW = self.cost_LWD.max(2)
        return peak_LW.max(1) if self.worst_window else peak_LW.mean(1)


def incremental(problem: BalanceProblem) -> Ints:
    """Without a current placement it starts from DeepSeek's, and what it moves costs nothing."""
    if not problem.active.all():
        return _on_live_ranks(problem)
    fresh = problem.current_LP is None
    start_LP = deepseek(problem) if problem.current_LP is None else problem.current_LP
    layers, ranks, objective = problem.num_layers, problem.num_ranks, SEARCHED[problem.objective]
    load_LWE = np.ascontiguousarray(problem.loads_SLE.swapaxes(0, 1))
    start_LDC = start_LP.reshape(layers, ranks, -1).copy()
    state = SearchState(start_LDC, load_LWE, objective, worst_window=problem.worst_window)
    search = Search(state, problem.max_fetches, 0.0 if fresh else problem.cost.price(ranks))
    search.run(1.0 if fresh else problem.target)
    if fresh:
        search.kick(np.random.default_rng(0))
    return search.best_LDC.reshape(layers, -1)


def _on_live_ranks(problem: BalanceProblem) -> Ints:
    """Slots of dead ranks hold expert 0 and get no tokens."""
    live_P = live_slots(problem)
    current_LP = None
    if problem.current_LP is not None:
        current_LP = with_lost_experts(problem.current_LP[:, live_P], problem.total_LE)
    live = replace(
        problem,
        num_slots=int(live_P.sum()),
        num_ranks=int(problem.active.sum()),
        num_groups=1,
        num_nodes=1,
        current_LP=current_LP,
        active_D=None,
    )
    slots_LP = np.zeros((problem.num_layers, problem.num_slots), np.int64)
    slots_LP[:, live_P] = incremental(live)
    return slots_LP


def with_lost_experts(slots_LP: Ints, load_LE: Floats) -> Ints:
    """Experts that have no slot take those of the replicas that are needed least."""
    slots_LP = slots_LP.copy()
    for slots_P, load_E in zip(slots_LP, load_LE, strict=True):
        count_E = counts_of(slots_P[None], len(load_E))[0]
        for lost in np.flatnonzero(count_E == 0):
            less_E = np.where(count_E > 1, load_E / np.maximum(count_E - 1, 1), np.inf)
            given = int(less_E.argmin())
            slots_P[np.flatnonzero(slots_P == given)[-1]] = lost
            count_E[given] -= 1
            count_E[lost] = 1
    return slots_LP


class Search:
    """The best placement of each layer so far. `price`: of a fetched slot, in units of the mean."""

    def __init__(self, state: SearchState, max_fetches: int | None, price: float) -> None:
        self.state, self.price = state, price
        self.max_fetches = state.slots_LDC[0].size if max_fetches is None else max_fetches
        layers, ranks, experts = state.held_LDE.shape
        self.before = state.held_LDE.reshape(-1).copy()
        self.first_LD1 = experts * np.arange(layers * ranks).reshape(layers, ranks, 1)
        self.fetched_L = np.zeros(layers, np.int64)
        """Slots that hold an expert which their rank did not have."""
        self.best_LDC, self.best_L = state.slots_LDC.copy(), state.peak()

    def run(self, target: float) -> None:
        spread_duplicates(self.state)
        # Where replicas stood twice on a rank, the start is no longer a choice.
        changed = (self.best_LDC != self.state.slots_LDC).any((1, 2))
        self.best_L[changed] = np.inf
        self.note()
        most = max(self.max_fetches - int(self.fetched_L.max()), 0)
        self.state.objective.change_replicas(self.state, target, most)
        self.note()
        self.swap(np.arange(len(self.best_L)), target)

    def swap(self, among: Ints, target: float) -> None:
        """Passes over some layers until they are at the target or nothing is left to swap."""
        stuck_L = np.zeros(len(self.best_L), np.int64)
        target_L = np.full(len(self.best_L), target, np.float32)
        if self.price:
            target_L = np.maximum(target_L, BOUND_SLACK * least_peak(self.state))
        for _ in range(MAX_PASSES):
            goes_on = (self.state.peak() > target_L) & (stuck_L < MOST_STUCK)
            layers = among[goes_on[among]]
            if not len(layers):
                break
            left_l = np.maximum(self.max_fetches - self.fetched_L[layers], 0)
            rule = SwapRule(
                target_L[layers], max(2 * self.price, LEAST_GAIN), stuck_L[layers], left_l // 2
            )
            swapped_l = swap_pairs(self.state, layers, rule)
            stuck_L[layers] = np.where(swapped_l, 0, stuck_L[layers] + 1)
            self.note()

    def kick(self, rng: np.random.Generator) -> None:
        """Leaves local optima: replaces replicas at random, searches on, and goes on from what is
        hardly worse. The hottest ranks count together, so that one after the other can cool."""
        at_LDC, at_L = self.best_LDC.copy(), np.full(len(self.best_L), np.inf, np.float32)
        for _ in range(MAX_KICKS):
            old = self.state
            self.state = SearchState(
                at_LDC.copy(), old.load_LWE, old.objective, old.unit_LW1, old.worst_window
            )
            layers = np.flatnonzero(self.state.cost_LWD.mean(1).max(1) > KICK_ABOVE)
            if not len(layers) or not kick_layers(self.state, layers, rng):
                return
            self.swap(layers, 1.0)
            heat_L = (self.state.cost_LWD**8).mean((1, 2)) ** 0.125
            taken = heat_L < at_L * (1 + KICK_SLACK * rng.random(len(at_L)))
            at_LDC[taken], at_L = self.state.slots_LDC[taken], np.where(taken, heat_L, at_L)

    def note(self) -> None:
        """Keeps what is better than the best so far."""
        kept_LDC = self.before.take(self.state.slots_LDC + self.first_LD1)
        self.fetched_L = kept_LDC[0].size - kept_LDC.sum((1, 2))
        worth_L = self.state.peak() + self.price * self.fetched_L
        allowed = (self.fetched_L <= self.max_fetches) | np.isinf(self.best_L)
        better = (worth_L < self.best_L) & allowed
        self.best_L = np.where(better, worth_L, self.best_L)
        self.best_LDC[better] = self.state.slots_LDC[better]


def spread_duplicates(state: SearchState) -> None:
    """Replaces the second replica of an expert on a rank, which does not lower the rank's load, by
    the hottest expert that the rank does not have."""
    held = np.sort(state.slots_LDC, axis=2)
    for layer, rank in np.argwhere((held[..., 1:] == held[..., :-1]).any(2)):
        slots_C = state.slots_LDC[layer, rank]
        for place in range(len(slots_C)):
            twice = slots_C[place] in slots_C[:place]
            value_E = np.where(state.held_LDE[layer, rank], -1, state.value_LWE[layer].mean(0))
            if not twice or value_E.max() < 0:  # or the rank has every expert
                continue
            at = np.array([layer]), np.array([rank]), np.array([place])
            state.put(*at, np.array([value_E.argmax()]))


def drop_replicas(state: SearchState, target: float, most: int) -> None:
    """Replaces replicas on hot ranks by experts that are rarely asked for, which need not be read,
    while the hottest rank is above the target and gets less to read."""
    layers = np.flatnonzero(state.peak() > target)
    for _ in range(most):
        at_l, mean_lE = np.arange(len(layers)), state.value_LWE[layers].mean(1)
        rank_l = state.cost_LWD[layers].mean(1).argmax(1)
        slots_lC = state.slots_LDC[layers, rank_l]
        spare_lC = np.take_along_axis(state.count_LE[layers], slots_lC, 1) > 1
        value_lC = np.where(spare_lC, np.take_along_axis(mean_lE, slots_lC, 1), -1)
        place_l = value_lC.argmax(1)
        new_l = np.where(state.held_LDE[layers, rank_l], np.inf, mean_lE).argmin(1)
        fits = (value_lC[at_l, place_l] > mean_lE[at_l, new_l]) & (
            ~state.held_LDE[layers, rank_l, new_l]
        )
        layers, rank_l, place_l, new_l = layers[fits], rank_l[fits], place_l[fits], new_l[fits]
        if not len(layers):
            return
        before_l, gone_l = state.peak()[layers], state.slots_LDC[layers, rank_l, place_l]
        state.put(layers, rank_l, place_l, new_l)
        worse = state.peak()[layers] >= before_l - LEAST_GAIN
        state.put(layers[worse], rank_l[worse], place_l[worse], gone_l[worse])
        layers = layers[~worse]


def kick_layers(state: SearchState, layers: Ints, rng: np.random.Generator) -> bool:
    """Replaces a random replica in each layer; false where no expert has two."""
    kicked: list[tuple[int, int, int, int]] = []
    for layer in layers:
        spare = np.argwhere(state.count_LE[layer][state.slots_LDC[layer]] > 1)
        if not len(spare):
            continue
        rank, place = spare[rng.integers(len(spare))]
        absent = np.flatnonzero(~state.held_LDE[layer, rank])
        if len(absent):
            kicked.append((layer, rank, place, absent[rng.integers(len(absent))]))
    if kicked:
        state.put(*np.array(kicked).T)
    return bool(kicked)


def replace_hot(state: SearchState, target: float, most: int) -> None:
    """Gives experts that are too hot for a rank the slots of replicas that are needed least."""
    limit_L = ROOM_SHARE * room_of_ranks(state, target)
    layers = np.arange(len(limit_L))
    for _ in range(most):
        mean_LE = state.value_LWE[layers].mean(1)
        hot_L = mean_LE.argmax(1)
        at = np.arange(len(layers))
        count_LE = state.count_LE[layers]
        less_LE = np.where(count_LE > 1, mean_LE * count_LE / np.maximum(count_LE - 1, 1), np.inf)
        less_LE[at, hot_L] = np.inf
        given_L = less_LE.argmin(1)
        hot_value = mean_LE[at, hot_L]
        needed = (hot_value > limit_L[layers]) & (less_LE[at, given_L] < hot_value)
        needed &= count_LE[at, hot_L] < state.slots_LDC.shape[1]
        layers, hot_L, given_L = layers[needed], hot_L[needed], given_L[needed]
        if not len(layers):
            return
        layers = layers[replace_replica(state, layers, hot_L, given_L)]


def room_of_ranks(state: SearchState, target: float) -> Floats:
    """[L]: what one slot may cost beside the smallest others."""
    return target - smallest_others(state).mean(1)


def least_peak(state: SearchState) -> Floats:
    """[L]: no swap gets below the hottest expert beside the smallest others."""
    return (state.value_LWE.max(2) + smallest_others(state)).mean(1)


def smallest_others(state: SearchState) -> Floats:
    """[L, W]: the sum of the smallest slots that fill a rank but for one."""
    layers, windows, _ = state.value_LWE.shape
    others = state.slots_LDC.shape[2] - 1
    if not others:
        return np.zeros((layers, windows), np.float32)
    value_LWP = state.slot_values(slice(None)).reshape(layers, windows, -1)
    return np.asarray(np.partition(value_LWP, others - 1, 2)[..., :others].sum(2))


def replace_replica(state: SearchState, layers: Ints, hot_l: Ints, given_l: Ints) -> Bools:
    """In the coldest rank that holds the one and not the other; false where there is none."""
    has_lD = state.held_LDE[layers, :, given_l] & ~state.held_LDE[layers, :, hot_l]
    cost_lD = np.where(has_lD, state.cost_LWD[layers].mean(1), np.inf)
    rank_l, done = cost_lD.argmin(1), has_lD.any(1)
    layers, rank, hot, given = layers[done], rank_l[done], hot_l[done], given_l[done]
    place = (state.slots_LDC[layers, rank] == given[:, None]).argmax(1)
    state.put(layers, rank, place, hot)
    return np.asarray(done)


@dataclass(frozen=True)
class SwapRule:
    """When a swap is made. `shift_l` pairs layers otherwise that have found nothing; `most_l` is
    how many swaps of a layer are left."""

    target_l: Floats
    least_gain: float
    shift_l: Ints
    most_l: Ints


def swap_pairs(state: SearchState, layers: Ints, rule: SwapRule) -> Bools:
    """Swaps one expert of each pair of a hot and a cold rank where that pays; [l]: where any."""
    cost_lWD = state.cost_LWD[layers]
    hot_lK, cold_lK = pair_ranks(cost_lWD, rule.target_l, rule.shift_l)
    hot_lWK = np.take_along_axis(cost_lWD, hot_lK[:, None], 2)
    cold_lWK = np.take_along_axis(cost_lWD, cold_lK[:, None], 2)
    half_lWK = (hot_lWK - cold_lWK) * np.float32(0.5)
    place_lK, left_lK = best_swaps(state, layers, (hot_lK, cold_lK), half_lWK)
    pays_lK = np.abs(half_lWK).mean(1) - left_lK > rule.least_gain
    pays_lK &= (hot_lWK > rule.target_l[:, None, None]).any(1)
    pays_lK &= np.cumsum(pays_lK, 1) <= rule.most_l[:, None]
    row, pair = np.nonzero(pays_lK)
    i, j = np.divmod(place_lK[row, pair], state.slots_LDC.shape[2])
    state.swap(layers[row], (hot_lK[row, pair], i), (cold_lK[row, pair], j))
    return np.asarray(pays_lK.any(1))


def best_swaps(
    state: SearchState, layers: Ints, pairs: tuple[Ints, Ints], half_lWK: Floats
) -> tuple[Ints, Floats]:
    """(place in the hot rank × C + place in the cold one, what then is left of half the difference
    of the two) of the best swap of each pair. What the other rank has already is not moved."""
    hot_lK, cold_lK = pairs
    at_l1, at_l11 = layers[:, None], layers[:, None, None]
    hot_lKC, cold_lKC = state.slots_LDC[at_l1, hot_lK], state.slots_LDC[at_l1, cold_lK]
    _, ranks, experts = state.held_LDE.shape
    held, value = state.held_LDE.reshape(-1), state.value_LWE.reshape(-1)
    in_cold = held.take((at_l1 * ranks + cold_lK)[..., None] * experts + hot_lKC)
    in_hot = held.take((at_l1 * ranks + hot_lK)[..., None] * experts + cold_lKC)
    windows = half_lWK.shape[1]
    left = np.zeros((*hot_lKC.shape, hot_lKC.shape[2]), np.float32)
    for w in range(windows):
        first_l11 = (at_l11 * windows + w) * experts
        hot_value = value.take(first_l11 + hot_lKC) - half_lWK[:, w, :, None]
        cold_value = value.take(first_l11 + cold_lKC)
        hot_value[in_cold], cold_value[in_hot] = np.inf, -np.inf
        apart = hot_value[..., None] - cold_value[..., None, :]
        left += np.abs(apart, out=apart)
    flat = left.reshape(*hot_lK.shape, -1)
    place_lK = flat.argmin(2)
    return place_lK, np.take_along_axis(flat, place_lK[..., None], 2)[..., 0] / windows


def pair_ranks(cost_lWD: Floats, target_l: Floats, shift_l: Ints) -> tuple[Ints, Ints]:
    """(hot, cold) ranks [l, K], the hottest first, and beside it the coldest."""
    over_lD = np.maximum(cost_lWD - target_l[:, None, None], 0).mean(1)
    order_lD = np.argsort(cost_lWD.mean(1) + 4 * over_lD, axis=1)
    ranks = order_lD.shape[1]
    most = int((over_lD > 0).sum(1).max())
    pairs = max(1, min(ranks // 2, most))
    cold = (np.arange(pairs) + shift_l[:, None]) % max(ranks - pairs, 1)
    return order_lD[:, ::-1][:, :pairs], np.take_along_axis(order_lD, cold, 1)


SEARCHED: Final = {
    "tokens": Objective(_rows, replace_hot),
    "experts": Objective(_reads, drop_replicas),
}
