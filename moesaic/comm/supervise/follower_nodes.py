"""The other nodes as the supervisor that leads sees them: who has joined, what their ranks do, and
how a rank there is started and ended.

Messages of a node arrive in order. So what the process of a rank has sent comes before the answer
that it is gone, and a rank that hangs is gone before others of its node hear of a new epoch.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from socket import socket
from typing import Any, Final, Protocol

from moesaic.comm.mesh import Mesh
from moesaic.comm.supervise.config_check import differences, facts_of
from moesaic.comm.supervise.poll_loop import PollLoop
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.comm.supervise.supervisor_links import (
    BEAT_SECONDS,
    WAIT_SECONDS,
    Disconnected,
    Event,
    FollowerLinks,
)
from moesaic.core import messages
from moesaic.core.messages import AnyMessage, decode
from moesaic.core.rank_state import RankSnapshot, RankState

logger = logging.getLogger(__name__)

ABSENT: Final = RankSnapshot(RankState.ABSENT, 0, "", 0.0, 0.0, 0)


class LeadHost(Protocol):
    """What this needs of the supervisor that leads."""

    spec: ServiceSpec
    secret: bytes
    mesh: Mesh
    loop: PollLoop

    @property
    def is_serving(self) -> bool: ...

    @property
    def goes_on(self) -> bool:
        """Whether the service outlives the loss of a node."""

    def fail(self, message: str, ranks: Sequence[int]) -> None: ...

    def lose_ranks(self, ranks: Sequence[int], cause: str) -> None: ...

    def on_rank(self, rank: int, message: AnyMessage, data: bytes) -> None: ...

    def on_joined(self, node: int) -> None: ...

    def on_left(self, node: int) -> None: ...

    def yields_to(self, node: int, why: str) -> bool:
        """Whether the service ends here, as a node that is silent may lead it from now on."""

    def on_mirrored(self, node: int, number: int) -> None: ...


class FollowerNodes:
    def __init__(self, host: LeadHost, listening: socket, are_away: bool = False) -> None:
        """`are_away`: the service serves already, and nodes come again."""
        self._host, self._spec, self._mesh = host, host.spec, host.mesh
        self._links = FollowerLinks(host.spec, listening, host.secret)
        self.store, self.table = self._links.store, self._links.table
        self.send, self.broadcast = self._links.send, self._links.broadcast
        self.close = self._links.close
        self._started = time.monotonic()
        self._last_beat = 0.0
        self._last_logged = -math.inf
        """When the missing nodes were last logged."""
        self._seen: dict[int, tuple[float, RankSnapshot]] = {}
        """The last snapshot of each rank on other nodes, and when it was received."""
        self._ending: Counter[int] = Counter()
        """Ranks whose end was ordered and is not reported yet: what they send is dropped."""
        self._away = set(self._links.nodes) if are_away else set[int]()
        """Nodes that were lost and have not joined again."""
        host.loop.add(self._links.inbox.wakeup_fd, self._on_inbox)

    @property
    def here(self) -> list[int]:
        """The other nodes that have joined."""
        return [node for node in self._links.nodes if node not in self._links.missing]

    def snapshots(self, now: float) -> dict[int, RankSnapshot]:
        return {rank: one.later(now - then) for rank, (then, one) in self._seen.items()}

    def is_away(self, rank: int) -> bool:
        return self._mesh.node_of(rank) in self._away

    def send_rank(self, rank: int, data: bytes) -> None:
        self.send(self._mesh.node_of(rank), messages.Relay(rank, data))

    def start_rank(self, rank: int) -> None:
        self.send(self._mesh.node_of(rank), messages.StartRank(rank))

    def end_rank(self, rank: int) -> None:
        """Its messages are dropped from now on. A node that is away has no say any more."""
        self._seen[rank] = time.monotonic(), ABSENT
        if not self.is_away(rank):
            self._ending[rank] += 1
            self.send(self._mesh.node_of(rank), messages.EndRank(rank))

    def tick(self, now: float, was_late: bool) -> None:
        if was_late:
            self._links.reset_silence(now)
        if now - self._last_beat >= BEAT_SECONDS:
            self._last_beat = now
            self.broadcast(messages.Beat(self._spec.node_rank, serves=self._host.is_serving))
        if not self._host.is_serving:
            self._await_nodes(now)
        lost = self._links.lost(now)
        if lost is not None:
            node, seconds = lost
            self._lose(node, f"silent for {seconds:.1f} s", silent=True)

    def _on_inbox(self) -> None:
        now = time.monotonic()
        for node, event in self._links.receive(now):
            if isinstance(event, Disconnected):
                self._on_disconnected(node, event)
            elif node not in self._away or isinstance(event, messages.Hello):
                self._handle(node, event, now)

    def _handle(self, node: int, event: Event, now: float) -> None:
        match event:
            case messages.Relay(rank, data) if rank in self._mesh.ranks_of_node(node):
                if not self._ending[rank]:
                    self._host.on_rank(rank, decode(data), data)
            case messages.Beat(ranks=seen):
                self._seen |= {rank: (now, snapshot) for rank, snapshot in seen.items()}
            case messages.RanksLost(ranks, cause):
                known = [rank for rank in ranks if not self._ending[rank]]
                if known:
                    self._host.lose_ranks(known, cause)
            case messages.RankEnded(rank):
                self._ending[rank] -= 1
            case messages.Fault(text, ranks):
                if self._host.goes_on:
                    self._lose(node, text)
                else:
                    self._host.fail(text, ranks)
            case messages.Mirrored(number):
                self._host.on_mirrored(node, number)
            case messages.Hello(facts=facts):
                self._admit(node, facts)

    def _on_disconnected(self, node: int, event: Disconnected) -> None:
        if self._spec.elastic and not self._host.is_serving and node in self._links.missing:
            self._links.forget(node)  # it has looked whether a supervisor is here again
            return
        if node not in self._away:
            self._lose(node, event.reason, event.silent)
        if self._host.goes_on:
            self._links.forget(node)

    def _admit(self, node: int, facts: Mapping[str, Any]) -> None:
        unlike = differences(facts_of(self._spec), facts, node)
        if unlike:
            own = self._spec.node_rank
            text = f"nodes {own} and {node} have different settings: {unlike}"
            if not self._host.goes_on:
                self._host.fail(text, [])
                return
            logger.error("%s", text)
            self.send(node, messages.Fault(text))
            self._links.cut(node)
            return
        self._away.discard(node)
        self._links.welcome(node, serves=self._host.is_serving)
        here = self._mesh.nnodes - len(self._links.missing)
        logger.info("node %d is here (%d of %d nodes)", node, here, self._mesh.nnodes)
        self._host.on_joined(node)

    def _await_nodes(self, now: float) -> None:
        missing, nnodes = self._links.missing, self._mesh.nnodes
        if not missing:
            return
        names = f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        address, limit = self._spec.dist_init_addr, self._spec.timeouts.nodes
        if now - self._started > limit:
            flags = f"--nnodes {nnodes} --node-rank {missing[0]} --dist-init-addr {address}"
            self._host.fail(
                f"{names} did not connect to {address} within {limit:.0f} s: start {flags}", []
            )
        elif now - self._last_logged > WAIT_SECONDS:
            self._last_logged = now
            here = nnodes - len(missing)
            logger.info("waiting for %s (%d of %d nodes are here)", names, here, nnodes)

    def _lose(self, node: int, why: str, silent: bool = False) -> None:
        ranks, address = self._mesh.ranks_of_node(node), self._links.host_of(node)
        more = f" to {ranks[-1]}" if len(ranks) > 1 else ""
        names = f"rank{'s' * (len(ranks) > 1)} {ranks[0]}{more}"
        if silent and self._host.yields_to(node, f"node {node} ({address}) is {why}"):
            return
        if self._host.goes_on:
            self._away.add(node)
            self._links.cut(node)
            for rank in ranks:
                del self._ending[rank]
                self._seen[rank] = time.monotonic(), ABSENT
        self._host.on_left(node)
        self._host.lose_ranks(ranks, f"node {node} ({address}, {names}) is lost: {why}")
