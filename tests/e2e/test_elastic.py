"""Ranks are killed, stopped and made to raise under a real server: every answer is the one of a run
without faults, no stream ends early, and nothing is left behind. bench/elastic.py counts more."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import elastic_resize
from bench.elastic import BACKENDS, GROUPS, LAYOUTS, Plan, ranks_of, run_layout
from bench.fault_run import Run, wait_for
from moesaic import Engine
from moesaic.engine.frontend import core_client
from tests.e2e import interrupted_rank
from tests.unit.test_draft_model import RANDOM

PROMPTS = [[number + 1] * (5 + 9 * number) for number in range(8)]
PARAMS = [
    {
        "max_new_tokens": 40 + 6 * number,
        "ignore_eos": True,
        "temperature": 0.8 * (number % 2),
        "sampling_seed": number,
    }
    for number in range(8)
]
# Some answers are due to more than the last token.
PARAMS[2] |= {"repetition_penalty": 1.2, "presence_penalty": 0.5}
PARAMS[3] = {"max_new_tokens": 90, "regex": "[a-f ]{90}", "sampling_seed": 3}
COMMON = {
    "model_path": "tiny:qwen3_moe",
    "tp_size": 4,
    "ep_size": 4,
    "dp_size": 4,
    "enable_dp_attention": True,
    "ep_num_redundant_experts": 4,
    "moe_a2a_backend": "deepep",
    "enable_deterministic_inference": True,
    "max_total_tokens": 4096,
    "chunked_prefill_size": 32,
    "elastic_ep_backend": "mooncake",
    "restart_limit": 0,
    "speculative_algorithm": "NGRAM",
}


# Without drafts every token takes a step.
# Layouts that `python -m bench.elastic` alone tries.
LARGE = [f"{name}, 8 ranks" for name in BACKENDS if name != "deepep"]
SHORT = [one | {"max_new_tokens": one["max_new_tokens"] // 2} for one in PARAMS]
SHORT[3] |= {"regex": "[a-f ]{45}"}


def ask(engine: Engine, params: list[dict[str, Any]] = PARAMS) -> list[Any]:
    """The tokens of all answers, their logprobs, and those of the prompts."""
    answers = engine.generate(
        input_ids=PROMPTS,
        sampling_params=params,
        return_logprob=[number < 2 for number in range(8)],
        logprob_start_len=[0 if number < 2 else -1 for number in range(8)],
    )
    names = ("output_token_logprobs", "input_token_logprobs")
    return [
        (answer["output_ids"], *(answer["meta_info"].get(name) for name in names))
        for answer in answers
    ]


def during(
    engine: Engine,
    run: Run,
    strike: Callable[[], None],
    params: list[dict[str, Any]] = PARAMS,
) -> list[Any]:
    """The answers of requests in whose midst `strike` is called. Drafts of tokens that were seen
    before leave them few steps."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(ask(engine, params)))
    begin = run.step()
    thread.start()
    wait_for(lambda: run.step() > begin + 4, "steps", run)
    strike()
    thread.join(240)
    assert not thread.is_alive(), run.log.read_text()
    return found


def scale(engine: Engine, size: int) -> None:
    state = engine.scale_elastic_ep(size)
    assert (state["target_ep_size"], state["max_ep_size"]) == (size, 4)


def all_live(engine: Engine) -> bool:
    return all(one["state"] not in ("absent", "starting") for one in info(engine)["ranks"])


def info(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine.get_server_info()
    return found


def check_resizing(engine: Engine, run: Run, wanted: list[Any]) -> None:
    """Two ranks are too few for the experts; one fewer, and four again, change no answer."""
    with pytest.raises(ValueError, match="2 ranks: 2 ranks have 6 slots for 8 experts"):
        engine.scale_elastic_ep(2)
    for size, phase in ((3, "serving_reduced"), (4, "serving_expanded")):
        assert during(engine, run, partial(scale, engine, size)) == wanted
        wait_for(lambda: not engine.scale_elastic_ep()["is_scaling_elastic_ep"], "ranks", run)
        state = engine.scale_elastic_ep()
        assert (state["scale_phase"], state["effective_ep_size"]) == (phase, size)


@pytest.mark.timeout(400)
def test_answers_survive_the_loss_of_ranks() -> None:
    """A leader is killed, one hangs, and both of two that hold an expert die at once."""
    run = Run()
    try:
        with run.marked():
            engine = Engine(**COMMON)
        try:
            pids = {one["rank"]: one["pid"] for one in info(engine)["ranks"]}
            run.learn()
            wanted = ask(engine)

            def kill(*ranks: int, number: int = signal.SIGKILL) -> None:
                for rank in ranks:
                    os.kill(pids[rank], number)

            assert during(engine, run, lambda: kill(1)) == wanted
            wait_for(lambda: all_live(engine), "rank 1", run)
            assert during(engine, run, lambda: kill(2, number=signal.SIGSTOP)) == wanted
            # Rank 3 has the only copy of nothing, rank 0 its replicas: the others have too few
            # slots, and wait for a rank to return.
            assert during(engine, run, lambda: kill(0, 3)) == wanted
            wait_for(lambda: all_live(engine), "all ranks", run)
            found = info(engine)
            told = found["membership"]
            # On a busy machine a rank may be taken for one that hangs.
            assert told["lost"] == told["returned"] >= 4 and told["live"] == [0, 1, 2, 3]
            stats = engine.get_stats()
            assert stats.membership is not None and stats.membership.live == [0, 1, 2, 3]
            assert told["moved_requests"] >= 1 and all(one["seconds"] for one in told["changes"])
            assert all(one["pid"] != pids[one["rank"]] for one in found["ranks"])
            assert (found["running"], found["waiting"], found["pages_used"]) == (0, 0, 0)
            check_resizing(engine, run, wanted)
            log = run.log.read_text()
            assert len(re.findall(r"rank \d \([^)]*\) returns after", log)) >= 5
            assert "had returned (the step was abandoned after" in log and "read again" in log
            assert re.search(r"waits for its lost ranks: 2 ranks have 6 slots for 8 experts", log)
            run.learn()
        finally:
            engine.shutdown()
        run.await_gone()
        # A compiler of grammars stays with this process.
        assert [one for one in run.left() if not one.startswith("descriptors")] == []
    finally:
        run.close()


@pytest.mark.timeout(400)
def test_a_service_grows_beyond_its_start() -> None:
    """One rank with all experts becomes three, of which one dies on its way, and one again."""
    flags = {"tp_size": 1, "dp_size": 1, "ep_size": 1, "ep_num_redundant_experts": 0}
    run = Run()
    try:
        with run.marked():
            engine = Engine(**COMMON | flags | {"enable_dp_attention": False, "max_ep_size": 3})
        try:
            assert engine.scale_elastic_ep() == {
                "is_scaling_elastic_ep": False,
                "scale_phase": "idle",
                "effective_ep_size": 1,
                "target_ep_size": 1,
                "max_ep_size": 3,
                "last_error": None,
            }
            assert [one["state"] for one in info(engine)["ranks"]][1:] == ["absent"] * 2
            wanted = ask(engine)

            def grow() -> None:
                engine.scale_elastic_ep(3)
                wait_for(lambda: rank_of(run, 2) is not None, "rank 2", run)
                os.kill(rank_of(run, 2) or 0, signal.SIGKILL)

            assert during(engine, run, grow) == wanted
            wait_for(lambda: all_live(engine), "ranks", run)
            assert info(engine)["membership"]["live"] == [0, 1, 2]
            assert during(engine, run, lambda: engine.scale_elastic_ep(1)) == wanted
            assert info(engine)["membership"]["live"] == [0]
            with pytest.raises(ValueError, match=r"4 ranks: give a multiple of 1 up to 3"):
                engine.scale_elastic_ep(4)
        finally:
            engine.shutdown()
        run.await_gone()
        assert [one for one in run.left() if not one.startswith("descriptors")] == []
    finally:
        run.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "overlap", ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tbo", "sbo"))]
)
def test_a_rank_returns_to_steps_that_overlap(overlap: str) -> None:
    """With auto it does not measure again: its choices must be those of the others."""
    flags: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "overlap": overlap}
    flags |= {"model_path": "tiny:deepseek_v3", "ep_num_redundant_experts": 8}
    flags |= {"max_running_requests": 8, "speculative_algorithm": None}
    run = Run()
    try:
        with run.marked():
            engine = Engine(**COMMON | flags)
        try:
            wanted = ask(engine, SHORT)
            choices = info(engine)["overlap_choices"]
            assert bool(choices) == (overlap == "auto")
            pid = info(engine)["ranks"][0]["pid"]
            strike = partial(os.kill, pid, signal.SIGKILL)
            assert during(engine, run, strike, SHORT) == wanted
            wait_for(lambda: all_live(engine), "rank 0", run)
            assert ask(engine, SHORT) == wanted
            found = info(engine)
            assert found["membership"]["returned"] >= 1
            assert found["overlap_choices"] == choices
            log = run.log.read_text()
            assert ("as it was measured when the service started" in log) == (overlap == "auto")
        finally:
            engine.shutdown()
    finally:
        run.close()


@pytest.mark.slow  # test_elastic_head always kills one
@pytest.mark.timeout(400)
def test_all_ranks_end_with_a_supervisor_that_hangs_and_no_request_does() -> None:
    run = Run()
    try:
        with run.marked():
            engine = Engine(**COMMON)
            try:
                wanted, pid = ask(engine), run.pid("supervisor")
                assert during(engine, run, partial(os.kill, pid, signal.SIGSTOP)) == wanted
                assert run.pid("supervisor") != pid
                told = info(engine)["losses"]
                assert (told["http"], told["supervisor"]) == (0, 1)
                (loss,) = told["last"]
                assert loss["process"] == "supervisor" and "hangs" in loss["cause"]
                assert loss["requests"] and loss["seconds"]
            finally:
                engine.shutdown()
        run.await_gone()
    finally:
        run.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_service_of_one_rank_becomes_eight_and_back_under_load() -> None:
    found = elastic_resize.run([1, 8], period=2.0, seconds=30.0)
    assert found.is_good, json.dumps([found.refused, found.shown])
    assert found.asked >= 10 and found.requests > 0 and len(found.reached["1"]) >= 5


@pytest.mark.timeout(400)
def test_ranks_that_share_requests_wait_for_a_lost_one() -> None:
    """Without groups of their own: nobody computes meanwhile, and the service answers questions."""
    flags = {"tp_size": 2, "dp_size": 1, "ep_size": 1, "enable_dp_attention": False}
    run = Run()
    try:
        with run.marked():
            engine = Engine(**COMMON | flags | {"ep_num_redundant_experts": 0})
        try:
            wanted = ask(engine)
            pid = info(engine)["ranks"][1]["pid"]

            def strike() -> None:
                os.kill(pid, signal.SIGKILL)
                while not info(engine)["membership"]["returned"]:
                    engine.get_stats()

            assert during(engine, run, strike) == wanted
            assert info(engine)["membership"]["live"] == [0, 1]
            log = run.log.read_text()
            assert "waits for its lost ranks: without --enable-dp-attention all ranks" in log
            assert re.search(r"replica 0 has waited for \d\.\d\d s", log)
        finally:
            engine.shutdown()
    finally:
        run.close()


@pytest.mark.timeout(400)
def test_an_error_between_two_changes_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the leader had half done is not rolled back but given up: others have the truth."""
    monkeypatch.setattr(core_client, "TARGET", interrupted_rank.TARGET)
    flags = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 8}
    run = Run()
    try:
        with run.marked():
            engine = Engine(**COMMON | flags | {"speculative_algorithm": None})
        try:
            wanted = ask(engine, SHORT)
            for count, point in enumerate(interrupted_rank.POINTS, 1):
                pid, number = info(engine)["ranks"][1]["pid"], interrupted_rank.number_of(point)
                if point == "added, not acknowledged":
                    os.kill(pid, number)
                    assert ask(engine, SHORT) == wanted, point
                else:
                    strike = partial(os.kill, pid, number)
                    assert during(engine, run, strike, SHORT) == wanted, point
                wait_for(lambda: all_live(engine), "rank 1", run)
                assert info(engine)["membership"]["lost"] >= count, point
            log = run.log.read_text()
            assert log.count(f"ValueError: {interrupted_rank.ERROR}") >= len(
                interrupted_rank.POINTS
            )
        finally:
            engine.shutdown()
    finally:
        run.close()


@pytest.mark.timeout(400)
def test_a_rank_that_cannot_start_again_ends_the_service() -> None:
    """It is started again twice, with a pause before the second time."""
    flags = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "restart_limit": 2}
    run = Run()
    try:
        with run.marked():
            engine = Engine(**COMMON | flags | {"speculative_algorithm": None})
        deadline = time.monotonic() + 120
        while not engine.fault and time.monotonic() < deadline:
            if (pid := rank_of(run, 1)) is not None:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        engine.shutdown()
        assert re.search(r"it was lost 2 times in a row \(--restart-limit\)", engine.fault)
    finally:
        run.close()


def rank_of(run: Run, rank: int) -> int | None:
    """The process of a rank, if it is there."""
    for path in Path(f"/proc/{run.find('fork server')}/task").glob("*/children"):
        for pid in path.read_text().split():
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == f"moesaic-rank-{rank}":
                    return int(pid)
    return None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [n for n in LAYOUTS if n not in LARGE])
def test_streams_survive_random_faults(name: str) -> None:
    found = run_layout(name, Plan(faults=12, seconds=60))
    assert found.is_good, json.dumps([found.shown, found.left, found.reconnects])
    assert sum(found.faults.values()) >= 6 and found.requests > 0


def test_layouts_cover_the_backends() -> None:
    backends = ("none", "deepep", "mooncake", "mori", "flashinfer", "ascend_fuseep")
    assert all(GROUPS in LAYOUTS[name] and f"backend {name}" in LAYOUTS[name] for name in backends)
    large = [LAYOUTS[f"{name}, 8 ranks"] for name in backends]
    assert all(flags.endswith(f"backend {one}") for flags, one in zip(large, backends, strict=True))
    assert {*map(ranks_of, large)} == {8} and ranks_of(LAYOUTS["TP 2, PP 2"]) == 4


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "drafts",
    [
        {"speculative_algorithm": "NEXTN", "model_path": RANDOM},
        pytest.param(
            {
                "speculative_algorithm": "STANDALONE",
                "speculative_draft_model_path": "tiny:qwen3_moe",
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_drafts_rest_while_a_rank_is_away(drafts: dict[str, Any]) -> None:
    """Nobody takes over its share of the draft model; answers are those of a run without faults."""
    flags: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "ep_size": 2, **drafts}
    flags |= {"ep_num_redundant_experts": 8, "speculative_num_steps": 1}
    flags |= {"disable_speculative_adaptive": True}
    run = Run()
    try:
        with run.marked():
            engine = Engine(**COMMON | flags)
        try:
            wanted = ask(engine)
            assert drafted_by(engine) > 0
            pid = info(engine)["ranks"][0]["pid"]
            assert during(engine, run, lambda: os.kill(pid, signal.SIGKILL)) == wanted
            wait_for(lambda: all_live(engine), "rank 0", run)
            before = drafted_by(engine)
            assert ask(engine) == wanted
            assert drafted_by(engine) > before
            assert engine.scale_elastic_ep(1)["target_ep_size"] == 1
            wait_for(lambda: info(engine)["membership"]["live"] == [0], "one rank", run)
            before = drafted_by(engine)
            assert ask(engine) == wanted
            assert drafted_by(engine) == before
        finally:
            engine.shutdown()
    finally:
        run.close()


def drafted_by(engine: Engine) -> int:
    return sum(sum(group.drafted_tokens) for group in engine.get_stats().groups)
