"""Questions to ranks, and what has come back of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from moesaic.core.messages import QueryReply
from moesaic.core.stats import EngineStats, RankStats
from moesaic.engine.worker.rank_stats import RankTold

# A rank answers between two steps. Who has not told its statistics by then is left out: whoever
# asks for them does so again and again.
STATS_SECONDS: Final = 3.0
# Everything else is worth waiting for: a prompt of a large model may take long.
ANSWER_SECONDS: Final = 60.0
# Of a caller's own patience, which ends only where nobody is there to count the others'.
CALLER_SECONDS: Final = ANSWER_SECONDS + 5.0


class QueryTimeout(RuntimeError):
    """A question was not answered in time."""


@dataclass(frozen=True, slots=True)
class RankReply:
    """By one rank. `sent` and `received` are of the clock of whoever asked, in nanoseconds."""

    value: Any
    sent: int
    received: int


@dataclass(frozen=True, slots=True)
class RankAnswers:
    """By rank, of those that answered; `overview`: every rank as the supervisor sees it."""

    told: Mapping[int, RankReply]
    overview: Sequence[Mapping[str, Any]] = ()


@dataclass(slots=True)
class PendingQuery:
    """On its way: `waits_for` so many replies. By group, or by rank."""

    what: str
    answer: Future[Any]
    every: bool
    waits_for: int
    sent: int = field(default_factory=time.monotonic_ns)
    replies: dict[int, RankReply] = field(default_factory=dict)
    overview: Any = None

    @property
    def deadline(self) -> float:
        """On the monotonic clock."""
        return self.sent / 1e9 + (STATS_SECONDS if self.what == "stats" else ANSWER_SECONDS)

    def take(self, reply: QueryReply) -> None:
        if reply.group < 0:
            self.overview = reply.value
            return
        who = reply.rank if self.every else reply.group
        self.replies[who] = RankReply(reply.value, self.sent, time.monotonic_ns())

    @property
    def is_answered(self) -> bool:
        needs_overview = self.what in ("info", "stats")
        return len(self.replies) == self.waits_for and not (
            needs_overview and self.overview is None
        )

    def by_rank(self) -> RankAnswers:
        return RankAnswers(self.replies, self.overview or ())


def engine_stats(answers: RankAnswers, num_experts: int) -> EngineStats:
    """Ranks that did not answer are there as the supervisor sees them."""
    told = {
        rank: msgspec.convert(msgspec.to_builtins(one.value), RankTold)
        for rank, one in answers.told.items()
    }
    ranks = {rank: found.rank for rank, found in told.items()}
    for seen in answers.overview:
        ranks[seen["rank"]] = _complete(ranks.get(seen["rank"]), seen)
    groups = [found.group for found in told.values() if found.group is not None]
    return EngineStats(
        when=time.time(),
        groups=sorted(groups, key=lambda group: group.group),
        ranks=[ranks[rank] for rank in sorted(ranks)],
        num_experts=num_experts,
    )


def _complete(own: RankStats | None, seen: Mapping[str, Any]) -> RankStats:
    """`seen`: when it was asked. A rank that answers always computes."""
    stats = own or RankStats(
        seen["rank"],
        seen["place"],
        steps=seen["step"],
        compute_seconds=seen["computed"],
        wait_seconds=seen["waited"],
    )
    stats.state, stats.state_age, stats.pid = seen["state"], seen["state_age"], seen["pid"]
    return stats
