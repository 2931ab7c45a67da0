"""The supervisor that leads: it owns membership and the journal, and assigns requests to groups."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import zmq

from moesaic.comm.network.store import LocalStore
from moesaic.comm.supervise.address import listen
from moesaic.comm.supervise.elastic import ElasticMembership
from moesaic.comm.supervise.event_hook import EventHooks
from moesaic.comm.supervise.follower_nodes import FollowerNodes
from moesaic.comm.supervise.follower_supervisor import FollowerSupervisor
from moesaic.comm.supervise.journal import HELD, Journal, refusal
from moesaic.comm.supervise.lead_search import LeadSearch
from moesaic.comm.supervise.load_balance import LoadBalancer
from moesaic.comm.supervise.mirror import JournalMirror, MirroredService
from moesaic.comm.supervise.node_supervisor import NodeSupervisor
from moesaic.comm.supervise.replica import Replica, overview_of
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.comm.supervise.step_rollback import StepRollbacks
from moesaic.comm.supervise.step_watchdog import StepWatchdog
from moesaic.core import messages
from moesaic.core.addresses import host_and_port
from moesaic.core.messages import AnyMessage, Message, encode
from moesaic.core.rank_state import RankSnapshot, RankState
from moesaic.core.request import NewRequest

logger = logging.getLogger(__name__)

# Questions that the supervisor answers alone.
SUPERVISOR_QUERIES: Final = ("scaling",)


class LeadSupervisor(NodeSupervisor):
    def __init__(
        self,
        spec: ServiceSpec,
        folder: Path,
        context: zmq.Context[zmq.Socket[bytes]],
        former: FollowerSupervisor | None = None,
    ) -> None:
        """`former`: the one that has mirrored the node which led."""
        super().__init__(spec, folder, context, former)
        mesh, times = spec.mesh, spec.timeouts
        mirrored = None if former is None else former.mirrored
        if mirrored is None:
            balancer = LoadBalancer(mesh.num_groups, spec.load_balance, spec.prefix_page)
            self.journal = Journal(balancer)
        else:
            self.journal = mirrored.journal
        self._balancer = self.journal.balancer
        self._watchdog = StepWatchdog(mesh, times.guard, times.hang)
        self._facts: dict[int, dict[str, Any]] = {}
        self._replicas = [self._replica(number) for number in range(mesh.replicas)]
        self._started = time.monotonic()
        self._followers: FollowerNodes | None = None
        self._open_queries: dict[int, messages.Query] = {}
        """Where ranks may be lost: questions, and below who has not replied."""
        self._awaited: dict[int, set[int]] = {}
        self._hooks = EventHooks(spec.config)
        self.elastic: ElasticMembership | None = None
        if spec.elastic:
            rollbacks = [replica.rollbacks for replica in self._replicas]
            self.policy = self.elastic = ElasticMembership(self, rollbacks)
        self._mirror = JournalMirror(
            self.journal, self._send_node, lambda data: self.send_client(data)
        )
        self._inherited = mirrored
        self._search: LeadSearch | None = None
        if mirrored is not None:
            self._inherit(mirrored)

    def _inherit(self, mirrored: MirroredService) -> None:
        """All ranks are lost, and those of this node start again."""
        assert self.elastic is not None, "only an elastic service is mirrored"
        self.is_serving = True
        self._facts = dict(enumerate(mirrored.facts))
        self._limit_cache()
        self.elastic.inherit(mirrored.facts[0], mirrored.generations)

    def _replica(self, number: int) -> Replica:
        mesh = self.mesh
        ranks = mesh.ranks_of_replica(number)
        groups = range(number * mesh.dp, (number + 1) * mesh.dp)
        leaders = [mesh.leader(group) for group in groups]
        return Replica(ranks, groups, StepRollbacks(number, ranks, leaders))

    def start(self) -> None:
        if self.mesh.nnodes == 1:
            self.start_ranks(LocalStore(self.folder).address)
            return
        try:
            host, listening = listen(self.spec)
        except (OSError, ValueError) as error:
            node = self.spec.node_rank
            self.fail(f"node {node} cannot listen at {self.spec.dist_init_addr}: {error}", [])
            return
        self._followers = FollowerNodes(self, listening, self._inherited is not None)
        if self._inherited is None:
            self.start_ranks(self._followers.store, self.spec.host or host)
            self._search = LeadSearch(self.spec, self.secret, self.loop, self._on_other_lead)
        else:
            self._followers.table.fill(self._inherited.store)
            self.set_store(self._followers.store, self.spec.host or host)

    def tick(self, now: float) -> None:
        super().tick(now)
        if self._followers is not None and self.exit_code is None:
            self._followers.tick(now, self.watch.was_late)
        if self.exit_code is not None:
            return
        if not self.is_serving:
            self._check_start(now)
            return
        self.journal.kept.expire(now)
        if self.elastic is not None:
            self.elastic.tick(now)
            self._hooks.tell_changes(self.elastic.stats.changes)
        if not self.watch.is_fair:
            self._watchdog.pause()
            return
        hang = self._watchdog.look(self._watched(self.snapshots(now)), now)
        if hang is not None:
            self.lose_ranks(hang.ranks, hang.text)

    def snapshots(self, now: float) -> dict[int, RankSnapshot]:
        """What each rank of the service was last seen doing."""
        here = {rank: self.page.snapshot(rank) for rank in self.spec.ranks}
        return here if self._followers is None else here | self._followers.snapshots(now)

    def _watched(self, seen: dict[int, RankSnapshot]) -> dict[int, RankSnapshot]:
        if self.elastic is None:
            return seen
        return {rank: one for rank, one in seen.items() if self.elastic.is_watched(rank)}

    def is_starting(self, rank: int) -> bool:
        if self.elastic is not None and self.is_serving:
            return self.elastic.is_starting(rank)
        return super().is_starting(rank)

    @property
    def goes_on(self) -> bool:
        return self.elastic is not None and self.is_serving

    def is_away(self, rank: int) -> bool:
        return self._followers is not None and self._followers.is_away(rank)

    def start_rank(self, rank: int) -> None:
        if rank in self.spec.ranks:
            super().start_rank(rank)
        elif self._followers is not None:
            self._followers.start_rank(rank)

    def kill_rank(self, rank: int) -> bool:
        """A rank of another node is gone when that node goes on with what it is told next."""
        if rank in self.spec.ranks:
            return super().kill_rank(rank)
        assert self._followers is not None
        self._followers.end_rank(rank)
        return True

    def roll_back(self, rollback: messages.RollbackStep, ranks: Sequence[int]) -> None:
        rollback.ranks = list(ranks)
        self.tell_nodes(rollback)
        super().roll_back(rollback, ranks)

    def on_joined(self, node: int) -> None:
        """One of the nodes that may lead mirrors the journal."""
        followers, mirror = self._followers, self._mirror
        if followers is None or self.elastic is None or not self.is_serving:
            return
        may = [one for one in followers.here if one < len(self.spec.heads)]
        if mirror.node is None and may:
            logger.info("the journal is mirrored on node %d", may[0])
            facts = [self._facts[rank] for rank in range(self.mesh.world)]
            mirror.begin(may[0], followers.table, facts, self.elastic.generations)

    def on_left(self, node: int) -> None:
        if node == self._mirror.node:
            self._mirror.end()
            self.on_joined(node)

    def yields_to(self, node: int, why: str) -> bool:
        """Of two nodes that do not hear each other the one that mirrors leads."""
        if self.mesh.nnodes > 2 or node != self._mirror.node:
            return False
        text = f"{why}, and may lead from now on: node {self.spec.node_rank} waits for it"
        self.fail_with(messages.Fault(text, supervisor=True), tell=False)
        return True

    def _on_other_lead(self, address: tuple[str, int]) -> None:
        if not self.is_serving:
            text = f"another node leads, at {host_and_port(*address)}"
            self.fail_with(messages.Fault(text, supervisor=True, yields=True), tell=False)

    def on_mirrored(self, node: int, number: int) -> None:
        self._mirror.confirm(node, number)

    def _send_node(self, node: int, message: Message) -> None:
        if self._followers is not None:
            self._followers.send(node, message)

    def abandon(self, reason: str) -> None:
        """A node that mirrors the journal goes on without this one."""
        if self._mirror.node is None:
            self.stop(reason)
        elif self.end(1, logging.ERROR, f"node {self.spec.node_rank} ends: {reason}"):
            self.fence([], reason)

    def tell_nodes(self, message: Message) -> None:
        if self._followers is not None:
            self._followers.broadcast(message)

    def stop(self, reason: str) -> None:
        if self.end(0, logging.INFO, f"the service stops: {reason}"):
            self._mirror.end()
            for answer in self.journal.end_all(f"the service stops: {reason}"):
                self.send_client(answer)
            self.tell_nodes(messages.Stop())
            self.stop_ranks()

    def on_client(self, message: AnyMessage) -> None:
        match message:
            case messages.Submit(requests):
                self._submit(requests)
            case messages.Abort(request_no, keep):
                if request_no in self.journal.open:
                    self._mirror.note(encode(message))
                    if keep:
                        self.journal.keep(request_no)
                    self._abort(request_no)
            case messages.Query():
                self._ask(message)
            case _:
                super().on_client(message)
                if isinstance(message, messages.Hello) and self.is_serving:
                    self.send_client(self._ready())

    def _abort(self, request_no: int) -> None:
        entry = self.journal.open[request_no]
        if entry.group != HELD:
            entry.is_aborted = True
            self.send_rank(self.mesh.leader(entry.group), encode(messages.Abort(request_no)))
        if not self.journal.is_served(request_no):
            self.send_answer(encode(self.journal.abort(request_no)))

    def lose_client(self) -> None:
        """Requests go on whose clients may ask for them again."""
        super().lose_client()
        self._open_queries.clear()
        self._awaited.clear()
        for number in self.journal.lose_client():
            self._abort(number)

    def send_answer(self, data: bytes) -> None:
        """To the client, an encoded StepOutput that is noted in the journal."""
        self._mirror.note(data)
        self._mirror.answer(data)

    def on_rank(self, rank: int, message: AnyMessage, data: bytes) -> None:
        """Outputs and replies are passed on without being encoded again."""
        match message:
            case messages.StepOutput():
                self.journal.record(message)
                self.send_answer(data)
                self._replica_of(rank).rollbacks.note_progress()
            case messages.QueryReply():
                self._note_reply(message, rank)
                self.send_client(data)
            case messages.Asleep(replica, round_):
                self._on_asleep(self._replicas[replica], round_)
            case messages.Runnable(request_no):
                self.journal.note_runnable(request_no)
                self._wake_if_due(self._replica_of(rank))
            case messages.SlowStep():
                seen = self.snapshots(time.monotonic())
                logger.warning("%s", self._watchdog.explain_slow(message, seen))
            case messages.Ready(facts=facts):
                self._facts[rank] = facts
                if self.elastic is not None and self.is_serving:
                    self.send_client(data)
                    self.elastic.on_ready(rank)
                else:
                    self._check_ready()
            case messages.MembersAdopted():
                if self.elastic is not None:
                    self.elastic.on_adopted(message)
            case messages.StepFailed():
                self._on_step_failed(message)
            case messages.StepAbandoned():
                self._on_abandoned(message)
            case messages.Failed():
                self._on_failed(message)

    def send_rank(self, rank: int, data: bytes) -> None:
        """Sends to a rank of any node."""
        if rank in self.spec.ranks:
            self.send_local(rank, data)
        elif self._followers is not None:
            self._followers.send_rank(rank, data)

    def close(self) -> None:
        if self._followers is not None:
            self._followers.close()
        if self._search is not None:
            self._search.close()
        super().close()

    def _submit(self, requests: Sequence[NewRequest]) -> None:
        accepted: dict[int, NewRequest] = {}
        for request in requests:
            if request.request_no in self.journal.open or request.request_no in accepted:
                self.send_client(refusal(request.request_no))
            elif (found := self.journal.attach(request)) is not None:
                self._mirror.answer(encode(messages.Attached(request.request_no, found[0])))
                self._mirror.answer(found[1])
            else:
                accepted[request.request_no] = request
        groups = self.journal.assign(list(accepted.values()))
        if accepted:
            self._mirror.note(encode(messages.Submit(list(accepted.values()))))
        by_group: dict[int, list[NewRequest]] = {}
        for request, group in zip(accepted.values(), groups, strict=True):
            by_group.setdefault(group, []).append(request)
        by_group.pop(HELD, None)
        for group, chosen in by_group.items():
            self.send_rank(self.mesh.leader(group), encode(messages.Submit(chosen)))
        for replica in self._replicas:
            self._wake_if_due(replica)

    def _ask(self, question: messages.Query) -> None:
        if question.what in SUPERVISOR_QUERIES:
            self.send_client(messages.QueryReply(question.number, -1, self._scale(question)))
            return
        if question.what in ("info", "stats"):
            membership = None if self.elastic is None else self.elastic.stats
            overview = overview_of(self.mesh, self.snapshots(time.monotonic()), self._facts)
            view = messages.QueryReply(question.number, -1, overview, membership=membership)
            self.send_client(view)
        if question.what == "flush_cache":
            self._balancer.flush_cache()
        for replica in self._replicas:
            replica.poked = replica.poked or question.what == "rebalance"
        leaders = map(self.mesh.leader, range(self.mesh.num_groups))
        # Ranks that are asleep answer, too.
        asked = [*range(self.mesh.world)] if question.every else [*leaders]
        live = asked if self.elastic is None else [r for r in asked if r in self.elastic.live]
        for rank in live:
            self.send_rank(rank, encode(question))
        if self.elastic is not None:
            self._open_queries[question.number] = question
            self._awaited[question.number] = set(asked)
            for rank in set(asked).difference(live):
                self.answer_for(rank)
        for replica in self._replicas:
            self._wake_if_due(replica)

    def _scale(self, question: messages.Query) -> dict[str, Any]:
        """The answer to a wish for another number of ranks, or to the question how far it is."""
        if self.elastic is None:
            return {"refused": "the number of ranks is fixed without --elastic-ep-backend"}
        size = question.options.get("size")
        refused = "" if size is None else self.elastic.scale(size)
        return self.elastic.scaling | {"refused": refused}

    def _note_reply(self, reply: messages.QueryReply, rank: int) -> None:
        awaited = self._awaited.get(reply.number)
        if awaited is None:
            return
        awaited.discard(rank)
        if not awaited:
            del self._awaited[reply.number], self._open_queries[reply.number]

    def answer_for(self, rank: int) -> None:
        """Answers open queries for a rank that is lost."""
        group = self.mesh.group_of(self.mesh.place(rank))
        for number in [n for n, awaited in self._awaited.items() if rank in awaited]:
            every = self._open_queries[number].every
            reply = messages.QueryReply(number, group, None, rank if every else -1, lost=True)
            self.send_client(reply)
            self._note_reply(reply, rank)

    def note_awake(self, replica: int) -> None:
        self._replicas[replica].awake = True

    def _replica_of(self, rank: int) -> Replica:
        return self._replicas[self.mesh.place(rank).replica]

    def _on_asleep(self, replica: Replica, round_: int) -> None:
        """During a rollback it is ignored: all ranks step again afterwards."""
        if not replica.rollbacks.in_progress:
            replica.awake, replica.round = False, round_
            self._wake_if_due(replica)

    def _on_step_failed(self, failed: messages.StepFailed) -> None:
        replica = self._replica_of(failed.rank)
        if failed.lost_link and self.elastic is not None:
            self.elastic.on_link_lost(failed)
            return
        rollback = replica.rollbacks.start(failed)
        if rollback is None:
            return
        if replica.rollbacks.is_hopeless:
            steps = f"the last {replica.rollbacks.failures} steps have failed, with nothing done"
            message = f"{self.mesh.describe(failed.rank)} failed: {failed.error}; {steps}"
            self.lose_ranks([failed.rank], message)
            return
        rollback.error = f"{self.mesh.describe(failed.rank)}: {failed.error}"
        logger.warning("a step is abandoned: %s", rollback.error)
        replica.awake = True
        self.roll_back(rollback, replica.rollbacks.ranks)

    def _on_abandoned(self, abandoned: messages.StepAbandoned) -> None:
        replica = self._replica_of(abandoned.rank)
        resume = replica.rollbacks.note_abandoned(abandoned)
        if resume is not None and self.elastic is not None:
            self.elastic.settle(replica.rollbacks.replica, resume)
        elif resume is not None:
            for rank in replica.ranks:
                self.send_rank(rank, encode(resume))

    def _wake_if_due(self, replica: Replica) -> None:
        if replica.awake or not (replica.poked or self.journal.has_work(replica.groups)):
            return
        replica.awake, replica.poked = True, False
        for rank in replica.rollbacks.ranks:
            self.send_rank(rank, encode(messages.Wake(replica.round)))

    def _check_ready(self) -> None:
        if len(self._facts) == self.mesh.world and not self.is_serving:
            self.is_serving = True
            if self._search is not None:
                self._search.close()
            ranks = [self._facts[rank] for rank in range(self.mesh.world)]
            if self.elastic is not None:
                self.elastic.note_ready(ranks[0])
                if self.exit_code is not None:
                    return
            self._limit_cache()
            ready = self._ready()
            self.tell_nodes(ready)
            self.send_client(ready)
            self.on_joined(self.spec.node_rank)

    def _limit_cache(self) -> None:
        if "cache_tokens" in self._facts[0]:
            self._balancer.limit_cache(self._facts[0]["cache_tokens"])

    def _ready(self) -> messages.Ready:
        ranks = [self._facts[rank] for rank in range(self.mesh.world)]
        facts = {**ranks[0], "ranks": ranks, "open_requests": len(self.journal.open)}
        facts["first_request"] = self.journal.next_number
        return messages.Ready(0, facts)

    def _check_start(self, now: float) -> None:
        if now - self._started < self.spec.timeouts.start:
            return
        late = [rank for rank in range(self.mesh.world) if rank not in self._facts]
        seen = self.snapshots(now)
        states = "; ".join(
            f"{self.mesh.describe(rank)}: {seen.get(rank, 'not seen')}" for rank in late
        )
        self.fail(f"not ready within {self.spec.timeouts.start:.0f} s: {states}", late)

    def _on_failed(self, failed: messages.Failed) -> None:
        """A rank whose wait timed out is not at fault if another rank is seen not to take part."""
        self.journal.suspect(failed.request_no)
        seen = self.snapshots(time.monotonic())
        where = f"; {seen[failed.rank]}" if failed.rank in seen else ""
        message = f"{self.mesh.describe(failed.rank)} failed: {failed.error}{where}"
        ranks = self._stalled(failed.rank, seen) if failed.waited else []
        for rank in ranks:
            message = f"{self.mesh.describe(rank)} did not take part: {seen[rank]}. {message}"
        self.lose_ranks(ranks or [failed.rank], message)

    def _stalled(self, waiter: int, seen: Mapping[int, RankSnapshot]) -> list[int]:
        """The live ranks of the same replica that neither wait nor make progress."""
        return [
            rank
            for rank in self._replica_of(waiter).rollbacks.ranks
            if rank != waiter
            and rank in seen
            and seen[rank].state != RankState.WAITING
            and seen[rank].state_age > self.spec.timeouts.guard
        ]
