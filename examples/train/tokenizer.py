"""The house model's tokenizer: byte-level BPE; every digit, and every letter of a run of capitals,
is a token of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from moesaic.evals.tasks.draw import TASKS, problems

BEGIN, END, USER, ASSISTANT, SYSTEM, PAD = (
    f"<|{name}|>" for name in ("begin", "end", "user", "assistant", "system", "pad")
)
SPECIAL = (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT)
PATTERN = r" ?[A-Z]?[a-z]+| ?[A-Z](?![A-Za-z])|[A-Z]|\d| ?[^\sA-Za-z\d]+|\s"
SAMPLES = 20_000  # problems of each task that the vocabulary is made from
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('this model knows the roles system, user and assistant, not ' ~ m.role) }}"
    "{% endif %}"
    "{{ '<|' ~ m.role ~ '|>' ~ (m.content | trim) ~ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def texts() -> Iterator[str]:
    for task in TASKS:
        for problem in islice(problems(task, "train", 0), SAMPLES):
            yield problem.prompt
            yield problem.solution


def make_tokenizer(vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
