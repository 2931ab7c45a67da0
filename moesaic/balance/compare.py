"""Placements side by side: balance, what must be fetched, predicted time of a step.

S steps · L layers · E experts · P slots · D ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from moesaic.balance.algorithms import ALGORITHMS, AUTO, make_plan
from moesaic.balance.incremental import incremental
from moesaic.balance.problem import (
    BalanceProblem,
    Floats,
    Ints,
    MoveCost,
    counts_of,
    fetched_slots,
    max_over_mean,
    rank_loads,
    trivial_placement,
)
from moesaic.balance.split import split_by_step

CURRENT: Final = "current"
MOST_STEPS: Final = 32


@dataclass(frozen=True)
class StepModel:
    """The experts of a rank take as long as the slower of their arithmetic and their weights'
    way from memory; a layer takes as long as its slowest rank."""

    expert_bytes: float = 3 * 7168 * 2048
    row_flops: float = 2 * 3 * 7168 * 2048
    flops: float = 700e12
    memory_bytes_s: float = 3.2e12
    link_bytes_s: float = 50e9
    horizon_steps: int = 1000

    def seconds(self, rows_SLD: Floats, reads_SLD: Floats) -> float:
        """The time that the experts of all layers take in a step, averaged over steps."""
        arithmetic = rows_SLD * (self.row_flops / self.flops)
        memory = reads_SLD * (self.expert_bytes / self.memory_bytes_s)
        return float(np.maximum(arithmetic, memory).max(2).sum(1).mean())

    def cost(self, loads_SLE: Floats, ranks: int) -> MoveCost:
        """What a move costs, relative to steps of these loads under perfect balance."""
        rows = float(loads_SLE.sum(2).mean()) / ranks
        reads = float((loads_SLE > 0).sum(2).mean()) / ranks
        layer = max(
            rows * self.row_flops / self.flops, reads * self.expert_bytes / self.memory_bytes_s
        )
        slot = self.expert_bytes / self.link_bytes_s
        return MoveCost(slot, max(layer, 1e-9), self.horizon_steps)


@dataclass(frozen=True)
class Row:
    """One placement. `max_over_mean` is averaged over steps and layers; `split` is the same where
    every step splits tokens between replicas; `balancedness` is mean/max, SGLang's. `move_ms`: to
    fetch what is missing, all ranks at once."""

    algorithm: str
    reason: str
    redundant: int
    balancedness: float
    max_over_mean: float
    split: float
    fetched_slots: int
    fetched_share: float
    fetched_bytes: float
    step_ms: float
    move_ms: float
    plan_ms: float
    slots_LP: Ints


@dataclass(frozen=True)
class Comparison:
    """`plan_SLE`: what algorithms see; `judge_SLE`: steps that they are judged by.
    `before_LE`: what the current placement was planned for; None: it is `current_LP`, or trivial.
    """

    plan_SLE: Floats
    judge_SLE: Floats
    ranks: int
    groups: int = 1
    nodes: int = 1
    before_LE: Floats | None = None
    current_LP: Ints | None = None
    windows: int = 1
    objective: str = "tokens"
    target: float = 1.03
    max_fetches: int | None = None
    step: StepModel = StepModel()

    def problem(self, redundant: int) -> BalanceProblem:
        layers, experts = self.plan_SLE.shape[1:]
        slots = experts + redundant
        problem = BalanceProblem(
            in_windows(self.plan_SLE, self.windows),
            slots,
            self.ranks,
            self.groups,
            self.nodes,
            cost=self.step.cost(self.plan_SLE, self.ranks),
            objective=self.objective,
            target=self.target,
            max_fetches=self.max_fetches,
        )
        current_LP = self.current_LP
        if self.before_LE is not None:
            current_LP = incremental(BalanceProblem(self.before_LE[None], slots, self.ranks))
        elif current_LP is None:
            current_LP = trivial_placement(layers, experts, slots)
        return replace(problem, current_LP=current_LP)


def in_windows(loads_SLE: Floats, windows: int) -> Floats:
    """Means of consecutive steps, at most as many as there are steps."""
    steps = len(loads_SLE)
    starts = np.linspace(0, steps, min(windows, steps), endpoint=False).astype(int)
    number_W = np.diff(starts, append=steps).astype(np.float32)
    sums_WLE: Floats = np.add.reduceat(loads_SLE, starts, axis=0)
    return np.divide(sums_WLE, number_W[:, None, None], dtype=np.float32)


def compare(
    comparison: Comparison,
    redundancies: Sequence[int],
    algorithms: Sequence[str],
    progress: Callable[[], object] = lambda: None,
) -> list[Row]:
    """The current placement and those of the algorithms, for each number of redundant slots."""
    rows = []
    for redundant in redundancies:
        problem = comparison.problem(redundant)
        assert problem.current_LP is not None
        rows.append(judge(comparison, problem, CURRENT, problem.current_LP))
        progress()
        for name in algorithms:
            tried = problem
            if name in ALGORITHMS and ALGORITHMS[name].takes_steps:
                tried = replace(problem, loads_SLE=in_windows(comparison.plan_SLE, MOST_STEPS))
            begin = time.perf_counter()
            plan = make_plan(name, tried)
            plan_ms = (time.perf_counter() - begin) * 1e3
            shown = f"{AUTO}: {plan.algorithm}" if name == AUTO else name
            row = judge(comparison, problem, shown, plan.slots_LP)
            rows.append(replace(row, reason=plan.reason, plan_ms=plan_ms))
            progress()
    return rows


def judge(comparison: Comparison, problem: BalanceProblem, name: str, slots_LP: Ints) -> Row:
    steps_SLE, ranks = comparison.judge_SLE, comparison.ranks
    rows_SLD = rank_loads(steps_SLE, slots_LP, ranks)
    peak_SL = max_over_mean(rows_SLD)
    split_SL = max_over_mean(split_by_step(steps_SLE, slots_LP, ranks))
    assert problem.current_LP is not None
    fetched = int(fetched_slots(problem.current_LP, slots_LP, ranks, problem.num_experts).sum())
    moved = fetched * comparison.step.expert_bytes
    return Row(
        algorithm=name,
        reason="",
        redundant=problem.num_slots - problem.num_experts,
        balancedness=float((1 / peak_SL).mean()),
        max_over_mean=float(peak_SL.mean()),
        split=float(split_SL.mean()),
        fetched_slots=fetched,
        fetched_share=fetched / slots_LP.size,
        fetched_bytes=moved,
        step_ms=1e3 * comparison.step.seconds(rows_SLD, rank_reads(steps_SLE, slots_LP, ranks)),
        move_ms=1e3 * moved / comparison.ranks / comparison.step.link_bytes_s,
        plan_ms=0.0,
        slots_LP=slots_LP,
    )


def rank_reads(steps_SLE: Floats, slots_LP: Ints, ranks: int) -> Floats:
    """[S, L, D]: experts that a rank is expected to read where tokens take replicas at random."""
    count_LE = np.maximum(counts_of(slots_LP, steps_SLE.shape[2]), 1)
    read_SLE = (1 - (1 - 1 / count_LE) ** steps_SLE).astype(np.float32)
    read_SLP = np.take_along_axis(read_SLE, slots_LP[None], 2)
    return read_SLP.reshape(*read_SLP.shape[:2], ranks, -1).sum(-1)


def best_of(rows: Sequence[Row], horizon_steps: int) -> Row:
    """The plan that takes the least time over the steps until the next one, moves included."""
    plans = [row for row in rows if row.algorithm != CURRENT]
    return min(plans, key=lambda row: row.step_ms * horizon_steps + row.move_ms)
