"""Messages over a connection. No torch here."""

from __future__ import annotations

import struct
from typing import Final

from moesaic.comm.network.handshake import read_exactly
from moesaic.comm.network.tls import Connection

HEAD: Final = struct.Struct("<Q")
MOST_BYTES: Final = 1 << 28


class MessageStream:
    """One thread may send while another receives. Between nodes TLS protects what is sent, within
    one the kernel does."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, data: bytes) -> None:
        if len(data) > MOST_BYTES:
            raise ValueError(f"a message of {len(data)} bytes: {MOST_BYTES} are allowed")
        self._connection.sendall(HEAD.pack(len(data)) + data)

    def receive(self) -> bytes:
        """The next message; ConnectionError at the end."""
        length = HEAD.unpack(read_exactly(self._connection, HEAD.size))[0]
        if length > MOST_BYTES:
            raise ConnectionError(f"a message of {length} bytes: {MOST_BYTES} are allowed")
        return read_exactly(self._connection, length)
