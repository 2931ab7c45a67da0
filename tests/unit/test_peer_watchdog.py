"""A rank whose kernels wait for a rank that does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from moesaic.comm.errors import ConnectionLost, PeerTimeout, WindowAborted
from moesaic.comm.lifecycle import Lifecycle, Membership, Participant
from moesaic.comm.supervise.control_page import ControlPage, RankStatus, StepRolledBack
from moesaic.comm.windows.device_window import CpuDeviceWindow, DeviceWindow
from moesaic.comm.windows.window import PlaneSpec
from moesaic.engine.runner.peer_watchdog import PeerWatchdog
from moesaic.kernels.a2a import signal, wait

OPERATION = "combine of layer 3"


class Owner(Participant):
    lost = ""

    def __init__(self, window: DeviceWindow) -> None:
        self.window, self.lifecycle = window, Lifecycle(Membership(0, (0, 1)))
        self.lifecycle.register(self, (0, 1))

    def restart(self, membership: Membership) -> None:
        self.window.restart(membership)

    def abort(self, reason: str) -> None:
        self.window.abort(reason)

    def broken(self) -> str:
        return self.lost

    def check(self) -> None:
        self.window.check()


def owners(timeout: float) -> list[Owner]:
    return [Owner(window) for window in CpuDeviceWindow.between(2, [], timeout, channels=1)]


def watchdog(owner: Owner, status: RankStatus | None) -> PeerWatchdog:
    return PeerWatchdog(owner.lifecycle, status, [owner.window])


@pytest.fixture
def page() -> Iterator[ControlPage]:
    yield ControlPage.create(2)[0]


def meet(owner: Owner) -> None:
    call = owner.window.call(0, OPERATION)
    signal(call)
    wait(call)


def called_back(page: ControlPage, status: RankStatus, owner: Owner) -> float:
    """Rolls the rank back while it waits; returns the seconds until it stops waiting."""
    told: list[float] = []

    def roll_back() -> None:
        told.append(time.monotonic())
        page.roll_back(0, status.generation + 1)

    threading.Timer(0.1, roll_back).start()
    meet(owner)
    return time.monotonic() - told[0]


def test_kernels_give_up_when_the_rank_is_called_back(page: ControlPage):
    mine, other = owners(timeout=60.0)
    status = page.status(0)
    watch = watchdog(mine, status)
    assert called_back(page, status, mine) < 30.0
    with pytest.raises(WindowAborted) as caught:
        watch.lifecycle.check()
    with pytest.raises(StepRolledBack) as recalled:
        watch.raise_cause(caught.value)
    assert recalled.value.generation == status.generation + 1
    # Both ranks adopt the new generation and go on.
    status.generation += 1
    for owner in (mine, other):
        owner.lifecycle.restart(Membership(status.generation, (0, 1)))
    watch.lifecycle.check()
    peer = threading.Thread(target=meet, args=(other,))
    peer.start()
    meet(mine)
    peer.join()
    watch.lifecycle.check()
    assert called_back(page, status, mine) < 30.0, "it still watches"


def test_kernels_give_up_when_a_connection_is_lost(page: ControlPage):
    """The supervisor does not know yet, so that the step fails of it."""
    (mine, _), status = owners(timeout=60.0), page.status(0)
    watch = watchdog(mine, status)
    threading.Timer(0.1, lambda: setattr(mine, "lost", "a connection is lost")).start()
    meet(mine)
    with pytest.raises(WindowAborted, match="a connection is lost") as caught:
        watch.lifecycle.check()
    with pytest.raises(ConnectionLost, match="a connection is lost"):
        watch.raise_cause(caught.value)
    page.roll_back(0, status.generation + 1)
    status.generation += 1
    watch.raise_cause(caught.value)  # the next generation has not lost it


def test_memory_of_windows_is_counted():
    plane = PlaneSpec("rows", (3, 512), torch.float16)
    two = [CpuDeviceWindow.between(2, [plane], 1.0, channels=1)[0] for _ in range(2)]
    lifecycle = Lifecycle(Membership(0, (0, 1)))
    # Flags take 512 bytes.
    assert PeerWatchdog(lifecycle, None, two).nbytes == 2 * (3 * 1024 + 512)
    assert PeerWatchdog(lifecycle, None).nbytes == 0


def test_a_rank_that_does_not_come_is_named(page: ControlPage):
    mine, _ = owners(timeout=0.05)
    watch = watchdog(mine, page.status(0))
    meet(mine)
    with pytest.raises(PeerTimeout, match=f"rank 1 did not reach '{OPERATION}' within 0.1 s") as e:
        watch.lifecycle.check()
    watch.raise_cause(e.value)  # the rank is not rolled back
    assert e.value.missing == (1,)


def test_waits_may_last_longer_for_a_while(page: ControlPage):
    mine, other = owners(timeout=0.2)
    watch = watchdog(mine, None)
    with watch.waiting_longer(30.0):
        threading.Timer(0.6, lambda: signal(other.window.call(0, OPERATION))).start()
        meet(mine)
        watch.lifecycle.check()
    meet(mine)
    with pytest.raises(PeerTimeout, match=r"rank 1 did not reach .* within 0\.2 s"):
        watch.lifecycle.check()


def test_kernels_of_a_rank_apart_leave_no_trace(page: ControlPage):
    mine, other = owners(timeout=0.2)
    watch = watchdog(mine, None)
    before = [window.signals.state.tolist() for window in (mine.window, other.window)]
    with watch.compiling_only():
        meet(mine)  # does not wait
    watch.lifecycle.check()
    assert [window.signals.state.tolist() for window in (mine.window, other.window)] == before
    assert not other.window.signals.flag(1, 0).any() and not mine.window.signals.flag(0, 0).any()
    meet(mine)
    with pytest.raises(PeerTimeout):
        watch.lifecycle.check()


def test_a_rank_that_returns_starts_alone(page: ControlPage):
    """The others serve, so that its kernels neither wait for them nor signal; then they do."""
    (mine, other), status = owners(timeout=0.05), page.status(0)
    watch = PeerWatchdog(mine.lifecycle, status, [mine.window], returns=True)
    with watch.starting(60.0):
        meet(mine)
        watch.lifecycle.check()
    assert other.window.signals.flag(1, 0).tolist() == [0, 0]
    for owner in (mine, other):
        owner.lifecycle.restart(Membership(1, (0, 1)))
    signal(other.window.call(0, OPERATION))
    meet(mine)
    watch.lifecycle.check()
    with (
        PeerWatchdog(mine.lifecycle, None, [mine.window]).starting(0.2),
        pytest.raises(PeerTimeout),
    ):
        meet(mine)
        watch.lifecycle.check()
