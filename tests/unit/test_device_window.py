"""Windows for kernels: the layout of planes, and the error if another rank does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from math import prod

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.errors import OutOfStep, PeerTimeout, WindowAborted
from moesaic.comm.lifecycle import Membership
from moesaic.comm.windows.device_window import (
    ALIGN,
    MAX_GENERATION,
    UNREADABLE,
    CpuDeviceWindow,
    DeviceWindow,
    layout,
)
from moesaic.comm.windows.factory import create_device_window, device_window_bytes
from moesaic.comm.windows.window import PlaneSpec
from moesaic.kernels.a2a import DeviceStateWord, SignalPlanes, signal, wait

SPECS = (PlaneSpec("x", (3, 5), torch.float32), PlaneSpec("ids", (7,), torch.int32))
CPU = torch.device("cpu")
SECONDS = 0.05


def windows(size: int, timeout: float = SECONDS, channels: int = 2) -> list[CpuDeviceWindow]:
    return CpuDeviceWindow.between(size, SPECS, timeout, channels)


def test_planes_do_not_overlap():
    offsets, nbytes = layout(SPECS, channels=3, size=50)
    ends = [3 * 50 * 8]
    for spec in SPECS:
        assert offsets[spec.name] % ALIGN == 0 and offsets[spec.name] >= ends[-1]
        ends.append(offsets[spec.name] + prod(spec.shape) * spec.dtype.itemsize)
    assert nbytes >= ends[-1]
    # There is one flag per rank.
    assert layout(SPECS, channels=3, size=2)[1] == 3 * ALIGN
    assert device_window_bytes(SPECS, 2, 3, CPU) == 3 * ALIGN


def test_what_a_window_takes_on_a_gpu():
    """The size of a GPU's window is known without a GPU."""
    assert device_window_bytes(SPECS, 4, 2, torch.device("cuda", 0)) == 2 << 20
    large = (PlaneSpec("x", (2 << 20,), torch.uint8),)
    assert device_window_bytes(large, 4, 2, torch.device("cuda", 0)) == 4 << 20


def test_one_array_of_each_rank():
    a, b = windows(2)
    a.plane("x", 1).fill_(2.0)
    a.plane("ids").fill_(7)
    assert b.plane("x").tolist() == [[2.0] * 5] * 3
    assert b.plane("ids").tolist() == [0] * 7
    assert b.plane("ids", 0).tolist() == [7] * 7
    with pytest.raises(ValueError, match=r"no plane 'y': this window has \['ids', 'x'\]"):
        a.plane("y")
    with pytest.raises(ValueError, match="give each a name of its own"):
        CpuDeviceWindow.between(2, (SPECS[0], SPECS[0]), SECONDS, 1)


def test_a_rank_alone():
    """The window is made like models: in inference mode, with another default device."""
    with torch.inference_mode(), torch.device("meta"):
        window = create_device_window(RankGroup.alone(), SPECS, SECONDS, 2, CPU)
    call = window.call(0, "alone")
    signal(call)
    wait(call)
    window.check()
    with torch.device("meta"):
        window.restart(Membership(1, tuple(range(window.size))))
    step([window])
    window.close()
    window.close()


def test_too_many_ranks():
    group = RankGroup.alone()
    group.size = 64
    with pytest.raises(ValueError, match=r"a window holds 1\.\.63 ranks, not 64"):
        create_device_window(group, SPECS, SECONDS, 2, CPU)


def test_ranks_on_two_nodes():
    group = RankGroup.alone()
    group.size, group.nodes = 2, (0, 1)
    with pytest.raises(ValueError, match=r"ranks on nodes \[0, 1\]: kernels reach memory of one"):
        create_device_window(group, SPECS, SECONDS, 2, CPU)


def step(ranks: Sequence[DeviceWindow], channel: int = 0, layer: int = 0) -> None:
    """Runs one operation of all these ranks."""
    calls = [window.call(channel, f"dispatch, layer {layer}", layer) for window in ranks]
    for call in calls:
        signal(call)
    for call in calls:
        wait(call)
    for window in ranks:
        window.check()


def test_missing_ranks_are_named():
    ranks = windows(4)
    step(ranks)
    step(ranks, layer=1)
    for rank in (0, 2):
        signal(ranks[rank].call(0, "dispatch, layer 2", 2))
    wait(ranks[0].call(0, "dispatch, layer 2", 2))
    with pytest.raises(PeerTimeout) as caught:
        ranks[0].check()
    assert caught.value.missing == (1, 3)
    assert caught.value.seconds == SECONDS
    assert str(caught.value) == "; ".join(
        f"rank {rank} did not reach 'dispatch, layer 2' within 0.1 s (last seen: "
        f"'dispatch, layer 1')"
        for rank in (1, 3)
    )


def lost(mail: SignalPlanes, rank: int, channel: int) -> Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_missing_ranks_are_named_though_the_gpu_is_lost(monkeypatch: pytest.MonkeyPatch):
    """The host's memory names the missing ranks, and has the flag of the first one."""
    ranks = windows(4)
    step(ranks)
    for rank in (0, 2):
        signal(ranks[rank].call(0, "dispatch, layer 2", 2))
    wait(ranks[0].call(0, "dispatch, layer 2", 2))
    monkeypatch.setattr(SignalPlanes, "flag", lost)
    with pytest.raises(PeerTimeout) as caught:
        ranks[0].check()
    assert caught.value.missing == (1, 3)
    assert caught.value.last_seen == {1: "dispatch, layer 0", 3: UNREADABLE}


def test_a_rank_that_never_came():
    a, _ = windows(2)
    signal(a.call(1, "combine, layer 5", 5))
    wait(a.call(1, "combine, layer 5", 5))
    with pytest.raises(PeerTimeout, match=r"rank 1 did not reach 'combine, layer 5'.*not seen bef"):
        a.check()


def test_nothing_moves_after_a_failure():
    """Later kernels neither wait nor signal, and the first error stays."""
    a, b = windows(2, timeout=0.2)
    signal(a.call(0, "first"))
    wait(a.call(0, "first"))
    started = time.monotonic()
    with a.longer_timeout(60.0):
        signal(a.call(1, "second"))
        wait(a.call(1, "second"))
    assert time.monotonic() - started < 30.0
    assert b.signals.flag(1, 1).tolist() == [0, 0]
    for _ in range(2):
        with pytest.raises(PeerTimeout, match="'first'"):
            a.check()


def test_another_layer():
    a, b = windows(2)
    signal(a.call(0, "dispatch, layer 3", 3))
    signal(b.call(0, "dispatch, layer 4", 4))
    wait(a.call(0, "dispatch, layer 3", 3))
    with pytest.raises(OutOfStep, match=r"^dispatch, layer 3: rank 1 is in layer 4, this rank"):
        a.check()


def test_a_rank_that_has_gone_on():
    a, b = windows(2)
    signal(a.call(0, "dispatch"))
    for _ in range(2):
        signal(b.call(0, "dispatch"))
    wait(a.call(0, "dispatch"))
    with pytest.raises(OutOfStep, match="rank 1 has moved to a later step"):
        a.check()


def test_a_rank_left_behind():
    a, b = windows(2)
    b.restart(Membership(2, tuple(range(b.size))))
    signal(a.call(0, "dispatch"))
    signal(b.call(0, "dispatch"))
    wait(a.call(0, "dispatch"))
    with pytest.raises(OutOfStep, match="rank 1 is in generation 2, this rank in 0: one of them"):
        a.check()
    # The other rank sees no signal of its own generation.
    wait(b.call(0, "dispatch"))
    with pytest.raises(PeerTimeout, match="not seen before"):
        b.check()


def test_abort_ends_a_wait():
    a, _ = windows(2, timeout=30.0)
    signal(a.call(0, "dispatch"))
    timer = threading.Timer(0.05, a.abort, ("rank 1 died",))
    timer.start()
    started = time.monotonic()
    wait(a.call(0, "dispatch"))
    assert time.monotonic() - started < 20.0
    timer.join()
    with pytest.raises(WindowAborted, match=r"^rank 1 died$"):
        a.check()


def test_restart_after_a_failure():
    ranks = windows(3)
    step(ranks)
    signal(ranks[0].call(0, "lost"))
    wait(ranks[0].call(0, "lost"))
    ranks[1].abort("another failed")
    for window in ranks:
        window.restart(Membership(1, tuple(range(window.size))))
    for layer in range(3):
        step(ranks, layer=layer)


@pytest.mark.parametrize("count", [0, 2**16 - 1, 2**32 - 1, 2**32 + 9, 5 * 2**32])
def test_a_rank_that_is_late_after_a_restart(count: int):
    """The late rank may have signalled any number of times before."""
    ranks = windows(2, timeout=10.0)
    for window in ranks:
        window.signals.state[DeviceStateWord.CHANNELS] = count
    step(ranks, layer=3)
    step(ranks, layer=4)
    for window in ranks:
        window.restart(Membership(1, tuple(range(window.size))))
    a, b = (window.call(0, "dispatch, layer 3", 3) for window in ranks)
    late = threading.Timer(0.1, signal, (b,))
    late.start()
    signal(a)
    wait(a)
    late.join()
    wait(b)
    for window in ranks:
        window.check()


def test_many_restarts():
    """Flags survive as many restarts as a server has in years; not every generation uses each
    channel."""
    ranks = windows(2)
    step(ranks, channel=1)
    for generation in range(1, 40_000):
        for window in ranks:
            window.restart(Membership(generation, tuple(range(window.size))))
        if generation % 1000 == 999:
            step(ranks)
    step(ranks, channel=1)
    for window in ranks:
        window.restart(Membership(MAX_GENERATION, tuple(range(window.size))))
    step(ranks)
    step(ranks, channel=1)


def test_ranks_that_take_no_part():
    """Excluded ranks are neither waited for nor signalled, and may come back."""
    ranks = windows(3)
    others = [ranks[0], ranks[2]]
    for window in others:
        window.restart(
            Membership(
                1,
                (
                    0,
                    2,
                ),
            )
        )
    step(others)
    assert ranks[1].signals.flag(1, 0).tolist() == [0, 0, 0]
    for window in ranks:
        window.restart(Membership(2, tuple(range(window.size))))
    step(ranks)


def test_bad_restarts():
    a, _ = windows(2)
    a.restart(Membership(4, tuple(range(a.size))))
    with pytest.raises(
        ValueError, match=f"generation 4: give one above 4 and below {MAX_GENERATION + 1}"
    ):
        a.restart(Membership(4, tuple(range(a.size))))
    with pytest.raises(ValueError, match="generation 2147483648: give one above 4"):
        a.restart(Membership(1 << 31, tuple(range(a.size))))
    with pytest.raises(ValueError, match=r"active ranks \[1\]: give some of 0..1, with 0 among"):
        a.restart(Membership(5, (1,)))
    a.restart(Membership(MAX_GENERATION, tuple(range(a.size))))
    signal(a.call(0, "the last"))
    assert int(a.signals.flag(0, 0)[0]) > 0
