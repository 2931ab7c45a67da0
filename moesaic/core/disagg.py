"""A request of two instances, of which one computes its prompt and the other continues it: data
only. An instance is one server with all its ranks."""

from __future__ import annotations

from typing import Annotated

import msgspec

Port = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
"""Checked where a message is read."""


class Room(msgspec.Struct, array_like=True, frozen=True):
    """Names the two halves of one request. The client or router that sends both chooses `number`;
    `host` and `port` are the bootstrap address of the prefill instance."""

    number: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"room {self.number}"

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class KVShare(msgspec.Struct, array_like=True, frozen=True):
    """The part of every token's entries in a KV cache that a rank holds: layers and key/value
    heads, numbered in the whole model, from the first to before the last."""

    layers: tuple[int, int]
    heads: tuple[int, int]
    key_dim: int
    value_dim: int
    """0 for latents, which serve as values too."""


class KVRank(msgspec.Struct, array_like=True, frozen=True):
    """A rank of an instance, and where it listens for KV caches if it does."""

    rank: int
    node: int
    group: int
    shares: tuple[KVShare, ...]
    """Of the model's cache, and of that of a draft model which reads the model's hidden states."""
    host: str = ""
    """Empty: the address by which its leader is reached."""
    port: Port = 0


class Ticket(msgspec.Struct, array_like=True, frozen=True):
    """One transfer. No `epoch` is used twice: what comes late for another one is dropped."""

    room: int
    epoch: int


class KVTarget(msgspec.Struct, array_like=True, frozen=True):
    """Where the KV cache of a request's tokens from `first` up to `stop` goes: `ranks` are those of
    the group that continues it, its leader first."""

    ticket: Ticket
    first: int
    stop: int
    ranks: tuple[KVRank, ...]


class KVSend(msgspec.Struct, array_like=True, frozen=True):
    """Tokens whose KV cache a step sends once it has computed the last of them."""

    target: KVTarget
    first: int
    stop: int
