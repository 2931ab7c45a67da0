"""What the tests of KV transfers share: two instances' ranks with known caches, their rooms and
lobby, and what a peer sends."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moesaic.comm.mesh import share
from moesaic.comm.network.connect import connect
from moesaic.comm.network.handshake import Identity, Role
from moesaic.core.disagg import KVRank, KVShare, KVTarget, Room, Ticket
from moesaic.disagg.allowed_hosts import LOOPBACK, AllowedHosts
from moesaic.disagg.likeness import prompt_digest
from moesaic.disagg.lobby import Lobby, LobbyEvent
from moesaic.disagg.messages import Chunk
from moesaic.disagg.outlets import KVOutlets
from moesaic.disagg.receiver import KVReceiver
from moesaic.disagg.rooms import DecodeRooms
from moesaic.disagg.send_buffer import SendBuffer
from moesaic.layers.attention import AttentionConfig, Heads
from moesaic.layers.context import CacheSpec
from moesaic.layers.paged_cache import PagedCache
from tests.server.serving import wait_until

SECRET = b"of both instances alike"
OWN = Identity(0, 0)
LOCAL = AllowedHosts(LOOPBACK)
PROMPT, MODEL = prompt_digest([1, 2, 3], ""), b"the digest of it"
LAYERS, HEADS = 6, 4


def shares(tp: int, pp: int, latent: bool, dims: tuple[int, int] = (2, 3)) -> list[KVShare]:
    """Of a group's ranks, as models split them."""
    config = AttentionConfig(16, 2 * HEADS, HEADS, 2)
    found = []
    for stage in range(pp):
        layers = share(LAYERS, stage, pp)
        for rank in range(tp):
            heads = range(1) if latent else Heads.of(config, rank, tp).kv
            sizes = (sum(dims), 0) if latent else dims
            found.append(KVShare((layers.start, layers.stop), (heads.start, heads.stop), *sizes))
    return found


@dataclass
class Group:
    """The ranks of an instance: their parts of the cache, and the pages of one request."""

    shares: list[KVShare]
    page_size: int
    dtype: torch.dtype
    tokens: int

    def __post_init__(self) -> None:
        pages = -(-self.tokens // self.page_size)
        self.pages = np.random.default_rng(self.tokens).permutation(2 * pages)[:pages] + 1
        self.caches = [
            PagedCache(self._spec(one), 2 * pages, self.page_size, self.dtype)
            for one in self.shares
        ]
        for cache in self.caches:  # what is not sent shows
            cache.keys.fill_(torch.nan)
            cache.values.fill_(torch.nan)

    @staticmethod
    def _spec(one: KVShare) -> CacheSpec:
        layers, heads = len(range(*one.layers)), len(range(*one.heads))
        return CacheSpec(layers, heads, one.key_dim, one.value_dim)

    def slots(self, first: int, stop: int) -> torch.Tensor:
        places = np.arange(first, stop)
        pages = self.pages[places // self.page_size]
        return torch.from_numpy(pages * self.page_size + places % self.page_size)

    def fill(self, whole: list[torch.Tensor]) -> None:
        for one, cache in zip(self.shares, self.caches, strict=True):
            slots = self.slots(0, self.tokens)
            for part, kept in zip(whole, (cache.keys, cache.values), strict=True):
                kept.flatten(1, 2)[:, slots] = self._part(one, part).to(self.dtype)

    def check(self, whole: list[torch.Tensor], first: int) -> None:
        """The tokens from `first` on are there, and nothing else was written."""
        for one, cache in zip(self.shares, self.caches, strict=True):
            slots = self.slots(first, self.tokens)
            for part, kept in zip(whole, (cache.keys, cache.values), strict=True):
                found = kept.flatten(1, 2)[:, slots]
                assert torch.equal(found, self._part(one, part)[:, first:].to(self.dtype))
                others = torch.ones(kept.flatten(1, 2).shape[1], dtype=torch.bool)
                others[slots] = False
                assert kept.flatten(1, 2)[:, others].isnan().all()

    @staticmethod
    def _part(one: KVShare, part: torch.Tensor) -> torch.Tensor:
        return part[slice(*one.layers), :, slice(*one.heads)]


@contextmanager
def receivers(
    group: Sequence[KVShare | tuple[KVShare, ...]],
    dtype: torch.dtype = torch.float32,
    transport: str = "auto",
) -> Iterator[Any]:
    """A receiver for each rank, and the rooms of their leader. `group`: the shares of each rank, or
    that of its only cache."""
    made, ranks = [], []
    for n, one in enumerate(group):
        own_shares = (one,) if isinstance(one, KVShare) else one
        listening, own = socket.create_server(("127.0.0.1", 0)), Identity(n, 0)
        given = dtype, listening, own, SECRET, "cpu", transport
        made.append(KVReceiver(own_shares, *given))
        ranks.append(KVRank(n, 0, 0, own_shares, "127.0.0.1", made[-1].port))
    rooms = DecodeRooms(ranks, OWN, SECRET, MODEL, b"", LOCAL)
    made[0].on_result = rooms.on_result
    try:
        yield made, rooms
    finally:
        for receiver in made:
            receiver.close()


@contextmanager
def prefill_lobby() -> Iterator[tuple[Lobby, Room]]:
    listening = socket.create_server(("127.0.0.1", 0))
    lobby = Lobby(listening, SECRET, MODEL)
    lobby.serve([(one,) for one in shares(1, 1, False)], lambda: None)
    try:
        yield lobby, Room(7, "127.0.0.1", listening.getsockname()[1])
    finally:
        lobby.close()


def is_complete(receiver: KVReceiver, ticket: Ticket) -> bool:
    """False, too, before its leader's Open is there, which takes another way."""
    return ticket in receiver._staged and receiver.staged(ticket).is_complete


def next_event(source: Any) -> Any:
    found: list[Any] = []
    wait_until(lambda: bool(found.extend(source.take()) or found), 20)
    (event,) = found
    return event


def meet(lobby: Lobby, rooms: DecodeRooms, room: Room, first: int, stop: int) -> KVTarget:
    rooms.announce(1, room, PROMPT)
    rooms.offer(1, first, stop)
    lobby.enter(1, room.number, PROMPT)
    event = next_event(lobby)
    assert isinstance(event, LobbyEvent) and event.target is not None, event
    return event.target


def outlets_of(rank: int, transport: str, nbytes: int = 1 << 20) -> KVOutlets:
    return KVOutlets(Identity(rank, 1), SECRET, SendBuffer(nbytes), transport)


def chunk_of(ticket: Ticket, **more: Any) -> Chunk:
    extent: dict[str, Any] = {"first": 0, "stop": 2, "layers": (0, LAYERS), "heads": (0, HEADS)}
    return Chunk(ticket, **{**extent, "dtype": "float32", **more})


def talk(receiver: KVReceiver, *frames: list[Any]) -> Any:
    """A connection on which these were sent."""
    address = "127.0.0.1", receiver.port
    made, _ = connect(lambda: socket.create_connection(address), Role.KV, OWN, SECRET, 5)
    for buffers in frames:
        for buffer in buffers:
            made.sendall(buffer)
    return made


BODY = torch.ones(LAYERS * 2 * HEADS * 5).numpy().tobytes()
