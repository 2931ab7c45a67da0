"""The supervisor of a node other than the first: it relays between its ranks and the head."""

from __future__ import annotations

import logging
import math
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import zmq

from moesaic.comm.supervise.address import address_towards, numeric
from moesaic.comm.supervise.alike import facts_of
from moesaic.comm.supervise.node import Node
from moesaic.comm.supervise.nodes import (
    BEAT_SECONDS,
    CONTROL,
    MADE_SECRET,
    SESSION,
    WAIT_SECONDS,
    FirstNode,
    beat_of,
)
from moesaic.comm.supervise.spec import ServiceSpec, split_address
from moesaic.core.messages import (
    AnyMessage,
    Failed,
    Fault,
    Hello,
    Ready,
    Recall,
    Relay,
    Stop,
    decode,
)

logger = logging.getLogger(__name__)

# How long node 0 may take to answer once it was met.
ANSWER_SECONDS: Final = 30.0


class Agent(Node):
    """Its ranks' own faults it sees itself; whether the step goes on is for the head to judge."""

    def __init__(
        self, spec: ServiceSpec, folder: Path, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        super().__init__(spec, folder, context)
        host, port = split_address(spec.dist_init_addr or "")
        self._address = (numeric(host), port)
        self._host = spec.host or address_towards(*self._address)
        self._head: FirstNode | None = None
        self._joined = False
        """Whether node 0 has let this node in."""
        self._beaten = 0.0
        self._begun = time.monotonic()
        self._said = -math.inf

    def begin(self) -> None:
        self._answer, theirs = multiprocessing.Pipe(duplex=False)
        names = [CONTROL, SESSION, MADE_SECRET]
        self.start_store("meet", *self._address, self.spec.timeouts.start, names, theirs)
        self.loop.add(self._answer.fileno(), self._on_met)

    def tick(self, now: float) -> None:
        super().tick(now)
        if self.exit_code is not None:
            return
        if self._head is None:
            self._await_head(now)
        elif self._joined:
            self._keep_up(self._head, now)
        elif now - self._head.met > ANSWER_SECONDS:
            self.fail(
                f"node 0 ({self.spec.dist_init_addr}) gives no answer at {self._head.address} "
                f"within {ANSWER_SECONDS:.0f} s: is that port open between the nodes?",
                [],
            )

    def _await_head(self, now: float) -> None:
        limit, address = self.spec.timeouts.meet, self.spec.dist_init_addr
        if now - self._begun > limit:
            self.fail(
                f"node 0 was not met at {address} within {limit:.0f} s: start it with "
                f"--node-rank 0, and look whether it has ended with an error",
                [],
            )
        elif now - self._said > WAIT_SECONDS:
            self._said = now
            logger.info("waiting for node 0 at %s", address)

    def _keep_up(self, head: FirstNode, now: float) -> None:
        if self.was_late:
            head.heard = now
        silence, times = now - head.heard, self.spec.timeouts
        # The head has the same limit, and knows better who is late.
        if not self.is_serving and now - self._begun > times.start + times.node:
            self.fail(f"not ready within {times.start:.0f} s, though node 0 was met", [])
        elif silence > times.node:
            self.fail(
                f"node 0 ({self.spec.dist_init_addr}) is lost: silent for {silence:.1f} s", []
            )
        elif now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            head.send(beat_of(self.spec.node_rank, self.spec.ranks, self.page))

    def on_rank(self, rank: int, data: bytes) -> None:
        assert self._head is not None
        message = decode(data)
        if isinstance(message, Failed):
            if not message.waited:
                self.fail(self.blame(rank, f"failed: {message.error}"), [rank])
                return
            # The head sees all ranks, and so who is to blame.
            self.excused.add(rank)
        self._head.send(Relay(rank, data))

    def on_client(self, message: AnyMessage) -> None:
        if isinstance(message, Stop):
            self.stop(message.reason)

    def fail(self, message: str, ranks: Sequence[int]) -> None:
        self._end(f"node {self.spec.node_rank}: {message}", ranks, tell=True)

    def stop(self, reason: str) -> None:
        """The others cannot go on without this node: for them it is a fault."""
        if self.exit_code is not None:
            return
        self.exit_code = 0
        self.log_end(logging.INFO, f"node {self.spec.node_rank} leaves: {reason}")
        if self._head is not None:
            self._head.send(Fault(f"node {self.spec.node_rank} has left: {reason}"))
        self.stop_ranks()
        self.tell_client(Stop())

    def close(self) -> None:
        if self._head is not None:
            self._head.socket.close()
        super().close()

    def _end(self, message: str, ranks: Sequence[int], *, tell: bool) -> None:
        if self.exit_code is not None:
            return
        self.exit_code = 1
        self.log_end(logging.ERROR, f"the service ends: {message}")
        if tell and self._head is not None:
            self._head.send(Fault(message, list(ranks)))
        self.fence(ranks, message)
        self.tell_client(Fault(message, list(ranks)))

    def _on_met(self) -> None:
        """The store has answered, or does not."""
        self.loop.remove(self._answer.fileno())
        try:
            facts = msgspec.msgpack.decode(self._answer.recv_bytes(), type=dict[str, str])
        except EOFError:
            return  # the end of the process that was to answer is seen by itself
        if "error" in facts:
            self.fail(facts["error"], [])
            return
        self._head = FirstNode(
            self.spec.node_rank, facts, self.socket(zmq.DEALER), time.monotonic()
        )
        self.loop.add(self._head.socket, self._on_head)
        self._head.send(Hello(self.spec.node_rank, facts_of(self.spec)))

    def _join(self, head: FirstNode) -> None:
        """Ranks are started only now: those of a node that is not let in would be of no use."""
        self._joined = True
        ranks = self.spec.ranks
        told = f"ranks {ranks.start} to {ranks.stop - 1} are" if len(ranks) > 1 else "its rank is"
        logger.info("joined node 0 at %s; %s here", self.spec.dist_init_addr, told)
        self.start_ranks(self._address, head.secret, self._host)

    def _on_head(self) -> None:
        assert self._head is not None
        for message in self._head.receive(time.monotonic()):
            match message:
                case Hello():
                    self._join(self._head)
                case Relay(rank, data):
                    self.tell_rank(rank, data)
                case Recall():
                    self.call_back(message)
                case Ready():
                    self.is_serving = True
                    self.tell_client(message)
                case Fault(text, ranks):
                    self._end(text, ranks, tell=False)
                case Stop():
                    self._stop_with_head()
        if self._head.refused:
            why = f"node 0 ({self.spec.dist_init_addr}) refuses: {self._head.refused}"
            self._end(f"node {self.spec.node_rank}: {why}", [], tell=False)

    def _stop_with_head(self) -> None:
        if self.exit_code is None:
            self.exit_code = 0
            self.log_end(logging.INFO, "node 0 has ended the service")
            self.stop_ranks()
            self.tell_client(Stop())
