"""A listening socket that authenticates callers before it serves them. No torch here."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from moesaic.comm.network.handshake import (
    PROOF_SECONDS,
    WELCOME,
    Identity,
    Role,
    Session,
    identify,
)
from moesaic.comm.network.node_secret import check_is_secret
from moesaic.comm.network.quiet_log import QuietLog
from moesaic.comm.network.tls import Connection, TlsConnection, tls_context

logger = logging.getLogger(__name__)

# Connections that are not authenticated yet.
MOST_UNPROVED: Final = 64
# The pause after a failed accept.
PAUSE_SECONDS: Final = 0.05
# A machine that vanishes is noticed after this many seconds.
SILENCE_SECONDS: Final = 5


# Gets connection, session and a name for messages, in a thread of the connection. The connection
# is a plain socket for data links and within a node, a TlsConnection for control between nodes.
RoleHandler = Callable[[Any, Session, str], None]


class Listener:
    """Accepts connections, each in its own thread. Beyond MOST_UNPROVED unauthenticated ones, the
    address with most of them loses its oldest: a flood from one machine does not keep out callers
    from another."""

    def __init__(
        self,
        listening: socket.socket,
        identity: Identity,
        secret: bytes,
        handlers: Mapping[Role, RoleHandler],
        *,
        shared: bool = False,
    ) -> None:
        """`shared`: another process has the socket, too, where callers are to wait for a listener
        behind this one."""
        self._listening, self._identity, self._handlers = listening, identity, handlers
        self._shared = shared
        self._secret = secret
        if listening.family != socket.AF_UNIX:
            check_is_secret(secret, listening.getsockname()[0])
        is_control = {role.is_control for role in handlers}
        assert len(is_control) == 1, f"{handlers}: a caller's first byte says whether TLS follows"
        encrypts = is_control == {True} and listening.family != socket.AF_UNIX
        self._tls = tls_context(secret, calls=False) if encrypts else None
        self._lock = threading.Lock()
        self._unproved: dict[socket.socket, str] = {}
        """The host of each, the oldest first."""
        self._proved: set[socket.socket] = set()
        self._log = QuietLog(logger)
        self.closed = False
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def close(self) -> None:
        """Ends the listener and all of its connections. May be repeated."""
        with self._lock:
            self.closed = True
            waiting = [*self._unproved, *self._proved]
        # Closing alone does not wake the threads that wait on these.
        for one in waiting if self._shared else (self._listening, *waiting):
            _wake(one)
        self._listening.close()

    def _accept(self) -> None:
        while not self.closed:
            try:
                connection, address = self._listening.accept()
            except OSError:
                # The listener is closed, no descriptor is free, or the caller is gone.
                time.sleep(PAUSE_SECONDS)
                continue
            host, port = address[:2] if isinstance(address, tuple) else ("this machine", "socket")
            self._admit(connection, str(host))
            where = f"{host}:{port}"
            thread = threading.Thread(target=self._serve, args=(connection, where), daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads can be started
                self._settle(connection)
                connection.close()
                self._log.warn(f"refused a connection from {where}: {error}")
                time.sleep(PAUSE_SECONDS)

    def _admit(self, connection: socket.socket, host: str) -> None:
        """Records an unauthenticated connection, and closes one if there are too many."""
        with self._lock:
            self._unproved[connection] = host
            if len(self._unproved) <= MOST_UNPROVED:
                return
            largest = Counter(self._unproved.values()).most_common(1)[0][0]
            oldest = next(one for one, found in self._unproved.items() if found == largest)
            del self._unproved[oldest]
        _wake(oldest)

    def _settle(self, connection: socket.socket, *, proved: bool = False) -> bool:
        """Ends the wait for authentication; returns whether the connection was still waiting."""
        with self._lock:
            was_waiting = self._unproved.pop(connection, None) is not None
            if proved and was_waiting and not self.closed:
                self._proved.add(connection)
            return was_waiting and not self.closed

    def _serve(self, connection: socket.socket, where: str) -> None:
        with connection:
            try:
                tune(connection)
                session, secured = self._authenticate(connection)
                # From here on a flood cannot close it; only then is the caller welcomed.
                if not self._settle(connection, proved=True):
                    return
                secured.settimeout(None)
                secured.sendall(WELCOME)
                self._handlers[session.role](secured, session, f"{session.peer} ({where})")
            except OSError as error:
                # A process of this machine that ended is its supervisor's to tell.
                ended = isinstance(error, ConnectionError) and connection.family == socket.AF_UNIX
                if not (self.closed or ended):
                    self._log.warn(f"refused a connection from {where}: {error}")
            finally:
                self._settle(connection)
                with self._lock:
                    self._proved.discard(connection)

    def _authenticate(self, plain: socket.socket) -> tuple[Session, Connection]:
        deadline = time.monotonic() + PROOF_SECONDS
        connection: Connection = plain
        if self._tls is not None:
            connection = TlsConnection(plain, self._tls, calls=False)
            connection.hand_shake(deadline)
        session = identify(connection, self._handlers, self._identity, self._secret, deadline)
        return session, connection


def tune(connection: socket.socket) -> None:
    """Does not set buffer sizes: the kernel's own may exceed what can be set."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_SECONDS - 2)


def _wake(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
