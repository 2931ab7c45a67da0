"""The supervisor of a node other than the first: it relays between its ranks and the head."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from moesaic.comm.supervise.node import Node
from moesaic.comm.supervise.nodes import (
    BEAT_SECONDS,
    CONTROL,
    MADE_SECRET,
    SESSION,
    FirstNode,
    address_towards,
    beat_of,
    numeric,
)
from moesaic.comm.supervise.seal import SECRET
from moesaic.comm.supervise.spec import ServiceSpec, split_address
from moesaic.core.messages import (
    AnyMessage,
    Failed,
    Fault,
    Hello,
    Ready,
    Relay,
    Stop,
    decode,
)

logger = logging.getLogger(__name__)


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
        self._beaten = 0.0
        # The head has the same limit, and knows better who is late.
        self._deadline = time.monotonic() + spec.timeouts.start + spec.timeouts.node

    def begin(self) -> None:
        self._answer, theirs = multiprocessing.Pipe(duplex=False)
        names = [CONTROL, SESSION, MADE_SECRET]
        given = {f"host/{self.spec.node_rank}": self._host}
        timeout = self.spec.timeouts.start
        self.start_store("meet", *self._address, timeout, given, names, theirs)
        self.loop.add(self._answer.fileno(), self._on_met)

    def tick(self, now: float) -> None:
        super().tick(now)
        if self.exit_code is None and not self.is_serving and now > self._deadline:
            missing = "" if self._head is None else ", though node 0 was met"
            self.fail(f"not ready within {self.spec.timeouts.start:.0f} s{missing}", [])
        if self._head is None or self.exit_code is not None:
            return
        if self.was_late:
            self._head.heard = now
        silence = now - self._head.heard
        if silence > self.spec.timeouts.node:
            self.fail(self._lost(silence), [])
        elif now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            self._head.send(beat_of(self.spec.node_rank, self.spec.ranks, self.page))

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
            self.stop("the client asked for it")

    def fail(self, message: str, ranks: Sequence[int]) -> None:
        self._end(f"node {self.spec.node_rank}: {message}", ranks, tell=True)

    def stop(self, reason: str) -> None:
        """The others cannot go on without this node: for them it is a fault."""
        if self.exit_code is not None:
            return
        self.exit_code = 0
        logger.info("the service stops: %s", reason)
        if self._head is not None:
            self._head.send(Fault(f"node {self.spec.node_rank} was stopped: {reason}"))
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
        logger.error("the service ends: %s", message)
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
        try:
            self._head = FirstNode(
                self.spec.node_rank, facts, self.socket(zmq.DEALER), time.monotonic()
            )
        except RuntimeError as error:
            self.fail(str(error), [])
            return
        self.loop.add(self._head.socket, self._on_head)
        self._head.send(Hello(self.spec.node_rank))
        self.start_ranks(self._address, self._head.secret, self._host)

    def _on_head(self) -> None:
        assert self._head is not None
        for message in self._head.receive(time.monotonic()):
            match message:
                case Relay(rank, data):
                    self.tell_rank(rank, data)
                case Ready():
                    self.is_serving = True
                    self.tell_client(message)
                case Fault(text, ranks):
                    self._end(text, ranks, tell=False)
                case Stop():
                    self._stop_with_head()

    def _stop_with_head(self) -> None:
        if self.exit_code is None:
            self.exit_code = 0
            logger.info("the service stops")
            self.stop_ranks()
            self.tell_client(Stop())

    def _lost(self, silence: float) -> str:
        assert self._head is not None
        host, port = self._address
        if self._head.answered:
            return f"node 0 ({host}:{port}) is lost: silent for {silence:.1f} s"
        return (
            f"node 0 ({host}:{port}) has given no answer that proves to be from it for "
            f"{silence:.1f} s: is {SECRET} the same on all nodes?"
        )
