"""lm-eval: generation and log likelihood, with its tokenizer here and on the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

GENERATE = """
output_type: generate_until
doc_to_target: "{{reply}}"
generation_kwargs: {until: ["<|end|>"], max_gen_toks: 300, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
TASKS = {
    "house_chat": GENERATE + 'doc_to_text: "{{prompt}}"',
    "house_complete": GENERATE + 'doc_to_text: "{{rendered}}"',
    "house_choose": """
output_type: multiple_choice
doc_to_text: "{{rendered}}"
doc_to_target: 1
target_delimiter: ""
doc_to_choice: choices
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
}
TOKENIZERS = {
    "huggingface": {"tokenizer_backend": "huggingface", "tokenizer": "models/house-moe"},
    "remote": {"tokenizer_backend": "remote"},
}


@pytest.fixture
def tasks(tmp_path: Path, problems: Any) -> TaskManager:
    """Tasks of our own problems: nothing is downloaded."""
    rows = [p | {"choices": ["I cannot say.", p["reply"], "It is Greta."]} for p in problems]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    for name, text in TASKS.items():
        files = (
            f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.json}}}}"
        )
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{files}\ntest_split: test\n{text}")
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def completions(house: Any, **more: Any) -> dict[str, Any]:
    return {"model": house.model, "base_url": f"{house.v1}/completions", "max_retries": 1} | more


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_loglikelihood(house: Any, given: Any, tokenizer: Any) -> None:
    model = LocalCompletionsAPI(**completions(house, batch_size=4, **tokenizer))
    asked = [
        Instance("loglikelihood", {}, (pair["context"], pair["continuation"]), number)
        for number, pair in enumerate(given["continuations"])
    ]
    found = model.loglikelihood(asked, disable_tqdm=True)
    for (logprob, is_greedy), pair in zip(found, given["continuations"], strict=True):
        assert logprob == pytest.approx(pair["logprob"], abs=1e-3)
        assert is_greedy == pair["is_greedy"]


def test_remote_tokenizer_is_found(house: Any) -> None:
    model = LocalCompletionsAPI(**completions(house))
    assert model.tokenizer_backend == "remote"
    assert model.tokenizer.bos_token == "<|begin|>" and model.tokenizer.eos_token == "<|end|>"
    assert model.tokenizer.decode(model.tok_encode("3 hours")) == "3 hours"


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_completions(house: Any, tasks: TaskManager, tokenizer: Any) -> None:
    found = simple_evaluate(
        model="local-completions",
        model_args=completions(house, **tokenizer),
        tasks=["house_choose", "house_complete"],
        task_manager=tasks,
        batch_size=2,
    )
    assert found["results"]["house_choose"]["acc,none"] == 1.0
    assert found["results"]["house_complete"]["exact_match,none"] == 1.0


def test_chat_completions(house: Any, tasks: TaskManager) -> None:
    found = simple_evaluate(
        model="local-chat-completions",
        model_args={"model": house.model, "base_url": f"{house.v1}/chat/completions"},
        tasks=["house_chat"],
        task_manager=tasks,
        apply_chat_template=True,
    )
    assert found["results"]["house_chat"]["exact_match,none"] == 1.0
