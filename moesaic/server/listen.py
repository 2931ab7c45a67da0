"""Binds the server's address. Needs no torch, so a port in use is an error before loading."""

from __future__ import annotations

import socket


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot listen on --host {host} --port {port}: {reason}") from None
    return listener
