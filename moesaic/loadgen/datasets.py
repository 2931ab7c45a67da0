"""Prompts by the name of a dataset."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from moesaic.loadgen.args import DatasetArgs
from moesaic.loadgen.outcome import BenchPrompt
from moesaic.loadgen.texts import Texts


@dataclass(frozen=True)
class DatasetSpec:
    """How to make prompts."""

    args: DatasetArgs
    texts: Texts
    seed: int
    number: int
    ids: bool = False  # send token ids

    def prompt(self, text: str, output_len: int) -> BenchPrompt:
        return BenchPrompt(text, self.texts.count(text) or 0, output_len)

    def random(self, rng: random.Random, tokens: int, output_len: int) -> BenchPrompt:
        if self.ids:
            return BenchPrompt("", tokens, output_len, self.texts.draw_ids(rng, tokens))
        return BenchPrompt(self.texts.draw(rng, tokens), tokens, output_len)


def draw_prompts(draw: DatasetSpec) -> list[BenchPrompt]:
    """Prompts that depend on the seed only; ValueError if a file has too few."""
    name = draw.args.dataset_name
    if draw.ids and name not in ("random", "random-ids"):
        raise ValueError(f"--tokenize-prompt is for --dataset-name random, not {name}")
    return _MAKERS[name](draw)


def _random(draw: DatasetSpec) -> list[BenchPrompt]:
    args, rng = draw.args, random.Random(draw.seed)

    def length(longest: int) -> int:
        return rng.randint(max(int(longest * args.random_range_ratio), 1), longest)

    sizes = [
        (length(args.random_input_len), length(args.random_output_len)) for _ in range(draw.number)
    ]
    return [draw.random(rng, tokens, output_len) for tokens, output_len in sizes]


def _shared_prefix(draw: DatasetSpec) -> list[BenchPrompt]:
    """Groups of questions after the same long text; --num-prompts has no effect."""
    args, rng = draw.args, random.Random(draw.seed)
    prompts = []
    for _ in range(args.gsp_num_groups):
        prefix = draw.texts.draw(rng, args.gsp_system_prompt_len)
        for _ in range(args.gsp_prompts_per_group):
            text = f"{prefix}\n\n{draw.texts.draw(rng, args.gsp_question_len)}"
            prompts.append(draw.prompt(text, args.gsp_output_len))
    rng.shuffle(prompts)
    return prompts


def _sharegpt(draw: DatasetSpec) -> list[BenchPrompt]:
    path = _path(draw.args)
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--dataset-path {path} is not JSON: {error}") from None
    if not isinstance(conversations, list):
        raise ValueError(f"--dataset-path {path} is not a list of conversations")
    pairs = [pair for entry in conversations if (pair := _first_turns(entry)) is not None]
    random.Random(draw.seed).shuffle(pairs)
    return _take_prompts(draw, _fitting(draw, pairs), len(pairs))


def _first_turns(entry: Any) -> tuple[str, str] | None:
    """The first question and its answer; None for an entry without two texts."""
    try:
        turns = entry.get("conversations") or entry.get("conversation")
        question, answer = (turn.get("value", turn.get("content")) for turn in turns[:2])
    except (AttributeError, TypeError, ValueError):  # not objects, or fewer than two
        return None
    texts = isinstance(question, str) and isinstance(answer, str) and question and answer
    return (question, answer) if texts else None


def _fitting(draw: DatasetSpec, pairs: list[tuple[str, str]]) -> Iterator[BenchPrompt]:
    """Skip turns of less than two tokens and those that are too long."""
    args = draw.args
    for question, answer in pairs:
        output_len = args.sharegpt_output_len or draw.texts.count(answer)
        if output_len is None:
            raise ValueError(
                "without a tokenizer the length of answers is not known: give --tokenizer DIR, "
                "or --sharegpt-output-len N"
            )
        prompt = draw.prompt(question, output_len)
        known = prompt.tokens > 0
        limit = args.sharegpt_context_len
        long = limit is not None and known and prompt.tokens + output_len > limit
        if output_len >= 2 and not long and not (known and prompt.tokens < 2):
            yield prompt


def _custom(draw: DatasetSpec) -> list[BenchPrompt]:
    path = _path(draw.args)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    found = (_custom_line(draw, path, number, line) for number, line in enumerate(lines, 1))
    return _take_prompts(draw, found, len(lines))


_LENGTHS: Final = ("output_len", "output_tokens", "max_tokens", "max_new_tokens")


def _custom_line(draw: DatasetSpec, path: Path, number: int, line: str) -> BenchPrompt:
    """{"prompt": "…", "output_len": 64}, or the first turn of messages or conversations."""
    try:
        entry = json.loads(line)
        if "prompt" in entry:
            text = entry["prompt"]
        else:
            turn = (entry.get("messages") or entry["conversations"])[0]
            text = turn.get("content", turn.get("value"))
        lengths = [entry[key] for key in _LENGTHS if key in entry]
        output_len = lengths[0] if lengths else draw.args.custom_output_len
        if not isinstance(text, str) or type(output_len) is not int or output_len < 1:
            raise ValueError(f"prompt {text!r:.40} with output_len {output_len!r:.40}")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f'--dataset-path {path}, line {number}: expected {{"prompt": "…", "output_len": 64}}: '
            f"{error!r}"
        ) from None
    return draw.prompt(text, output_len)


def _path(args: DatasetArgs) -> Path:
    if args.dataset_path is None:
        raise ValueError(
            f"--dataset-name {args.dataset_name} needs --dataset-path FILE; nothing is downloaded"
        )
    return Path(args.dataset_path)


def _take_prompts(
    draw: DatasetSpec, found: Iterator[BenchPrompt], entries: int
) -> list[BenchPrompt]:
    """The first prompts, none repeated: the prefix cache would hold it."""
    prompts = list(islice(found, draw.number))
    if len(prompts) < draw.args.num_prompts:
        raise ValueError(
            f"--dataset-path {draw.args.dataset_path} has {len(prompts)} usable prompts in "
            f"{entries} entries: give --num-prompts {len(prompts)} or fewer"
        )
    return prompts


_MAKERS: Final[dict[str, Callable[[DatasetSpec], list[BenchPrompt]]]] = {
    "random": _random,
    "random-ids": _random,
    "sharegpt": _sharegpt,
    "custom": _custom,
    "generated-shared-prefix": _shared_prefix,
}
