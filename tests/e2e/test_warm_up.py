"""Steps that are run before anything is served: which, and that nothing of them is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton import next_power_of_2

from moesaic.config import ServerArgs, resolve
from moesaic.core.sampling import SamplingParams
from moesaic.engine.runner.future_tokens import SamplingPath
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.runner.warm_up import (
    DRAWN,
    single_tokens,
    sorted_parts,
    step_sizes,
    warm_sequences,
    warm_steps,
)
from moesaic.engine.sampling.gpu_sampler import _row_sampling
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.schedule.plan import PlanItem, StepPlan
from moesaic.engine.setup.moe_setup import StepLimits
from moesaic.kernels.attention import choose_splits
from moesaic.kernels.sampling import SampleParams
from moesaic.kernels.triton.attention_decode import choose_config
from moesaic.kernels.triton.sort import FEW_PAIRS
from moesaic.kernels.tuning import ExpertsShape, plan_for
from moesaic.models.tiny import materialise
from tests.e2e.test_gpu_runner import asynchronous, steps_of

PAGE = 4


def arguments() -> ServerArgs:
    args = resolve(
        ServerArgs.from_kwargs(
            model_path="tiny:qwen3_moe",
            device="cuda" if torch.cuda.is_available() else "cpu",
            page_size=PAGE,
            max_total_tokens=128,
            max_running_requests=3,
            chunked_prefill_size=16,
        )
    )
    return replace(args, model_path=materialise(args.model_path))


def tokens(runner: ModelRunner) -> list[int | None]:
    sample = SampleRow(SamplingParams(temperature=0.0), seed=7, position=5)
    items = [
        PlanItem(n, [3, 1, 4, 1, 5 + n], 0, n, [1 + 2 * n, 2 + 2 * n], sample=sample)
        for n in (0, 1)
    ]
    found = runner.begin(StepPlan(items, [1, 2, 3, 4], True)).wait()
    return [item.token_ids[0] for item in found.items]


def test_sizes_reach_each_power_of_two_odd_and_even():
    assert step_sizes(1) == [1]
    assert step_sizes(6) == [1, 2, 3, 4, 5, 6]
    assert step_sizes(20) == [1, 2, 3, 4, 7, 8, 15, 16, 19, 20]
    assert step_sizes(16384)[-4:] == [8191, 8192, 16383, 16384]
    # Three pairs each: 2, 5 and 10 tokens are the last with which these are within 8, 16 and 32.
    assert step_sizes(11, [1, 3]) == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]


def test_steps_reach_all_that_the_scheduler_plans_and_both_ways_between_ranks():
    limits = StepLimits(tokens=16 + 4, decode_tokens=4)
    sizes = [1, 2, 3, 4, 7, 8, 15, 16, 19, 20]
    prefills = [(size, True) for size in sizes]
    assert warm_steps(limits, (), False) == prefills
    assert warm_steps(limits, (1, 2, 4), True) == prefills
    assert warm_steps(limits, (1, 2), True) == [*prefills, (3, False), (4, False)]
    assert warm_steps(limits, (), True) == [*prefills, *((n, False) for n in (1, 2, 3, 4))]
    # Two ranks take up to 10 each: with 6, 14 and 18 tokens an odd number.
    shared = [(size, True) for size in sorted([*sizes, 6, 14, 18])]
    assert warm_steps(limits, (4,), True, sharers=2) == shared


E72 = ExpertsShape("bf16", 72, 2048, 768)


@pytest.mark.parametrize("sharers", [1, 2, 3])
@pytest.mark.parametrize("ranks, top_k", [(2, 8), (3, 8), (4, 8), (6, 6), (8, 4), (3, 3)])
def test_steps_take_every_kernel_of_experts_between_ranks(ranks: int, top_k: int, sharers: int):
    """Whatever a rank's share of the pairs: sorting knows the width of all of them and the block of
    a plan, products know the plan."""
    shape = replace(E72, experts=72 // ranks)

    def kernels(tokens: int) -> set[Any]:
        rows = -(-tokens // sharers)
        pairs, plan = ranks * rows * top_k, plan_for(torch.device("cpu"), shape, rows * top_k)
        width = next_power_of_2(pairs) if pairs <= FEW_PAIRS else 0
        return {plan, (plan.block, width)}

    limits = StepLimits(tokens=2048 + 64, decode_tokens=64)
    steps = warm_steps(limits, (64,), True, sorted_parts(ranks, top_k), sharers)
    warm = set().union(*(kernels(rows) for rows, _ in steps))
    assert not [rows for rows in range(1, limits.tokens + 1) if not kernels(rows) <= warm]


def test_steps_are_tokens_with_context_and_a_prompt():
    """First row, new tokens and all tokens of each sequence."""

    def sequences(*sizes: int) -> list[tuple[int, ...]]:
        starts, lengths, kv_lens, first = (a.tolist() for a in warm_sequences(*sizes).arrays())
        assert not any(first)
        return list(zip(starts, lengths, kv_lens, strict=True))

    assert sequences(1, 4, 9) == [(0, 1, 1)]
    assert sequences(2, 4, 9) == [(0, 2, 2)]
    assert sequences(8, 1, 9) == [(0, 1, 9), (1, 7, 7)]
    assert sequences(4, 4, 9) == [(0, 1, 9), (1, 1, 9), (2, 2, 2)]


def test_single_tokens_take_every_kernel_of_attention():
    """Those that serve any number of them, beside a prompt, of Qwen3 on an H200."""
    assert single_tokens(4, 9000) == [(4, 2048), (2, 2048), (1, 2048), (1, 9000), (1, 1)]

    def kernel(singles: int, context: int) -> tuple[Any, bool]:
        splits = choose_splits(singles, 4, context, 132)
        return choose_config(8, 256, splits), splits.count > 1

    warm = {kernel(*kind) for kind in single_tokens(256, 40960)}
    assert {kernel(n, context) for n in range(1, 257) for context in (1, 300, 40960)} <= warm


def test_the_row_that_is_drawn_takes_every_kernel():
    """Kernels that narrow top-p run for rows without top-k alone: the most common ones."""
    params = SampleParams.pack([_row_sampling(DRAWN)])
    assert SamplingPath.of(DRAWN) is SamplingPath.DRAW and params.any_top_p


def test_a_step_that_does_not_fit_says_what_to_lower(monkeypatch: pytest.MonkeyPatch):
    args = arguments()
    runner = asynchronous(replace(args, skip_server_warmup=True))

    def logits(x_RH: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate too much")

    monkeypatch.setattr(runner.model, "logits", logits)
    with pytest.raises(ValueError, match=r"a step of 1 tokens .* --chunked-prefill-size"):
        runner.warm_up(args, [(1, True)])


def test_a_step_after_it_is_as_one_without_it(monkeypatch: pytest.MonkeyPatch):
    args = arguments()
    runner = asynchronous(args)
    # Nor of what is captured.
    assert all(layer.load.runner_ns == 0 for layer in runner.moe_layers)
    assert all(traffic.dispatches == 0 for traffic in runner.moe.comm.traffic.values())
    seen: list[int] = []
    forward = runner.model.logits
    monkeypatch.setattr(runner.model, "logits", lambda x: (seen.append(len(x)), forward(x))[1])
    cache, table = runner.cache, runner.page_table
    steps = warm_steps(runner.limits, steps_of(runner).graphs.sizes, False)
    runner.warm_up(args, steps)
    assert seen == [1, 2, *[3] * 8]  # at most as many rows as requests
    assert all(sum(layer.load.tokens) == 0 for layer in runner.moe_layers)
    assert all(traffic.dispatches == 0 for traffic in runner.moe.comm.traffic.values())
    runner.use_cache(cache, table)
    monkeypatch.undo()
    expected = asynchronous(replace(args, skip_server_warmup=True))
    assert tokens(runner) == tokens(expected)
    assert [layer.load.tokens for layer in runner.moe_layers] == [
        layer.load.tokens for layer in expected.moe_layers
    ]
