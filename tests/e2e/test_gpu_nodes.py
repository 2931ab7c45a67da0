"""Ranks on several nodes that compute as on a GPU: on CPU tensors, by the twins of kernels, with
windows over TCP in the place of NCCL; and on a GPU where there is one, which all nodes share."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from bench.http_server import free_port
from moesaic import Engine
from moesaic.comm.launch.mps import start_mps
from moesaic.engine.frontend import core_client as remote
from tests import gpu_rank
from tests.e2e.grid import model_path
from tests.e2e.poison_rank import POISONS
from tests.e2e.test_gpu_ranks import (
    DETERMINISTIC,
    GPU,
    GREEDY,
    LAUNCHES,
    MANY,
    MOVES,
    ON_GPU,
    PARAMS,
    SMALL,
    TENSORS,
    WHOLE,
    answers,
    check_death,
    groups,
    nothing_left,
    of_one,
    parts,
    supervisor_of,
    twins,
)
from tests.e2e.test_rank_isolation import prompts, reason

pytestmark = pytest.mark.timeout(300)

HALVES = {"enable_two_batch_overlap": True}
REPLICAS = {"ep_num_redundant_experts": 4, "ep_dispatch_algorithm": "lp"}
# With two ranks each, rows go both ways: tests/distributed/test_node_dispatch.py always has layers
# on such nodes.
CASES: dict[str, dict[str, Any]] = {
    "one rank each": groups(2, "deepep") | WHOLE,
}
SLOW = {
    "two ranks each": groups(4, "deepep") | WHOLE,
    "low latency": groups(4, "deepep") | WHOLE | {"deepep_mode": "low_latency"},
    "none": groups(4, "none") | WHOLE,
    "flashinfer": groups(4, "flashinfer") | WHOLE,
    "launches": groups(4, "mori") | WHOLE | LAUNCHES,
    "halves": groups(4, "deepep") | WHOLE | HALVES,
    "halves, tensors": TENSORS | HALVES,
    "deterministic": groups(4, "deepep") | WHOLE | DETERMINISTIC,
    "tensors": TENSORS,
    "parts": parts("deepep", tp_size=4, ep_size=4),
    "lp": groups(4, "deepep") | WHOLE | REPLICAS,
    "experts move": groups(4, "deepep") | WHOLE | MOVES,
}


@contextmanager
def second_node(
    flags: dict[str, Any],
    base: dict[str, Any] = SMALL,
    target: str = gpu_rank.TWINS,
    fails: bool = False,
) -> Iterator[dict[str, Any]]:
    """Runs node 1; gives the flags of node 0."""
    flags = {**flags, "nnodes": 2, "dist_init_addr": f"127.0.0.1:{free_port()}"}
    words = list[str]()
    for name, value in {**base, **flags}.items():
        values = value if isinstance(value, tuple) else () if value is True else (value,)
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    command = [sys.executable, "-m", "tests.gpu_rank", target, "serve", model_path("qwen3_moe")]
    other = subprocess.Popen([*command, *words, "--node-rank", "1"])
    try:
        yield flags
        assert (other.wait(60) != 0) == fails
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    "flags",
    [
        *(pytest.param(flags, id=name) for name, flags in CASES.items()),
        *(pytest.param(flags, id=name, marks=pytest.mark.slow) for name, flags in SLOW.items()),
    ],
)
def test_nodes_give_the_tokens_of_one_rank(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come beside decodes, ranks are without tokens, and a step fails."""
    monkeypatch.setenv("MOESAIC_SECRET", "a secret of some length")
    many = PARAMS * 2
    with Engine(model_path=model_path("qwen3_moe"), **SMALL) as one:
        expected = answers(one, many)
    with second_node(flags) as placed, twins("qwen3_moe", **placed) as engine:
        assert answers(engine, many) == expected
        assert answers(engine, many[:1]) == expected[:1]
        bad = [7, 8, POISONS["combine"], 9]
        told = engine.generate(input_ids=[*prompts()[:3], bad], sampling_params=[*many[:3], GREEDY])
        assert isinstance(told, list)
        assert [one["output_ids"] for one in told] == [*expected[:3], []]
        assert "poison in combine" in reason(told[3])["message"]
        if "enable_eplb" in flags:
            check_moves(engine, many, expected)
        if (number := flags.get("dp_size", 1)) > 1:
            digits = {"temperature": 0, "regex": "[0-9]{3}"}
            told = engine.generate("Hi", digits, data_parallel_rank=number - 1)
            assert isinstance(told, dict)
            assert re.fullmatch("[0-9]{3}", told["text"]), "the last group is on node 1"


def check_moves(engine: Engine, params: list[dict[str, Any]], expected: list[Any]) -> None:
    """No token changes until all experts that were to move have done so, twice."""
    for _ in range(20):
        engine.flush_cache()
        assert answers(engine, params) == expected
        moves = [rank.moves for rank in engine.get_stats().ranks]
        if moves[0].rebalances > 1:
            break
    assert moves[0].rebalances > 1 and sum(rank.bytes for rank in moves) > 0


PIDFD_GETFD = 438
STAGES = {"tp_size": 1, "pp_size": 2}
ON_GPUS: dict[str, dict[str, Any]] = {
    "two ranks each": groups(4, "deepep"),
    "one rank each": groups(2, "deepep"),
    "low latency": groups(4, "deepep") | {"deepep_mode": "low_latency"},
    "none": groups(4, "none"),
    "flashinfer": groups(4, "flashinfer"),
    "launches": groups(4, "mori") | LAUNCHES,
    "halves": groups(4, "deepep") | HALVES,
    "deterministic": groups(4, "deepep") | DETERMINISTIC,
    "tensors": TENSORS | {"tp_size": 4, "ep_size": 4},
    "parts": parts("deepep", tp_size=4, ep_size=4),
    "lp": groups(4, "deepep") | REPLICAS,
    "experts move": groups(4, "deepep") | MOVES,
    "a stage each": STAGES,
    "a stage of two ranks each": groups(2, "deepep") | {"pp_size": 2},
}


@pytest.fixture
def one_daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nodes on one GPU share an MPS daemon: processes of two take turns on it."""
    monkeypatch.setenv("MOESAIC_SECRET", "a secret of some length")
    of_one("qwen3_moe")  # in this process, whose part of the GPU stays
    with nothing_left(), start_mps() as mps:
        for name, value in mps.environment.items():
            monkeypatch.setenv(name, value)
        yield


@pytest.mark.parametrize(
    "flags", [pytest.param(flags, id=name, marks=GPU) for name, flags in ON_GPUS.items()]
)
def test_nodes_on_one_gpu(
    flags: dict[str, Any], one_daemon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fails, too: NCCL begins anew, and graphs are captured again."""
    expected = of_one("qwen3_moe")[0]
    monkeypatch.setattr(remote, "TARGET", gpu_rank.POISONED)
    base = {**ON_GPU, "cuda_graph_bs_prefill": (4,)}  # which has no room for poison
    bad = [7, 8, POISONS["combine"], *range(1, 20)]
    with (
        second_node(flags, base, gpu_rank.POISONED) as placed,
        Engine(model_path=model_path("qwen3_moe"), **base, **placed) as engine,
    ):
        assert answers(engine, MANY) == expected
        assert answers(engine, MANY[:1]) == expected[:1]
        told = engine.generate(input_ids=[*prompts()[:3], bad], sampling_params=GREEDY)
        assert isinstance(told, list)
        assert [one["output_ids"] for one in told] == [*expected[:3], []]
        assert "poison in combine" in reason(told[3])["message"]
        for _ in range(2):
            engine.flush_cache()
            assert answers(engine, MANY) == expected
        if "enable_eplb" in flags:
            check_moves(engine, MANY, expected)


@pytest.mark.parametrize("flags", [pytest.param(groups(4, "deepep"), marks=GPU)])
def test_the_same_bits_on_any_nodes(flags: dict[str, Any], one_daemon: None) -> None:
    """In deterministic mode, in bfloat16."""
    base = {**ON_GPU, **DETERMINISTIC, "dtype": "bfloat16"}
    with Engine(model_path=model_path("qwen3_moe"), **base) as one:
        expected = logprobs(one)
    with (
        second_node(flags, base, gpu_rank.POISONED) as placed,
        Engine(model_path=model_path("qwen3_moe"), **base, **placed) as engine,
    ):
        assert logprobs(engine) == expected


def logprobs(engine: Engine) -> list[Any]:
    told = engine.generate(input_ids=prompts()[:6], sampling_params=GREEDY, return_logprob=True)
    assert isinstance(told, list)
    return [one["meta_info"]["output_token_logprobs"] for one in told]


def sockets_of(pid: int) -> Iterator[socket.socket]:
    """Copies of another process's."""
    process, libc = os.pidfd_open(pid), ctypes.CDLL(None)
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                copy = libc.syscall(PIDFD_GETFD, process, int(name), 0)
                assert copy >= 0, "this process may not look into that one"
                yield socket.socket(fileno=copy)
    os.close(process)


def cut_nccl(pid: int) -> int:
    """Shuts down NCCL's connections of a rank; how many. Our own have keep-alive."""
    number = 0
    for one in sockets_of(pid):
        with one, suppress(OSError):
            is_tcp = one.family == socket.AF_INET and one.type == socket.SOCK_STREAM
            if is_tcp and not one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                one.getpeername()  # else it listens
                one.shutdown(socket.SHUT_RDWR)
                number += 1
    return number


@pytest.mark.parametrize("flags", [pytest.param(groups(2, "deepep"), marks=GPU)])
def test_connections_of_nccl_are_cut(flags: dict[str, Any], one_daemon: None) -> None:
    """The step that needs them is tried again on new ones, and no answer changes."""
    expected = of_one("qwen3_moe")[0]
    with (
        second_node(flags, ON_GPU, gpu_rank.POISONED) as placed,
        Engine(model_path=model_path("qwen3_moe"), **ON_GPU, **placed) as engine,
    ):
        for rank in (1, 0):
            assert answers(engine, MANY) == expected
            engine.flush_cache()
            told = engine.get_server_info()
            assert cut_nccl(told["ranks"][rank]["pid"]) > 0
            assert answers(engine, MANY) == expected
            assert engine.get_server_info()["failed_steps"] > told["failed_steps"]


DEATHS: dict[str, tuple[str, Callable[[int], int]]] = {
    "a rank": (r"rank 1 (.*SIGKILL|.*was killed|is lost .*node 1 \(127\.0\.0\.1:)", int),
    "a supervisor": (r"node 1 \(127\.0\.0\.1, rank 1\) is lost: the connection was", supervisor_of),
}


@pytest.mark.slow
@pytest.mark.parametrize("who", DEATHS)
def test_another_node_dies(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While others wait for it; by twins."""
    monkeypatch.setenv("MOESAIC_SECRET", "a secret of some length")
    flags = groups(2, "deepep") | WHOLE | {"max_total_tokens": 4096}
    with second_node(flags, fails=True) as placed, twins("qwen3_moe", **placed) as engine:
        check_death(engine, *DEATHS[who])


@pytest.mark.parametrize("who", [pytest.param(who, marks=GPU) for who in DEATHS])
def test_another_node_dies_on_one_gpu(who: str, one_daemon: None) -> None:
    """While others wait for it in NCCL: it is named, and nothing stays."""
    base, flags = {**ON_GPU, "max_total_tokens": 4096}, groups(2, "deepep")
    with (
        second_node(flags, base, gpu_rank.POISONED, fails=True) as placed,
        Engine(model_path=model_path("qwen3_moe"), **base, **placed) as engine,
    ):
        check_death(engine, *DEATHS[who])
