"""The connections between the supervisors of several nodes: all others talk with the first."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from typing import Final

import zmq

from moesaic.comm.control import ControlPage, Seen, State
from moesaic.comm.supervise.address import numeric
from moesaic.comm.supervise.loop import receive_now
from moesaic.comm.supervise.seal import SECRET, Doubt, Seal, new_secret, own_secret
from moesaic.comm.supervise.spec import ServiceSpec, split_address
from moesaic.core.messages import AnyMessage, Beat, Hello, Message, Sight, decode, encode

logger = logging.getLogger(__name__)

BEAT_SECONDS: Final = 0.25
# How often a node says that it waits for others.
WAIT_SECONDS: Final = 10.0
MOST_BYTES: Final = 1 << 28
SESSION_BYTES: Final = 16
# What the first node leaves in the store for the others.
CONTROL, SESSION, MADE_SECRET = "control", "session", "secret"
# Answers to who cannot prove to be a node of the service. They prove nothing themselves, and are
# heeded by a node only as long as it has not been welcomed.
WRONG_SECRET, TAKEN = b"wrong secret", b"taken"


class OtherNodes:
    """On the first node: all others, whose supervisors call here."""

    def __init__(self, spec: ServiceSpec, router: zmq.Socket[bytes]) -> None:
        self._silence, self._nnodes = spec.timeouts.node, spec.mesh.nnodes
        host = numeric(split_address(spec.dist_init_addr or "")[0])
        self.router = router
        router.ipv6 = ":" in host
        router.maxmsgsize = MOST_BYTES
        name = f"[{host}]" if ":" in host else host
        port = router.bind_to_random_port(f"tcp://{name}")
        session = secrets.token_bytes(SESSION_BYTES)
        given = own_secret()
        made = "" if given else new_secret()
        if made:
            logger.warning(
                "%s is not set: whoever reaches %s can read the secret of this service there",
                SECRET,
                spec.dist_init_addr,
            )
        self.secret = given or made.encode()
        self.facts = {CONTROL: f"{host} {port}", SESSION: session.hex(), MADE_SECRET: made}
        self._seal = Seal(self.secret, session, 0)
        self._routes: dict[int, bytes] = {}
        self._heard: dict[int, float] = {}
        self._joined: set[int] = set()

    @property
    def missing(self) -> list[int]:
        """Nodes that have not joined yet."""
        return [node for node in range(1, self._nnodes) if node not in self._joined]

    def welcome(self, node: int) -> None:
        self._joined.add(node)
        self.send(node, Hello())

    def send(self, node: int, message: Message) -> None:
        if node in self._routes:
            frames = self._seal.close(node, encode(message))
            self.router.send_multipart([self._routes[node], *frames])

    def tell_all(self, message: Message) -> None:
        for node in self._routes:
            self.send(node, message)

    def receive(self, now: float) -> list[tuple[int, AnyMessage]]:
        """What is there, from whom it says and proves to be."""
        messages = []
        while (frames := receive_now(self.router)) is not None:
            opened = self._seal.open(frames[1:])
            if isinstance(opened, Doubt):
                self._refuse(frames[0], opened)
                continue
            node, payload = opened
            # Whoever proves to be that node is reached where it last called from.
            self._routes[node] = frames[0]
            self._heard[node] = now
            messages.append((node, decode(payload)))
        return messages

    def _refuse(self, route: bytes, doubt: Doubt) -> None:
        """So that a node which was started wrongly can say why it does not get in."""
        answer = {Doubt.MAC: WRONG_SECRET, Doubt.AGAIN: TAKEN}.get(doubt)
        if answer is not None and route not in self._routes.values():
            self.router.send_multipart([route, answer])

    def lost(self, now: float) -> tuple[int, float] | None:
        """A node that has been silent for too long, and for how long."""
        silent = {node: now - heard for node, heard in self._heard.items()}
        late = [(node, seconds) for node, seconds in silent.items() if seconds > self._silence]
        return late[0] if late else None

    def forgive(self, now: float) -> None:
        """After a time in which this node did not listen."""
        self._heard = dict.fromkeys(self._heard, now)


class FirstNode:
    """On every other node: the way to the first."""

    def __init__(
        self, node: int, facts: dict[str, str], socket: zmq.Socket[bytes], now: float
    ) -> None:
        host, _, port = facts[CONTROL].partition(" ")
        made, given = facts[MADE_SECRET].encode(), own_secret()
        self._reasons = {
            WRONG_SECRET: _secret_trouble(bool(given), bool(made)),
            TAKEN: f"another node came with --node-rank {node} before: give each node its own",
        }
        # Where one of the two must be wrong, node 0 is told of it as well, by a wrong MAC.
        self.secret = given or made
        self._seal = Seal(self.secret, bytes.fromhex(facts[SESSION]), node)
        self.socket = socket
        socket.ipv6 = ":" in host
        socket.maxmsgsize = MOST_BYTES
        socket.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        self.met = self.heard = now
        self.answered = False
        """Whether anything has come that proves to be from there."""
        self.refused = ""
        """Why node 0 does not let this node in."""
        self.address = f"{host}:{port}"

    def send(self, message: Message) -> None:
        self.socket.send_multipart(self._seal.close(0, encode(message)))

    def receive(self, now: float) -> list[AnyMessage]:
        messages = []
        while (frames := receive_now(self.socket)) is not None:
            if len(frames) == 1 and not self.answered:
                self.refused = self._reasons.get(frames[0], "")
                continue
            opened = self._seal.open(frames)
            if not isinstance(opened, Doubt):
                self.heard, self.answered = now, True
                messages.append(decode(opened[1]))
        return messages


def _secret_trouble(given: bool, made: bool) -> str:
    """Why this node's secret is not that of node 0. `given`: here; `made`: there, for want of a
    given one."""
    if given and not made:
        return f"{SECRET} here is not that of node 0: give all nodes the same"
    here, there = ("here", "on node 0") if given else ("on node 0", "here")
    return f"{SECRET} is set {here} but not {there}: set it on all nodes"


@dataclass(slots=True)
class Sightings:
    """What the ranks of other nodes were last seen doing, and when."""

    seen: dict[int, tuple[float, Sight]]

    def take(self, beat: Beat, now: float) -> None:
        self.seen |= {sight.rank: (now, sight) for sight in beat.sights}

    def at(self, now: float) -> dict[int, Seen]:
        return {rank: _seen(sight, now - then) for rank, (then, sight) in self.seen.items()}


def beat_of(node: int, ranks: range, page: ControlPage) -> Beat:
    return Beat(node, [_sight(rank, page.seen(rank)) for rank in ranks])


def _sight(rank: int, seen: Seen) -> Sight:
    return Sight(
        rank,
        int(seen.state),
        seen.step,
        seen.operation,
        seen.beat_age,
        seen.state_age,
        seen.progress,
        seen.computed,
        seen.waited,
    )


def _seen(sight: Sight, later: float) -> Seen:
    return Seen(
        State(sight.state),
        sight.step,
        sight.operation,
        sight.beat_age + later,
        sight.state_age + later,
        sight.progress,
        sight.computed,
        sight.waited,
    )
