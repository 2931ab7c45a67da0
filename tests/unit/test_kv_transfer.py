"""KV caches between any two layouts: what is sent covers what is needed and arrives where it
belongs, also with the cache of a draft model."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from moesaic.core.disagg import KVSend, KVShare, KVTarget, Room
from moesaic.disagg.layout import CacheShape, piece
from moesaic.disagg.messages import PromptResult
from moesaic.disagg.sender import KVSender
from moesaic.layers.attention import AttentionConfig, Heads
from tests.server.serving import wait_until
from tests.unit.kv_instances import (
    HEADS,
    LAYERS,
    PROMPT,
    Group,
    is_complete,
    outlets_of,
    receivers,
    shares,
)

LAYOUTS = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 3, 6)]


@pytest.mark.parametrize("latent", [False, True])
def test_every_layer_and_head_comes_once(latent: bool) -> None:
    """All 256 pairs of layouts: the targets' parts are covered, by one source each."""
    for one in LAYOUTS:
        for other in LAYOUTS:
            sources, targets = shares(*one, latent), shares(*other, latent)
            for number, target in enumerate(targets):
                counts = np.zeros((LAYERS, HEADS), int)
                for source in range(len(sources)):
                    layers, heads = piece(sources, source, targets, number)
                    counts[layers.start : layers.stop, heads.start : heads.stop] += 1
                wanted = np.zeros_like(counts)
                wanted[slice(*target.layers), slice(*target.heads)] = 1
                assert (counts == wanted).all(), (one, other, number)


def test_shapes_of_other_models_differ() -> None:
    assert CacheShape.of(shares(4, 2, False)) == CacheShape.of(shares(8, 3, False))
    assert CacheShape.of(shares(1, 1, False)) != CacheShape.of(shares(1, 1, True))
    text = "6 layers, 4 key/value heads, 2 and 3 channels of keys and values"
    assert str(CacheShape.of(shares(2, 2, False))) == text


TRANSPORTS = ("shm", "tcp")
DIMS = (2, 3), (8, 4)
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    "number", [*range(32), *(pytest.param(n, marks=pytest.mark.slow) for n in range(32, 240))]
)
def test_what_is_sent_is_received(number: int) -> None:
    """Any layout, page size and type to any other, in chunks, of which one comes twice."""
    chooser = random.Random(number)
    latent, tokens = bool(number % 3 == 0), chooser.randint(1, 40)
    one, other = (
        chooser.choice([each for each in LAYOUTS if each[0] * each[1] <= 8]) for _ in "ab"
    )
    there, here = chooser.choice(TYPES), chooser.choice(TYPES)
    ours, theirs = (shares(*each, latent, DIMS[number % 2]) for each in (one, other))
    source = Group(ours, chooser.choice([1, 4, 7, 16]), there, tokens)
    target = Group(theirs, chooser.choice([1, 3, 8, 64]), here, tokens)
    heads, dims = (1, (sum(DIMS[number % 2]), 0)) if latent else (HEADS, DIMS[number % 2])
    torch.manual_seed(number)
    whole = [torch.randn(LAYERS, tokens, heads, dim).to(there) for dim in dims]
    source.fill(whole)
    first = chooser.randint(0, tokens - 1)
    outlets = [outlets_of(n, TRANSPORTS[number % 2]) for n in range(len(source.shares))]
    with receivers(target.shares, here) as (made, rooms):
        rooms.announce(1, Room(3, "127.0.0.1", 1), PROMPT)
        ticket = rooms.offer(1, first, tokens)
        order = KVTarget(ticket, first, tokens, rooms._ranks)
        cuts = sorted({first, tokens, *(chooser.randint(first, tokens) for _ in range(3))})
        chunks = [*pairwise(cuts)]
        for start, stop in [*chunks[:1], *chunks]:
            for n, cache in enumerate(source.caches):
                sender = KVSender([(one,) for one in source.shares], n, outlets[n])
                sender.send(KVSend(order, start, stop), cache, source.slots(start, stop))
        sender.finish(order, PromptResult(ticket, [5], [-0.5]))
        wait_until(lambda: all(is_complete(receiver, ticket) for receiver in made), 20)
        for receiver, cache in zip(made, target.caches, strict=True):
            receiver.staged(ticket).move_to([cache], target.slots(first, tokens))
        target.check(whole, first)
        rooms.release(1)
        wait_until(lambda: sum(receiver.staged_bytes for receiver in made) == 0, 20)
    for one_rank in outlets:
        assert set(one_rank.transports.values()) <= {TRANSPORTS[number % 2]}
        wait_until(lambda buffer=one_rank.buffer: buffer.free_bytes == buffer.nbytes)


def draft_shares(tp: int, latent: bool) -> list[KVShare]:
    """Of a draft model of one layer, with other heads than the target's."""
    config = AttentionConfig(16, HEADS, 2, 2)
    heads = [range(1) if latent else Heads.of(config, rank, tp).kv for rank in range(tp)]
    sizes = (7, 0) if latent else (5, 3)
    return [KVShare((0, 1), (one.start, one.stop), *sizes) for one in heads]


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(("one", "other"), [(1, 4), (4, 2), (2, 2)])
def test_the_cache_of_a_draft_model_comes_with_it(one: int, other: int, latent: bool) -> None:
    """Both have to be there; an instance without drafts gets the target's alone."""
    tokens, torch_type = 9, torch.float32
    ours, theirs = (
        (Group(shares(tp, 1, latent), page, torch_type, tokens), draft_shares(tp, latent))
        for tp, page in ((one, 4), (other, 7))
    )
    drafts = [Group(some, group.page_size, torch_type, tokens) for group, some in (ours, theirs)]
    kinds = (
        ([(1, 5), (1, 0)] if latent else [(HEADS, 2), (HEADS, 3)]),
        ([(1, 7), (1, 0)] if latent else [(2, 5), (2, 3)]),
    )
    wholes = []
    for layers, group, dims in zip((LAYERS, 1), (ours[0], drafts[0]), kinds, strict=True):
        wholes.append([torch.randn(layers, tokens, *each) for each in dims])
        group.fill(wholes[-1])
    pairs = [*zip(ours[0].shares, ours[1], strict=True)]
    outlets = [outlets_of(n, "shm") for n in range(one)]
    senders = [KVSender(pairs, n, outlet) for n, outlet in enumerate(outlets)]

    def send(target: KVTarget, which: int) -> None:
        source = (ours[0], drafts[0])[which]
        order, slots = KVSend(target, 0, tokens), source.slots(0, tokens)
        for sender, cache in zip(senders, source.caches, strict=True):
            sender.send(order, cache, slots, which)

    asked = [*zip(theirs[0].shares, theirs[1], strict=True)]
    with receivers(asked) as (made, rooms):
        rooms.announce(1, Room(3, "127.0.0.1", 1), PROMPT)
        ticket = rooms.offer(1, 0, tokens)
        target = KVTarget(ticket, 0, tokens, rooms._ranks)
        send(target, 0)
        draft_entries = [len(range(*share.heads)) * tokens for share in theirs[1]]
        wait_until(lambda: all(ticket in one._staged for one in made), 20)
        wait_until(lambda: [one.staged(ticket).num_missing for one in made] == draft_entries, 20)
        send(target, 1)
        wait_until(lambda: all(is_complete(receiver, ticket) for receiver in made), 20)
        for receiver, *caches in zip(made, theirs[0].caches, drafts[1].caches, strict=True):
            receiver.staged(ticket).move_to(caches, theirs[0].slots(0, tokens))
        for group, whole in zip((theirs[0], drafts[1]), wholes, strict=True):
            group.check(whole, 0)
    with receivers(theirs[0].shares) as (made, rooms):
        rooms.announce(1, Room(3, "127.0.0.1", 1), PROMPT)
        ticket = rooms.offer(1, 0, tokens)
        target = KVTarget(ticket, 0, tokens, rooms._ranks)
        send(target, 1)
        send(target, 0)
        wait_until(lambda: all(is_complete(receiver, ticket) for receiver in made), 20)
