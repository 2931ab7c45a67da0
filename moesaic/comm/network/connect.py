"""Connects to a listener of the service and completes the handshake. No torch here."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Final

from moesaic.comm.network.handshake import PROOF_SECONDS, Identity, Role, Session, introduce
from moesaic.comm.network.listener import tune
from moesaic.comm.network.tls import Connection, TlsConnection, tls_context

PAUSE_SECONDS: Final = 0.1


class Unreachable(OSError):
    """No connection could be opened."""


def connect(
    open_socket: Callable[[], socket.socket],
    role: Role,
    own: Identity,
    secret: bytes,
    seconds: float,
    *,
    waits: bool = True,
) -> tuple[Connection, Session]:
    """Retries for `seconds`, except after a refusal (PermissionError). `waits`: the listener may
    not have started yet; else only a connection that a busy listener closed is retried."""
    final = PermissionError if waits else (PermissionError, Unreachable, TimeoutError)
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _attempt(open_socket, role, own, secret)
        except OSError as error:
            if isinstance(error, final) or time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_SECONDS)


def _attempt(
    open_socket: Callable[[], socket.socket], role: Role, own: Identity, secret: bytes
) -> tuple[Connection, Session]:
    try:
        plain = open_socket()
    except OSError as error:
        raise Unreachable(str(error)) from error
    connection: Connection = plain
    deadline = time.monotonic() + PROOF_SECONDS
    try:
        tune(plain)
        if role.is_control and plain.family != socket.AF_UNIX:
            connection = TlsConnection(plain, tls_context(secret, calls=True), calls=True)
            connection.hand_shake(deadline)
        session = introduce(connection, role, own, secret, deadline)
        connection.settimeout(None)
    except OSError:
        plain.close()
        raise
    return connection, session
