"""Connects to a listener of the service and completes the handshake. No torch here."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Final

from moesaic.comm.network.handshake import Identity, Role, Session, introduce
from moesaic.comm.network.listener import tune

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
) -> tuple[socket.socket, Session]:
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
) -> tuple[socket.socket, Session]:
    try:
        connection = open_socket()
    except OSError as error:
        raise Unreachable(str(error)) from error
    try:
        session = introduce(connection, role, own, secret)
        connection.settimeout(None)
        tune(connection)
    except OSError:
        connection.close()
        raise
    return connection, session
