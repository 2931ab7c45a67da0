"""The supervisor of a node other than node 0: it relays between its ranks and node 0."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import zmq

from moesaic.comm.network.node_secret import NO_SECRET, own_secret
from moesaic.comm.network.store import StoreAddress
from moesaic.comm.supervise.address import address_towards, numeric
from moesaic.comm.supervise.config_check import facts_of
from moesaic.comm.supervise.node_supervisor import NodeSupervisor
from moesaic.comm.supervise.service_spec import ServiceSpec, split_address
from moesaic.comm.supervise.supervisor_links import (
    BEAT_SECONDS,
    WAIT_SECONDS,
    Connected,
    Disconnected,
    LeadLink,
)
from moesaic.core import messages
from moesaic.core.messages import AnyMessage, Message

logger = logging.getLogger(__name__)

# How long node 0 may take to answer once it is connected.
ANSWER_SECONDS: Final = 30.0


class FollowerSupervisor(NodeSupervisor):
    """It detects faults of its own ranks; node 0 decides everything else."""

    def __init__(
        self, spec: ServiceSpec, folder: Path, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        super().__init__(spec, folder, context)
        host, port = split_address(spec.dist_init_addr or "")
        self._lead = LeadLink(spec.node_rank, (numeric(host), port))
        self._host = spec.host or address_towards(*self._lead.address)
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
        if self.exit_code is not None:
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
            self._lose_lead(f"is lost: silent for {silence:.1f} s")
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
        super().close()

    def _join(self, serves: bool) -> None:
        """Starts the ranks, now that node 0 has admitted this node. If the service serves without
        them already, node 0 says when."""
        self._joined = True
        ranks = self.spec.ranks
        names = f"ranks {ranks.start} to {ranks.stop - 1} are" if len(ranks) > 1 else "its rank is"
        logger.info("joined node 0 at %s; %s here", self.spec.dist_init_addr, names)
        store = StoreAddress(*self._lead.address, own_secret() or NO_SECRET)
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
        for event in self._lead.receive(time.monotonic()):
            match event:
                case Connected():
                    self._lead.send(messages.Hello(self.spec.node_rank, facts_of(self.spec)))
                case Disconnected(reason, refused):
                    self._on_disconnected(reason, refused)
                case messages.Hello(facts=facts):
                    self._join(facts["serves"])
                case messages.Relay(rank, data):
                    self.send_local(rank, data)
                case messages.RollbackStep():
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

    def _on_disconnected(self, reason: str, refused: bool) -> None:
        gone = "is lost" if self._lead.connected_at else "cannot be reached"
        what = "refuses" if refused else gone
        self._lose_lead(f"{what}: {reason}")

    def _lose_lead(self, what: str) -> None:
        """This node ends; in an elastic service another supervisor of it waits for node 0."""
        text = f"{self._name}: node 0 ({self.spec.dist_init_addr}) {what}"
        self.fail_with(messages.Fault(text, supervisor=True))
