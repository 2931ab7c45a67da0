"""Connects to a listener of the service and completes the handshake. No torch here."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from moesaic.comm.network.handshake import Identity, Role, Session, introduce
from moesaic.comm.network.listener import tune

PAUSE_SECONDS: Final = 0.1


class Unreachable(OSError):
    """No connection could be opened."""


@dataclass(frozen=True, slots=True)
class Connector:
    """`open_socket`: one attempt to connect."""

    open_socket: Callable[[], socket.socket]
    role: Role
    identity: Identity
    secret: bytes = field(repr=False)

    def connect(self, seconds: float, *, waits: bool = True) -> tuple[socket.socket, Session]:
        """Retries for `seconds`, except after a refusal (PermissionError). `waits`: the listener
        may not have started yet; else only a connection that a busy listener closed is retried."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self._attempt()
            except OSError as error:
                final = PermissionError if waits else (PermissionError, Unreachable, TimeoutError)
                if isinstance(error, final) or time.monotonic() > deadline:
                    raise
            time.sleep(PAUSE_SECONDS)

    def _attempt(self) -> tuple[socket.socket, Session]:
        try:
            connection = self.open_socket()
        except OSError as error:
            raise Unreachable(str(error)) from error
        try:
            session = introduce(connection, self.role, self.identity, self.secret)
            connection.settimeout(None)
            tune(connection)
        except OSError:
            connection.close()
            raise
        return connection, session
