"""Queries to ranks, and their replies."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from moesaic.core.messages import QueryReply
from moesaic.core.stats import EngineStats, MembershipStats, RankStats
from moesaic.engine.worker.rank_stats import RankStatsReply

# Queries to the leaders of serving groups; all others go to every rank.
GROUP_QUERIES: Final = ("info", "flush_cache", "rooms")
# Those to the supervisor alone.
SUPERVISOR_QUERIES: Final = ("scaling",)
# Ranks reply between two steps; later replies are left out of the statistics.
STATS_SECONDS: Final = 3.0
# Who asks where a request waits is not to wait for a rank that is stopped.
ROOM_SECONDS: Final = 1.0
# Other queries wait longer, since a prompt of a large model may take long.
ANSWER_SECONDS: Final = 60.0
SECONDS: Final = {"stats": STATS_SECONDS, "rooms": ROOM_SECONDS}
# Client timeout; a backstop for when no per-rank timeout fires.
CALLER_SECONDS: Final = ANSWER_SECONDS + 5.0


class QueryTimeout(RuntimeError):
    """A query was not answered in time."""


@dataclass(frozen=True, slots=True)
class RankReply:
    value: Any
    sent: int
    """Nanoseconds on the clock of the process that asks; so is `received`."""
    received: int


@dataclass(frozen=True, slots=True)
class RankAnswers:
    replies: Mapping[int, RankReply]
    """By rank."""
    overview: Sequence[Mapping[str, Any]] = ()
    """The supervisor's view of every rank."""
    membership: MembershipStats | None = None


@dataclass(slots=True)
class PendingQuery:
    what: str
    answer: Future[Any]
    every: bool
    """Whether every rank replies, or only the leader of each serving group."""
    expected: int
    sent: int = field(default_factory=time.monotonic_ns)
    replies: dict[int, RankReply] = field(default_factory=dict)
    """By rank, or by group."""
    overview: Any = None
    membership: MembershipStats | None = None

    @property
    def deadline(self) -> float:
        """In seconds on the monotonic clock."""
        return self.sent / 1e9 + SECONDS.get(self.what, ANSWER_SECONDS)

    def record(self, reply: QueryReply) -> None:
        if reply.group < 0:
            self.overview, self.membership = reply.value, reply.membership
            return
        if reply.lost:
            self.expected -= 1
            return
        key = reply.rank if self.every else reply.group
        self.replies[key] = RankReply(reply.value, self.sent, time.monotonic_ns())

    @property
    def is_answered(self) -> bool:
        needs_overview = self.what in ("info", "stats", *SUPERVISOR_QUERIES)
        return len(self.replies) == self.expected and not (needs_overview and self.overview is None)

    def by_rank(self) -> RankAnswers:
        return RankAnswers(self.replies, self.overview or (), self.membership)


def engine_stats(answers: RankAnswers, num_experts: int) -> EngineStats:
    """For ranks that did not answer it has the supervisor's view."""
    found = {
        rank: msgspec.convert(msgspec.to_builtins(reply.value), RankStatsReply)
        for rank, reply in answers.replies.items()
    }
    ranks = {rank: stats.rank for rank, stats in found.items()}
    for seen in answers.overview:
        ranks[seen["rank"]] = _complete(ranks.get(seen["rank"]), seen)
    groups = [stats.group for stats in found.values() if stats.group is not None]
    return EngineStats(
        when=time.time(),
        groups=sorted(groups, key=lambda group: group.group),
        ranks=[ranks[rank] for rank in sorted(ranks)],
        num_experts=num_experts,
        membership=answers.membership,
    )


def _complete(own: RankStats | None, seen: Mapping[str, Any]) -> RankStats:
    """Adds the supervisor's view at the time of the query: a rank that replies always computes."""
    stats = own or RankStats(
        seen["rank"],
        seen["place"],
        steps=seen["step"],
        compute_seconds=seen["computed"],
        wait_seconds=seen["waited"],
    )
    stats.state, stats.state_age, stats.pid = seen["state"], seen["state_age"], seen["pid"]
    return stats
