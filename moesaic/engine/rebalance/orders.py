"""What ranks tell each other about a rebalance, when one is due, and what it did."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from moesaic.engine.rebalance.layer_groups import LayerGroup
from moesaic.engine.rebalance.planner_child import PlanReply

# Of the rebalancer, whose log ranks show.
logger = logging.getLogger("moesaic.engine.rebalance.rebalancer")


class RankReport(NamedTuple):
    """What each rank tells all others at the beginning of a step. Numbers only grow, so that a rank
    that has missed a step, which was abandoned, finds out what the others have done in it."""

    phases: int = 0
    """Phases that it has ended since the start of the service."""
    aborts: int = 0
    failed: int = 0
    """The abort that it asks for, as it cannot go on with the rebalance; else 0."""
    begun: int = 0
    """The order of the rebalance that it has begun last."""
    wanted: int = 0
    """From the first rank: the next order, 0 for none."""
    finished: int = 0
    """Requests of a serving group that have ended, from its leader."""


class Order(NamedTuple):
    """What the first rank wants. It travels as one number, which grows from order to order."""

    number: int = 0
    by_operator: bool = False
    dry_run: bool = False

    def encode(self) -> int:
        return self.number << 2 | self.by_operator << 1 | self.dry_run

    @classmethod
    def decode(cls, code: int) -> Order:
        return cls(code >> 2, bool(code & 2), bool(code & 1))


@dataclass
class RebalanceResult:
    """What one rebalance did. Balancedness is the mean over ranks divided by the largest, averaged
    over windows of load and layers, with the old placement and with the new one."""

    number: int
    dry_run: bool = False
    outcome: str = ""
    algorithm: str = ""
    reason: str = ""
    balancedness: float | None = None
    predicted: float | None = None
    fetched: int = 0
    """Slots whose expert comes from another rank."""
    fetched_bytes: int = 0
    """The bytes of those slots on all ranks."""
    layers: int = 0
    """Layers whose placement changes."""
    seconds: float = 0.0


@dataclass
class Running:
    """The rebalance in progress."""

    result: RebalanceResult
    by_operator: bool
    began: float = field(default_factory=time.monotonic)
    planned: list[LayerGroup] = field(default_factory=list)
    """The layers that have computed tokens; below a plan for each group of them."""
    plans: Future[list[PlanReply]] | None = None
    tokens_LE: Tensor | None = None
    """Tokens that this rank had computed when the rebalance began."""

    def note(self, replies: Sequence[PlanReply]) -> None:
        """Each layer counts as much as another; the algorithm is that of the first ones. Nothing
        where no layer has computed tokens."""
        counts = [len(group.layers) for group in self.planned]
        if not counts:
            return
        result, found = self.result, [*zip(counts, replies, strict=True)]
        result.algorithm, result.reason = replies[0].algorithm, replies[0].reason
        result.balancedness = sum(count * plan.before for count, plan in found) / sum(counts)
        result.predicted = sum(count * plan.after for count, plan in found) / sum(counts)


@dataclass
class Trigger:
    """When the next rebalance is due, on the first rank."""

    steps: int
    requests: int | None
    """Finished requests between two rebalances, instead of steps."""
    num_steps: int = 0
    num_finished: int = 0
    """Finished requests when the last one began."""
    earlier_steps: int = 0
    """Those before `num_steps` began to count."""

    def is_due(self, finished: int) -> bool:
        if self.requests is not None:
            return finished - self.num_finished >= self.requests
        return self.num_steps >= self.steps

    def restart(self, finished: int) -> None:
        self.earlier_steps += self.num_steps
        self.num_steps, self.num_finished = 0, finished

    def horizon(self, finished: int) -> int:
        """Steps until the next one, if requests go on to take as many as they did up to now."""
        if self.requests is None:
            return self.steps
        steps = self.earlier_steps + self.num_steps
        return max(1, steps * self.requests // max(finished, 1))


def log_end(result: RebalanceResult) -> None:
    if result.balancedness is None or result.predicted is None:
        logger.info("eplb: rebalance %d: %s", result.number, result.outcome)
        return
    logger.info(
        "eplb: rebalance %d by %s (%s): %s; balancedness %.3f, predicted %.3f; %d expert%s of %d "
        "layer%s %s (%.1f MiB) in %.2f s",
        result.number,
        result.algorithm,
        result.reason,
        result.outcome,
        result.balancedness,
        result.predicted,
        result.fetched,
        "s" * (result.fetched != 1),
        result.layers,
        "s" * (result.layers != 1),
        "to fetch" if result.dry_run else "fetched",
        result.fetched_bytes / 2**20,
        result.seconds,
    )
