"""Hidden states and messages through the stages of a pipeline. T tokens · H hidden."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.collectives.pipeline import Pipe, PipeSpec
from moesaic.comm.errors import PeerTimeout
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.network.handshake import Identity
from moesaic.comm.network.rendezvous import StoreGroup
from moesaic.comm.network.store import LocalStore, StoreAddress

Pools = Callable[[int], LocalRanks]
HIDDEN, MOST, DEPTH, SECONDS = 24, 16, 2, 30.0
SPEC = PipeSpec(MOST, HIDDEN, torch.bfloat16, message_bytes=100, depth=DEPTH)
STEPS = 60


def step_of(number: int) -> tuple[bytes, Tensor | None]:
    """What the first stage sends: lengths around the room of a slot (128 bytes), and no tensor, or
    one of no rows, or of some."""
    chance = random.Random(number)
    message = chance.randbytes(chance.choice((0, 1, 127, 128, 129, 256, 300, 5000)))
    tokens = chance.choice((None, 0, 1, 7, MOST))
    if tokens is None:
        return message, None
    generator = torch.Generator().manual_seed(number)
    return message, torch.randn(tokens, HIDDEN, generator=generator).bfloat16()


def changed(x_TH: Tensor | None, stage: int) -> Tensor | None:
    """What a stage makes of hidden states."""
    return None if x_TH is None else x_TH * (stage + 2) + stage


def same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(left, right)


def first_stage(pipe: Pipe, ahead: int, own: random.Random) -> int:
    """Up to `ahead` steps under way, then a reply for each before the next."""
    checked = 0
    for number in range(STEPS + ahead):
        if number >= ahead:
            checked += pipe.take_reply() == step_of(number - ahead)[0][::-1]
        if number < STEPS:
            pipe.send(*step_of(number))
        if own.random() < 0.1:
            time.sleep(own.random() * 0.01)
    return checked


def later_stage(pipe: Pipe, slow: int, own: random.Random) -> int:
    """All that came, kept to the end: it must not change by what comes after."""
    kept: list[tuple[Tensor | None, Tensor | None]] = []
    for number in range(STEPS):
        if pipe.rank == slow:
            time.sleep(own.random() * 0.01)
        with torch.inference_mode(number % 2 == 0):
            message, x_TH = pipe.receive()
            wanted, expected = step_of(number)
            for stage in range(pipe.rank):
                expected = changed(expected, stage) if stage else expected
            assert message == wanted, number
            kept.append((x_TH, expected))
            if pipe.is_last:
                pipe.reply(message[::-1])
            else:
                pipe.send(message, changed(x_TH, pipe.rank))
    return sum(same(found, expected) for found, expected in kept)


def stream(group: RankGroup, ahead: int, slow: int) -> int:
    pipe = Pipe(group, SPEC, SECONDS)
    own = random.Random(group.rank)
    if pipe.is_first:
        return first_stage(pipe, ahead, own)
    return later_stage(pipe, slow, own)


@pytest.mark.parametrize(("size", "ahead", "slow"), [(3, 1, 1), (3, 2, 2), (3, 4, 1), (2, 2, 1)])
def test_steps_stream_through_the_stages(size: int, ahead: int, slow: int, pools: Pools):
    """In order and unchanged, with fewer or more steps under way than slots, and a slow stage."""
    assert pools(size).run(stream, ahead, slow) == [STEPS] * size


def stuck(group: RankGroup, who: str) -> PeerTimeout | None:
    """Nobody takes or sends any more. A pipe is full after so many steps as it has slots."""
    pipe = Pipe(group, SPEC, 0.5)
    group.barrier("made")
    sent = 0
    try:
        if who == "consumer" and group.rank in (0, 1):
            while True:
                pipe.send(b"step", None)
                sent += 1
        if who == "producer" and group.rank == 2:
            pipe.receive()
        if who == "patience" and group.rank == 2:
            pipe.receive(timeout=0.1)
        if who == "reply" and group.rank == 0:
            pipe.take_reply()
    except PeerTimeout as error:
        assert sent in (0, DEPTH)
        return error
    return None


@pytest.mark.parametrize(
    ("who", "stage", "missing", "message"),
    [
        ("consumer", 0, 1, "'take step from stage 0 to stage 1' within 0.5 s"),
        ("consumer", 1, 2, "'take step from stage 1 to stage 2' within 0.5 s"),
        ("producer", 2, 1, "'send step from stage 1 to stage 2' within 0.5 s"),
        ("patience", 2, 1, "'send step from stage 1 to stage 2' within 0.1 s"),
        ("reply", 0, 2, "'send reply from stage 2 to stage 0' within 0.5 s"),
    ],
)
def test_a_missing_stage_is_named(who: str, stage: int, missing: int, message: str, pools: Pools):
    found = pools(3).run(stuck, who)
    error = found[stage]
    assert isinstance(error, PeerTimeout)
    assert error.missing == (missing,)
    assert str(error).startswith(f"rank {missing} did not reach {message}")
    waiting = (0, 1) if who == "consumer" else (stage,)
    assert [rank for rank, one in enumerate(found) if one is not None] == list(waiting)


def at_a_store(group: RankGroup, address: StoreAddress) -> bytes:
    """Two pipes over subgroups of four ranks, as tensor-parallel ranks have them."""
    store = address.connect(SECONDS, Identity(group.rank, 0))
    stage, column = divmod(group.rank, 2)
    pipe = Pipe(StoreGroup(store, f"pipe {column}", stage, 2, SECONDS), SPEC, SECONDS)
    if pipe.is_first:
        pipe.send(b"to", torch.full((1, HIDDEN), float(column)).bfloat16())
        answer = pipe.take_reply()
    else:
        answer, x_TH = pipe.receive()
        assert x_TH is not None and x_TH.unique().tolist() == [float(column)]
        pipe.reply(b"from %d" % column)
    return answer


def test_pipes_of_several_columns(pools: Pools, store: LocalStore):
    assert pools(4).run(at_a_store, store.address) == [b"from 0", b"from 1", b"to", b"to"]


def refused(group: RankGroup) -> list[str]:
    pipe = Pipe(group, SPEC, SECONDS)
    if not pipe.is_first:
        return []
    found = []
    for x_TH in (
        torch.zeros(MOST + 1, HIDDEN, dtype=torch.bfloat16),
        torch.zeros(1, HIDDEN),
        torch.zeros(1, HIDDEN + 1, dtype=torch.bfloat16),
    ):
        try:
            pipe.send(b"", x_TH)
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_does_not_fit_is_refused(pools: Pools):
    carries = "this pipe carries up to [16, 24] torch.bfloat16"
    assert pools(2).run(refused)[0] == [
        f"hidden states [17, 24] torch.bfloat16: {carries}",
        f"hidden states [1, 24] torch.float32: {carries}",
        f"hidden states [1, 25] torch.bfloat16: {carries}",
    ]
    with pytest.raises(ValueError, match=r"depth=0\): give sizes of 1 or more"):
        PipeSpec(MOST, HIDDEN, torch.bfloat16, 100, 0)
    with pytest.raises(ValueError, match="a pipe of 1 stage: nothing travels"):
        Pipe(RankGroup.alone(), SPEC, SECONDS)


def test_bytes_are_known_before():
    slots = 3 * DEPTH * (MOST * HIDDEN * 2 + 128 + 64)
    assert slots <= SPEC.window_bytes(3) <= slots + 3 * 4096
