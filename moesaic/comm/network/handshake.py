"""The handshake: both ends of a connection prove that they know a secret. No torch here.

    caller                                     listener
    greeting, role, nonce, identity   ───▶
                                      ◀───     nonce, identity, keyed, proof of the listener
    proof of the caller               ───▶
                                      ◀───     welcome

A proof is an HMAC over all earlier messages, so that it is worthless on another connection. The
caller proves itself second: a listener without the secret learns nothing from it. Until then a
fixed number of bytes is read from the caller, and nothing is kept.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

from moesaic.core.process import NODE_SECRET

PROOF_SECONDS: Final = 5.0
SECRET_BYTES: Final = 16
GREETING: Final = b"MOESAIC2"
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
WELCOME: Final = b"\1"
# A read allocates as much as it asks for.
MOST_AT_ONCE: Final = 1 << 20
IDENTITY: Final = struct.Struct("<qq")
# The secret of a service that was started without one. It is public, and keeps no one out.
NO_SECRET: Final = b"moesaic: no secret was given"


class Role(IntEnum):
    LINK = 1
    """Data of a rank for a rank of another node."""
    STORE = 2
    """Requests of a rank to the store."""
    NODE = 3
    """Messages between the supervisors of two nodes."""


class Identity(NamedTuple):
    """A rank of the service (-1: a supervisor) and its node."""

    rank: int
    node: int

    def __str__(self) -> str:
        rank = f"rank {self.rank}" if self.rank >= 0 else "the supervisor"
        return f"{rank} of node {self.node}"


@dataclass(frozen=True, slots=True)
class Session:
    """What both ends know after the handshake. `key` is unique to the connection."""

    role: Role
    peer: Identity
    key: bytes = field(repr=False)


class WrongSecret(PermissionError):
    """The listener has another secret. `keyed`: whether it has one of its own."""

    def __init__(self, keyed: bool) -> None:
        super().__init__("it does not know this node's secret: give all nodes the same")
        self.keyed = keyed


def check_secret(secret: bytes, name: str = "the secret") -> bytes:
    if len(secret) < SECRET_BYTES:
        raise ValueError(
            f"{name} has {len(secret)} bytes: give {SECRET_BYTES} or more, the same on all nodes"
        )
    return secret


def own_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret of the environment; empty if none is set."""
    secret = environment.get(NODE_SECRET, "").encode()
    return check_secret(secret, NODE_SECRET) if secret else b""


def introduce(connection: socket.socket, role: Role, own: Identity, secret: bytes) -> Session:
    """The caller's side; PermissionError if the listener does not belong to this service."""
    deadline = time.monotonic() + PROOF_SECONDS
    hello = GREETING + bytes([role]) + os.urandom(NONCE_BYTES) + IDENTITY.pack(*own)
    connection.sendall(hello)
    answer = read_exactly(connection, NONCE_BYTES + IDENTITY.size + 1, deadline)
    proof = read_exactly(connection, PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"listener", hello + answer)):
        raise WrongSecret(keyed=bool(answer[-1]))
    connection.sendall(_proof(secret, b"caller", hello + answer))
    if read_exactly(connection, len(WELCOME), deadline) != WELCOME:
        raise PermissionError("it does not welcome this node")
    there = Identity(*IDENTITY.unpack(answer[NONCE_BYTES:-1]))
    return Session(role, there, _proof(secret, b"session", hello + answer))


def identify(connection: socket.socket, own: Identity, secrets: Mapping[Role, bytes]) -> Session:
    """The listener's side, with the secret of each role that it serves; PermissionError if the
    caller does not belong to this service. The caller then waits for WELCOME."""
    deadline = time.monotonic() + PROOF_SECONDS
    hello = read_exactly(connection, len(GREETING) + 1, deadline)
    roles = [role for role in secrets if hello == GREETING + bytes([role])]
    if not roles:
        raise PermissionError("it does not speak this protocol")
    secret = secrets[roles[0]]
    hello += read_exactly(connection, NONCE_BYTES + IDENTITY.size, deadline)
    answer = os.urandom(NONCE_BYTES) + IDENTITY.pack(*own) + bytes([secret != NO_SECRET])
    connection.sendall(answer + _proof(secret, b"listener", hello + answer))
    try:
        proof = read_exactly(connection, PROOF_BYTES, deadline)
    except ConnectionError as error:
        text = "it does not accept this node's proof: it has no or another secret"
        raise PermissionError(text) from error
    if not hmac.compare_digest(proof, _proof(secret, b"caller", hello + answer)):
        raise PermissionError("it does not know the secret")
    there = Identity(*IDENTITY.unpack(hello[-IDENTITY.size :]))
    return Session(roles[0], there, _proof(secret, b"session", hello + answer))


def read_exactly(connection: socket.socket, length: int, deadline: float | None = None) -> bytes:
    data = bytearray()
    while len(data) < length:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(min(length - len(data), MOST_AT_ONCE))
        if not more:
            raise ConnectionError("it ended in the middle")
        data += more
    return bytes(data)


def _proof(secret: bytes, what: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, what + said, "sha256")
