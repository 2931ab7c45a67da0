"""Several ranks that compute as on a GPU: on CPU tensors, where the twins of kernels compute; and
on a GPU where there is one, which they share."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from moesaic import Engine
from moesaic.comm.launch.mps_owner import mps_processes
from moesaic.engine.frontend import core_client as remote
from moesaic.models.tiny import FAMILIES
from tests import gpu_rank
from tests.e2e.grid import model_path, sorted_experts
from tests.e2e.poison_rank import POISONS
from tests.e2e.test_rank_isolation import prompts, reason

pytestmark = pytest.mark.timeout(300)

WHOLE = {"enable_dp_lm_head": True, "moe_dense_tp_size": 1}
TENSORS = {"tp_size": 2, "ep_size": 2}
DETERMINISTIC = {"enable_deterministic_inference": True}
LAUNCHES = {"disable_cuda_graph": True}
MOVES = {
    "enable_eplb": True,
    "ep_num_redundant_experts": 4,
    "eplb_algorithm": "deepseek",
    "eplb_rebalance_num_iterations": 3,
    "eplb_max_bytes_per_step": 30_000,
}
BACKENDS = ("none", "mooncake", "mori", "flashinfer", "ascend_fuseep")
SMALL = {"page_size": 4, "chunked_prefill_size": 32, "max_running_requests": 6}
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
PARAMS: list[dict[str, Any]] = [
    GREEDY,
    {"temperature": 0.9, "sampling_seed": 3, "max_new_tokens": 7},
    {"temperature": 0, "max_new_tokens": 8, "repetition_penalty": 1.3, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "sampling_seed": 5, "max_new_tokens": 6},
    {"temperature": 0, "max_new_tokens": 1},
]


def groups(ranks: int, backend: str) -> dict[str, Any]:
    return {
        "tp_size": ranks,
        "ep_size": ranks,
        "dp_size": ranks,
        "enable_dp_attention": True,
        "moe_a2a_backend": backend,
    }


def parts(backend: str, **more: Any) -> dict[str, Any]:
    """Tensors are cut, and ranks that have the same tokens take a part each to the experts."""
    return {**TENSORS, "moe_a2a_backend": backend, **more}


def pairs_of_ranks(backend: str) -> dict[str, Any]:
    """The same in each of two attention groups."""
    return {**groups(4, backend), "dp_size": 2}


def cut_dense(flags: dict[str, Any]) -> dict[str, Any]:
    """Dense layers and shared experts are cut over the ranks of all attention groups."""
    return {**flags, "enable_dp_lm_head": True, "moe_dense_tp_size": flags["tp_size"]}


SLOW = {
    "tensors": TENSORS,
    "deepep": groups(2, "deepep") | WHOLE,
    **{backend: groups(2, backend) | WHOLE for backend in BACKENDS},
    "launches": groups(2, "deepep") | WHOLE | LAUNCHES,
    "deterministic": groups(2, "deepep") | WHOLE | DETERMINISTIC,
    "four": groups(4, "deepep") | WHOLE | {"deepep_mode": "low_latency"},
    "parts, low latency": parts("deepep", deepep_mode="low_latency"),
    "parts, normal": parts("deepep", deepep_mode="normal", moe_dense_tp_size=1, **LAUNCHES),
    "parts, deterministic": parts("deepep", tp_size=4, **DETERMINISTIC),
    **{f"parts, {backend}": parts(backend) for backend in BACKENDS if backend != "none"},
    **{f"pairs, {name}": pairs_of_ranks(name) | WHOLE for name in ("deepep", "none")},
    "pairs, launches": pairs_of_ranks("flashinfer") | WHOLE | LAUNCHES,
    "stages": {"tp_size": 1, "pp_size": 2},
    "stages, launches": {"tp_size": 1, "pp_size": 2} | LAUNCHES,
    **{
        f"stages of groups, {name}": groups(2, name) | WHOLE | {"pp_size": 2}
        for name in ("deepep", *BACKENDS)
    },
    "stages of tensors": {**TENSORS, "pp_size": 2},
    "stages, experts move": groups(2, "deepep") | WHOLE | {"pp_size": 2} | MOVES,
}
# Models with dense layers; only those without latents have graphs of steps with prompts.
CUT_DENSE = {
    "four": ("deepseek_v2", groups(4, "flashinfer")),
    "none": ("deepseek_v3", groups(2, "none")),
    "deterministic": ("qwen2_moe", groups(2, "deepep") | DETERMINISTIC),
    "launches": ("qwen2_moe", groups(2, "mori") | LAUNCHES),
    "pairs": ("qwen2_moe", pairs_of_ranks("deepep")),
    "pairs, none": ("deepseek_v3", pairs_of_ranks("none")),
    "stages": ("deepseek_v3", groups(2, "deepep") | {"pp_size": 2}),
    "waterfill": ("qwen2_moe", groups(3, "deepep") | {"enable_waterfill": True} | MOVES),
    "waterfill, latents": ("deepseek_v3", groups(2, "flashinfer") | {"enable_waterfill": True}),
}


@contextmanager
def twins(family: str, **flags: Any) -> Iterator[Engine]:
    before, remote.TARGET = remote.TARGET, gpu_rank.TWINS
    try:
        with Engine(model_path=model_path(family), **SMALL, **flags) as engine:
            yield engine
    finally:
        remote.TARGET = before


def answers(engine: Engine, params: list[dict[str, Any]], logprobs: bool = False) -> list[Any]:
    told = engine.generate(
        input_ids=prompts()[: len(params)], sampling_params=params, return_logprob=logprobs
    )
    assert isinstance(told, list)
    return [one["output_ids"] for one in told]


def routed(engine: Engine) -> Any:
    """The experts of some tokens in all layers: of prompts in chunks and of answers."""
    told = engine.generate(
        input_ids=prompts()[:6], sampling_params=GREEDY, return_routed_experts=True
    )
    assert isinstance(told, list)
    return np.concatenate([sorted_experts(one, engine.routing_info()["top_k"]) for one in told])


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(groups(2, "deepep") | WHOLE | MOVES, id="deepep, experts move"),
        pytest.param(parts("deepep"), id="parts"),
        *(pytest.param(flags, id=name, marks=pytest.mark.slow) for name, flags in SLOW.items()),
    ],
)
def test_ranks_give_the_tokens_of_one(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_twins("qwen3_moe", flags, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        pytest.param("deepseek_v3", groups(2, "deepep"), id="latents", marks=pytest.mark.slow),
        pytest.param("qwen2_moe", groups(3, "deepep"), id="three"),
        *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in CUT_DENSE.items()),
    ],
)
def test_attention_groups_share_dense_layers(
    family: str, flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_twins(family, cut_dense(flags), tmp_path, monkeypatch)


def check_twins(
    family: str, flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, so that buckets change and prompts come beside decodes; one alone, so that other
    ranks have nothing; and beside one whose step fails. Then one dies while others wait for its
    rows in kernels, which the supervisor's word ends."""
    pytest.importorskip("moesaic.layers.gpu_attention")
    many, buckets = PARAMS * 2, tmp_path / "buckets"
    monkeypatch.setenv(gpu_rank.BUCKETS, str(buckets))
    with Engine(model_path=model_path(family), **SMALL) as one:
        expected = answers(one, many)
        scored = answers(one, PARAMS[:2], logprobs=True)
        experts = routed(one)
    with twins(family, **flags) as engine:
        assert engine.get_server_info()["placement"]["version"] == 0, "nothing has moved"
        assert answers(engine, many) == expected
        assert answers(engine, many[:1]) == expected[:1]
        assert answers(engine, PARAMS[:2], logprobs=True) == scored
        assert (routed(engine) == experts).all()
        engine.flush_cache()
        bad = [7, 8, POISONS["combine"], 9]
        told = engine.generate(input_ids=[*prompts()[:3], bad], sampling_params=[*many[:3], GREEDY])
        assert isinstance(told, list)
        assert [one["output_ids"] for one in told] == [*expected[:3], []]
        assert "poison in combine" in reason(told[3])["message"]
        info = engine.get_server_info()
        ranks = flags["tp_size"] * flags.get("pp_size", 1)
        assert info["failed_steps"] > 0 and len(info["ranks"]) == ranks
        assert (engine.get_stats().ranks[0].moves.rebalances > 0) == ("enable_eplb" in flags)
        check_death(engine)
    has_graphs = "disable_cuda_graph" not in flags and not family.startswith("deepseek")
    assert buckets.exists() == has_graphs, "latents have no graphs of steps with prompts"
    if has_graphs:
        ran = {tuple(map(int, line.split())) for line in buckets.read_text().splitlines()}
        # With one attention group all ranks have the same tokens.
        assert any(own < agreed for own, agreed in ran) == (flags.get("dp_size", 1) > 1)


def supervisor_of(rank: int) -> int:
    """By process ids: a fork server is between them."""
    found = psutil.Process(rank).parents()[1]
    assert found.name() == "moesaic-super"
    return found.pid


def check_death(
    engine: Engine,
    lost: str = r"rank 1 (\(.*\) was killed|.*SIGKILL)",
    victim: Callable[[int], int] = int,
) -> None:
    """`victim`: the process to kill, by rank 1's."""
    params = {"temperature": 0, "max_new_tokens": 1000, "ignore_eos": True}
    pids = [rank["pid"] for rank in engine.get_server_info()["ranks"]]
    stream = engine.generate(input_ids=[1, 2, 3], sampling_params=params, stream=True)
    next(iter(stream))
    began = time.monotonic()
    os.kill(victim(pids[1]), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=lost):
        for piece in stream:
            if (end := reason(piece)) is not None and end["type"] == "abort":
                raise RuntimeError(end["message"])
    assert time.monotonic() - began < 20.0
    deadline = time.monotonic() + 20.0
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if lives(pid)] == []


def lives(pid: int) -> bool:
    return Path("/proc", str(pid)).exists()


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


def of_gpu(*cases: Any) -> list[Any]:
    return [pytest.param(*case, marks=GPU) for case in cases]


@contextmanager
def nothing_left() -> Iterator[None]:
    """Neither daemons nor memory of the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    daemons, used = set(mps_processes()), used_bytes()
    yield
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        if set(mps_processes()) <= daemons and used_bytes() <= used + (64 << 20):
            return
        time.sleep(0.2)
    raise AssertionError(f"{set(mps_processes()) - daemons}, {used_bytes() - used} bytes")


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info(0)
    return total - free


ON_GPU = {
    "device": "cuda",
    "dtype": "float32",
    "max_total_tokens": 2048,
    "cuda_graph_bs_prefill": gpu_rank.MIXED_SIZES,
    **SMALL,
}
MANY = [GREEDY] * 10


@cache
def of_one(family: str) -> list[Any]:
    """What one rank answers there."""
    with Engine(model_path=model_path(family), **ON_GPU) as engine:
        return [answers(engine, MANY), routed(engine)]


def check_on_gpu(family: str, flags: dict[str, Any]) -> None:
    expected, experts = of_one(family)
    with nothing_left(), Engine(model_path=model_path(family), **ON_GPU, **flags) as engine:
        assert answers(engine, MANY) == expected
        assert answers(engine, MANY[:1]) == expected[:1]
        # Rounding decides between two experts now and then.
        assert (routed(engine) != experts).any(-1).mean() < 0.01
        providers = engine.get_server_info()["providers"]
    backend = flags.get("moe_a2a_backend", "none")
    assert (providers["device"], providers["a2a"]) == ("cuda", backend)


@pytest.mark.parametrize(
    ("family", "ranks", "backend"),
    of_gpu(
        *((family, 2, "deepep") for family in FAMILIES),
        *(("qwen3_moe", 4, backend) for backend in ("deepep", *BACKENDS)),
        ("qwen3_moe", 8, "deepep"),
    ),
)
def test_ranks_on_one_gpu_give_the_tokens_of_one(family: str, ranks: int, backend: str) -> None:
    check_on_gpu(family, groups(ranks, backend))


@pytest.mark.parametrize(
    ("family", "flags"),
    of_gpu(
        *((family, TENSORS) for family in FAMILIES),
        *((family, parts("deepep")) for family in FAMILIES),
        *(("qwen3_moe", parts(backend, tp_size=4)) for backend in BACKENDS if backend != "none"),
        ("qwen3_moe", parts("deepep", tp_size=4, ep_size=4, deepep_mode="low_latency")),
        ("deepseek_v3", parts("deepep", moe_dense_tp_size=1, **LAUNCHES)),
        ("qwen3_moe", pairs_of_ranks("deepep")),
        ("deepseek_v3", pairs_of_ranks("none")),
        ("qwen3_moe", pairs_of_ranks("deepep") | {"tp_size": 8, "ep_size": 8}),
        ("deepseek_v3", cut_dense(groups(4, "deepep"))),
        ("deepseek_v3", cut_dense(pairs_of_ranks("none"))),
        ("qwen2_moe", cut_dense(groups(2, "deepep"))),
        ("qwen2_moe", cut_dense(groups(3, "flashinfer")) | LAUNCHES),
        ("qwen2_moe", cut_dense(pairs_of_ranks("deepep"))),
        ("qwen2_moe", groups(4, "deepep") | {"enable_waterfill": True}),
        ("deepseek_v3", groups(2, "flashinfer") | {"enable_waterfill": True}),
    ),
)
def test_a_model_cut_over_ranks_on_one_gpu(family: str, flags: dict[str, Any]) -> None:
    check_on_gpu(family, flags)


@pytest.mark.parametrize(
    ("family", "flags"),
    of_gpu(
        ("qwen3_moe", {"tp_size": 1, "pp_size": 2}),
        ("qwen3_moe", {**TENSORS, "pp_size": 2} | LAUNCHES),
        ("qwen3_moe", groups(2, "deepep") | {"pp_size": 2}),
        ("deepseek_v3", groups(2, "none") | {"pp_size": 2}),
        *(("qwen3_moe", groups(2, name) | {"pp_size": 2}) for name in BACKENDS if name != "none"),
        ("qwen3_moe", groups(2, "deepep") | {"pp_size": 2} | MOVES),
    ),
)
def test_pipeline_stages_on_one_gpu(family: str, flags: dict[str, Any]) -> None:
    check_on_gpu(family, flags)


@pytest.mark.parametrize("ranks", [pytest.param(count, marks=GPU) for count in (2, 4, 8)])
def test_a_rank_that_dies_leaves_nothing_on_the_gpu(ranks: int) -> None:
    flags = {**ON_GPU, "max_total_tokens": 4096, **groups(ranks, "deepep")}
    with nothing_left(), Engine(model_path=model_path("qwen3_moe"), **flags) as engine:
        check_death(engine)


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=GPU) for mode in ("auto", "normal")])
def test_experts_move_between_ranks_on_one_gpu(mode: str) -> None:
    """Every few steps, while graphs are replayed: no token changes."""
    flags = groups(4, "deepep") | MOVES | {"deepep_mode": mode}
    expected, _ = of_one("qwen3_moe")
    with nothing_left(), Engine(model_path=model_path("qwen3_moe"), **ON_GPU, **flags) as engine:
        for _ in range(12):
            assert answers(engine, MANY) == expected
            engine.flush_cache()
        moves = engine.get_stats().ranks[0].moves
    assert moves.aborted == 0 and moves.rebalances > 3 and moves.bytes > 0
