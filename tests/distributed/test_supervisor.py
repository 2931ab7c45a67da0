"""The supervisor and real processes: what it does when ranks work, die, hang, and when it dies."""

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from moesaic.comm.launch.service import Service, ServiceSpec, Timeouts
from moesaic.comm.mesh import Mesh
from moesaic.comm.supervise.control_page import ControlPage
from moesaic.comm.supervise.journal import Journal
from moesaic.comm.supervise.load_balance import LoadBalancer
from moesaic.comm.supervise.membership_policy import EndService
from moesaic.comm.supervise.process_watch import ProcessWatch
from moesaic.comm.supervise.run_folder import RunFolder, mark_of
from moesaic.comm.supervise.step_watchdog import StepWatchdog
from moesaic.core.messages import (
    Abort,
    Fault,
    Message,
    Query,
    QueryReply,
    RequestDelta,
    StepOutput,
    Stop,
    Submit,
)
from moesaic.core.rank_state import RankSnapshot, RankState
from moesaic.core.request import FinishReason, NewRequest
from moesaic.core.sampling import SamplingParams

TARGET = "tests.distributed.fake_rank:run"
LONG = 10**9
PAIR = Mesh(tp=2, dp=2, ep=2)
ODD = r"the odd one out is rank 1 \(tp 1, dp 1, ep 1\): step 4, computing for"


def spec(mesh: Mesh = PAIR, config: dict | None = None, **times: float) -> ServiceSpec:
    timeouts = Timeouts(**{"start": 60.0, "collective": 20.0, "stop": 5.0, **times})
    return ServiceSpec(mesh, TARGET, config or {}, timeouts=timeouts)


@contextmanager
def serving(wanted: ServiceSpec) -> Iterator[tuple[Service, list[psutil.Process]]]:
    """A service and all of its processes, which are gone at the end."""
    service = Service.start(wanted)
    processes = family(service.pid)
    folder = service.folder
    try:
        yield service, processes
    finally:
        service.close()
        alive = psutil.wait_procs(processes, timeout=20)[1]
        for process in alive:
            process.kill()
        assert alive == []
        assert not folder.exists()


def family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def request(number: int, tokens: int = 3, prompt: int = 3) -> NewRequest:
    return NewRequest("same", list(range(prompt)), SamplingParams(), 0, tokens, number)


def rank_pid(service: Service, rank: int) -> int:
    return service.facts["ranks"][rank]["pid"]


def next_message(service: Service, seconds: float = 30.0) -> Message:
    message = service.receive(seconds)
    assert message is not None, f"no message within {seconds} s"
    return message


def collect(
    service: Service, numbers: set[int]
) -> tuple[dict[int, list[int]], dict[int, FinishReason]]:
    """Tokens and ends of the requests, when all have ended."""
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    ends: dict[int, FinishReason] = {}
    while set(ends) < numbers:
        message = next_message(service)
        assert isinstance(message, StepOutput), message
        for number, token in zip(message.numbers, message.tokens, strict=True):
            tokens[number].append(token)
        for delta in message.deltas:
            tokens[delta.request_no] += delta.token_ids
            if delta.finish is not None:
                ends[delta.request_no] = delta.finish
    return tokens, ends


def start_stepping(service: Service) -> None:
    """A request in each group that never ends by itself."""
    service.send(Submit([request(0, LONG), request(1, LONG)]))
    seen: set[int] = set()
    while seen < {0, 1}:
        message = next_message(service)
        assert isinstance(message, StepOutput)
        seen |= set(message.numbers)


def test_serves_and_stops():
    with serving(spec()) as (service, processes):
        assert not any("torch" in m.path for m in psutil.Process(service.pid).memory_maps())
        assert stat.S_IMODE(service.folder.stat().st_mode) == 0o700
        assert [f["threads"] for f in service.facts["ranks"]] == [1, 1]
        for _ in range(3):  # each time the replica falls asleep and is woken again
            numbers = {0, 1, 2, 3}
            service.send(Submit([request(number, 7, 3) for number in sorted(numbers)]))
            tokens, ends = collect(service, numbers)
            assert tokens == {number: [0, 1, 2, 0, 1, 2, 0] for number in numbers}
            assert {end.type for end in ends.values()} == {"length"}
            await_sleep(service)
            check_ask(service)
        check_twins_and_aborts(service)
        check_wake(service)
        check_addresses(processes)
        names = sorted(process.name() for process in processes)
        assert {"moesaic-super", "moesaic-rank-0", "moesaic-rank-1"} < set(names)
        for process in processes[1:]:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
        check_ask(service)
        assert service.exit_code is None
    assert service.exit_code == 0
    assert isinstance(service.receive(), Fault)
    service.close()
    service.wake()
    service.send(Query(6, "info"))
    assert isinstance(service.receive(), Fault)


def await_sleep(service: Service) -> None:
    deadline = time.monotonic() + 30
    while any(rank["state"] != "idle" for rank in ask_all(service)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check_ask(service: Service) -> None:
    """Answered by leaders that sleep, and nobody is woken for it: no step goes by."""
    steps = [[rank["step"] for rank in ask_all(service)] for _ in range(2)]
    assert steps[0] == steps[1]


def ask_all(service: Service) -> list[dict[str, object]]:
    """What the supervisor sees of each rank, when all groups have answered, too."""
    service.send(Query(5, "info"))
    replies = [next_message(service) for _ in range(3)]
    assert all(isinstance(reply, QueryReply) and reply.number == 5 for reply in replies)
    found = {reply.group: reply.value for reply in replies}
    assert [found[group] for group in (0, 1)] == [{"what": "info", "rank": r} for r in (0, 1)]
    assert [sight["rank"] for sight in found[-1]] == [0, 1]
    return found[-1]


def check_twins_and_aborts(service: Service) -> None:
    start_stepping(service)
    service.send(Submit([request(0)]))
    finish = None
    while finish is None:
        finish = next(
            (d.finish for d in next_message(service).deltas if d.finish is not None), None
        )
    assert finish.failed and "request 0 was submitted twice" in finish.message
    service.send(Abort(0))
    service.send(Abort(1))
    service.send(Abort(9))
    _, ends = collect(service, {0, 1})
    assert [ends[number].type for number in (0, 1)] == ["abort", "abort"]
    assert not any(end.failed for end in ends.values())


def check_wake(service: Service) -> None:
    timer = threading.Timer(0.05, service.wake)
    timer.start()
    assert service.receive(30.0) is None
    timer.join()
    started = time.monotonic()
    assert service.receive(0.05) is None
    assert time.monotonic() - started >= 0.04


def check_addresses(processes: list[psutil.Process]) -> None:
    """On one node no process listens on a network address: all sockets are in the run folder."""
    found = [c for p in processes for c in p.net_connections("inet") if c.status == "LISTEN"]
    assert found == []


def fault_of(service: Service) -> Fault:
    """The fault that ends the service, and with it every open request."""
    while not isinstance(message := next_message(service), Fault):
        assert isinstance(message, StepOutput)
        assert all(delta.finish is None for delta in message.deltas)
    assert service.receive(0) == message  # again and again
    service.close()
    assert service.exit_code == 1
    return message


@pytest.mark.parametrize("stepping", [False, True], ids=["idle", "step"])
def test_killed_rank_is_named(stepping: bool):
    with serving(spec()) as (service, _):
        if stepping:
            start_stepping(service)
        os.kill(rank_pid(service, 1), signal.SIGKILL)
        fault = fault_of(service)
        assert fault.ranks == [1]
        assert "rank 1 (tp 1, dp 1, ep 1) was killed by signal 9 (SIGKILL); step " in fault.message
        if not stepping:
            assert "idle for" in fault.message and "'wait for requests'" in fault.message


@pytest.mark.parametrize(
    "stepping",
    [pytest.param(False, marks=pytest.mark.slow, id="idle"), pytest.param(True, id="step")],
)
def test_stopped_rank_is_named(stepping: bool):
    with serving(spec()) as (service, _):
        if stepping:
            start_stepping(service)
        os.kill(rank_pid(service, 0), signal.SIGSTOP)
        fault = fault_of(service)
        assert fault.ranks == [0]
        assert "rank 0 (tp 0, dp 0, ep 0) hangs: its process" in fault.message
        # Long before a step that takes too long would tell.
        assert re.search(r"has been stopped \(state T\) for [\d.]+ s", fault.message)


def test_error_in_a_step():
    with serving(spec(config={"rank": 1, "step": 5, "what": "raise"})) as (service, _):
        service.send(Submit([request(0, LONG), request(1, LONG)]))
        fault = fault_of(service)
        assert fault.ranks == [1]
        assert "failed: ValueError: as it was told to (in misbehave, fake_rank.py:" in fault.message
        assert "step 5" in fault.message


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("raise", "rank 1 (tp 1, dp 1, ep 1) failed: ValueError: as it was told to"),
        ("exit", "rank 1 (tp 1, dp 1, ep 1) ended with exit code 7; step 0, starting for"),
    ],
)
def test_error_at_start(what: str, told: str, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(RuntimeError) as caught:
        Service.start(spec(config={"rank": 1, "step": -1, "what": what}))
    assert told in str(caught.value)
    # The caller has it; a ValueError is an answer to what was asked for, and no bug to trace. Who
    # had begun may say that it gives up.
    lines = capfd.readouterr().err.splitlines()
    told = [line for line in lines if not re.search("abandoned: |too much to do", line)]
    assert told == []


@pytest.mark.slow
def test_slow_start_is_ended():
    with pytest.raises(RuntimeError, match=r"not ready within 8 s: .*rank 1 \(tp 1.*'sleep for"):
        Service.start(spec(config={"rank": 1, "step": -1, "what": "sleep"}, start=8.0))


def test_step_that_stands_still(capfd: pytest.CaptureFixture[str]):
    config = {"rank": 1, "step": 4, "what": "sleep"}
    with serving(spec(config=config, guard=0.5, hang=2.0)) as (service, _):
        service.send(Submit([request(0, LONG), request(1, LONG)]))
        fault = fault_of(service)
    assert fault.ranks == [1]
    for text in (
        "last in 'sleep for ever'",
        "Waiting for it: rank 0 in 'count work' of step 4 for ",
    ):
        assert re.search(text, fault.message), fault.message
    log = capfd.readouterr().err
    # The warning, long before the fault, which is for the client to log.
    assert log.count("the odd one out") == 1, log
    warned, ended = (re.search(rf"{ODD} (\d+\.\d)", text) for text in (log, fault.message))
    assert warned and ended and float(warned[1]) < float(ended[1]), log


def test_supervisor_that_was_held_up_accuses_nobody():
    """All stand still for longer than a step may, as on a machine that was suspended. Rank 0 waits
    for rank 1 then, and the supervisor has seen that."""
    with serving(spec(guard=0.2, hang=2.5, stopped=60.0, beat=60.0)) as (service, processes):
        start_stepping(service)
        held = [processes[0], *(psutil.Process(rank_pid(service, rank)) for rank in (0, 1))]
        for process in reversed(held):
            process.suspend()
            time.sleep(0.2)
        time.sleep(2.5)
        for process in held:
            process.resume()
            time.sleep(0.2)
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            assert isinstance(next_message(service), StepOutput)


def test_waiter_is_not_to_blame():
    """A rank gives up on another one before the guard does."""
    config = {"rank": 1, "step": 4, "what": "sleep"}
    with serving(spec(config=config, guard=0.2, collective=1.0)) as (service, _):
        service.send(Submit([request(0, LONG), request(1, LONG)]))
        fault = fault_of(service)
    assert fault.ranks == [1]
    assert "rank 1 (tp 1, dp 1, ep 1) did not take part: step 4, computing for" in fault.message
    assert "rank 0 (tp 0, dp 0, ep 0) failed: " in fault.message
    assert "PeerTimeout: rank 1 did not reach 'count work' within 1.0 s" in fault.message


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_signal_stops_in_order(number: signal.Signals):
    with serving(spec()) as (service, _):
        start_stepping(service)
        os.kill(service.pid, number)
        _, ends = collect(service, {0, 1})
        assert {end.message for end in ends.values()} == {
            f"the service stops: the supervisor got {number.name}"
        }
        assert not any(end.failed for end in ends.values())
        assert isinstance(next_message(service), Stop)
        assert next_message(service).message == "the service was stopped"
        assert service.exit_code == 0


def test_killed_supervisor():
    """Takes all ranks with it, also one that is stopped and cannot see it."""
    with serving(spec(stopped=60.0)) as (service, processes):
        start_stepping(service)
        os.kill(rank_pid(service, 1), signal.SIGSTOP)
        os.kill(service.pid, signal.SIGKILL)
        while not isinstance(message := next_message(service), Fault):
            pass
        assert message.message.startswith("the supervisor died (exit code -9)")
        assert psutil.wait_procs(processes[1:], timeout=20)[1] == []


CLIENT = """
import sys
from moesaic.comm.launch.service import Service, ServiceSpec
from moesaic.comm.mesh import Mesh
service = Service.start(ServiceSpec(Mesh(tp=2), "tests.distributed.fake_rank:run"))
assert "torch" not in sys.modules
print(service.pid, service.folder, flush=True)
service.receive()
"""


def test_killed_client():
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    )
    assert client.stdout is not None
    pid, folder = client.stdout.readline().split()
    processes = family(int(pid))
    assert len(processes) >= 5  # supervisor, fork server, store, two ranks
    client.kill()
    client.wait()
    client.stdout.close()
    assert psutil.wait_procs(processes, timeout=20)[1] == []
    assert not Path(folder).exists()


def test_folders_of_the_dead_are_swept():
    mine = RunFolder.create()
    dead = mine.path.parent / "1-dead"
    dead.mkdir()
    (dead / "owner").touch()
    kept = mine.path.parent / mark_of("torchrun", os.getpid(), 7)
    namesake = mine.path.parent / f"torchrun-{os.getpid()}-1-7"
    kept.touch()
    namesake.touch()
    other = RunFolder.create()
    try:
        assert mine.path.exists() and not dead.exists()
        assert kept.exists() and not namesake.exists()
        assert mine.path != other.path
    finally:
        kept.unlink()
        mine.remove()
        other.remove()
    assert not mine.path.exists() and not other.path.exists()


def test_journal_replays_a_request_where_it_stands():
    journal = Journal(LoadBalancer(1, "round_robin"))
    submitted = request(7, prompt=3)
    journal.assign([submitted])
    assert journal.replay(7) == submitted
    journal.record(StepOutput([RequestDelta(7, [7, 8])]))
    journal.record(StepOutput([], [7, 8], [9, 1]))  # request 8 is not open
    again = journal.replay(7)
    assert again.emitted == [7, 8, 9] and again.prompt_ids == submitted.prompt_ids
    assert (again.params, again.seed, again.request_no) == (
        submitted.params,
        submitted.seed,
        submitted.request_no,
    )
    assert submitted.emitted == [], "the request as it was submitted stays"
    # Another supervisor's journal counts what was emitted before.
    other = Journal(LoadBalancer(1, "round_robin"))
    other.assign([again])
    other.record(StepOutput([RequestDelta(7, [10])]))
    assert other.balancer.tokens == [7] and other.replay(7).emitted == [7, 8, 9, 10]


class ServiceDouble:
    def __init__(self) -> None:
        self.failures: list[tuple[str, list[int]]] = []

    def fail(self, message: str, ranks: Sequence[int]) -> None:
        self.failures.append((message, list(ranks)))


def test_any_loss_ends_the_service():
    service = ServiceDouble()
    EndService().on_ranks_lost(service, [3], "rank 3 was killed by signal 9")
    assert service.failures == [("rank 3 was killed by signal 9", [3])]


def test_journal_counts_tokens():
    journal = Journal(LoadBalancer(2, "total_tokens"))
    prompts = {0: 9, 1: 2, 2: 2}
    assert [journal.assign([request(i, prompt=n)]) for i, n in prompts.items()] == [[0], [1], [1]]
    journal.record(StepOutput([RequestDelta(1, [5] * 6)]))
    assert journal.balancer.tokens == [9, 10]
    assert journal.assign([request(3)]) == [0]
    (answer,) = journal.end_all("over")
    assert [(d.request_no, d.finish.type, d.finish.message) for d in answer.deltas] == [
        (number, "abort", "over") for number in range(4)
    ]
    balancer = journal.balancer
    assert (journal.open, balancer.requests, balancer.tokens) == ({}, [0, 0], [0, 0])


def seen(state: RankState, step: int, operation: str, age: float) -> RankSnapshot:
    return RankSnapshot(state, step, operation, 0.0, age, step)


def test_guard_compares_steps_and_operations(caplog: pytest.LogCaptureFixture):
    guard = StepWatchdog(Mesh(tp=3), 1.0, 5.0)
    wait = RankState.WAITING

    def ranks(*sights: RankSnapshot) -> dict[int, RankSnapshot]:
        return dict(enumerate(sights))

    even = seen(wait, 7, "combine", 3.0)
    assert guard.suspect(ranks(even, even, seen(wait, 7, "combine", 0.5)), 1.0) is None
    assert guard.suspect(ranks(even, even, seen(wait, 6, "combine", 2.0)), 1.0).ranks == (2,)
    assert guard.suspect(ranks(even, seen(wait, 7, "dispatch", 2.0), even), 1.0).ranks == (1,)
    assert guard.suspect(ranks(even, even, even), 1.0).ranks == (0, 1, 2)
    idle = seen(RankState.IDLE, 6, "wait for requests", 100.0)
    assert guard.suspect(ranks(idle, idle, idle), 1.0) is None
    stuck = ranks(even, idle, even)
    assert guard.look(stuck, 0.0) is None and guard.look(stuck, 0.1) is None
    assert len(caplog.messages) == 1 and "odd one out is rank 1 (tp 1): step 6" in caplog.text
    late = ranks(seen(wait, 7, "combine", 5.5), idle, seen(wait, 7, "combine", 6.0))
    assert guard.look(late, 3.0).ranks == (1,)


def test_guard_knows_the_usual_step():
    """Steps of 2 s: 3 s are nothing to talk about, and a hang takes 40 s."""
    guard = StepWatchdog(Mesh(tp=2), 1.0, 5.0)
    for step in range(10):
        busy = seen(RankState.COMPUTING, step, "mlp", 0.1)
        assert guard.look({0: busy, 1: busy}, 2.0 * step) is None
    for age, hung in ((3.0, False), (39.0, False), (41.0, True)):
        sights = {
            0: seen(RankState.WAITING, 9, "sum", age),
            1: seen(RankState.COMPUTING, 9, "mlp", age),
        }
        assert (guard.look(sights, 18.0 + age) is not None) == hung


def test_guard_pauses_after_a_gap():
    """A step that went by while nobody looked does not count as a slow one."""
    guard = StepWatchdog(Mesh(tp=2), 1.0, 5.0)
    busy = [seen(RankState.COMPUTING, step, "mlp", 0.1) for step in range(12)]
    for step in range(10):
        assert guard.look({0: busy[step], 1: busy[step]}, 0.1 * step) is None
    guard.pause()
    assert guard.look({0: busy[10], 1: busy[10]}, 1000.0) is None
    assert guard.look({0: busy[11], 1: busy[11]}, 1000.1) is None
    late = {
        0: seen(RankState.WAITING, 11, "sum", 6.0),
        1: seen(RankState.COMPUTING, 11, "mlp", 6.0),
    }
    assert guard.look(late, 1006.1).ranks == (1,)


def test_watch_is_not_fair_after_a_gap():
    page, descriptor = ControlPage.create(1)
    os.close(descriptor)
    watch = ProcessWatch(page, Timeouts())
    found = []
    for now in (100.0, 100.5, 101.1, 101.2, 109.0, 109.9, 110.1):
        watch.look({}, now, starting=False)
        found.append((watch.was_late, watch.is_fair))
    late, waiting, fair = (True, False), (False, False), (False, True)
    assert found == [late, waiting, fair, fair, late, waiting, fair]
