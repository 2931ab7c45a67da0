"""Messages between nodes that nobody without the secret can make, change or play again."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import struct
import time
from typing import Final

logger = logging.getLogger(__name__)

SECRET: Final = "MOESAIC_SECRET"
SECRET_BYTES: Final = 16
QUIET_SECONDS: Final = 1.0

_HEAD: Final = struct.Struct("<qqq")


def own_secret() -> bytes:
    """That of the environment, the same on all nodes; empty if there is none."""
    secret = os.environ.get(SECRET, "").encode()
    if secret and len(secret) < SECRET_BYTES:
        raise RuntimeError(f"{SECRET} has {len(secret)} bytes: give {SECRET_BYTES} or more")
    return secret


def new_secret() -> str:
    return secrets.token_hex(32)


class Seal:
    """This node's side. `session`: of this run of the service, so that nothing of an earlier run
    with the same secret is taken for good."""

    def __init__(self, secret: bytes, session: bytes, node: int) -> None:
        self._secret, self._session, self._node = secret, session, node
        self._sent = 0
        self._heard: dict[int, int] = {}
        self._complained = 0.0

    def close(self, receiver: int, payload: bytes) -> list[bytes]:
        """The frames of a message: a head (sender, receiver, number), its MAC, the payload."""
        self._sent += 1
        head = _HEAD.pack(self._node, receiver, self._sent)
        return [head, self._mac(head, payload), payload]

    def open(self, frames: list[bytes]) -> tuple[int, bytes] | None:
        """(sender, payload), or None for what is not to be believed; that is logged."""
        if len(frames) != 3 or len(frames[0]) != _HEAD.size:
            self._complain("has not the form of one")
            return None
        head, mac, payload = frames
        if not hmac.compare_digest(mac, self._mac(head, payload)):
            self._complain(f"has a wrong MAC; is {SECRET} the same on all nodes?")
            return None
        sender, receiver, number = _HEAD.unpack(head)
        if receiver != self._node or number <= self._heard.get(sender, 0):
            self._complain(f"is for another node than this, or node {sender} sent it before")
            return None
        self._heard[sender] = number
        return sender, payload

    def _mac(self, head: bytes, payload: bytes) -> bytes:
        # The session has a fixed length, and so has the head: no two messages read the same.
        return hmac.digest(self._secret, self._session + head + payload, hashlib.sha256)

    def _complain(self, why: str) -> None:
        now = time.monotonic()
        if now - self._complained > QUIET_SECONDS:
            self._complained = now
            logger.warning("a message between nodes is dropped: it %s", why)
