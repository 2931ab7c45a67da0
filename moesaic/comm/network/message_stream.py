"""Authenticated messages over a connection. No torch here."""

from __future__ import annotations

import hmac
import socket
import struct
from typing import Final

from moesaic.comm.network.handshake import Session, read_exactly

HEAD: Final = struct.Struct("<Q")
MAC_BYTES: Final = 32
MOST_BYTES: Final = 1 << 28


class Tampered(ConnectionError):
    """A message that fails authentication."""


class MessageStream:
    """One thread may send while another receives. Every message carries a MAC over its direction,
    number and bytes, under the key of the connection: a changed, repeated, dropped or reflected
    message ends the stream."""

    def __init__(self, connection: socket.socket, session: Session, *, calls: bool) -> None:
        self.peer = session.peer
        self._connection, self._key = connection, session.key
        self._sends, self._hears = (b">", b"<") if calls else (b"<", b">")
        self._sent = self._heard = 0

    def send(self, data: bytes) -> None:
        if len(data) > MOST_BYTES:
            raise ValueError(f"a message of {len(data)} bytes: {MOST_BYTES} are allowed")
        self._sent += 1
        mac = self._mac(self._sends, self._sent, data)
        self._connection.sendall(HEAD.pack(len(data)) + mac + data)

    def receive(self) -> bytes:
        """The next message; ConnectionError at the end."""
        head = read_exactly(self._connection, HEAD.size + MAC_BYTES)
        length = HEAD.unpack(head[: HEAD.size])[0]
        if length > MOST_BYTES:
            raise Tampered(f"a message of {length} bytes: {MOST_BYTES} are allowed")
        data = read_exactly(self._connection, length)
        self._heard += 1
        mac = self._mac(self._hears, self._heard, data)
        if not hmac.compare_digest(head[HEAD.size :], mac):
            raise Tampered("a message was changed on its way")
        return data

    def _mac(self, direction: bytes, number: int, data: bytes) -> bytes:
        # Direction and number have a fixed length, so that the input of the MAC is unambiguous.
        return hmac.digest(self._key, direction + HEAD.pack(number) + data, "sha256")
