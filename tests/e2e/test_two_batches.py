"""Steps in two micro-batches give the answers of whole ones: bit by bit on CPU ranks and on a GPU,
which ranks share; and by the twins of kernels."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moesaic import Engine
from tests.e2e.grid import DPA, SLOW, model_path
from tests.e2e.test_deterministic_ranks import QUICK_TOKENS, expected, serve
from tests.e2e.test_gpu_ranks import (
    DETERMINISTIC,
    GREEDY,
    LAUNCHES,
    MOVES,
    ON_GPU,
    PARAMS,
    SMALL,
    WHOLE,
    check_twins,
    cut_dense,
    groups,
    of_gpu,
    pairs_of_ranks,
    parts,
    prompts,
)
from tests.e2e.test_rank_isolation import Served, poisoned

pytestmark = pytest.mark.timeout(300)

TBO = {"enable_two_batch_overlap": True}
Answers = list[tuple[list[int], list[Any]]]

MOVING = (
    "--enable-eplb --ep-num-redundant-experts 4 --eplb-algorithm deepseek "
    "--eplb-rebalance-num-iterations 3 --eplb-max-bytes-per-step 30000"
)
# Every family and backend; attention groups of one rank and of several, one group, slices of
# experts, replicas, experts that move, stages; prompts in chunks, sequences that are never cut.
LINES = (f"qwen3_moe --tp 4 {DPA} 2 --moe-a2a-backend deepep --chunked-prefill-size 24 {MOVING}",)
SLOW_LINES = (
    f"deepseek_v3 --tp 2 --pp 2 {DPA} 2 --moe-a2a-backend flashinfer",
    f"gpt_oss --tp 2 {DPA} 2 --moe-a2a-backend ascend_fuseep --tbo-token-distribution-threshold 0",
    "mixtral --tp 4 --ep 2 --ep-num-redundant-experts 3 --ep-dispatch-algorithm lp",
    "qwen2_moe --tp 2 --moe-a2a-backend mori",
    f"deepseek_v2 --tp 3 {DPA} 3 --moe-a2a-backend mooncake",
    *(line for line in SLOW if "--tp" in line and "--tp 1" not in line),
)


def check_bits(line: str) -> None:
    family = line.split()[0]
    order = list(range(len(expected(family, "float32", QUICK_TOKENS))))
    random.Random(line).shuffle(order)
    found = serve(f"{line} --overlap tbo", "float32", order, QUICK_TOKENS, waves=2)
    # With --enable-waterfill bits may differ from those without it, whole or in halves.
    whole = line if "--enable-waterfill" in line else family
    assert found == expected(whole, "float32", QUICK_TOKENS)


@pytest.mark.parametrize("line", LINES)
def test_the_bits_of_one_rank(line: str) -> None:
    check_bits(line)


@pytest.mark.slow
@pytest.mark.parametrize("line", SLOW_LINES)
def test_the_bits_of_one_rank_on_other_meshes(line: str) -> None:
    if "--ep-num-redundant" in line and "--ep " in line:
        pytest.skip("deterministic mode has copies of experts in fixed places")
    check_bits(line)


def answers(engine: Engine, count: int = 12) -> Answers:
    """Tokens and their logprobs, of greedy and of random requests."""
    told = engine.generate(
        input_ids=prompts()[:count],
        sampling_params=[PARAMS[number % len(PARAMS)] for number in range(count)],
        return_logprob=True,
    )
    assert isinstance(told, list)
    return [(one["output_ids"], one["meta_info"]["output_token_logprobs"]) for one in told]


def tokens(told: Answers) -> list[list[int]]:
    return [ids for ids, _ in told]


@contextmanager
def engine_of(family: str, **flags: Any) -> Iterator[Engine]:
    with Engine(model_path=model_path(family), **SMALL, **flags) as engine:
        yield engine


def test_each_half_dispatches() -> None:
    """In a step of two micro-batches every layer dispatches twice."""
    with engine_of("qwen3_moe", **groups(2, "deepep"), **TBO) as engine:
        engine.generate(input_ids=prompts()[:6], sampling_params=GREEDY)
        stats = engine.get_stats().ranks[0]
        dispatches = sum(traffic.dispatches for traffic in stats.traffic.values())
        most = 2 * len(stats.layers) * stats.steps
        assert 0.8 * most < dispatches <= most
        routed = engine.generate(
            input_ids=prompts()[:6], sampling_params=GREEDY, return_routed_experts=True
        )
        assert isinstance(routed, list) and all("routed_experts" in r["meta_info"] for r in routed)


@pytest.mark.slow
def test_experts_move_at_the_same_time() -> None:
    flags = groups(2, "deepep") | MOVES | DETERMINISTIC
    with engine_of("qwen3_moe", **groups(2, "deepep"), **DETERMINISTIC) as engine:
        wanted = answers(engine)
    with engine_of("qwen3_moe", **flags, **TBO) as engine:
        for _ in range(3):
            assert answers(engine) == wanted
            engine.flush_cache()
        moves = engine.get_stats().ranks[0].moves
    assert moves.aborted == 0 and moves.rebalances > 1 and moves.bytes > 0


@pytest.mark.slow
def test_retraction() -> None:
    """With too few pages for all requests."""
    flags = groups(2, "flashinfer") | DETERMINISTIC | {"max_total_tokens": 96}
    with engine_of("qwen3_moe", **groups(2, "flashinfer"), **DETERMINISTIC) as engine:
        call = {"input_ids": prompts()[:6], "sampling_params": GREEDY | {"max_new_tokens": 30}}
        wanted = [one["output_ids"] for one in engine.generate(**call)]
    with engine_of("qwen3_moe", **flags, **TBO) as engine:
        found = [one["output_ids"] for one in engine.generate(**call)]
        assert found == wanted
        assert sum(group.retractions for group in engine.get_stats().groups) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        f"qwen3_moe --tp 2 {DPA} 2 --moe-a2a-backend deepep --page-size 4",
        f"qwen3_moe --tp 4 {DPA} 2 --moe-a2a-backend mooncake",
        "qwen3_moe --tp 2 --pp 2",
    ],
)
def test_a_failing_request_ends_alone(line: str) -> None:
    with poisoned(f"{line} --overlap tbo") as engine:
        served = Served(engine)
        for place, name in enumerate(("router", "experts", "combine")):
            served.poisoned_prompt(name, 3 * place)


@pytest.mark.slow
def test_aborted_requests_change_no_other() -> None:
    """Requests come at random, and every third is aborted after some tokens."""
    flags = groups(2, "deepep") | DETERMINISTIC
    with engine_of("qwen3_moe", **flags, **TBO) as engine:
        alone = [engine.generate(input_ids=p, sampling_params=GREEDY) for p in prompts()[:9]]

        async def ask(number: int) -> list[int]:
            chooser = random.Random(number)
            await asyncio.sleep(chooser.random() / 10)
            told: list[int] = []
            call = {"input_ids": prompts()[number % 9], "sampling_params": GREEDY}
            if number % 3:
                return (await engine.async_generate(**call))["output_ids"]
            async for piece in await engine.async_generate(**call, stream=True, rid=f"r{number}"):
                told = piece["output_ids"]
                if len(told) > chooser.randrange(8):
                    engine.abort(f"r{number}")
            return told

        async def ask_all() -> list[list[int]]:
            return await asyncio.gather(*map(ask, range(27)))

        for number, ids in enumerate(asyncio.run(ask_all())):
            wanted = alone[number % 9]["output_ids"]
            assert ids == wanted[: len(ids)]
            assert number % 3 == 0 or ids == wanted


TWINS = {
    "groups": ("qwen3_moe", groups(2, "deepep") | WHOLE),
}
SLOW_TWINS = {
    "latents": ("deepseek_v3", pairs_of_ranks("none") | WHOLE),
    "parts": ("gpt_oss", parts("flashinfer")),
    "launches": ("qwen2_moe", groups(2, "mori") | WHOLE | LAUNCHES),
    "four": ("deepseek_v2", groups(4, "deepep") | WHOLE | {"deepep_mode": "low_latency"}),
    "fused": ("mixtral", groups(2, "ascend_fuseep") | WHOLE),
    "mooncake": ("qwen3_moe", groups(2, "mooncake") | WHOLE),
    "same tokens": ("qwen3_moe", {"tp_size": 2, "ep_size": 2}),
    "experts move": ("qwen3_moe", groups(2, "deepep") | WHOLE | MOVES),
    "stages": ("qwen3_moe", groups(2, "deepep") | WHOLE | {"pp_size": 2}),
    "dense": ("qwen2_moe", cut_dense(pairs_of_ranks("deepep"))),
    "three": ("deepseek_v3", cut_dense(groups(3, "deepep"))),
}


@pytest.mark.parametrize(
    "name", [*TWINS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_TWINS)]
)
def test_the_tokens_of_one_rank_as_on_a_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the static buffers of graphs, of decode steps and of steps with prompts."""
    family, flags = (TWINS | SLOW_TWINS)[name]
    check_twins(family, flags | TBO, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("family", "flags"),
    of_gpu(
        ("qwen3_moe", groups(2, "deepep") | DETERMINISTIC),
        ("deepseek_v3", groups(4, "deepep") | DETERMINISTIC),
        ("qwen3_moe", parts("deepep", **DETERMINISTIC)),
        ("gpt_oss", groups(4, "none") | DETERMINISTIC),
        ("qwen2_moe", groups(2, "flashinfer") | DETERMINISTIC | LAUNCHES),
        ("qwen3_moe", groups(2, "ascend_fuseep") | DETERMINISTIC),
    ),
)
def test_the_same_bits_on_one_gpu(family: str, flags: dict[str, Any]) -> None:
    found = []
    for more in ({}, TBO):
        with Engine(model_path=model_path(family), **ON_GPU, **flags, **more) as engine:
            found.append(answers(engine))
    assert found[1] == found[0]
