"""Elasticity: the service goes on without ranks that are lost, and restarts them.

A loss, a return and a rank that is killed because it hangs are one thing: a new epoch. All live
ranks of the replica abandon their step (a new generation, as for a step that failed); once the last
has, the supervisor tells them who is live, and submits the requests of serving groups that have
lost a rank to groups that have not, with the tokens that they have emitted. Where ranks cannot
compute without the lost one they wait for its return, and no request is lost either.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from moesaic.comm.mesh import Mesh
from moesaic.comm.supervise.elastic_state import ElasticReplica, PendingChange, RankLife
from moesaic.comm.supervise.journal import Journal
from moesaic.comm.supervise.membership_policy import EndableService, MembershipPolicy
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.comm.supervise.step_rollback import StepRollbacks
from moesaic.core.messages import (
    MembersAdopted,
    ResumeSteps,
    RollbackStep,
    StepFailed,
    Submit,
    encode,
)
from moesaic.core.stats import MembershipChange, MembershipStats

logger = logging.getLogger(__name__)

KEPT_CHANGES: Final = 64
# How long a rank that has started waits for others that start, to join with them: each join makes
# all ranks redo a step.
JOIN_SECONDS: Final = 0.25
LOST, RETURNED, REMOVED = "lost", "returned", "removed"
CUT_OFF: Final = "cut off"
WORDS: Final = {
    LOST: "were lost",
    RETURNED: "had returned",
    REMOVED: "were removed",
    CUT_OFF: "were cut off",
}
# How often in a row connections of a rank that break are made anew, and what ends such a row.
MOST_CUTS: Final = 3
CUT_SECONDS: Final = 60.0
MIB: Final = 1 << 20


class ElasticHost(Protocol):
    """What this needs of the supervisor."""

    spec: ServiceSpec
    mesh: Mesh
    journal: Journal

    @property
    def is_serving(self) -> bool: ...

    def fail(self, message: str, ranks: Sequence[int]) -> None: ...

    def is_away(self, rank: int) -> bool:
        """Whether its node is lost, so that it cannot be started."""

    def start_rank(self, rank: int) -> None: ...

    def strike(self, ranks: Sequence[int]) -> None:
        """Kills their processes, and waits for none to be gone."""

    def kill_rank(self, rank: int) -> bool:
        """Whether its process is gone."""

    def send_rank(self, rank: int, data: bytes) -> None: ...

    def send_answer(self, data: bytes) -> None: ...

    def roll_back(self, rollback: RollbackStep, ranks: Sequence[int]) -> None: ...

    def note_members(self, live: Sequence[int]) -> None: ...

    def note_awake(self, replica: int) -> None:
        """Its ranks step again."""

    def answer_for(self, rank: int) -> None:
        """Answers open queries that only this rank could answer."""


class ElasticMembership(MembershipPolicy):
    def __init__(self, host: ElasticHost, rollbacks: Sequence[StepRollbacks]) -> None:
        self._host, self._mesh = host, host.mesh
        now = time.monotonic()
        self.ranks = {rank: RankLife(since=now) for rank in range(self._mesh.world)}
        self._replicas = [ElasticReplica(n, each) for n, each in enumerate(rollbacks)]
        self._slots: tuple[int, int] | None = None
        """Slots of a rank in a layer, and the experts of a layer; None before ranks are ready."""
        self.totals = MembershipStats(live=self.live)
        self._size = self._mesh.world
        """The ranks that there are to be: those with the lowest numbers."""
        self._phase = "idle"
        """What `scaling` tells once that many are live."""

    @property
    def live(self) -> list[int]:
        return [rank for rank, life in self.ranks.items() if life.is_live]

    @property
    def stats(self) -> MembershipStats:
        pending = [one.change for replica in self._replicas for one in replica.pending]
        changes = [*self.totals.changes, *pending]
        return msgspec.structs.replace(self.totals, live=self.live, changes=changes)

    @property
    def scaling(self) -> dict[str, Any]:
        """Whether the number of ranks changes, in SGLang's words."""
        phase, live = self._phase, self.live
        if any(rank not in live for rank in range(self._size)) and phase != "idle":
            phase = "joining"
        elif any(replica.pending for replica in self._replicas) and phase != "idle":
            phase = "syncing_new_world"
        return {
            "is_scaling_elastic_ep": phase in ("joining", "syncing_new_world"),
            "scale_phase": phase,
            "effective_ep_size": len(live),
            "target_ep_size": self._size,
            "max_ep_size": self._mesh.world,
            "last_error": None,
        }

    def scale(self, size: int) -> str:
        """Removes ranks, or starts those that were removed; returns why that cannot be done."""
        mesh, now = self._mesh, time.monotonic()
        if mesh.replicas > 1 or mesh.pp > 1 or mesh.dp == 1:
            return "only attention groups (--enable-dp-attention) of one replica come and go"
        if not 0 < size <= mesh.world or size % mesh.attention_tp:
            return (
                f"{size} ranks: give a multiple of {mesh.attention_tp} up to {mesh.world}, for "
                "which the service is laid out (--max-ep-size)"
            )
        if why := self._cannot_serve(self._replicas[0], range(size)):
            sizes = range(size, mesh.world + 1, mesh.attention_tp)
            least = next(n for n in sizes if not self._cannot_serve(self._replicas[0], range(n)))
            return f"{size} ranks: {why}. Sizes from {least} to {mesh.world} work"
        before, self._size = self._size, size
        for rank in range(before, size):
            self.ranks[rank] = RankLife(is_live=False, since=now, restart_at=now)
        self._remove(range(size, before), now)
        if size != before:
            self._phase = "serving_expanded" if size > before else "serving_reduced"
        return ""

    def _remove(self, ranks: Sequence[int], now: float) -> None:
        """Those that had not joined yet leave without a change."""
        removed = [rank for rank in ranks if self.ranks[rank].is_live]
        self._host.strike(ranks)
        for rank in ranks:
            if not self._host.kill_rank(rank):
                self._host.fail(f"{self._mesh.describe(rank)} cannot be ended", [rank])
                return
            self._host.answer_for(rank)
            self.ranks[rank] = RankLife(is_live=False, since=now)
        if removed:
            cause = f"{_numbers(removed)} are removed: the service is to have {self._size} ranks"
            self._change(self._replicas[0], REMOVED, removed, cause, now)

    def is_watched(self, rank: int) -> bool:
        """Whether a rank that makes no progress holds others up: not while it starts, and not once
        all have abandoned their step and wait for one that is lost."""
        replica = self._replicas[self._mesh.place(rank).replica]
        waits = replica.waits_since is not None and not replica.rollbacks.in_progress
        return self.ranks[rank].is_live and not waits

    def is_starting(self, rank: int) -> bool:
        return not self.ranks[rank].is_live

    def note_ready(self, facts: Mapping[str, Any]) -> None:
        """All ranks are ready for the first time; these are the facts of one."""
        self._slots = len(facts["experts"]), facts.get("num_experts", 0)
        for replica in self._replicas:
            ranks = list(self._mesh.ranks_of_replica(replica.number))
            if len(ranks) > 1:
                why = self._cannot_serve(replica, ranks[1:])
                logger.info(
                    "elastic: %s",
                    f"without one of its ranks replica {replica.number} waits for its return: {why}"
                    if why
                    else "a rank that is lost is restarted, and the others go on meanwhile",
                )
        start = self._host.spec.start_size
        if start is not None and (why := self.scale(start)):
            self._host.fail(f"the service cannot start with fewer ranks: {why}", [])
        self._phase = "idle"

    def inherit(self, facts: Mapping[str, Any], generations: Sequence[int]) -> None:
        """Another node led the service, and is lost: all ranks are to start again, and those of
        nodes that live do. A smaller size might have ranks of the lost node only. `facts`: those of
        one; `generations`: the last of each replica."""
        now = time.monotonic()
        self._slots = len(facts["experts"]), facts.get("num_experts", 0)
        for life in self.ranks.values():
            life.is_live, life.restart_at = False, now
        for replica, generation in zip(self._replicas, generations, strict=True):
            replica.rollbacks.generation, replica.rollbacks.ranks = generation, []
            replica.reset = set(
                range(replica.number * self._mesh.dp, (replica.number + 1) * self._mesh.dp)
            )
            replica.waits_since = now

    @property
    def generations(self) -> list[int]:
        return [replica.rollbacks.generation for replica in self._replicas]

    def on_ranks_lost(self, service: EndableService, ranks: Sequence[int], cause: str) -> None:
        if not self._host.is_serving:
            service.fail(cause, ranks)
            return
        now = time.monotonic()
        self._host.strike(ranks)
        for rank in ranks:
            if not self._host.kill_rank(rank):
                service.fail(f"{cause}; its process cannot be killed", [rank])
                return
            self._host.answer_for(rank)
        hopeless = [rank for rank in ranks if not self._plan_restart(rank, now)]
        if hopeless:
            limit = self._host.spec.restart_limit
            service.fail(f"{cause}; it was lost {limit} times in a row (--restart-limit)", hopeless)
            return
        lost = [rank for rank in ranks if self.ranks[rank].is_live]
        if not lost:  # they had not joined yet, so nobody waits for them
            logger.warning("%s while it started again", cause)
            return
        self.totals.lost += len(lost)
        for rank in lost:
            self.ranks[rank].is_live = False
        for replica in self._replicas:
            here = [rank for rank in lost if rank in self._mesh.ranks_of_replica(replica.number)]
            if here:
                self._change(replica, LOST, here, cause, now)

    def on_link_lost(self, failed: StepFailed) -> None:
        """A connection between nodes has broken, and no rank is lost: all make new ones. A rank
        whose connections break again and again is lost."""
        rank, now = failed.rank, time.monotonic()
        replica, life = self._replicas[self._mesh.place(rank).replica], self.ranks[rank]
        if replica.rollbacks.in_progress or failed.generation != replica.rollbacks.generation:
            return
        life.cuts = [then for then in life.cuts if now - then < CUT_SECONDS] + [now]
        cause = f"{self._mesh.describe(rank)} is cut off: {failed.error}"
        if len(life.cuts) > MOST_CUTS:
            self.on_ranks_lost(self._host, [rank], cause)
        else:
            self._change(replica, CUT_OFF, [rank], cause, now)

    def on_ready(self, rank: int) -> None:
        """A rank that was started can serve."""
        now = time.monotonic()
        self.ranks[rank].ready_at = now
        self._join(self._replicas[self._mesh.place(rank).replica], now)

    def _join(self, replica: ElasticReplica, now: float) -> None:
        """Ranks that start at about the same time join together, unless the others wait anyway."""
        here = [rank for rank in self._mesh.ranks_of_replica(replica.number) if rank < self._size]
        away = {rank: self.ranks[rank] for rank in here if not self.ranks[rank].is_live}
        ready = {rank: life.ready_at for rank, life in away.items() if life.ready_at is not None}
        starting = any(life.ready_at is life.restart_at is None for life in away.values())
        in_use = replica.waits_since is None and len(away) < len(here)
        if not ready or (starting and in_use and now - min(ready.values()) < JOIN_SECONDS):
            return
        told = []
        for rank in ready:
            life = away[rank]
            told.append(f"{self._mesh.describe(rank)} returns after {now - life.since:.2f} s")
            life.is_live, life.since, life.ready_at = True, now, None
        self.totals.returned += len(ready)
        self._change(replica, RETURNED, list(ready), ", ".join(told), now)

    def on_adopted(self, adopted: MembersAdopted) -> None:
        replica = self._replicas[self._mesh.place(adopted.rank).replica]
        if adopted.epoch != replica.epoch or adopted.rank not in replica.adopting:
            return
        replica.adopting.remove(adopted.rank)
        for one in replica.pending[-1:]:
            one.change.experts += adopted.experts
            one.change.nbytes += adopted.nbytes
            one.change.from_memory += adopted.from_memory
        if not replica.adopting:
            replica.reset.clear()
            self._end_changes(replica)

    def tick(self, now: float) -> None:
        for rank, life in self.ranks.items():
            if life.restart_at is not None:
                if now >= life.restart_at and not self._host.is_away(rank):
                    life.restart_at, life.started = None, now
                    self._host.start_rank(rank)
            elif not life.is_live and rank < self._size:
                limit = self._host.spec.timeouts.start
                if now - life.started > limit:
                    why = f"{self._mesh.describe(rank)} is not ready after {limit:.0f} s"
                    self.on_ranks_lost(self._host, [rank], why)
                    return
        for replica in self._replicas:
            self._join(replica, now)
            self._lose_stuck(replica, now)
            self._give_up(replica, now)

    def _give_up(self, replica: ElasticReplica, now: float) -> None:
        """Ranks wait for a node that is away as long as nodes wait for each other at the start."""
        limit, since = self._host.spec.timeouts.nodes, replica.waits_since
        away = [rank for rank in self.ranks if self._host.is_away(rank)]
        if away and since is not None and now - since > limit:
            nodes = sorted({self._mesh.node_of(rank) for rank in away})
            text = f"node {_numbers(nodes)} has not come again within {limit:.0f} s"
            self._host.fail(f"{text}, and the others cannot serve without it", away)

    def _lose_stuck(self, replica: ElasticReplica, now: float) -> None:
        """Ranks that do not abandon their step hold up all others."""
        limit, missing = self._host.spec.timeouts.abandon, sorted(replica.rollbacks.missing)
        if missing and replica.pending and now - replica.pending[-1].began > limit:
            which = f"rank{'s' * (len(missing) > 1)} {_numbers(missing)}"
            cause = f"{which} did not abandon the step within {limit:.0f} s"
            self.on_ranks_lost(self._host, missing, cause)

    def settle(self, number: int, resume: ResumeSteps) -> None:
        """All live ranks have abandoned their step: they go on, or wait for those that are lost."""
        replica, now = self._replicas[number], time.monotonic()
        live = [r for r in self._mesh.ranks_of_replica(number) if self.ranks[r].is_live]
        for one in replica.pending:
            if one.change.abandoned_seconds is None:
                one.change.abandoned_seconds = now - one.began
        if why := self._cannot_serve(replica, live):
            self._wait(replica, why)
            return
        if replica.waits_since is not None:
            logger.info("replica %d has waited for %.2f s", number, now - replica.waits_since)
            replica.waits_since = None
        if replica.adopting:  # some may have adopted the epoch, and others not
            replica.epoch += 1
        if replica.pending or replica.adopting:
            replica.adopting = set(live)
        resume.active, resume.epoch, resume.reset = live, replica.epoch, sorted(replica.reset)
        for rank in live:
            self._host.send_rank(rank, encode(resume))
        self._host.note_awake(number)
        moved = self._move_requests(replica.reset)
        for one in replica.pending[-1:]:
            one.change.moved_requests += moved

    def _move_requests(self, groups: set[int]) -> int:
        """Submits the requests of these groups, and those that wait for any, with their tokens;
        returns how many."""
        count, journal = 0, self._host.journal
        for number in journal.aborted_in(groups):  # a lost rank may not have heard of it
            self._host.send_answer(encode(journal.abort(number)))
        for group in range(self._mesh.num_groups):
            journal.balancer.set_away(group, not self._serves(group))
        for group, requests in journal.move(groups).items():
            self._host.send_rank(self._mesh.leader(group), encode(Submit(requests)))
            count += len(requests)
        return count

    def _serves(self, group: int) -> bool:
        """Whether all ranks of the group live, and those of its replica step."""
        replica = self._replicas[group // self._mesh.dp]
        whole = all(self.ranks[rank].is_live for rank in self._ranks_of_group(group))
        return whole and replica.waits_since is None

    def _ranks_of_group(self, group: int) -> list[int]:
        ranks = self._mesh.ranks_of_replica(group // self._mesh.dp)
        return [rank for rank in ranks if self._mesh.group_of(self._mesh.place(rank)) == group]

    def _plan_restart(self, rank: int, now: float) -> bool:
        """False if the rank has been lost too often in a row."""
        life, limit = self.ranks[rank], self._host.spec.restart_limit
        pause = life.restarts.next_pause(now - life.since if life.is_live else 0.0, limit)
        life.since, life.ready_at = now, None
        if pause is not None:
            life.restart_at = now + pause
        return pause is not None

    def _change(
        self, replica: ElasticReplica, kind: str, ranks: list[int], cause: str, now: float
    ) -> None:
        """Begins a new epoch: live ranks abandon their step."""
        replica.epoch += 1
        live = [r for r in self._mesh.ranks_of_replica(replica.number) if self.ranks[r].is_live]
        change = MembershipChange(replica.epoch, kind, ranks, cause, time.time(), live)
        replica.pending.append(PendingChange(change, now))
        if kind != CUT_OFF:
            replica.reset |= {self._mesh.group_of(self._mesh.place(rank)) for rank in ranks}
        for group in replica.reset:
            self._host.journal.balancer.set_away(group, True)
        level = logging.WARNING if kind in (LOST, CUT_OFF) else logging.INFO
        logger.log(level, "epoch %d: %s; live ranks: %s", replica.epoch, cause, _numbers(live))
        self._host.note_members(self.live)
        rollback = replica.rollbacks.change(live)
        self._host.note_awake(replica.number)
        if live:
            self._host.roll_back(rollback, live)
        else:
            self._wait(replica, "no rank is left")

    def _cannot_serve(self, replica: ElasticReplica, live: Sequence[int]) -> str:
        """Why these ranks of a replica cannot compute by themselves; empty if they can."""
        mesh = self._mesh
        if len(live) == mesh.pp * mesh.tp:
            return ""
        if not live:
            return "no rank is left"
        if mesh.pp > 1:
            return "each stage of a pipeline needs all of its ranks"
        if mesh.dp == 1:
            return "without --enable-dp-attention all ranks compute each request"
        if mesh.dense_spans_groups or mesh.vocab_tp not in (1, mesh.attention_tp):
            return "dense layers or logits are shared by all ranks"
        slots, experts = self._slots or (0, 0)
        if experts and mesh.moe_tp > 1:
            return "each expert is shared by several ranks"
        if experts and slots * len(live) < experts:
            return (
                f"{len(live)} ranks have {slots * len(live)} slots for {experts} experts of a "
                "layer: more --ep-num-redundant-experts would do"
            )
        groups = range(replica.number * mesh.dp, (replica.number + 1) * mesh.dp)
        if not any(set(self._ranks_of_group(group)) <= set(live) for group in groups):
            return "each attention group has lost a rank"
        return ""

    def _wait(self, replica: ElasticReplica, why: str) -> None:
        if replica.waits_since is None:
            replica.waits_since = time.monotonic()
            logger.warning(
                "replica %d waits for its lost ranks: %s; %d requests are open",
                replica.number,
                why,
                len(self._host.journal.open),
            )
        self._move_requests(replica.reset)

    def _end_changes(self, replica: ElasticReplica) -> None:
        now, totals = time.monotonic(), self.totals
        for one in replica.pending:
            change, seconds = one.change, now - one.began
            change.seconds = seconds
            totals.moved_requests += change.moved_requests
            totals.experts += change.experts
            totals.nbytes += change.nbytes
            totals.from_memory += change.from_memory
            totals.seconds += seconds
            logger.info(
                "epoch %d: adopted by ranks %s %.3f s after %s %s (the step was abandoned after "
                "%.3f s); %d requests moved, %d experts (%.1f MiB) read again, %d of them from "
                "memory",
                replica.epoch,
                _numbers(change.live),
                seconds,
                _numbers(change.ranks),
                WORDS[change.kind],
                change.abandoned_seconds or 0.0,
                change.moved_requests,
                change.experts,
                change.nbytes / MIB,
                change.from_memory,
            )
        ended = [one.change for one in replica.pending]
        totals.changes = [*totals.changes, *ended][-KEPT_CHANGES:]
        replica.pending = []


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"
