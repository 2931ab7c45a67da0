"""Faults done to a running engine, and to the commands around it; what comes of each.

A case is a victim, a fault and a phase. `outcome` starts the product anew, brings it into the
phase, does the fault and looks: when is it told, when have all requests an answer, what is left.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from bench.fault_run import PATIENCE, Run, wait_for
from bench.faulty_rank import HOLD, PAUSE, TARGET
from moesaic.engine.engine import Engine
from moesaic.engine.frontend import core_client as remote

MODEL: Final = "tiny:qwen3_moe,num_hidden_layers=4,num_attention_heads=8"
COMMON: Final[dict[str, Any]] = {
    "watchdog_timeout": 30.0,
    "model_path": MODEL,
    "max_running_requests": 16,
    "max_total_tokens": 16384,
    "chunked_prefill_size": 16,
    "disable_radix_cache": True,
    "num_threads": 1,
}
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "tp 4, dp 2": {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True},
    "pp 3": {"pp_size": 3},
    "tp 2": {"tp_size": 2},
}
FAULTS: Final = {
    "kill -9": signal.SIGKILL,
    "SIGSTOP": signal.SIGSTOP,
    "exception": signal.SIGUSR1,
    "stuck": signal.SIGUSR2,
    "lock held": signal.SIGRTMIN,
}
PHASES: Final = ("start", "prefill", "decode", "idle")
REQUESTS: Final = 8
# Long enough that no request ends by itself before the fault does it.
PROMPT_TOKENS: Final = {"prefill": 1500, "decode": 8}
OUTPUT_TOKENS: Final = 500
# What "stuck" and "lock held" mean: longer than anybody waits.
FOR_EVER: Final = "3600"


@dataclass(frozen=True)
class Victim:
    """`process`: as Run.find names it."""

    name: str
    process: str
    layout: str

    @property
    def rank(self) -> int | None:
        number = self.process.removeprefix("rank")
        return int(number) if number.isdigit() else None


LEADER: Final = Victim("rank 0, the first leader", "rank0", "tp 4, dp 2")
FOLLOWER: Final = Victim("rank 1, an attention follower", "rank1", "tp 4, dp 2")
DP_LEADER: Final = Victim("rank 2, leader of the second DP group", "rank2", "tp 4, dp 2")
MIDDLE: Final = Victim("rank 1, the middle stage", "rank1", "pp 3")
LAST: Final = Victim("rank 2, the last stage", "rank2", "pp 3")
RANKS: Final = (LEADER, FOLLOWER, DP_LEADER, MIDDLE, LAST)
SUPERVISOR: Final = Victim("the supervisor", "supervisor", "tp 2")
FORK_SERVER: Final = Victim("the fork server", "fork server", "tp 2")


@dataclass(frozen=True)
class Case:
    victim: Victim
    fault: str
    phase: str


@dataclass(frozen=True)
class Outcome:
    """Seconds after the fault; None: does not apply. `named_s`: when the victim is named, in the
    log or to the client. `answered_s`: when no request is open any more; in idle, how long the
    next one takes to fail. `gone_s`: when no other process of the run lives."""

    layout: str
    victim: str
    fault: str
    phase: str
    named_s: float | None
    answered_s: float | None
    gone_s: float | None
    pending: int
    failed: int
    message: str
    status: int | None
    left: list[str]


def outcome(case: Case) -> Outcome:
    run = Run()
    try:
        with _faulty_ranks():
            return (_at_start if case.phase == "start" else _while_serving)(case, run)
    finally:
        run.close()


def _at_start(case: Case, run: Run) -> Outcome:
    """One rank does not begin to load; the others wait for it."""
    held = 0 if case.victim.rank is None else case.victim.rank
    world = _world(case.victim.layout)
    start = Start(LAYOUTS[case.victim.layout])
    with run.marked(**{HOLD: str(held), PAUSE: FOR_EVER}):
        start.begin()
        for rank in range(world):
            run.pid(f"rank{rank}")
        run.learn()
        struck = _strike(run, case)
        start.join()
    run.await_gone()
    gone = time.monotonic()
    told = Told(start.ended, start.error)
    return _result(case, run, struck, told, Answered(start.ended, 0, 0), gone)


def _while_serving(case: Case, run: Run) -> Outcome:
    with run.marked(**{PAUSE: FOR_EVER}):
        engine = Engine(**COMMON, **LAYOUTS[case.victim.layout])
    try:
        run.learn()
        calls = _bring_into(case.phase, engine, run)
        with listening() as hear:
            struck = _strike(run, case)
            told = hear(run)
        if calls is not None:
            calls.join()
        run.await_gone()
        gone = time.monotonic()
        later = Calls(engine, 1, 8)
        later.join()
    finally:
        engine.shutdown()
    assert later.failures, "the service answered a request after its end"
    if calls is None:
        answered = Answered(struck.at + later.seconds, 1, len(later.failures))
    else:
        answered = Answered(calls.ended, REQUESTS, len(calls.failures))
    return _result(case, run, struck, told, answered, gone)


@dataclass(frozen=True)
class Struck:
    """When the fault was done, by the clock that measures and by that of the logs."""

    at: float
    date: float


@dataclass(frozen=True)
class Told:
    """When and what the client heard."""

    at: float
    message: str


@dataclass(frozen=True)
class Answered:
    """When the last of `pending` requests had its end; `failed`: with an error."""

    at: float
    pending: int
    failed: int


def _result(
    case: Case, run: Run, struck: Struck, told: Told, answered: Answered, gone: float
) -> Outcome:
    named = told.at - struck.at
    if case.victim.rank is not None:
        named = min([named, *logged(run, rf"\brank {case.victim.rank}\b", struck)])
    return Outcome(
        layout=case.victim.layout,
        victim=case.victim.name,
        fault=case.fault,
        phase=case.phase,
        named_s=named,
        answered_s=answered.at - struck.at,
        gone_s=gone - struck.at,
        pending=answered.pending,
        failed=answered.failed,
        message=told.message,
        status=None,
        left=run.left(),
    )


def _strike(run: Run, case: Case) -> Struck:
    pid = run.pid(case.victim.process)
    struck = Struck(time.monotonic(), time.time())
    os.kill(pid, FAULTS[case.fault])
    return struck


def logged(run: Run, pattern: str, struck: Struck) -> list[float]:
    """Seconds after the fault at which the supervisor logged a line that matches."""
    found = re.findall(rf"^\[(\S+ \S+)\] \[supervisor\] .*{pattern}", run.log.read_text(), re.M)
    dates = [datetime.strptime(date, "%Y-%m-%d %H:%M:%S,%f").timestamp() for date in found]
    # The log counts in milliseconds, downwards.
    return [max(0.0, date - struck.date) for date in dates if date >= struck.date - 0.001]


def _bring_into(phase: str, engine: Engine, run: Run) -> Calls | None:
    if phase == "idle":
        return None
    before = run.step()
    calls = Calls(engine, REQUESTS, PROMPT_TOKENS[phase])
    if phase == "prefill":
        wait_for(lambda: run.step() > before + 3, "third step", run)
        assert not calls.tokens, f"prefill was over before the fault: {calls.tokens}"
    else:
        wait_for(calls.all_have(2), "tokens", run)
    assert not calls.reasons, f"requests ended before the fault: {calls.reasons}"
    return calls


class Start:
    """An engine that is being made, and why it could not be."""

    def __init__(self, layout: dict[str, Any]) -> None:
        self._layout = layout
        self.error, self.ended = "", 0.0
        self._thread = threading.Thread(target=self._make, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(PATIENCE)
        if not self.error:
            raise TimeoutError("the engine started, or neither started nor failed")

    def _make(self) -> None:
        try:
            Engine(**COMMON, **self._layout).shutdown()
        except RuntimeError as error:
            self.ended, self.error = time.monotonic(), str(error)


class Calls:
    """Requests under way in a thread; `tokens` and `reasons` by the number of the request."""

    def __init__(
        self, engine: Engine, number: int, prompt_tokens: int, tokens: int = OUTPUT_TOKENS
    ) -> None:
        self._engine, self._most = engine, tokens
        self._prompts = [[1 + i + j % 200 for j in range(prompt_tokens)] for i in range(number)]
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, dict[str, Any]] = {}
        self.began = self.ended = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def failures(self) -> list[str]:
        """What those were told that ended with an error."""
        reasons = [reason for reason in self.reasons.values() if reason["type"] == "abort"]
        return [reason["message"] for reason in reasons]

    def all_have(self, number: int) -> Callable[[], bool]:
        return lambda: (
            len(self.tokens) == len(self._prompts)
            and min(map(len, list(self.tokens.values()))) >= number
        )

    def join(self) -> None:
        self._thread.join(PATIENCE)
        if self._thread.is_alive() or len(self.reasons) < len(self._prompts):
            raise TimeoutError(f"requests without an end: only {sorted(self.reasons)} have one")

    def _run(self) -> None:
        sampling = {"temperature": 0, "max_new_tokens": self._most, "ignore_eos": True}
        pieces: Any = self._engine.generate(
            input_ids=self._prompts, sampling_params=sampling, stream=True
        )
        for piece in pieces:
            if piece["output_ids"]:
                self.tokens[piece["index"]] = piece["output_ids"]
            if (reason := piece["meta_info"]["finish_reason"]) is not None:
                self.reasons[piece["index"]] = reason
                self.ended = time.monotonic()


@contextmanager
def listening() -> Iterator[Callable[[Run], Told]]:
    """Hears what the client logs of the end of the service."""
    heard: list[Told] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(Told(time.monotonic(), record.getMessage()))

    ear, logger = Ear(logging.ERROR), logging.getLogger(remote.__name__)
    logger.addHandler(ear)
    try:
        yield lambda run: wait_for(lambda: heard[0] if heard else None, "word of the fault", run)
    finally:
        logger.removeHandler(ear)


@contextmanager
def _faulty_ranks() -> Iterator[None]:
    before, remote.TARGET = remote.TARGET, TARGET
    try:
        yield
    finally:
        remote.TARGET = before


def _world(layout: str) -> int:
    flags = LAYOUTS[layout]
    return int(flags.get("tp_size", 1) * flags.get("pp_size", 1))


@dataclass(frozen=True)
class Pause:
    """A rank that slept in a step for a while. `told_s`: when the log named it, `told` how.
    `same`: whether the tokens are those of an undisturbed run."""

    told_s: float
    told: str
    same: bool
    left: list[str]


def pause(victim: Victim, seconds: int) -> Pause:
    """The others wait for it, the log tells, and then all goes on."""
    run = Run()
    try:
        with _faulty_ranks(), run.marked(**{PAUSE: str(seconds)}):
            engine = Engine(**COMMON, **LAYOUTS[victim.layout])
        with engine:
            undisturbed = Calls(engine, REQUESTS, 8, 400)
            undisturbed.join()
            calls = Calls(engine, REQUESTS, 8, 400)
            wait_for(calls.all_have(2), "tokens", run)
            struck = Struck(time.monotonic(), time.time())
            os.kill(run.pid(victim.process), FAULTS["stuck"])
            calls.join()
        pattern = rf"odd one out is rank {victim.rank}\b"
        told = re.findall(rf"\[supervisor\] (.*{pattern}.*)", run.log.read_text())
        times = logged(run, pattern, struck)
        same = calls.tokens == undisturbed.tokens and not calls.failures
        run.await_gone()
        return Pause(min(times), told[0], same, run.left())
    finally:
        run.close()
