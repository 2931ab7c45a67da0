"""The supervisor of a node that another one leads: it relays between its ranks and that node."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import zmq

from moesaic.comm.network.store import StoreAddress
from moesaic.comm.supervise.address import address_towards_first, numeric_or_name
from moesaic.comm.supervise.config_check import facts_of
from moesaic.comm.supervise.mirror import MirroredService
from moesaic.comm.supervise.node_supervisor import NodeSupervisor
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.comm.supervise.supervisor_links import (
    BEAT_SECONDS,
    WAIT_SECONDS,
    Connected,
    Disconnected,
    LeadLink,
    Refused,
    Silent,
)
from moesaic.core import messages
from moesaic.core.addresses import host_and_port
from moesaic.core.messages import AnyMessage, Message

logger = logging.getLogger(__name__)

# How long node 0 may take to answer once it is connected.
ANSWER_SECONDS: Final = 30.0


class FollowerSupervisor(NodeSupervisor):
    """It detects faults of its own ranks; the node that leads, node 0 at first, decides everything
    else. It may mirror the journal, and ends when it is to lead itself (`mirrored.takes_over`)."""

    def __init__(
        self, spec: ServiceSpec, folder: Path, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        super().__init__(spec, folder, context)
        heads = [(numeric_or_name(host), port) for host, port in spec.heads]
        own, others = spec.node_rank, heads[: spec.node_rank] + heads[spec.node_rank + 1 :]
        self._heads, self._others = heads, others
        self._lead = LeadLink(own, others, self.secret)
        self._host = spec.host or (
            heads[own][0] if own < len(heads) else address_towards_first(others)
        )
        self.mirrored: MirroredService | None = None
        """What the node that leads has told of the service, if this one mirrors it."""
        self._search: LeadLink | None = None
        """Looks whether the node that led is gone, or leads again; None: it is not lost."""
        self.takes_over = False
        self._name = f"node {spec.node_rank} ({self._host})"
        self._joined = False
        """Whether node 0 has admitted this node."""
        self._starting: set[int] = set()
        """Ranks that were started again and are not ready yet."""
        self._last_beat = 0.0
        self._started = time.monotonic()
        self._last_logged = -math.inf

    def start(self) -> None:
        self._lead.start(self.spec.timeouts.start)
        self.loop.add(self._lead.inbox.wakeup_fd, self._on_lead)

    def tick(self, now: float) -> None:
        super().tick(now)
        if self.exit_code is not None or self._search is not None:
            return
        if not self._lead.connected_at:
            self._await_lead(now)
        elif self._joined:
            self._keep_alive(now)
        elif now - self._lead.connected_at > ANSWER_SECONDS:
            address = self.spec.dist_init_addr
            self.fail(f"node 0 ({address}) gives no answer within {ANSWER_SECONDS:.0f} s", [])

    def _await_lead(self, now: float) -> None:
        limit, address = self.spec.timeouts.nodes, self.spec.dist_init_addr
        if now - self._started > limit:
            self.fail(
                f"node 0 did not answer at {address} within {limit:.0f} s: start it with "
                f"--node-rank 0, and check whether it failed",
                [],
            )
        elif now - self._last_logged > WAIT_SECONDS:
            self._last_logged = now
            logger.info("waiting for node 0 at %s", address)

    def _keep_alive(self, now: float) -> None:
        if self.watch.was_late:
            self._lead.last_heard = now
        silence, times = now - self._lead.last_heard, self.spec.timeouts
        # Node 0 has a shorter limit, and knows which rank is late.
        if not self.is_serving and now - self._started > times.start + times.node:
            self.fail(f"not ready within {times.start:.0f} s, although node 0 is connected", [])
        elif silence > times.node:
            self._lose_lead(f"is lost: silent for {silence:.1f} s", silent=True)
        elif now - self._last_beat >= BEAT_SECONDS:
            self._last_beat = now
            ranks = {rank: self.page.snapshot(rank) for rank in self.spec.ranks}
            self._lead.send(messages.Beat(self.spec.node_rank, ranks))

    def is_starting(self, rank: int) -> bool:
        return rank in self._starting or super().is_starting(rank)

    def lose_ranks(self, ranks: Sequence[int], cause: str) -> None:
        """Node 0 decides how an elastic service goes on without them."""
        if not self._goes_on:
            super().lose_ranks(ranks, cause)
        elif self._end_ranks(ranks):
            self._lead.send(messages.RanksLost(list(ranks), f"{self._name}: {cause}"))

    def _end_ranks(self, ranks: Sequence[int]) -> bool:
        self.strike(ranks)
        self._starting.difference_update(ranks)
        for rank in ranks:
            if not self.kill_rank(rank):
                self.fail(f"the process of {self.mesh.describe(rank)} cannot be killed", [rank])
                return False
        return True

    @property
    def _goes_on(self) -> bool:
        return self.spec.elastic and self.is_serving

    def on_rank(self, rank: int, message: AnyMessage, data: bytes) -> None:
        if isinstance(message, messages.Ready):
            self._starting.discard(rank)
        if isinstance(message, messages.Failed):
            if self._goes_on:
                self._lead.send(messages.Relay(rank, data))
                self.lose_ranks([rank], self.describe_loss(rank, f"failed: {message.error}"))
                return
            if not message.waited:
                self.lose_ranks([rank], self.describe_loss(rank, f"failed: {message.error}"))
                return
            # Node 0 sees all ranks, and finds the one at fault.
            self.reported.add(rank)
        self._lead.send(messages.Relay(rank, data))

    def tell_nodes(self, message: Message) -> None:
        self._lead.send(message)

    def fail(self, message: str, ranks: Sequence[int], *, tell: bool = True) -> None:
        super().fail(f"{self._name}: {message}", ranks, tell=tell)

    def stop(self, reason: str) -> None:
        """For the other nodes it is a fault: they cannot go on without this one."""
        if self.end(0, logging.INFO, f"{self._name} leaves: {reason}"):
            self.tell_nodes(messages.Fault(f"{self._name} has left: {reason}"))
            self.stop_ranks()

    def close(self) -> None:
        self._lead.close()
        if self._search is not None:
            self._search.close()
        super().close()

    def _join(self, serves: bool) -> None:
        """Starts the ranks, now that node 0 has admitted this node. If the service serves without
        them already, node 0 says when."""
        self._joined = True
        ranks = self.spec.ranks
        names = f"ranks {ranks.start} to {ranks.stop - 1} are" if len(ranks) > 1 else "its rank is"
        logger.info("joined node 0 at %s; %s here", self.spec.dist_init_addr, names)
        store = StoreAddress(*self._lead.address, self.secret)
        if serves:
            self.is_serving = True
            self.set_store(store, self._host)
            self.send_client(messages.Ready(ranks.start, {"serves": True}))
        else:
            self.start_ranks(store, self._host)

    def _start_again(self, rank: int) -> None:
        self._starting.add(rank)
        self.start_rank(rank)

    def _on_lead(self) -> None:
        confirmed = None
        for event in self._lead.receive(time.monotonic()):
            match event:
                case messages.MirrorStep() if self.mirrored is not None:
                    confirmed = self.mirrored.take(event)
                case messages.MirrorOpen() | messages.MirrorKept() | messages.MirrorStore():
                    self._mirror.take(event)
                case messages.MirrorBegin():
                    confirmed = self._mirror.take(event)
                case Connected():
                    self._lead.send(messages.Hello(self.spec.node_rank, facts_of(self.spec)))
                case Disconnected():
                    self._on_disconnected(event)
                case messages.Hello(facts=facts):
                    self._join(facts["serves"])
                case messages.Relay(rank, data):
                    self.send_local(rank, data)
                case messages.RollbackStep():
                    if self.mirrored is not None:
                        self.mirrored.note_generation(event.replica, event.generation)
                    self.roll_back(event, event.ranks)
                case messages.StartRank(rank):
                    self._start_again(rank)
                case messages.EndRank(rank):
                    if self._end_ranks([rank]):
                        self._lead.send(messages.RankEnded(rank))
                case messages.Ready():
                    self.is_serving = True
                    self.send_client(event)
                case messages.Fault():
                    self.fail_with(event, tell=False)
                case messages.Stop() if self.end(0, logging.INFO, "node 0 has ended the service"):
                    self.stop_ranks()
        if confirmed is not None:
            self._lead.send(messages.Mirrored(confirmed))

    @property
    def _mirror(self) -> MirroredService:
        if self.mirrored is None:
            self.mirrored = MirroredService(self.spec)
        return self.mirrored

    def _on_disconnected(self, event: Disconnected) -> None:
        gone = "is lost" if self._lead.connected_at else "cannot be reached"
        what = "refuses" if event.refused else gone
        self._lose_lead(f"{what}: {event.reason}", event.silent)

    def _lose_lead(self, what: str, silent: bool = False) -> None:
        """This node ends; in an elastic service another supervisor of it waits for one that leads.
        A mirror first makes sure that the one that led is not gone for good. Of more than two nodes
        one that is silent goes on without this one, so that the mirror is of no use."""
        if self._search is not None or self.exit_code is not None:
            return
        address = self._lead.address
        self._lost = f"node {self._heads.index(address)} ({host_and_port(*address)}) {what}"
        stale = silent and self.mesh.nnodes > 2
        if stale or self.mirrored is None or not self.mirrored.is_complete:
            self._end_without_lead()
            return
        logger.warning("%s: %s", self._name, self._lost)
        self._end_ranks(self.spec.ranks)
        self._search = LeadLink(self.spec.node_rank, self._others, self.secret)
        self._search.start(self.spec.timeouts.nodes)
        self.loop.add(self._search.inbox.wakeup_fd, self._on_search)

    def _end_without_lead(self) -> None:
        self.fail_with(messages.Fault(f"{self._name}: {self._lost}", supervisor=True), tell=False)

    def _on_search(self) -> None:
        assert self._search is not None
        for event in self._search.receive(time.monotonic()):
            if (isinstance(event, Refused) and event.address == self._lead.address) or (
                isinstance(event, Silent) and self.mesh.nnodes == 2
            ):
                self._take_over()
            elif isinstance(event, Connected | Disconnected):
                self._end_without_lead()
            if self.exit_code is not None:
                return

    def _take_over(self) -> None:
        """No process of the node that led is left, as another one would keep its socket; or it is
        silent, and shows clients nothing that is not mirrored. The connection to it stays open: if
        it only slept, an end would tell it that no mirror is left, and it would go on alone."""
        assert self.mirrored is not None and self._search is not None
        self._search.close()
        self.mirrored.journal.inherit()
        requests = len(self.mirrored.journal.open)
        logger.warning(
            "%s leads the service from now on; %d open requests go on", self._name, requests
        )
        self.takes_over, self.exit_code = True, 0
        self.send_client(messages.TakeOver(self._lost))
