"""Ranks of a GPU's code are killed, stopped and made to raise in the midst of answers: on CPU
tensors, where the twins of kernels compute, and on a GPU that they share where there is one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from bench import faulty_rank
from bench.fault_run import Run, wait_for
from moesaic import Engine
from moesaic.engine.frontend import core_client as remote
from tests import gpu_rank
from tests.e2e.test_gpu_ranks import GPU, SMALL, WHOLE, groups, nothing_left

pytestmark = pytest.mark.timeout(400)

PROMPTS = [[number + 1] * (5 + 4 * number) for number in range(6)]
PARAMS = [
    {
        "max_new_tokens": 16 + 4 * number,
        "ignore_eos": True,
        "temperature": 0.8 * (number % 2),
        "sampling_seed": number,
    }
    for number in range(6)
]
COMMON = {
    **SMALL,
    **WHOLE,
    "model_path": "tiny:qwen3_moe",
    "elastic_ep_backend": "mooncake",
    "restart_limit": 0,
    "enable_deterministic_inference": True,
    "max_total_tokens": 2048,
}
# Long enough for a strike in their midst, of which a step takes some milliseconds there.
LONGER = 8
ON_GPU = {"device": "cuda", "dtype": "float32", "cuda_graph_bs_prefill": gpu_rank.MIXED_SIZES}
SLOW = pytest.mark.slow
KILLED, STOPPED, RAISES = signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1
Strike = Sequence[tuple[int, signal.Signals]]


@contextmanager
def serving(target: str, ranks: int, redundant: int, **flags: Any) -> Iterator[tuple[Engine, Run]]:
    run = Run()
    before, remote.TARGET = remote.TARGET, target
    try:
        layout = groups(ranks, "deepep") | {"ep_num_redundant_experts": redundant}
        with run.marked():
            engine = Engine(**COMMON | layout | flags)
        try:
            yield engine, run
        finally:
            engine.shutdown()
    finally:
        remote.TARGET = before
        run.close()


def ask(engine: Engine, longer: int = 1) -> list[list[int]]:
    params = [one | {"max_new_tokens": longer * one["max_new_tokens"]} for one in PARAMS]
    found = engine.generate(input_ids=PROMPTS, sampling_params=params)
    return [answer["output_ids"] for answer in found]


def during(engine: Engine, run: Run, longer: int, strike: Callable[[], None]) -> list[list[int]]:
    """The answers of requests in whose midst `strike` is called."""
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.extend(ask(engine, longer)))
    begin = run.step()
    thread.start()
    wait_for(lambda: run.step() > begin + 10, "steps", run)
    strike()
    thread.join(240)
    assert not thread.is_alive(), run.log.read_text()
    return found


def check(engine: Engine, run: Run, strikes: Sequence[Strike], longer: int = 1) -> None:
    """Answers are the same under each strike, all ranks return, and none is lost but those that
    were struck; an error in a step is that step's."""
    wanted = ask(engine, longer)
    run.learn()
    for strike in strikes:
        pids = {one["rank"]: one["pid"] for one in engine.get_server_info()["ranks"]}

        def hit(strike: Strike = strike, pids: dict[int, int] = pids) -> None:
            for rank, number in strike:
                os.kill(pids[rank], number)

        before = membership(engine)["lost"]
        assert during(engine, run, longer, hit) == wanted, run.log.read_text()
        wait_for(lambda: len(membership(engine)["live"]) == engine.mesh.world, "all ranks", run)
        assert ask(engine, longer) == wanted
        log, told = run.log.read_text(), membership(engine)
        surely = sum(number != RAISES for _, number in strike)
        assert surely <= told["lost"] - before <= len(strike), log
        assert told["returned"] == told["lost"]
        assert "captured again" not in log and "unusable" not in log
    info = engine.get_server_info()
    assert (info["running"], info["waiting"], info["pages_used"]) == (0, 0, 0)


def membership(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine.get_server_info()["membership"]
    return found


@pytest.mark.parametrize(
    ("ranks", "flags", "strikes"),
    [
        pytest.param(3, {}, [[(1, KILLED)]], id="killed"),
        pytest.param(3, {}, [[(2, STOPPED)], [(0, KILLED), (1, KILLED)]], id="more", marks=SLOW),
        pytest.param(3, {"overlap": "tbo"}, [[(0, KILLED)]], id="halves", marks=SLOW),
        pytest.param(3, {"enable_eplb": True}, [[(1, KILLED)]], id="experts move", marks=SLOW),
        pytest.param(4, {"dp_size": 2}, [[(1, KILLED)], [(2, KILLED)]], id="pairs", marks=SLOW),
    ],
)
def test_twins_survive_the_loss_of_ranks(
    ranks: int, flags: dict[str, Any], strikes: list[Strike]
) -> None:
    pytest.importorskip("moesaic.layers.gpu_attention")
    with serving(gpu_rank.SOUND_TWINS, ranks, 4, **flags) as (engine, run):
        check(engine, run, strikes)


@pytest.mark.slow
def test_a_death_that_takes_all_devices_with_it_loses_no_answer() -> None:
    pytest.importorskip("moesaic.layers.gpu_attention")
    with serving(gpu_rank.FRAGILE_TWINS, 3, 4) as (engine, run):
        wanted = ask(engine)
        pid = engine.get_server_info()["ranks"][1]["pid"]
        assert during(engine, run, 1, lambda: os.kill(pid, KILLED)) == wanted
        wait_for(lambda: len(membership(engine)["live"]) == 3, "all ranks", run)
        told, log = membership(engine), run.log.read_text()
        assert (told["lost"], told["returned"]) == (3, 3), log
        assert log.count(f"the GPU is unusable in this process: {gpu_rank.LOST_DEVICE}") >= 2
        assert ask(engine) == wanted


STRIKES = {
    "killed": [[(1, KILLED)]],
    "leader and another": [[(0, KILLED)], [(3, KILLED)]],
    "stopped": [[(2, STOPPED)]],
    "raises": [[(1, RAISES)]],
}


@pytest.mark.parametrize(
    ("ranks", "redundant", "name"),
    [
        pytest.param(ranks, redundant, name, marks=GPU, id=f"{ranks} ranks, {name}")
        for ranks, redundant, name in (
            (2, 8, "killed"),
            (4, 4, "killed"),
            (4, 4, "stopped"),
            (4, 4, "raises"),
            (4, 4, "leader and another"),
        )
    ],
)
def test_ranks_on_one_gpu_survive(ranks: int, redundant: int, name: str) -> None:
    with nothing_left(), serving(faulty_rank.TARGET, ranks, redundant, **ON_GPU) as (engine, run):
        check(engine, run, STRIKES[name], LONGER)
