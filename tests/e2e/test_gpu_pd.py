"""Prompts that one instance computes on a GPU and another continues, against one instance that does
both: on CPU tensors, by the twins of kernels; and on a GPU where there is one, which they share."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from bench.http_server import free_port
from moesaic import Engine
from moesaic.comm.launch.mps import start_mps
from moesaic.config.gpus import PERCENT
from moesaic.engine.frontend import core_client as remote
from moesaic.router.args import RouterArgs
from tests import gpu_rank
from tests.e2e.grid import model_path
from tests.e2e.test_disaggregation import Pair
from tests.e2e.test_gpu_ranks import (
    DETERMINISTIC,
    GREEDY,
    LAUNCHES,
    MANY,
    ON_GPU,
    PARAMS,
    SMALL,
    TENSORS,
    WHOLE,
    answers,
    groups,
    nothing_left,
    of_gpu,
)
from tests.e2e.test_rank_isolation import prompts
from tests.server.routers import routed
from tests.server.serving import served

pytestmark = pytest.mark.timeout(400)

DPA = groups(2, "deepep") | WHOLE
STAGES = {"tp_size": 1, "pp_size": 2}


@contextmanager
def pair_of(
    family: str, prefill: dict[str, Any], decode: dict[str, Any], target: str | None = None
) -> Iterator[Pair]:
    port, before = free_port(), remote.TARGET
    there = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": port}
    given = {"model_path": model_path(family), "apart": True, "dist_timeout": 60}
    try:
        remote.TARGET = target or before
        with ExitStack() as stack:
            made = [
                stack.enter_context(Engine(**given, **flags))
                for flags in (prefill | there, decode | {"disaggregation_mode": "decode"})
            ]
            yield Pair(*made, port)
    finally:
        remote.TARGET = before


def both(pair: Pair, params: list[dict[str, Any]], logprobs: bool = False) -> list[Any]:
    """The decode instance's answers."""
    call = {"input_ids": prompts()[: len(params)], "sampling_params": params}
    call |= {"return_logprob": logprobs} | pair.where(len(params))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: pair.prefill.generate(**call))
        found: Any = pair.decode.generate(**call)
        first.result(60)
    return found  # type: ignore[no-any-return]


def transports(pair: Pair) -> set[str]:
    return set(pair.prefill.get_server_info()["kv_transports"].values())


@pytest.mark.parametrize(
    ("family", "prefill", "decode"),
    [
        pytest.param("qwen3_moe", DPA, STAGES, id="heads"),
        pytest.param("deepseek_v3", TENSORS, DPA, id="latents", marks=pytest.mark.slow),
        pytest.param("gpt_oss", STAGES, TENSORS, id="tensors", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", DPA, DPA | LAUNCHES, id="launches", marks=pytest.mark.slow),
    ],
)
def test_twins_give_the_tokens_of_one_rank(
    family: str, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    """Steps are asynchronous on both sides: prompts are sent and taken beside the next step."""
    many = PARAMS * 2
    with Engine(model_path=model_path(family), **SMALL) as one:
        expected = answers(one, many)
    twins = SMALL | {"page_size": 8}, SMALL
    with pair_of(family, twins[0] | prefill, twins[1] | decode, gpu_rank.TWINS) as pair:
        for _ in range(2):
            assert [one["output_ids"] for one in both(pair, many)] == expected
        assert pair.counts()[:2] == (2 * len(many), 0)
        assert transports(pair) == {"shm"}
        pair.check_idle()


@pytest.fixture
def one_daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both instances are clients of one MPS daemon, each with its share of the processors."""
    with nothing_left(), start_mps() as mps:
        for name, value in {**mps.environment, PERCENT: "50"}.items():
            monkeypatch.setenv(name, value)
        yield


SIZES: dict[str, Any] = ON_GPU | {"mem_fraction_static": 0.3}


@pytest.mark.parametrize(
    ("family", "prefill", "decode", "used"),
    of_gpu(
        ("qwen3_moe", {}, {"page_size": 16}, "cuda_ipc"),
        ("qwen3_moe", {"disaggregation_transfer_backend": "tcp"}, {}, "tcp"),
        ("qwen3_moe", DETERMINISTIC, DETERMINISTIC | LAUNCHES, "cuda_ipc"),
        ("deepseek_v3", {}, {"page_size": 8}, "cuda_ipc"),
        ("gpt_oss", TENSORS, STAGES, "cuda_ipc"),
        ("qwen3_moe", DPA, {}, "cuda_ipc"),
    ),
)
def test_instances_on_one_gpu(
    family: str, prefill: dict[str, Any], decode: dict[str, Any], used: str, one_daemon: None
) -> None:
    """Through the router, too. In deterministic mode logprobs are the same to the bit."""
    flags = DETERMINISTIC if DETERMINISTIC.items() <= prefill.items() else {}
    with Engine(model_path=model_path(family), apart=True, **SIZES, **flags) as one:
        expected = answers(one, MANY)
        scored: Any = one.generate(
            input_ids=prompts()[:4], sampling_params=GREEDY, return_logprob=True
        )
    with pair_of(family, SIZES | prefill, SIZES | decode) as pair:
        for _ in range(2):
            assert [one["output_ids"] for one in both(pair, MANY)] == expected
        found = both(pair, [GREEDY] * 4, logprobs=True)
        for one, other in zip(found, scored, strict=True):
            mine, theirs = (each["meta_info"]["output_token_logprobs"] for each in (one, other))
            if flags:
                assert mine == theirs
            assert [entry[0] for entry in mine] == pytest.approx(
                [entry[0] for entry in theirs], abs=1e-3
            )
        assert pair.counts()[:2] == (2 * len(MANY) + 4, 0)
        assert transports(pair) == {used}
        with ExitStack() as stack:
            urls = [stack.enter_context(served(one)) for one in (pair.prefill, pair.decode)]
            ends = {"prefill": (f"{urls[0]} {pair.port}",), "decode": (urls[1],)}
            _, http = stack.enter_context(routed(RouterArgs(pd_disaggregation=True, **ends)))
            body = {"input_ids": prompts()[: len(MANY)], "sampling_params": GREEDY}
            told = http.post("/generate", json=body).json()
        assert [one["output_ids"] for one in told] == expected
        assert pair.counts()[:2] == (3 * len(MANY) + 4, 0)
        pair.check_idle()


@pytest.mark.parametrize(("one", "other"), of_gpu(("cuda", "cpu"), ("cpu", "cuda")))
def test_a_gpu_and_a_cpu(one: str, other: str) -> None:
    """Neither reads the memory of the other: from the GPU by TCP, from shared memory to it."""
    first, second = ({"device": kind, "dtype": "float32", **SMALL} for kind in (one, other))
    with Engine(model_path=model_path("qwen3_moe"), **SMALL) as engine:
        expected = answers(engine, MANY)
    with pair_of("qwen3_moe", first, second) as pair:
        assert [found["output_ids"] for found in both(pair, MANY)] == expected
        assert transports(pair) == {"tcp" if one == "cuda" else "shm"}
