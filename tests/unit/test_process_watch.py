"""Silent ranks: they hang, or the machine has no core for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from moesaic.comm.launch.service import Timeouts
from moesaic.comm.supervise import process_watch as watch_module
from moesaic.comm.supervise.control_page import ControlPage
from moesaic.comm.supervise.process_watch import ProcessWatch
from moesaic.core.rank_state import RankSnapshot, RankState


def look_at_silence(monkeypatch: pytest.MonkeyPatch, waited: float) -> list[str]:
    """The verdict of each second on a silent rank, one of whose threads waits for a core for the
    share `waited` of the time."""
    page, descriptor = ControlPage.create(1)
    os.close(descriptor)
    page.status(0).enter(RankState.COMPUTING, "a long step")
    watch, clock = ProcessWatch(page, Timeouts(beat=5.0)), 100.0
    monkeypatch.setattr(watch_module, "process_state", lambda pid: "R")
    monkeypatch.setattr(
        watch_module, "run_delays", lambda pid: {"7": 1.0, "8": waited * (clock - 100.0)}
    )
    told = []
    for second in range(40):
        clock = 100.0 + second
        age = second + 1.0
        monkeypatch.setattr(page, "snapshot", lambda rank, age=age: seen_computing(age))
        for part in range(10):  # rare looks would count as the watch's own delay
            found = watch.look({0: 1}, clock + part / 10, starting=lambda rank: False)
        told.append("" if found is None else found[1])
    return told


def seen_computing(beat_age: float) -> RankSnapshot:
    return RankSnapshot(RankState.COMPUTING, 3, "layer 1", beat_age, beat_age, 9)


def test_silence_of_a_rank_that_gets_no_core_is_forgiven_for_longer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = look_at_silence(monkeypatch, waited=0.3)
    starves = look_at_silence(monkeypatch, waited=0.8)
    first = [next(n for n, text in enumerate(told) if text) + 1 for told in (hangs, starves)]
    assert first == [5, 30]
    assert starves[-1] == "hangs: it has given no heartbeat for 40.0 s"
    (warning,) = [r.getMessage() for r in caplog.records]
    assert warning.startswith("rank 0 has waited for a core for ")


def test_a_silence_is_examined_before_it_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that was stalled finds a rank silent for longer than the limit, and cannot know
    yet whether that had a core."""
    page, descriptor = ControlPage.create(1)
    os.close(descriptor)
    watch = ProcessWatch(page, Timeouts(beat=5.0))
    monkeypatch.setattr(watch_module, "process_state", lambda pid: "R")
    monkeypatch.setattr(watch_module, "run_delays", lambda pid: {"7": 1.0})
    verdicts = []
    for tenth in range(60):
        age = 8.0 + tenth / 10
        monkeypatch.setattr(page, "snapshot", lambda rank, age=age: seen_computing(age))
        verdicts.append(watch.look({0: 1}, 100.0 + age, starting=lambda rank: False))
    # Late at first, fair a second later, and then three seconds of silence are examined.
    assert verdicts[:40] == [None] * 40
    assert verdicts[42] == (0, "hangs: it has given no heartbeat for 12.2 s")


def test_waits_for_a_core_are_seen() -> None:
    """Three busy processes share one core."""
    code = "import os, time\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    try:
        end = time.monotonic() + 20
        while min(sum(watch_module.run_delays(p.pid).values()) for p in busy) < 0.2:
            assert time.monotonic() < end, "no wait was seen"
            time.sleep(0.05)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert watch_module.run_delays(2**22) == {}
