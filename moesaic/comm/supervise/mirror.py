"""The journal on a second node, which takes the place of the node that leads if that is lost.

The supervisor that leads tells the mirror each message that changes its journal, and what ranks put
into the store. No answer goes to a client before the mirror has confirmed all that comes before it:
whatever a client has seen, the node that takes over knows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from moesaic.comm.mesh import Mesh
from moesaic.comm.network.store import StoreTable
from moesaic.comm.supervise.journal import Journal
from moesaic.comm.supervise.kept_answers import KeptAnswer
from moesaic.comm.supervise.load_balance import LoadBalancer
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.core import messages
from moesaic.core.messages import Message, decode, encode


class JournalMirror:
    """On the node that leads. `send`: to a node; `answer`: to the client."""

    def __init__(
        self,
        journal: Journal,
        send: Callable[[int, Message], None],
        answer: Callable[[bytes], None],
    ) -> None:
        self._journal, self._send, self._answer = journal, send, answer
        self.node: int | None = None
        """The node that mirrors; None: none does."""
        self._sent = self._confirmed = 0
        """The numbers of the last message to the mirror, and of the last that it has."""
        self._held: deque[tuple[int, bytes]] = deque()
        """Answers that wait for the mirror, with the number that it has to confirm."""

    @property
    def is_complete(self) -> bool:
        """Whether the mirror has all that clients have seen, and clients see no less."""
        return self.node is not None and self._confirmed == self._sent

    def begin(
        self,
        node: int,
        store: StoreTable,
        facts: Sequence[dict[str, Any]],
        generations: Sequence[int],
    ) -> None:
        """Tells another node all that there is, and from now on what changes."""
        self.node, now = node, time.monotonic()
        for entry in self._journal.open.values():
            submit = encode(messages.Submit([entry.request]))
            told = entry.told
            message = messages.MirrorOpen(submit, entry.emitted, entry.key, entry.is_aborted, told)
            self._send(node, message)
        for key, kept in self._journal.kept.items():
            self._send(node, messages.MirrorKept(key, kept.number, kept.data, kept.until - now))
        values = store.follow(lambda key, value: self._send(node, messages.MirrorStore(key, value)))
        self._sent += 1
        begin = messages.MirrorBegin(self._sent, list(facts), values, list(generations))
        self._send(node, begin)

    def note(self, data: bytes) -> None:
        """An encoded message that has changed the journal."""
        if self.node is not None:
            self._sent += 1
            self._send(self.node, messages.MirrorStep(self._sent, data))

    def answer(self, data: bytes) -> None:
        """Passes it to the client once the mirror has all that precedes it."""
        if self._held or (self.node is not None and self._confirmed < self._sent):
            self._held.append((self._sent, data))
        else:
            self._answer(data)

    def confirm(self, node: int, number: int) -> None:
        if node == self.node:
            self._confirmed = number
            self._release()

    def end(self) -> None:
        """The mirror is lost: answers do not wait for it."""
        self.node, self._confirmed = None, self._sent
        self._release()

    def _release(self) -> None:
        while self._held and self._held[0][0] <= self._confirmed:
            self._answer(self._held.popleft()[1])


class MirroredService:
    """On the node that mirrors: what it needs to lead the service."""

    def __init__(self, spec: ServiceSpec) -> None:
        mesh: Mesh = spec.mesh
        balancer = LoadBalancer(mesh.num_groups, spec.load_balance, spec.prefix_page)
        for group in range(mesh.num_groups):
            balancer.set_away(group, True)
        self.journal = Journal(balancer)
        self.store: dict[str, bytes] = {}
        self.facts: list[dict[str, Any]] = []
        self.generations = [0] * mesh.replicas
        self.is_complete = False

    def take(self, message: Message) -> int | None:
        """The number to confirm, if there is one."""
        match message:
            case messages.MirrorOpen():
                self._open(message)
            case messages.MirrorKept(key, number, data, seconds):
                self.journal.kept.put(key, KeptAnswer(number, data, time.monotonic() + seconds))
            case messages.MirrorStore(key, value):
                self.store[key] = value
            case messages.MirrorBegin(number, facts, store, generations):
                self.facts, self.store = facts, store | self.store
                for replica, generation in enumerate(generations):
                    self.note_generation(replica, generation)
                self.is_complete = True
                return number
            case messages.MirrorStep(number, data):
                self._apply(data)
                return number
        return None

    def note_generation(self, replica: int, generation: int) -> None:
        """Generations of ranks that this node leads are above all that it has heard of."""
        self.generations[replica] = max(self.generations[replica], generation)

    def _open(self, message: messages.MirrorOpen) -> None:
        submit = decode(message.submit, passing=True)
        assert isinstance(submit, messages.Submit)
        self.journal.assign(submit.requests)
        entry = self.journal.open[submit.requests[0].request_no]
        entry.emitted, entry.key = message.emitted, message.key
        entry.is_aborted, entry.told = message.is_aborted, message.told

    def _apply(self, data: bytes) -> None:
        journal = self.journal
        match decode(data, passing=True):
            case messages.Submit(requests):
                journal.assign(requests)
            case messages.StepOutput() as output:
                journal.record(output)
            case messages.Abort(number, keep) if number in journal.open:
                if keep:
                    journal.keep(number)
                journal.open[number].is_aborted = True
        journal.kept.expire(time.monotonic())
