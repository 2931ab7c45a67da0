"""The handshake: both ends of a connection prove that they know a secret. No torch here.

    caller                                     listener
    greeting, role, nonce, identity   ───▶
                                      ◀───     nonce, identity, proof of the listener
    proof of the caller               ───▶
                                      ◀───     welcome

A proof is an HMAC over all earlier messages, so that it is worthless on another connection. The
caller proves itself second: a listener without the secret learns nothing from it, and gets a
REFUSAL. Until then a fixed number of bytes is read from the caller, and nothing is kept.

Between nodes and instances, control connections speak TLS before and after (tls.py). Data links do
not: their bytes go straight into memory.
"""

from __future__ import annotations

import hmac
import os
import struct
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from moesaic.comm.network.tls import Connection, WrongSecret, received

PROOF_SECONDS: Final = 5.0
GREETING: Final = b"MOESAIC3"
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
REFUSAL: Final = bytes(PROOF_BYTES)
WELCOME: Final = b"\1"
# A read allocates as much as it asks for.
MOST_AT_ONCE: Final = 1 << 20
IDENTITY: Final = struct.Struct("<qq")


class Role(IntEnum):
    LINK = 1
    """Data of a rank for a rank of another node."""
    STORE = 2
    """Requests of a rank to the store."""
    NODE = 3
    """Messages between the supervisors of two nodes."""
    KV = 4
    """KV caches for a rank of another instance."""
    ROOM = 5
    """Messages of a decode instance to a prefill instance about the rooms where they meet."""
    MEMORY = 6
    """Descriptors of memory that outlives a rank, on a Unix socket."""

    @property
    def is_control(self) -> bool:
        return self not in (Role.LINK, Role.KV)


class Identity(NamedTuple):
    """A rank of the service (-1: a supervisor) and its node."""

    rank: int
    node: int

    def __str__(self) -> str:
        rank = f"rank {self.rank}" if self.rank >= 0 else "the supervisor"
        return f"{rank} of node {self.node}"


@dataclass(frozen=True, slots=True)
class Session:
    """What both ends know after the handshake."""

    role: Role
    peer: Identity


def introduce(
    connection: Connection, role: Role, own: Identity, secret: bytes, deadline: float
) -> Session:
    """The caller's side; PermissionError if the listener does not belong to this service."""
    hello = GREETING + bytes([role]) + os.urandom(NONCE_BYTES) + IDENTITY.pack(*own)
    connection.sendall(hello)
    answer = read_exactly(connection, NONCE_BYTES + IDENTITY.size, deadline)
    proof = read_exactly(connection, PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"listener", hello + answer)):
        with suppress(OSError):
            connection.sendall(REFUSAL)
        raise WrongSecret
    connection.sendall(_proof(secret, b"caller", hello + answer))
    if read_exactly(connection, len(WELCOME), deadline) != WELCOME:
        raise PermissionError("it does not welcome this node")
    there = Identity(*IDENTITY.unpack(answer[NONCE_BYTES:]))
    return Session(role, there)


def identify(
    connection: Connection, roles: Collection[Role], own: Identity, secret: bytes, deadline: float
) -> Session:
    """The side of a listener that serves `roles`; PermissionError if the caller does not belong to
    this service. The caller then waits for WELCOME."""
    hello = read_exactly(connection, len(GREETING) + 1, deadline)
    role = next((role for role in roles if hello == GREETING + bytes([role])), None)
    if role is None:
        raise PermissionError("it does not speak this protocol")
    hello += read_exactly(connection, NONCE_BYTES + IDENTITY.size, deadline)
    answer = os.urandom(NONCE_BYTES) + IDENTITY.pack(*own)
    connection.sendall(answer + _proof(secret, b"listener", hello + answer))
    proof = read_exactly(connection, PROOF_BYTES, deadline)
    if proof == REFUSAL:
        raise PermissionError("it does not accept this node's proof: it has no or another secret")
    if not hmac.compare_digest(proof, _proof(secret, b"caller", hello + answer)):
        raise PermissionError("it does not know the secret")
    there = Identity(*IDENTITY.unpack(hello[-IDENTITY.size :]))
    return Session(role, there)


def read_exactly(connection: Connection, length: int, deadline: float | None = None) -> bytes:
    data = bytearray()
    while len(data) < length:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = received(connection, min(length - len(data), MOST_AT_ONCE))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return bytes(data)


def _proof(secret: bytes, what: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, what + said, "sha256")
