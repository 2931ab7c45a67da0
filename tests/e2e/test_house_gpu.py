"""The house model by the code of a GPU: its sizes are smaller than those kernels are made for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from inspect import getclosurevars
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic import Engine
from moesaic.comm.launch.mps import QUEUES, start_mps
from moesaic.comm.launch.mps_owner import PIPES
from moesaic.config import ServerArgs, resolve
from moesaic.core.sampling import SamplingParams
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.schedule.plan import PlanItem, StepPlan
from moesaic.kernels.routing import RouterWeights, TopKInputs
from moesaic.models import blocks
from moesaic.models.blocks import Router, SparseBlock
from moesaic.moe.formats import TopKOutput
from tests.e2e.test_gpu_runner import steps_of
from tests.kernels.triton_cases import GPU

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROMPTS = [
    [1, 40, 41, 42, 43],
    [1, 300],
    [1, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22],
]
STEPS = 2


def arguments(dtype: str) -> ServerArgs:
    return resolve(
        ServerArgs.from_kwargs(
            model_path="models/house-moe",
            dtype=dtype,
            max_total_tokens=256,
            max_running_requests=4,
        )
    )


def on_cpu_tensors(args: ServerArgs, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr(
        "moesaic.engine.runner.model_runner.compute_device", lambda *_: torch.device("cpu")
    )
    return ModelRunner(replace(args, device="cuda", cuda_graph_bs=(4,)))


def answers(runner: ModelRunner, told: list[list[int]] | None = None) -> list[list[int]]:
    """Prompts in one step, then steps of one token each; `told`: go on with these tokens."""
    tokens = [list(prompt) for prompt in PROMPTS]
    computed = [0] * len(tokens)
    for step in range(1 + STEPS):
        items = [
            PlanItem(n, one[done:], done, n, [1 + 3 * n, 2 + 3 * n, 3 + 3 * n], sample=row(one))
            for n, (one, done) in enumerate(zip(tokens, computed, strict=True))
        ]
        computed = [len(one) for one in tokens]
        clear = list(range(1, 10)) if step == 0 else []
        for n, found in enumerate(runner.begin(StepPlan(items, clear, step == 0)).wait().items):
            assert len(found.token_ids) == 1, found
            tokens[n].append(found.token_ids[0] if told is None else told[n][len(tokens[n])])
    return tokens


def row(tokens: list[int]) -> SampleRow:
    return SampleRow(SamplingParams(temperature=0.0), seed=1, position=len(tokens))


def natives() -> Iterator[tuple[Any, str, Any]]:
    """Wherever a function is called that has a kernel: module, name, kernel."""
    for module in [m for name, m in sorted(sys.modules.items()) if name.startswith("moesaic.")]:
        for name, value in list(vars(module).items()):
            if hasattr(value, "twin"):
                source = getclosurevars(value).nonlocals["module"]
                yield module, name, getattr(import_module(source), value.__name__)


def fused(gate: Router, x_TH: Tensor) -> RouterWeights | None:
    """As on a GPU."""
    few = len(x_TH) <= blocks.MAX_NORM_ROWS
    return RouterWeights(gate.weight, gate.bias, not gate.float32, gate._counter_1) if few else None


def choose(self: SparseBlock, x_TH: Tensor, num_tokens_1: Tensor | None) -> TopKOutput:
    """As on a GPU with a few rows."""
    route_rows = import_module("moesaic.kernels.triton.routing").route_rows
    gate, spec = self.gate, self.topk.spec
    router = RouterWeights(gate.weight, gate.bias, not gate.float32, gate._counter_1)
    bias = gate.e_score_correction_bias
    rows = [
        route_rows(x_TH[at : at + 8], router, TopKInputs(spec, bias, None if at else num_tokens_1))
        for at in range(0, len(x_TH), 8)
    ]
    return TopKOutput(*(torch.cat(parts) for parts in zip(*rows, strict=True)))


def test_twins_give_the_answers_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("float32")
    assert answers(on_cpu_tensors(args, monkeypatch)) == answers(ModelRunner(args))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="there is no GPU")
def test_a_gpu_gives_the_answers_of_a_cpu() -> None:
    args = arguments("float32")
    there = ModelRunner(replace(args, device="cuda", cuda_graph_bs=(4,)))
    assert answers(there) == answers(ModelRunner(args))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="there is no GPU")
def test_servers_on_one_daemon_do_not_hold_each_other_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of three servers but one may wait at once: if they did on all processors, those of
    the one would never come. Answers to the bit, so that prompts may come in any order."""
    flags: dict[str, Any] = {
        "model_path": "models/house-moe",
        "device": "cuda",
        "max_total_tokens": 16384,
        "max_running_requests": 64,
        "cuda_graph_bs": (16, 64),
        "enable_deterministic_inference": True,
        "disable_radix_cache": True,
        "dist_timeout": 30.0,
    }
    texts = [f"What is {n} plus {n * n}?" for n in range(192)]
    params = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}

    def ask(engine: Engine) -> list[list[int]]:
        told = engine.generate(texts, params)
        assert isinstance(told, list)
        return [one["output_ids"] for one in told]

    with Engine(**flags) as one:
        expected = ask(one)
    with start_mps() as daemon, ExitStack() as stack:
        monkeypatch.setenv(PIPES, daemon.environment[PIPES])
        monkeypatch.setenv(QUEUES, "2")
        engines = [stack.enter_context(Engine(**flags, tp_size=4, ep_size=4)) for _ in range(3)]
        with ThreadPoolExecutor(len(engines)) as pool:
            for _ in range(4):
                assert list(pool.map(ask, engines)) == [expected] * len(engines)


@pytest.mark.skipif(GPU, reason="kernels take CPU tensors in the interpreter alone")
def test_kernels_give_what_their_twins_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, in float16: tensor cores' kernels are not for float32."""
    args = arguments("float16")
    by_twins = on_cpu_tensors(args, monkeypatch)
    expected, logits_BV = answers(by_twins), steps_of(by_twins).graph_batch.logits_BV
    assert logits_BV.abs().max() > 0
    for _ in range(2):  # kernels' modules take in others
        for module, name, kernel in list(natives()):
            monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(SparseBlock, "_choose", choose)
    monkeypatch.setattr(Router, "fused", fused)
    monkeypatch.setattr(blocks, "MAX_NORM_ROWS", 8)
    by_kernels = on_cpu_tensors(args, monkeypatch)
    answers(by_kernels, told=expected)  # whose best tokens may be equally likely
    found_BV = steps_of(by_kernels).graph_batch.logits_BV
    off_B = (found_BV - logits_BV)[:3].norm(dim=-1) / logits_BV[:3].norm(dim=-1)
    assert off_B.max() < 5e-3, off_B
