"""Drafts change no answer of a thousand prompts in batches of any size, and break no grammar."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from moesaic import Engine
from moesaic.evals.tasks.draw import TASKS, distinct
from tests.e2e.schemas import schema_of
from tests.unit.test_draft_model import HOUSE, tokenizer

PROMPTS, NEW_TOKENS = 1000, 10
FLAGS: dict[str, Any] = {
    "model_path": str(HOUSE),
    "dtype": "float32",
    "page_size": 16,
}
OTHER = "tiny:qwen3_moe,num_hidden_layers=1,vocab_size=1024,max_position_embeddings=1024"
DRAFTERS: dict[str, dict[str, Any]] = {
    "NEXTN": {"speculative_algorithm": "NEXTN"},
    "NGRAM": {"speculative_algorithm": "NGRAM"},
    "STANDALONE": {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": OTHER,
        "speculative_num_steps": 2,
    },
}
FIXED = {"disable_speculative_adaptive": True}


@cache
def prompts() -> list[list[int]]:
    problems = [p for task in TASKS for p in distinct(task, "test", 5, -(-PROMPTS // len(TASKS)))]
    texts = (
        tokenizer().apply_chat_template([{"role": "user", "content": problem.prompt}])
        for problem in problems[:PROMPTS]
    )
    return [tokenizer().encode(text, add_special_tokens=False) for text in texts]


def answers(count: int, **flags: Any) -> tuple[list[list[int]], float]:
    """Greedy and seeded ones in turns; and how many tokens were accepted of each answer."""
    sampling = [
        {"max_new_tokens": NEW_TOKENS, "temperature": 0.7 * (n % 2), "sampling_seed": n}
        for n in range(count)
    ]
    with Engine(**FLAGS, **flags) as engine:
        outputs = engine.generate(input_ids=prompts()[:count], sampling_params=sampling)
    assert isinstance(outputs, list)
    accepted = sum(one["meta_info"].get("spec_accept_token_num", 0) for one in outputs)
    return [one["output_ids"] for one in outputs], accepted / count


@cache
def without_drafts() -> list[list[int]]:
    return answers(PROMPTS, max_running_requests=32)[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("drafter", "batch"),
    [*((name, size) for name in ("NEXTN", "NGRAM") for size in (1, 8, 32)), ("STANDALONE", 8)],
)
def test_a_thousand_prompts(drafter: str, batch: int) -> None:
    assert len(prompts()) == PROMPTS and len(set(map(tuple, without_drafts()))) > 200
    flags = DRAFTERS[drafter] | {"max_running_requests": batch} | FIXED
    found, accepted = answers(PROMPTS, **flags)
    assert found == without_drafts()
    assert accepted > {"NEXTN": 4, "NGRAM": 0.1, "STANDALONE": 0}[drafter]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("drafter", ["NEXTN", "NGRAM"])
def test_two_hundred_schemas(drafter: str) -> None:
    """What a model says that knows of none is valid, and the same as without drafts."""
    given = [
        {"json_schema": json.dumps(schema_of(n)), "sampling_seed": n, "max_new_tokens": 800}
        for n in range(200)
    ]
    found = []
    for flags in ({}, DRAFTERS[drafter] | FIXED):
        with Engine(**FLAGS, max_running_requests=32, **flags) as engine:
            found.append(engine.generate(input_ids=prompts()[:200], sampling_params=given))
    plain, drafted = found
    assert [one["output_ids"] for one in drafted] == [one["output_ids"] for one in plain]
    ended = [one["meta_info"]["finish_reason"]["type"] == "stop" for one in drafted]
    assert sum(ended) > 150
    for number, (one, done) in enumerate(zip(drafted, ended, strict=True)):
        if done:
            Draft202012Validator(schema_of(number)).validate(json.loads(one["text"]))
    assert sum(one["meta_info"].get("spec_accept_token_num", 0) for one in drafted) > 500
