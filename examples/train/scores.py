"""Scores of a model in training, without decoding: a reply counts as known where each of its tokens
is the likeliest one after those before it. Greedy decoding then gives that very reply."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer

from examples.train.model import Model
from examples.train.tokenizer import ASSISTANT, BEGIN, END, USER
from moesaic.evals.tasks.draw import TASKS, distinct
from moesaic.evals.tasks.problem import Problem

NUMBER, BATCH = 512, 128


@torch.no_grad()
def score(model: Model, file: Path, device: str, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """`replies`: share of test problems whose whole reply is known; `tokens`: share of tokens;
    `mtp`: share of tokens that the MTP layer knows one earlier."""
    tokenizer = Tokenizer.from_file(str(file))
    model.eval()
    found = {
        task: _score(model, tokenizer, distinct(task, "test", 0, NUMBER), device, dtype)
        for task in TASKS
    }
    model.train()
    return found


def _score(
    model: Model,
    tokenizer: Tokenizer,
    problems: list[Problem],
    device: str,
    dtype: torch.dtype,
) -> dict[str, float]:
    whole, right, ahead, tokens = 0, 0, 0, 0
    for start in range(0, len(problems), BATCH):
        pairs = [_ids(tokenizer, problem) for problem in problems[start : start + BATCH]]
        length = max(len(asked) + len(reply) for asked, reply in pairs)
        ids = torch.zeros(len(pairs), length, dtype=torch.long)
        replied = torch.zeros(len(pairs), length, dtype=torch.bool)
        for row, (asked, reply) in enumerate(pairs):
            ids[row, : len(asked) + len(reply)] = torch.tensor(asked + reply)
            replied[row, len(asked) : len(asked) + len(reply)] = True
        ids, replied = ids.to(device), replied.to(device)
        logits, nextn = model(ids, torch.ones_like(ids), dtype)
        good = (logits[:, :-1].argmax(-1) == ids[:, 1:]) | ~replied[:, 1:]
        early = (nextn[:, :-2].argmax(-1) == ids[:, 2:]) & replied[:, 2:]
        whole += int(good.all(1).sum())
        right += int((good & replied[:, 1:]).sum())
        ahead += int(early.sum())
        tokens += int(replied.sum())
    return {"replies": whole / len(problems), "tokens": right / tokens, "mtp": ahead / tokens}


def _ids(tokenizer: Tokenizer, problem: Problem) -> tuple[list[int], list[int]]:
    asked = f"{BEGIN}{USER}{problem.prompt}{END}{ASSISTANT}"
    encode = tokenizer.encode
    return (
        encode(asked, add_special_tokens=False).ids,
        encode(problem.solution + END, add_special_tokens=False).ids,
    )
