"""As test_draft_counts.py, of the drafters that the house model has no drafts for: heads, a whole
draft model, and trees, with a small random target."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from moesaic import Engine
from moesaic.models.tiny import materialise
from tests.e2e.schemas import schema_of
from tests.unit.test_eagle import QWEN, trained

PROMPTS, NEW_TOKENS, SCHEMAS = 1000, 10, 200
FLAGS: dict[str, Any] = {"model_path": QWEN, "dtype": "float32", "page_size": 8}
TREE = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": 9,
}
CHAIN = {"speculative_num_steps": 3}
DRAFTERS: dict[str, dict[str, Any]] = {
    "EAGLE": {"speculative_algorithm": "EAGLE", **CHAIN},
    "EAGLE3": {"speculative_algorithm": "EAGLE3", **CHAIN},
    "EAGLE, trees": {"speculative_algorithm": "EAGLE", **TREE},
    "EAGLE3, trees": {"speculative_algorithm": "EAGLE3", **TREE},
    "STANDALONE": {"speculative_algorithm": "STANDALONE", **CHAIN},
    "STANDALONE, trees": {"speculative_algorithm": "STANDALONE", **TREE},
    "NGRAM, trees": {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 10},
    "EAGLE3, trees, adaptive": {
        "speculative_algorithm": "EAGLE3",
        **TREE,
        "disable_speculative_adaptive": False,
    },
}
# The least accepted tokens of an answer. The draft model of STANDALONE is the target.
ACCEPTED = {"EAGLE": 0.1, "EAGLE3": 0.1, "STANDALONE": 3.0, "NGRAM": 0.02}


@cache
def prompts() -> list[list[int]]:
    """Some of them begin as others do, and some repeat themselves."""
    chance, found = random.Random(1), list[list[int]]()
    while len(found) < PROMPTS:
        own = [chance.randrange(97, 123) for _ in range(chance.randrange(2, 14))]
        stem = chance.choice(found)[:16] if found and chance.random() < 0.3 else []
        found.append([*stem, *own * chance.choice((1, 1, 1, 3))])
    return found


def served(count: int, sampling: list[dict[str, Any]], **flags: Any) -> list[dict[str, Any]]:
    with Engine(**FLAGS, **flags) as engine:
        outputs = engine.generate(input_ids=prompts()[:count], sampling_params=sampling)
    assert isinstance(outputs, list)
    return outputs


def sampling() -> list[dict[str, Any]]:
    """Greedy and seeded ones in turns."""
    given = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return [given | {"temperature": 0.7 * (n % 2), "sampling_seed": n} for n in range(PROMPTS)]


@cache
def without_drafts() -> list[list[int]]:
    found = served(PROMPTS, sampling(), max_running_requests=32)
    return [one["output_ids"] for one in found]


@pytest.fixture(scope="module")
def flags_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Heads have learnt some of the answers."""
    folder = tmp_path_factory.mktemp("heads")

    @cache
    def head(algorithm: str) -> str:
        texts = [prompts()[n] + without_drafts()[n] for n in range(0, 24, 2)]
        trained(algorithm == "EAGLE3", texts).write(folder / algorithm)
        return str(folder / algorithm)

    def flags(name: str) -> dict[str, Any]:
        given: dict[str, Any] = {"disable_speculative_adaptive": True} | DRAFTERS[name]
        algorithm = given["speculative_algorithm"]
        if algorithm != "NGRAM":
            path = materialise(QWEN) if algorithm == "STANDALONE" else head(algorithm)
            given["speculative_draft_model_path"] = path
        return given

    return flags


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("drafter", "batch"),
    [
        *((name, 32) for name in DRAFTERS),
        *((name, 8) for name in ("EAGLE", "EAGLE3, trees", "NGRAM, trees")),
        ("EAGLE3", 1),
    ],
)
def test_a_thousand_prompts(drafter: str, batch: int, flags_of: Any) -> None:
    expected = without_drafts()
    assert len(expected) == PROMPTS and len(set(map(tuple, expected))) > 900
    found = served(PROMPTS, sampling(), max_running_requests=batch, **flags_of(drafter))
    assert [one["output_ids"] for one in found] == expected
    accepted = sum(one["meta_info"].get("spec_accept_token_num", 0) for one in found)
    if "adaptive" not in drafter:
        assert accepted > ACCEPTED[drafter.partition(",")[0]] * PROMPTS


def schemas() -> list[dict[str, Any]]:
    return [
        {"json_schema": json.dumps(schema_of(n)), "sampling_seed": n, "max_new_tokens": 400}
        for n in range(SCHEMAS)
    ]


@cache
def plain_schemas() -> list[list[int]]:
    found = served(SCHEMAS, schemas(), max_running_requests=32)
    return [one["output_ids"] for one in found]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_hundred_schemas(drafter: str, flags_of: Any) -> None:
    """What a random model says is valid, and the same as without drafts."""
    found = served(SCHEMAS, schemas(), max_running_requests=32, **flags_of(drafter))
    assert [one["output_ids"] for one in found] == plain_schemas()
    ended = [one["meta_info"]["finish_reason"]["type"] == "stop" for one in found]
    assert sum(ended) > 100
    for number, (one, done) in enumerate(zip(found, ended, strict=True)):
        if done:
            Draft202012Validator(schema_of(number)).validate(json.loads(one["text"]))
    accepted = sum(one["meta_info"].get("spec_accept_token_num", 0) for one in found)
    assert accepted > 0 or "adaptive" in drafter
