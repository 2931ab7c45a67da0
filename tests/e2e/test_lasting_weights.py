"""Ranks are killed while their weights stay: a rank that is started again, and ranks that take over
its experts, read nothing from a checkpoint that is gone, and answers are those of before."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from bench.fault_run import Run, wait_for
from moesaic import Engine
from moesaic.comm.windows.lasting_memory import NAME
from moesaic.models.tiny import make_tiny_checkpoint

PROMPTS = [[number + 1] * (5 + 9 * number) for number in range(4)]
PARAMS = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0}
FLAGS: dict[str, Any] = {
    "tp_size": 3,
    "ep_size": 3,
    "dp_size": 3,
    "enable_dp_attention": True,
    "ep_num_redundant_experts": 4,  # four slots a rank for eight experts
    "moe_a2a_backend": "deepep",
    "enable_deterministic_inference": True,
    "dtype": "bfloat16",
    "max_total_tokens": 2048,
    "page_size": 4,
    "elastic_ep_backend": "mooncake",
    "restart_limit": 0,
    "weight_cache_mode": "daemon",
    "enable_eplb": True,
    "eplb_rebalance_num_iterations": 1000,
    "eplb_algorithm": "deepseek",
    "num_threads": 1,
}


def ask(engine: Engine) -> list[Any]:
    answers = engine.generate(input_ids=PROMPTS, sampling_params=PARAMS, return_logprob=True)
    return [(one["output_ids"], one["meta_info"]["output_token_logprobs"]) for one in answers]


def kill(engine: Engine, run: Run, *ranks: int) -> None:
    """Also waits until they are back."""
    before = engine.get_server_info()
    for rank in ranks:
        os.kill(before["ranks"][rank]["pid"], signal.SIGKILL)

    def is_back() -> bool:
        told = engine.get_server_info()["membership"]
        ended = all(one["seconds"] is not None for one in told["changes"])
        return bool(told["returned"] == before["membership"]["returned"] + len(ranks) and ended)

    wait_for(is_back, "return", run)


def flip_bit(run: Run, number: int) -> None:
    """In the middle of the memory that was created at `number`, which is the supervisor's."""
    folder = Path(f"/proc/{run.pid('supervisor')}/fd")
    links = sorted(folder.iterdir(), key=lambda link: int(link.name))
    memories = [link for link in links if f"memfd:{NAME} " in os.readlink(link)]
    assert len(memories) == 3
    with memories[number].open("r+b") as memory:
        place = os.fstat(memory.fileno()).st_size // 2
        memory.seek(place)
        (byte,) = memory.read(1)
        memory.seek(place)
        memory.write(bytes([byte ^ 8]))


@pytest.mark.timeout(300)
def test_weights_outlive_ranks(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint("qwen3_moe", tmp_path / "model")
    weights = folder / "model.safetensors"
    run = Run()
    try:
        with run.marked():
            engine = Engine(model_path=str(folder), **FLAGS)
        try:
            run.learn()
            wanted = ask(engine)
            bytes_there = [one["lasting_bytes"] for one in engine.get_server_info()["ranks"]]
            weights = weights.rename(folder / "away")
            kill(engine, run, 1)
            assert ask(engine) == wanted
            facts = engine.get_server_info()["ranks"][1]
            assert facts["mapped_bytes"] == facts["lasting_bytes"] == bytes_there[1] > 0
            # Both ranks that have an expert: the third one finds it in the memory of one of them.
            kill(engine, run, 0)
            kill(engine, run, 2)
            assert ask(engine) == wanted
            # Experts have moved since, also while a rank was lost, and stay where they are.
            moved = engine.rebalance_experts(wait=True)
            placed = engine.get_server_info()["placement"]["version"]
            kill(engine, run, 0)
            assert ask(engine) == wanted, moved
            assert engine.get_server_info()["placement"]["version"] >= placed
            told = engine.get_server_info()["membership"]
            assert told["experts"] == told["from_memory"]
            # What is damaged is read from the checkpoint.
            away.rename(folder / "model.safetensors")
        finally:
            engine.shutdown()
        run.await_gone()
        assert [one for one in run.left() if not one.startswith("descriptors")] == []
    finally:
        run.close()
