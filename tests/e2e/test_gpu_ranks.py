"""Several ranks that compute as on a GPU: here on CPU tensors, on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from moesaic import Engine
from moesaic.engine import remote
from tests import gpu_rank
from tests.e2e.grid import model_path
from tests.e2e.test_rank_isolation import Served, prompts

pytestmark = pytest.mark.timeout(300)

GROUPS = {
    "tp_size": 2,
    "ep_size": 2,
    "dp_size": 2,
    "enable_dp_attention": True,
    "enable_dp_lm_head": True,
    "moe_dense_tp_size": 1,
    "moe_a2a_backend": "deepep",
}
TENSORS = {"tp_size": 2, "ep_size": 2}
SMALL = {"page_size": 4, "chunked_prefill_size": 32, "max_running_requests": 6}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
    {"temperature": 0.9, "sampling_seed": 3, "max_new_tokens": 10},
    {"temperature": 0, "max_new_tokens": 12, "repetition_penalty": 1.3, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "sampling_seed": 5, "max_new_tokens": 9},
    {"temperature": 0, "max_new_tokens": 1},
    {"temperature": 0, "max_new_tokens": 9, "min_new_tokens": 7, "frequency_penalty": 0.5},
]


@contextmanager
def ranks(target: str, family: str, **flags: Any) -> Iterator[Engine]:
    before, remote.TARGET = remote.TARGET, target
    try:
        with Engine(model_path=model_path(family), **SMALL, **flags) as engine:
            yield engine
    finally:
        remote.TARGET = before


def answers(engine: Engine, count: int, logprobs: bool = False) -> list[list[int]]:
    """Of so many requests at once, more than run at once."""
    params = [PARAMS[n % len(PARAMS)] for n in range(count)]
    told = engine.generate(
        input_ids=prompts()[:count], sampling_params=params, return_logprob=logprobs
    )
    assert isinstance(told, list)
    return [one["output_ids"] for one in told]


@pytest.mark.parametrize("flags", [GROUPS, TENSORS], ids=["groups", "tensors"])
def test_ranks_give_the_tokens_of_one(flags: dict[str, Any]) -> None:
    """All at once, so that buckets change and prompts come beside decodes; then one alone, so that
    other ranks have nothing; then one whose step fails, beside others that go on."""
    with Engine(model_path=model_path("qwen3_moe"), **SMALL) as one:
        expected = answers(one, 12), answers(one, 1), answers(one, 6, logprobs=True)
    with ranks(gpu_rank.STEPS, "qwen3_moe", **flags) as engine:
        assert answers(engine, 12) == expected[0]
        assert answers(engine, 1) == expected[1]
        assert answers(engine, 6, logprobs=True) == expected[2]
        served = Served(engine)
        for name in ("attention", "dispatch", "combine"):
            served.poisoned_prompt(name, 4)
