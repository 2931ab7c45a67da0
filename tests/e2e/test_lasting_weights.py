"""Ranks are killed while their weights stay: a rank that is started again, and ranks that take over
its experts, read nothing from a checkpoint that is gone, and answers are those of before."""

from __future__ import annotations

import os
import re
import signal
import threading
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
    "enable_elastic_expert_backup": True,
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


def held(engine: Engine, rank: int) -> Any:
    """The experts in a rank's slots, layer by layer."""
    return engine.routing_info()["ranks"][rank]["experts"]


@pytest.mark.timeout(300)
def test_weights_outlive_ranks(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint("qwen3_moe", tmp_path / "model")
    checkpoint = folder / "model.safetensors"
    run = Run()
    try:
        with run.marked():
            engine = Engine(model_path=str(folder), **FLAGS)
        try:
            run.learn()
            wanted = ask(engine)
            away = checkpoint.rename(folder / "away")
            found: list[Any] = []
            thread = threading.Thread(target=lambda: found.extend(ask(engine)))
            begin = run.step()
            thread.start()
            wait_for(lambda: run.step() > begin + 8, "steps", run)
            kill(engine, run, 1)
            thread.join(60)
            assert found == wanted == ask(engine)
            rank = engine.get_server_info()["ranks"][1]
            assert rank["mapped_bytes"] == rank["lasting_bytes"] >= rank["weight_bytes"] > 0
            # Nobody else had experts 4 to 7: the others found them in the memory of rank 1.
            told = engine.get_server_info()["membership"]
            assert told["experts"] == told["from_memory"] == 4 * len(held(engine, 0))
            (state,) = engine.rebalance()
            assert state["last"]["outcome"] == "moved"
            before = held(engine, 0)
            assert before != [[0, 1, 2, 3]] * len(before)
            kill(engine, run, 0)
            assert held(engine, 0) == before, "what the slots held last"
            assert ask(engine) == wanted
            told = engine.get_server_info()["membership"]
            assert told["experts"] == told["from_memory"]
            away.rename(checkpoint)
            flip_bit(run, 2)
            kill(engine, run, 0, 1, 2)
            assert ask(engine) == wanted
            rank = engine.get_server_info()["ranks"]
            assert sum(one["mapped_bytes"] < one["lasting_bytes"] for one in rank) == 1
            log = run.log.read_text()
            assert re.search(
                r"\[rank 0 DP0\] weights: 0\.\d MiB in memory that outlives ranks", log
            )
            assert re.search(r"\[rank 0 DP0\] weights: 0\.\d MiB mapped from memory, compared", log)
            assert (
                len(re.findall(r"weights: .* (not whole|differ from their checksums):", log)) == 1
            )
        finally:
            engine.shutdown()
        run.await_gone()
        assert [one for one in run.left() if not one.startswith("descriptors")] == []
    finally:
        run.close()
