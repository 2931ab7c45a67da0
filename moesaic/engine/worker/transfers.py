"""Makes what a rank needs to exchange KV caches with other instances."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

import msgspec
import torch

from moesaic.comm.launch.rank_link import RankLink
from moesaic.comm.network.handshake import Identity
from moesaic.comm.supervise.address import numeric
from moesaic.config import ServerArgs
from moesaic.core.disagg import KVRank, KVShare, Ticket
from moesaic.disagg.allowed_hosts import AllowedHosts, bootstrap_hosts
from moesaic.disagg.likeness import draft_digest, model_digest
from moesaic.disagg.messages import Chunk
from moesaic.disagg.outlets import KVOutlets
from moesaic.disagg.receiver import KVReceiver
from moesaic.disagg.rooms import DecodeRooms
from moesaic.disagg.sender import KVSender, gather
from moesaic.disagg.staging import StagedCache
from moesaic.disagg.transports.registry import transport_of
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.runner.step_transfers import StepTransfers
from moesaic.engine.worker.kv_share import kv_shares
from moesaic.layers.paged_cache import PagedCache


@dataclass(frozen=True, slots=True)
class RankTransfers(StepTransfers):
    """`rooms`: on a leader of a decode instance."""

    rooms: DecodeRooms | None = None


def make_transfers(args: ServerArgs, runner: ModelRunner, link: RankLink) -> RankTransfers:
    """All ranks of a replica call it together."""
    role, own = args.disaggregation_mode, Identity(link.rank, link.node)
    if role == "null":
        return RankTransfers()
    shares, host = kv_shares(runner), link.host
    if runner.device.type == "cuda":
        for share, cache in zip(shares, runner.sent_caches, strict=True):
            _warm_up(share, cache)
    group, port, listening = link.mesh.group_of(link.place), 0, None
    if role == "decode":
        where, is_only_node = host or numeric(args.host), not host
        listening = _listen(where, is_only_node)
        here, port = listening.getsockname()[:2]
        host = host or (here if ipaddress.ip_address(here).is_loopback else "")
    rank = KVRank(link.rank, link.node, group, shares, host, port)
    ranks = _ranks_of_group(runner, rank)
    if listening is None:
        outlets, numbers = _outlets(args, runner, link), [one.rank for one in ranks]
        sender = KVSender([one.shares for one in ranks], numbers.index(link.rank), outlets)
        return RankTransfers(sender=sender)
    if (known := next(one.port for one in ranks if one.rank == rank.rank)) != port:
        listening.close()
        listening = _listen(where, is_only_node, known)
    dtype, asked = runner.cache.keys.dtype, args.disaggregation_transfer_backend
    most = runner.num_pages * args.page_size
    given = shares, dtype, listening, own, link.secret, runner.device, asked, most
    receiver = KVReceiver(*given)
    if not link.place.is_leader:
        return RankTransfers(receiver=receiver)
    assert ranks[0].rank == rank.rank, "the leader is the first rank of its group"
    digests = model_digest(args), draft_digest(args)
    rooms = DecodeRooms(ranks, own, link.secret, *digests, AllowedHosts(bootstrap_hosts(args)))
    receiver.on_result = rooms.on_result
    return RankTransfers(receiver=receiver, rooms=rooms)


def _ranks_of_group(runner: ModelRunner, own: KVRank) -> list[KVRank]:
    """Of a rank that was restarted, as its predecessor was known: others of the group connect to
    the port where that one listened. A rank alone has no others."""
    encoded = msgspec.msgpack.encode(own)
    found = runner.ranks.replica.all_gather_bytes(encoded, "tell the parts of the KV cache")
    known = [msgspec.msgpack.decode(data, type=KVRank) for data in found]
    ranks = [one for one in known if one.group == own.group]
    return ranks if len(ranks) > 1 else [own]


def _warm_up(share: KVShare, cache: PagedCache) -> None:
    """Compiles what copies caches on a GPU, with the slot that pads and is zero."""
    device = cache.keys.device
    first = torch.zeros(1, dtype=torch.int64, device=device)
    layers, heads = len(range(*share.layers)), len(range(*share.heads))
    size = layers * heads * (share.key_dim + share.value_dim) * cache.keys.element_size()
    data = torch.empty(size, dtype=torch.uint8, device=device)
    gather(cache, slice(0, layers), slice(0, heads), first, data)
    data.zero_()
    staged = StagedCache(share, 0, 1, cache.keys.dtype, device)
    dtype = str(cache.keys.dtype).removeprefix("torch.")
    staged.write(Chunk(Ticket(0, 0), 0, 1, share.layers, share.heads, dtype), data)
    staged.move_to(cache, first)


def _outlets(args: ServerArgs, runner: ModelRunner, link: RankLink) -> KVOutlets:
    assert runner.send_buffer is not None, "a prefill instance's ranks have one"
    transport = transport_of(args.disaggregation_transfer_backend, runner.device.type)
    own = Identity(link.rank, link.node)
    return KVOutlets(own, link.secret, runner.send_buffer, transport, link.lifecycle)


def _listen(host: str, is_only_node: bool, port: int = 0) -> socket.socket:
    """At the address of this node. The only node has none: its ranks listen on loopback if the
    server does, and else for other machines, too. `port`: 0 for any."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if is_only_node and not address.is_loopback:
        host = "::" if address.version == 6 else ""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)
