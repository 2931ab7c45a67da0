"""Instances that lose ranks and supervisors while prompts travel between them: every answer is the
one of a run without faults. bench/pd_faults.py --elastic does it for longer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from bench.fault_run import Run, wait_for
from bench.http_server import free_port
from moesaic import Engine
from tests.e2e.test_disaggregation import Pair
from tests.e2e.test_elastic import PARAMS, PROMPTS, all_live, info

SAME: dict[str, Any] = {
    "model_path": "tiny:qwen3_moe",
    "enable_deterministic_inference": True,
    "elastic_ep_backend": "mooncake",
    "restart_limit": 0,
    "chunked_prefill_size": 8,
    "max_total_tokens": 4096,
    "num_threads": 1,
    "moe_a2a_backend": "deepep",
}
# Each rank has all experts: none has to wait for another one's.
GROUPS = {"enable_dp_attention": True, "ep_num_redundant_experts": 8}
TWO = {"tp_size": 2, "dp_size": 2, "ep_size": 2, **GROUPS}
SHARED = {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 8}
PAIRS_OF_RANKS = {"tp_size": 4, "dp_size": 2, "ep_size": 4, **GROUPS}


@dataclass
class Side:
    """An instance and its processes."""

    engine: Engine
    run: Run

    def strike(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(info(self.engine)["ranks"][rank]["pid"], number)

    def await_all(self) -> None:
        wait_for(lambda: all_live(self.engine), "all ranks", self.run)


@contextmanager
def started(prefill: dict[str, Any], decode: dict[str, Any]) -> Iterator[tuple[Pair, Side, Side]]:
    port, sides = free_port(), list[Side]()
    halves: tuple[dict[str, Any], ...] = (
        {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": port, **prefill},
        {"disaggregation_mode": "decode", **decode},
    )
    with ExitStack() as stack:
        for flags in halves:
            run = Run()
            stack.callback(run.close)
            with run.marked():
                engine = stack.enter_context(Engine(apart=True, **SAME | flags))
            sides.append(Side(engine, run))
        yield Pair(sides[0].engine, sides[1].engine, port), sides[0], sides[1]


def ask(pair: Pair) -> list[Any]:
    """The decode instance's answers. A prefill half may end with an error: it is not needed."""
    call: dict[str, Any] = {"input_ids": PROMPTS, "sampling_params": PARAMS, "return_logprob": True}
    halves = pair.where(len(PROMPTS)) | call
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: pair.prefill.generate(**halves))
        found = pair.decode.generate(**halves)
        first.exception(60)
    return [(one["output_ids"], one["meta_info"]["output_token_logprobs"]) for one in found]


def during(pair: Pair, side: Side, steps: int, strike: Callable[[], None]) -> list[Any]:
    """The answers of requests in whose midst `strike` is called."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(ask(pair)))
    begin = side.run.step()
    thread.start()
    wait_for(lambda: side.run.step() > begin + steps, "steps", side.run)
    strike()
    thread.join(240)
    assert not thread.is_alive(), side.run.log.read_text()
    return found


def check_arrivals(pair: Pair, wanted: list[Any]) -> None:
    """Ranks that have returned send and receive."""
    before = pair.counts()
    assert ask(pair) == wanted
    arrived, recomputed = (b - a for a, b in zip(before[:2], pair.counts()[:2], strict=True))
    assert (arrived, recomputed) == (len(PROMPTS), 0)


@pytest.mark.timeout(400)
def test_answers_survive_what_instances_lose() -> None:
    """Ranks are killed while prompts are computed and sent, and while answers are written."""
    with started(TWO, TWO) as (pair, first, second):
        wanted = ask(pair)
        assert pair.counts()[:2] == (len(PROMPTS), 0)
        assert during(pair, first, 1, lambda: first.strike(1)) == wanted
        assert during(pair, second, 8, lambda: second.strike(0)) == wanted
        pid = first.run.pid("supervisor")
        assert during(pair, first, 1, lambda: os.kill(pid, signal.SIGKILL)) == wanted
        for side in (first, second):
            side.await_all()
        check_arrivals(pair, wanted)
        pair.check_idle()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(TWO, TWO, id="groups of one rank"),
        pytest.param(SHARED, PAIRS_OF_RANKS, id="groups of two ranks"),
    ],
)
def test_every_rank_and_supervisor_once(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    with started(prefill, decode) as (pair, first, second):
        wanted = ask(pair)
        for side, steps in ((first, 1), (second, 8)):
            for rank in range(len(info(side.engine)["ranks"])):
                strike = partial(side.strike, rank, (signal.SIGKILL, signal.SIGSTOP)[rank % 2])
                assert during(pair, side, steps, strike) == wanted
                side.await_all()
                check_arrivals(pair, wanted)
            strike = partial(os.kill, side.run.pid("supervisor"), signal.SIGKILL)
            assert during(pair, side, steps, strike) == wanted
            side.await_all()
            check_arrivals(pair, wanted)
            assert info(side.engine)["losses"]["supervisor"] == 1
        pair.check_idle()
