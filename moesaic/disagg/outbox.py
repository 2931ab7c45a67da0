"""Control messages to another instance, sent by a thread of their own: whoever has something to say
never waits for a peer that takes nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any, Final

from moesaic.disagg.messages import TransferMessage, send

# A peer for which so many messages wait is given up.
MOST_WAITING: Final = 1 << 16


class Outbox:
    """`connection` has a timeout: a peer that takes nothing for so long is given up, too. Whoever
    reads from the connection then sees its end."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._waiting: deque[TransferMessage] = deque()
        self._sending = self._closed = False
        threading.Thread(target=self._run, name="outbox", daemon=True).start()

    def post(self, message: TransferMessage) -> None:
        """A message to a peer that is given up is dropped."""
        with self._changed:
            if self._closed:
                return
            self._waiting.append(message)
            is_full = len(self._waiting) > MOST_WAITING
            self._changed.notify_all()
        if is_full:
            self.close()

    @property
    def is_empty(self) -> bool:
        with self._changed:
            return self._is_empty

    @property
    def _is_empty(self) -> bool:
        return self._closed or not (self._waiting or self._sending)

    def flush(self, deadline: float) -> None:
        """Returns once everything is sent, or at the deadline."""
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: self._is_empty, left)

    def close(self) -> None:
        """Drops what waits, and ends the connection. May be repeated."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._sending = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                message, self._sending = self._waiting.popleft(), True
            try:
                send(self._connection, message)
            except OSError:
                self.close()
