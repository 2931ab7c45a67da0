"""Ranks on several nodes that compute as on a GPU: on CPU tensors, by the twins of kernels, with
windows over TCP in the place of NCCL."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from moesaic import Engine
from tests.e2e.grid import model_path
from tests.e2e.poison_rank import POISONS
from tests.e2e.test_gpu_ranks import (
    DETERMINISTIC,
    GREEDY,
    LAUNCHES,
    MOVES,
    PARAMS,
    SMALL,
    TENSORS,
    WHOLE,
    answers,
    groups,
    parts,
    twins,
)
from tests.e2e.test_rank_isolation import prompts, reason

pytestmark = pytest.mark.timeout(300)

REPLICAS = {"ep_num_redundant_experts": 4, "ep_dispatch_algorithm": "lp"}
CASES: dict[str, dict[str, Any]] = {
    "two ranks each": groups(4, "deepep") | WHOLE,
}
SLOW = {
    "one rank each": groups(2, "deepep") | WHOLE,
    "low latency": groups(4, "deepep") | WHOLE | {"deepep_mode": "low_latency"},
    "none": groups(4, "none") | WHOLE,
    "flashinfer": groups(4, "flashinfer") | WHOLE,
    "launches": groups(4, "mori") | WHOLE | LAUNCHES,
    "deterministic": groups(4, "deepep") | WHOLE | DETERMINISTIC,
    "tensors": TENSORS,
    "parts": parts("deepep", tp_size=4, ep_size=4),
    "lp": groups(4, "deepep") | WHOLE | REPLICAS,
    "experts move": groups(4, "deepep") | WHOLE | MOVES,
}


@contextmanager
def second_node(flags: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs node 1; gives the flags of node 0."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    flags = {**flags, "nnodes": 2, "dist_init_addr": address}
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in {**SMALL, **flags}.items()
    ]
    command = [sys.executable, "-m", "tests.gpu_rank", "serve", model_path("qwen3_moe"), *words]
    other = subprocess.Popen([*command, "--node-rank=1"])
    try:
        yield flags
        assert other.wait(60) == 0
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


def check_moves(engine: Engine, params: list[dict[str, Any]], expected: list[Any]) -> None:
    """No token changes until all experts that were to move have done so, twice."""
    for _ in range(20):
        engine.flush_cache()
        assert answers(engine, params) == expected
        moves = [rank.moves for rank in engine.get_stats().ranks]
        if moves[0].rebalances > 1:
            break
    assert moves[0].rebalances > 1 and sum(rank.bytes for rank in moves) > 0
