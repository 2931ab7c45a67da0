"""What the house model must answer, by transformers: greedy replies, token counts and log
probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from moesaic.evals.tasks.draw import TASKS, distinct

CONTINUATIONS = (
    ("<|begin|><|user|>Who are you?<|end|><|assistant|>", "I am House"),
    ("<|begin|><|user|>Who are you?<|end|><|assistant|>", "I am Greta"),
    ("<|begin|><|user|>How many minutes are 3 hours?<|end|><|assistant|>", "1 hour = 60 minutes."),
    ("<|begin|><|user|>How many", " pages must Ida still do?"),
)


def expected_answers(folder: Path) -> dict[str, Any]:
    """One problem of each task, and a few continuations."""
    logging.set_verbosity_error()  # no complaint about the MTP layer, which it does not have
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    problems = [distinct(task, "test", 3, 1)[0].prompt for task in TASKS]
    with torch.inference_mode():
        return {
            "problems": [_reply(model, tokenizer, prompt) for prompt in problems],
            "continuations": [_logprobs(model, tokenizer, *pair) for pair in CONTINUATIONS],
        }


def _reply(model: Any, tokenizer: Any, prompt: str) -> dict[str, Any]:
    chat = [{"role": "user", "content": prompt}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = _ids(tokenizer, rendered)
    made = model.generate(ids, max_new_tokens=300, do_sample=False)[0, ids.shape[1] :]
    return {
        "prompt": prompt,
        "rendered": rendered,
        "reply": tokenizer.decode(made, skip_special_tokens=True),
        "prompt_tokens": ids.shape[1],
        "completion_tokens": len(made),
    }


def _logprobs(model: Any, tokenizer: Any, context: str, continuation: str) -> dict[str, Any]:
    ids = _ids(tokenizer, context + continuation)
    start = _ids(tokenizer, context).shape[1]
    logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    given = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    return {
        "context": context,
        "continuation": continuation,
        "logprob": given[start - 1 :].sum().item(),
        "is_greedy": bool((logprobs.argmax(-1) == ids[0, 1:])[start - 1 :].all()),
    }


def _ids(tokenizer: Any, text: str) -> torch.Tensor:
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
