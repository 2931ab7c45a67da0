"""Windows for kernels between processes, and how ranks agree on one of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.errors import PeerTimeout, RankFailed
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.windows.factory import create_device_window
from moesaic.comm.windows.symmetric_memory import SymmetricRendezvous
from moesaic.comm.windows.window import PlaneSpec
from moesaic.kernels.a2a import signal, wait

SPECS = (PlaneSpec("x", (4,), torch.float32),)
STEPS = 50


def steps(group: RankGroup) -> list[list[float]]:
    """In each step every rank writes a number into everybody's plane; what it then finds in its
    own. Two channels take turns, so that nobody overwrites what is not read yet."""
    window = create_device_window(group, SPECS, 10.0, 2, torch.device("cpu"))
    seen = []
    for step in range(STEPS):
        for rank in range(group.size):
            window.plane("x", rank)[group.rank] = 100 * step + group.rank
        for channel in (0, 1):
            call = window.call(channel, f"step {step}", step)
            signal(call)
            wait(call)
            if not channel:
                seen.append(window.plane("x")[: group.size].tolist())
    window.check()
    return seen


def test_numbers_between_processes(pools: Callable[[int], LocalRanks]):
    wanted = [[100.0 * step + rank for rank in range(3)] for step in range(STEPS)]
    assert pools(3).run(steps) == [wanted] * 3


def without_one(group: RankGroup) -> tuple[tuple[int, ...], str]:
    window = create_device_window(group, SPECS, 0.3, 1, torch.device("cpu"))
    if group.rank != 1:
        call = window.call(0, "dispatch, layer 7", 7)
        signal(call)
        wait(call)
        with pytest.raises(PeerTimeout) as caught:
            window.check()
        return caught.value.missing, caught.value.operation
    return (), ""


def test_a_process_that_does_not_come(pools: Callable[[int], LocalRanks]):
    told = ((1,), "dispatch, layer 7")
    assert pools(3).run(without_one) == [told, ((), ""), told]


def other_planes(group: RankGroup) -> None:
    specs = (PlaneSpec("x", (4 + group.rank,), torch.float32),)
    create_device_window(group, specs, 1.0, 1, torch.device("cpu"))


def test_other_planes_are_refused_on_all_ranks(pools: Callable[[int], LocalRanks]):
    with pytest.raises(RankFailed) as failed:
        pools(3).run(other_planes)
    assert len(failed.value.failures) == 3
    for text in failed.value.failures.values():
        assert "ranks [1, 2] ask for other planes than rank 0" in text


def as_torch_does(group: RankGroup, first: int) -> list[list[bytes]]:
    """What C++ asks of the store: values of all ranks at once, one by one, and a barrier. Names
    count from another number on each rank."""
    meeting = SymmetricRendezvous(group, 1 << 20)
    store = PrefixStore("group", meeting)
    names = [f"exchange/{first + group.rank}/{rank}" for rank in range(group.size)]
    store.set(names[group.rank], f"a{group.rank}")
    at_once = store.multi_get(names)
    store.set(names[group.rank], f"b{group.rank}")
    one_by_one = []
    for name in names:
        store.wait([name])
        one_by_one.append(store.get(name))
    assert store.add("barrier", 1) < group.size
    store.wait(["barrier"])
    return [at_once, one_by_one, meeting.exchange(b"c")]


def test_a_meeting_is_the_store_of_torch(pools: Callable[[int], LocalRanks]):
    told = [[b"a0", b"a1", b"a2"], [b"b0", b"b1", b"b2"], [b"c"] * 3]
    assert pools(3).run(as_torch_does, 5) == [told] * 3


def fail(where: str) -> bytes:
    raise OSError(f"no memory {where}\nand a long stack")


def refused(group: RankGroup, torch_waits: bool) -> str:
    """Rank 1 fails in its own part; the others are on their way to an exchange, of ours or of
    torch's."""
    meeting = SymmetricRendezvous(group, 3 << 20)
    meeting.agree("the same")
    store = PrefixStore("group", meeting)
    work = partial(fail, "here")
    if group.rank != 1:
        work = partial(store.get, "exchange/0/0") if torch_waits else partial(bytes, b"fine")
    with pytest.raises(RuntimeError) as caught:
        meeting.part(work)
        meeting.exchange(b"")
    return str(caught.value)


@pytest.mark.parametrize("torch_waits", [False, True])
def test_trouble_of_one_rank_is_told_to_all(torch_waits: bool, pools: Callable[[int], LocalRanks]):
    message = "no window of 3.0 MiB a rank on the GPU: rank 1: no memory here"
    assert pools(3).run(refused, torch_waits) == [message] * 3


def disagree(group: RankGroup) -> None:
    SymmetricRendezvous(group, 1).agree(f"planes {min(group.rank, 1)}")


def test_a_meeting_of_ranks_that_want_different_things(pools: Callable[[int], LocalRanks]):
    with pytest.raises(RankFailed, match=r"ranks \[1, 2\] ask for other planes than rank 0"):
        pools(3).run(disagree)
