"""What a balancing algorithm gets and how its result is judged.

L layers · S steps or windows of load · E experts · P slots · D ranks · C slots of a rank
· X replicas of an expert at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

OBJECTIVES: Final = ("tokens", "experts")


@dataclass(frozen=True)
class MoveCost:
    """What fetching costs, against what balance gains over the steps until the next plan."""

    slot_seconds: float = 44e6 / 50e9
    """To fetch one expert; the default is one of DeepSeek-V3 in fp8 over 50 GB/s."""
    layer_seconds: float = 200e-6
    """The time of one layer's experts in a step under perfect balance."""
    horizon_steps: int = 1000

    def price(self, ranks: int) -> float:
        """The cost of one fetched slot in units of a layer's max/mean; ranks fetch in parallel."""
        return self.slot_seconds / (self.layer_seconds * self.horizon_steps * ranks)


@dataclass(frozen=True)
class BalanceProblem:
    """`loads_SLE`: tokens of each expert in each recorded step or window. Algorithms without a
    step axis use the sum over steps."""

    loads_SLE: Floats
    num_slots: int
    num_ranks: int
    num_groups: int = 1
    num_nodes: int = 1
    current_LP: Ints | None = None
    """Expert in each slot today; None before anything is loaded, when fetching costs nothing."""
    active_D: Bools | None = None
    """Ranks that live; None: all."""
    cost: MoveCost = MoveCost()
    objective: str = "tokens"
    """`tokens`: even numbers of rows. `experts`: few distinct experts read, for steps that are
    bound by memory; the loads are then tokens of one step."""
    target: float = 1.03
    """Max/mean at which `incremental` stops."""
    worst_window: bool = False
    """Whether `incremental` judges a placement by the worst window of load, not by their mean."""
    max_fetches: int | None = None
    """Slots of a layer that `incremental` may fetch; None: as many as pay."""

    def __post_init__(self) -> None:
        # Whole numbers are welcome; results are exact in float32.
        object.__setattr__(self, "loads_SLE", np.asarray(self.loads_SLE, np.float32))
        check_loads(self.loads_SLE)
        check_sizes(self)
        if self.current_LP is not None:
            check_placement(self.current_LP, self.num_layers, self.num_experts, self.num_slots)
        if self.active_D is not None:
            check_active(self.active_D, self)
        if self.objective not in OBJECTIVES:
            raise ValueError(
                f"objective {self.objective!r} is not known: choose one of {', '.join(OBJECTIVES)}"
            )

    @property
    def num_layers(self) -> int:
        return int(self.loads_SLE.shape[1])

    @property
    def num_experts(self) -> int:
        return int(self.loads_SLE.shape[2])

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    @property
    def active(self) -> Bools:
        return np.ones(self.num_ranks, bool) if self.active_D is None else self.active_D

    @cached_property
    def total_LE(self) -> Floats:
        """Summed over steps in float64, so that the order of steps does not count."""
        return self.loads_SLE.sum(0, dtype=np.float64).astype(np.float32)


def check_loads(loads_SLE: Floats) -> None:
    if loads_SLE.ndim != 3 or 0 in loads_SLE.shape:
        raise ValueError(
            f"loads of shape {list(loads_SLE.shape)}: give steps × layers × experts, none of them 0"
        )
    right_SLE = np.isfinite(loads_SLE) & (loads_SLE >= 0)
    if not right_SLE.all():
        step, layer, expert = np.argwhere(~right_SLE)[0]
        raise ValueError(
            f"the load of expert {expert} in layer {layer} of step {step} is "
            f"{loads_SLE[step, layer, expert]}: give numbers of tokens, finite and not negative"
        )


def check_sizes(problem: BalanceProblem) -> None:
    experts, slots, ranks = problem.num_experts, problem.num_slots, problem.num_ranks
    groups, nodes = problem.num_groups, problem.num_nodes
    if min(ranks, groups, nodes) < 1:
        raise ValueError(f"{ranks} ranks, {groups} groups, {nodes} nodes: give at least 1 of each")
    if slots < experts:
        raise ValueError(f"{slots} slots for {experts} experts: give at least {experts}")
    if slots % ranks:
        more = -slots % ranks
        raise ValueError(
            f"{slots} slots cannot be laid evenly over {ranks} ranks: add {more} redundant slots"
        )
    if experts % groups:
        raise ValueError(f"{experts} experts do not form {groups} groups of equal size")
    if ranks % nodes:
        raise ValueError(f"{ranks} ranks cannot be laid evenly over {nodes} nodes")


def check_placement(slots_LP: Ints, layers: int, experts: int, slots: int) -> None:
    if slots_LP.shape != (layers, slots):
        raise ValueError(
            f"a placement of {' × '.join(map(str, slots_LP.shape))} (layers × slots) does not fit "
            f"{layers} × {slots}"
        )
    if slots_LP.min() < 0 or slots_LP.max() >= experts:
        wrong = slots_LP[(slots_LP < 0) | (slots_LP >= experts)][0]
        raise ValueError(f"a placement names expert {wrong}: there are 0..{experts - 1}")
    missing_LE = counts_of(slots_LP, experts) == 0
    if missing_LE.any():
        layer, expert = np.argwhere(missing_LE)[0]
        raise ValueError(f"a placement has no slot for expert {expert} in layer {layer}")


def check_active(active_D: Bools, problem: BalanceProblem) -> None:
    if active_D.shape != (problem.num_ranks,):
        raise ValueError(f"active ranks: {len(active_D)} values for {problem.num_ranks} ranks")
    room = int(active_D.sum()) * problem.slots_per_rank
    if room < problem.num_experts:
        needed = -(-problem.num_experts // problem.slots_per_rank)
        raise ValueError(
            f"{int(active_D.sum())} live ranks have {room} slots for {problem.num_experts} experts:"
            f" at least {needed} ranks must live, or add redundant slots"
        )


def counts_of(slots_LP: Ints, experts: int) -> Ints:
    """Replicas of each expert in each layer."""
    layers = len(slots_LP)
    flat = (slots_LP + experts * np.arange(layers)[:, None]).ravel()
    return np.bincount(flat, minlength=layers * experts).reshape(layers, experts)


def trivial_placement(layers: int, experts: int, slots: int) -> Ints:
    """Slot i holds expert i modulo their number."""
    return np.tile(np.arange(slots) % experts, (layers, 1))


def replica_table(
    slots_LP: Ints, experts: int, replica_LP: Ints | None = None, live_P: Bools | None = None
) -> tuple[Ints, Ints]:
    """(slots of each expert [L, E, X] padded by -1, how many it has [L, E]). Replicas stand in the
    order of `replica_LP`, else of slots; those in slots that are not live are left out."""
    layers, slots = slots_LP.shape
    live = np.arange(slots) if live_P is None else np.flatnonzero(live_P)
    held = slots_LP[:, live]
    count_LE = counts_of(held, experts)
    if replica_LP is None:
        order = np.argsort(held, axis=1, kind="stable")
        first_LE = np.cumsum(count_LE, 1) - count_LE
        sorted_held = np.take_along_axis(held, order, 1)
        nth = np.arange(len(live)) - np.take_along_axis(first_LE, sorted_held, 1)
        replica_LP = np.empty_like(held)
        np.put_along_axis(replica_LP, order, nth, 1)
    table = np.full((layers, experts, int(count_LE.max())), -1)
    table[np.arange(layers)[:, None], held, replica_LP] = live
    return table, count_LE


def rank_loads(loads_SLE: Floats, slots_LP: Ints, ranks: int) -> Floats:
    """[S, L, D]: tokens of each rank where replicas share an expert's tokens evenly."""
    count_LE = counts_of(slots_LP, loads_SLE.shape[2])
    share_SLE = loads_SLE / np.maximum(count_LE, 1).astype(np.float32)
    share_SLP = np.take_along_axis(share_SLE, slots_LP[None], 2)
    return share_SLP.reshape(*share_SLP.shape[:2], ranks, -1).sum(-1)


def max_over_mean(loads_SLD: Floats) -> Floats:
    """[S, L]: 1 is perfect balance, also where there is no token."""
    mean_SL = loads_SLD.mean(-1)
    return np.where(mean_SL > 0, loads_SLD.max(-1) / np.where(mean_SL > 0, mean_SL, 1), 1)


def experts_of_ranks(slots_LP: Ints, ranks: int, experts: int) -> Bools:
    """[L, D, E]: whether a rank holds an expert."""
    layers = len(slots_LP)
    held = np.zeros((layers, ranks, experts), bool)
    held_LDC = slots_LP.reshape(layers, ranks, -1)
    held[np.arange(layers)[:, None, None], np.arange(ranks)[:, None], held_LDC] = True
    return held


def fetched_slots(old_LP: Ints, new_LP: Ints, ranks: int, experts: int) -> Bools:
    """[L, P]: slots whose expert was on no slot of their rank and must come from another."""
    held_LDE = experts_of_ranks(old_LP, ranks, experts)
    layers, slots = new_LP.shape
    rank_P = np.arange(slots) // (slots // ranks)
    return ~held_LDE[np.arange(layers)[:, None], rank_P, new_LP]


def duplicates(slots_LP: Ints, ranks: int) -> int:
    """Slots that repeat an expert of their own rank."""
    held = np.sort(slots_LP.reshape(len(slots_LP), ranks, -1), axis=-1)
    return int((held[..., 1:] == held[..., :-1]).sum())
