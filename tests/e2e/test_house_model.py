"""The model in models/house-moe: what its folder promises, and the engine against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bench.mtp import Models, answer, score
from moesaic import Engine
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.evals.tasks.draw import TASKS, distinct
from moesaic.evals.tasks.problem import Problem
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.quantize import PROJECTION, QuantizeJob, quantize
from tests.oracle import Oracle, load
from tests.server.serving import served

HOUSE = Path(__file__).parents[2] / "models" / "house-moe"
pytestmark = [
    pytest.mark.skipif(not HOUSE.is_dir(), reason="models/house-moe is not there"),
    pytest.mark.timeout(900),
]

MOST_BYTES = 32_000_000
BLOCK = 128
SPECIAL = ("<|begin|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
SEED = 6


def problems(each: int) -> list[Problem]:
    return [problem for task in TASKS for problem in distinct(task, "test", SEED, each)]


def chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HOUSE / "config.json").read_text())
    return found


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    with Checkpoint(HOUSE) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(HOUSE)


@pytest.fixture(scope="module")
def their_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(HOUSE)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(load(HOUSE))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path=str(HOUSE), dtype="float32", log_level="warning") as made:
        yield made


def test_the_folder() -> None:
    files = [path for path in HOUSE.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    assert (HOUSE / "README.md").read_text().strip()
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {p.name for p in files}
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".md", ".jinja", ".png"}


def test_the_architecture(config: dict[str, Any]) -> None:
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["n_routed_experts"] >= 32 and config["num_experts_per_tok"] >= 4
    assert config["n_shared_experts"] >= 1 and config["num_nextn_predict_layers"] == 1
    assert 1 == config["first_k_dense_replace"] < config["num_hidden_layers"]


def test_blocks_fit(checkpoint: Checkpoint) -> None:
    """Inputs of every quantised matrix, and both sides of an expert's, which ranks may cut."""
    matrices = [name for name in checkpoint.location if PROJECTION.fullmatch(name)]
    assert len(matrices) > 300
    for name in matrices:
        rows, columns = checkpoint.shape(name)
        assert columns % BLOCK == 0, f"{name} [{rows}, {columns}]"
        # The rotary part makes this one ragged in DeepSeek's own checkpoints too.
        assert rows % BLOCK == 0 or "kv_a_proj_with_mqa" in name, f"{name} [{rows}, {columns}]"


def test_types(checkpoint: Checkpoint) -> None:
    types: dict[str, set[bool]] = {}
    for name in checkpoint.location:
        is_bias = name.endswith("e_score_correction_bias")
        types.setdefault(checkpoint.dtype(name), set()).add(is_bias)
    assert types == {"BF16": {False}, "F32": {True}}


def test_digits_are_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("0123456789", add_special_tokens=False)) == 10
    assert len(tokenizer.encode("Take 40321 of 7.", add_special_tokens=False)) >= 6 + 4
    for token_id in range(tokenizer.vocab_size):
        token = tokenizer.id_to_token(token_id)
        if token is not None and any(digit in token for digit in "0123456789"):
            assert len(token) == 1, f"token {token_id} is {token!r}"


def test_special_tokens(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(token, add_special_tokens=False) for token in SPECIAL]
    assert [len(found) for found in ids] == [1] * len(SPECIAL)
    assert tokenizer.eos_ids == {ids[-1][0]}
    text = tokenizer.apply_chat_template(chat("Hi"))
    assert text == "<|begin|><|user|>Hi<|end|><|assistant|>"


def check_tokenizers(
    ours: Tokenizer, theirs: PreTrainedTokenizerBase, asked: Sequence[Problem]
) -> None:
    for problem in asked:
        turns = chat(problem.prompt)
        text = ours.apply_chat_template(turns)
        assert text == theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = ours.encode(text, add_special_tokens=False)
        found = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        assert ids == list(found["input_ids"])
        turns.append({"role": "assistant", "content": problem.solution})
        whole = ours.apply_chat_template(turns, add_generation_prompt=False)
        assert whole == text + problem.solution + "<|end|>"
        ids = ours.encode(whole, add_special_tokens=False)
        assert ids == theirs(whole, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=False) == whole


def test_tokenizers_agree(tokenizer: Tokenizer, their_tokenizer: PreTrainedTokenizerBase) -> None:
    check_tokenizers(tokenizer, their_tokenizer, problems(34))


def test_replies_are_transformers_greedy_ones(engine: Engine, oracle: Oracle) -> None:
    """Every token is transformers' first choice after those before it, and so is the end."""
    asked = problems(2)
    assert len(asked) == 12
    for problem, reply in zip(asked, answer(engine, [p.prompt for p in asked]), strict=True):
        assert oracle.greedy_divergence(reply.prompt_ids, reply.reply_ids) is None, problem.prompt
        assert reply.reply_ids[-1] in engine.limits.eos_ids, problem.prompt


def generate(oracle: Oracle, prompt: list[int], length: int, eos: int) -> list[int]:
    """transformers' own loop, with its cache."""
    with torch.inference_mode():
        ids = oracle.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=length,
            eos_token_id=eos,
            pad_token_id=eos,
        )
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found


@pytest.mark.slow
def test_200_replies_of_transformers(engine: Engine, oracle: Oracle) -> None:
    asked = problems(34)[:200]
    assert len(asked) == 200
    (eos,) = engine.limits.eos_ids
    for problem, reply in zip(asked, answer(engine, [p.prompt for p in asked]), strict=True):
        theirs = generate(oracle, reply.prompt_ids, len(reply.reply_ids) + 8, eos)
        assert reply.reply_ids == theirs, problem.prompt


@pytest.mark.slow
def test_the_mtp_layer_foresees(engine: Engine) -> None:
    replies = answer(engine, [problem.prompt for problem in problems(20)])
    found = score(Models.load(HOUSE, "float32"), replies)
    assert found.drafts > 1000
    assert found.share >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8", "int4_w4a16"])
def test_a_quantised_twin_keeps_the_mtp_layer(form: str, engine: Engine, tmp_path: Path) -> None:
    quantize(HOUSE, tmp_path / "twin", QuantizeJob(form))
    replies = answer(engine, [problem.prompt for problem in problems(10)])
    before = score(Models.load(HOUSE, "float32"), replies)
    after = score(Models.load(tmp_path / "twin", "float32"), replies)
    assert after.share > before.share - 0.1


@pytest.fixture(scope="module")
def http(engine: Engine) -> Iterator[httpx.Client]:
    with served(engine) as url, httpx.Client(base_url=url, timeout=300) as client:
        yield client


TURNS = {"messages": [{"role": "user", "content": "3+4"}], "temperature": 0, "max_tokens": 10}


def test_a_switch_that_the_template_ignores(http: httpx.Client) -> None:
    """The model does not think, so the whole answer is content."""

    def chat_message(**fields: Any) -> dict[str, Any]:
        answer = http.post("/v1/chat/completions", json=TURNS | fields).json()
        found: dict[str, Any] = answer["choices"][0]["message"]
        return found

    plain = chat_message()
    assert plain["content"] and plain.get("reasoning_content") is None
    for switch in ("thinking", "enable_thinking"):
        asked = chat_message(chat_template_kwargs={switch: True})
        assert (asked["content"], asked.get("reasoning_content")) == (plain["content"], None)
    schema = {"name": "s", "schema": {"enum": ["red", "blue"]}}
    form = {"type": "json_schema", "json_schema": schema}
    found = chat_message(chat_template_kwargs={"thinking": True}, response_format=form)
    assert json.loads(found["content"]) in ("red", "blue")
    for display in ({}, {"display": "omitted"}):
        thinking = {"type": "enabled", "budget_tokens": 1024, **display}
        message = http.post("/v1/messages", json=TURNS | {"thinking": thinking}).json()
        assert message["content"] == [{"type": "text", "text": plain["content"]}]
