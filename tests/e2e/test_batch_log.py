"""The lines that people grep, and what is told when a rank holds all others up."""

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch.utils.hooks import RemovableHandle

from moesaic import Engine
from moesaic.core.stats import EngineStats

PREFILL = re.compile(
    r"Prefill batch, #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+), "
    r"token usage: (\d\.\d\d), #running-req: (\d+), #queue-req: (\d+), "
    r"input throughput \(token/s\): (\d+\.\d\d)$",
    re.MULTILINE,
)
DECODE = re.compile(
    r"Decode batch, #running-req: (\d+), #token: (\d+), token usage: (\d\.\d\d), "
    r"gen throughput \(token/s\): (\d+\.\d\d), #queue-req: (\d+)$",
    re.MULTILINE,
)
GREEDY = {"temperature": 0, "ignore_eos": True}
# An a2a backend whose rank 1 stands still from when one file goes until another comes.
SLEEPY = """
import pathlib, time
from moesaic.moe.dispatch.none import NONE
from moesaic.moe.registry import A2aBackend, Provider, register_a2a

CPU = NONE.provider("cpu")

def hook(dispatcher, value):
    if dispatcher.comm.group.rank == 1 and pathlib.Path("sleep").exists():
        pathlib.Path("sleep").unlink()
        while not pathlib.Path("go").exists():
            time.sleep(0.02)

def make(config, comm):
    made = CPU.make(config, comm)
    made.register_hook("pre_dispatch", hook)
    return made

register_a2a(A2aBackend(
    name="sleepy", summary="none, with a rank that sleeps", formats=NONE.formats,
    payloads=NONE.payloads, providers={"cpu": Provider(make, CPU.buffers)},
))
"""
DRIVER = """
import logging, pathlib, threading, time, msgspec
from moesaic import Engine

def until(condition):
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)

def main():
    logging.basicConfig(level="INFO")
    flags = {"tp_size": 2, "ep_size": 2, "dp_size": 2, "enable_dp_attention": True}
    flags |= {"moe_a2a_backend": "sleepy", "moe_backend_module": "sleepy"}
    with Engine(model_path="tiny:qwen3_moe", decode_log_interval=5, **flags) as engine:
        params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 1900}
        call = {"input_ids": [[0, 7, 7], [1, 7, 7]], "sampling_params": params, "rid": ["a", "b"]}
        user = threading.Thread(target=engine.generate, kwargs=call)
        user.start()
        until(lambda: all(group.decode_steps > 30 for group in engine.get_stats().groups))
        pathlib.Path("sleep").touch()
        until(lambda: not pathlib.Path("sleep").exists())
        held = []  # on a busy machine rank 0 may still compute
        until(lambda: held.append(engine.get_stats()) or held[-1].ranks[0].state == "waiting")
        print(msgspec.json.encode(held[-1]).decode())
        time.sleep(1.2)  # between two lines of a kind
        pathlib.Path("go").touch()
        steps = [group.decode_steps for group in engine.get_stats().groups]
        until(lambda: all(group.decode_steps > steps[group.group] + 10 for group in
            engine.get_stats().groups))
        print(msgspec.json.encode(engine.get_stats()).decode())
        engine.abort("a")
        engine.abort("b")
        user.join()

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path="tiny:qwen3_moe", decode_log_interval=3) as made:
        yield made


def test_lines_sum_up_what_was_not_said(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moesaic")
    before = engine.get_stats().groups[0]
    start = time.monotonic()
    for number in range(6):
        prompt = [[number, 3, 3, 3] * 10]
        engine.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 12})
    until(lambda: prompts_said(caplog) == 6)
    took = time.monotonic() - start
    said = [tuple(map(float, found)) for found in PREFILL.findall(caplog.text)]
    stats = engine.get_stats().groups[0]
    assert sum(line[1] for line in said) == stats.prompt_tokens - before.prompt_tokens
    assert sum(line[2] for line in said) == stats.cached_tokens - before.cached_tokens
    assert all(line[6] > 0 for line in said) and len(said) <= took + 2
    decodes = DECODE.findall(caplog.text)
    assert 1 <= len(decodes) <= took + 2 and all(float(line[3]) > 0 for line in decodes)


def prompts_said(caplog: pytest.LogCaptureFixture) -> int:
    return sum(int(found[0]) for found in PREFILL.findall(caplog.text))


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.05)


def test_a_slow_step_is_told(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "moesaic")
    call = {**GREEDY, "max_new_tokens": 30}
    engine.generate(input_ids=[1, 2, 3], sampling_params=call)
    # As long as it takes to be slow, were the machine ten times slower than now.
    stats = engine.get_stats().groups[0]
    usual = stats.decode_seconds / stats.decode_steps
    slept: list[float] = []

    def sleep(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if not slept and len(inputs[0]) == 1:  # one token: no prompt
            slept.append(1.2 + 30 * usual)
            time.sleep(slept[0])

    hooks: list[RemovableHandle] = []
    engine._thread.submit(
        lambda core: hooks.append(core.runner.model.register_forward_pre_hook(sleep))
    )
    engine.generate(input_ids=[1, 2, 3], sampling_params=call)
    hooks[0].remove()
    told = re.findall(r"step (\d+) took \d+\.\d s, usually \d\.\d\d s", caplog.text)
    assert told and len(set(told)) == len(told), caplog.text


def test_a_rank_that_holds_up_the_others(tmp_path: Path) -> None:
    """It is named when the step is over; meanwhile nobody waits for its statistics. In a process of
    its own, as backends stay registered."""
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    (tmp_path / "driver.py").write_text(DRIVER)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "driver.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    held, freed = (msgspec.json.decode(line, type=EngineStats) for line in done.stdout.splitlines())
    assert held.groups == [] and [rank.rank for rank in held.ranks] == [0, 1]
    assert [rank.state for rank in held.ranks] == ["waiting", "computing"]
    assert all(rank.steps > 30 and not rank.expert_tokens for rank in held.ranks)
    assert all(rank.expert_tokens for rank in freed.ranks) and len(freed.groups) == 2
    slow = r"step (\d+) took .* s, usually .* s: rank 1 \(.*\) computed longest, for"
    told = re.findall(slow, done.stderr)  # a busy machine may make others slow, too
    assert told and len(set(told)) == len(told), done.stderr
    for rank in range(2):
        assert f"[rank {rank} DP{rank}] Prefill batch, #new-seq: 1, #new-token: 3," in done.stderr
        assert f"[rank {rank} DP{rank}] Decode batch, #running-req: 1," in done.stderr
