"""Checks single arguments of a request."""

from __future__ import annotations

import hashlib
import operator
from typing import Any, Final, Protocol

from moesaic.core.disagg import Room
from moesaic.core.foreign_fields import BadParameter
from moesaic.core.redact import shown
from moesaic.disagg.allowed_hosts import AllowedHosts

# Also of `token_ids_logprob`.
MAX_TOP_LOGPROBS: Final = 1024
MOST_ROOMS: Final = 1 << 63
MAX_HOST: Final = 253
DEFAULT_BOOTSTRAP_PORT: Final = 8998
# Characters of `extra_key` and of `cache_salt`.
MAX_CACHE_KEY: Final = 256


class HasRoom(Protocol):
    """A call of one prompt."""

    @property
    def bootstrap_host(self) -> Any: ...

    @property
    def bootstrap_port(self) -> Any: ...

    @property
    def bootstrap_room(self) -> Any: ...


def integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise BadParameter(name, f"{name} must be made of integers, not {shown(value)}")
    return operator.index(value)


def meeting_room(call: HasRoom, role: str, allowed: AllowedHosts) -> Room | None:
    """Where this instance, of this --disaggregation-mode, meets the other one. `allowed`: the hosts
    that it connects to."""
    number, host, port = call.bootstrap_room, call.bootstrap_host, call.bootstrap_port
    if number is None:
        return None
    if role == "null":
        text = (
            "bootstrap_room names a request of two instances, and this server does both halves: "
            "leave it out, or start servers with --disaggregation-mode prefill and decode"
        )
        raise BadParameter("bootstrap_room", text)
    if not 0 <= integer("bootstrap_room", number) < MOST_ROOMS:
        text = f"bootstrap_room is {shown(number)}: give a number from 0 to 2**63 - 1"
        raise BadParameter("bootstrap_room", text)
    port = DEFAULT_BOOTSTRAP_PORT if port is None else integer("bootstrap_port", port)
    if not 0 < port < 1 << 16:
        raise BadParameter("bootstrap_port", f"bootstrap_port is {port}: give one of 1 to 65535")
    if role == "decode" and not _is_host(host):
        given = repr(host) if isinstance(host, str) and len(host) <= MAX_HOST else shown(host)
        text = f"bootstrap_host is {given}: give the host of the prefill instance"
        raise BadParameter("bootstrap_host", text)
    if role == "decode" and (text := allowed.refusal(host)):
        raise BadParameter("bootstrap_host", f"bootstrap_host: {text}")
    return Room(number, host if isinstance(host, str) else "", port)


def _is_host(host: Any) -> bool:
    """Whether it can be looked up at all: "a..b" and labels of over 63 characters cannot."""
    if not isinstance(host, str) or not 0 < len(host) <= MAX_HOST or not host.isprintable():
        return False
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def room_of_sample(room: Room, sample: int) -> Room:
    """Each sample of a prompt has a room of its own, which both instances know."""
    return Room((room.number + sample) % MOST_ROOMS, room.host, room.port)


def only_nulls(value: Any) -> bool:
    """Whether a list with a value for each prompt has none; it is then as good as left out."""
    return isinstance(value, list) and bool(value) and all(item is None for item in value)


def tokens_to_score(given: Any, vocab_size: int) -> tuple[int, ...]:
    """`token_ids_logprob` of one prompt."""
    name = "token_ids_logprob"
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise BadParameter(name, f"{name} must be a list of token ids, not {shown(given)}")
    if len(given) > MAX_TOP_LOGPROBS:
        text = f"{name} has {len(given)} entries: give at most {MAX_TOP_LOGPROBS}"
        raise BadParameter(name, text)
    ids = tuple(integer(name, token) for token in given)
    for token in ids:
        if not 0 <= token < vocab_size:
            text = f"{name} has {shown(token)}: token ids of this model are in [0, {vocab_size})"
            raise BadParameter(name, text)
    return ids


def cache_namespace(extra_key: Any, cache_salt: Any) -> str:
    """A text of one length for each pair of keys; empty without any."""
    for name, value in (("extra_key", extra_key), ("cache_salt", cache_salt)):
        if not isinstance(value, str | None):
            raise BadParameter(name, f"{name} must be a text, not {shown(value)}")
        if value is not None and len(value) > MAX_CACHE_KEY:
            text = f"{name} has {len(value)} characters: give at most {MAX_CACHE_KEY}"
            raise BadParameter(name, text)
    if not (extra_key or cache_salt):
        return ""
    pair = repr((extra_key or "", cache_salt or ""))
    return hashlib.sha256(pair.encode()).hexdigest()
