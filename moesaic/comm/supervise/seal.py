"""Messages between nodes that nobody without the secret can make, change or play again."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import struct
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

logger = logging.getLogger(__name__)

SECRET: Final = "MOESAIC_SECRET"
SECRET_BYTES: Final = 16
QUIET_SECONDS: Final = 1.0

_HEAD: Final = struct.Struct("<qqq")


class Doubt(StrEnum):
    """Why a message is not to be believed."""

    FORM = "has not the form of one"
    MAC = f"was made with another {SECRET} than this node's, or changed on its way"
    PLACE = "is for another node than this"
    AGAIN = "has come before, or another node has the same --node-rank"


def own_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """That of the environment, the same on all nodes; empty if there is none."""
    secret = environment.get(SECRET, "").encode()
    if secret and len(secret) < SECRET_BYTES:
        raise ValueError(
            f"{SECRET} has {len(secret)} bytes: give {SECRET_BYTES} or more, the same on all nodes"
        )
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

    def open(self, frames: list[bytes]) -> tuple[int, bytes] | Doubt:
        """(sender, payload), or why it is not to be believed; that is logged."""
        doubt = self._doubt(frames)
        if doubt is not None:
            self._complain(doubt)
            return doubt
        sender, _, number = _HEAD.unpack(frames[0])
        self._heard[sender] = number
        return sender, frames[2]

    def _doubt(self, frames: list[bytes]) -> Doubt | None:
        if len(frames) != 3 or len(frames[0]) != _HEAD.size:
            return Doubt.FORM
        head, mac, payload = frames
        if not hmac.compare_digest(mac, self._mac(head, payload)):
            return Doubt.MAC
        sender, receiver, number = _HEAD.unpack(head)
        if receiver != self._node:
            return Doubt.PLACE
        return Doubt.AGAIN if number <= self._heard.get(sender, 0) else None

    def _mac(self, head: bytes, payload: bytes) -> bytes:
        # The session has a fixed length, and so has the head: no two messages read the same.
        return hmac.digest(self._secret, self._session + head + payload, hashlib.sha256)

    def _complain(self, why: str) -> None:
        now = time.monotonic()
        if now - self._complained > QUIET_SECONDS:
            self._complained = now
            logger.warning("a message between nodes is dropped: it %s", why)
