"""Checks of what `generate` was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moesaic.core.foreign_fields import BadParameter
from moesaic.core.redact import shown, shown_id
from moesaic.core.request import Request
from moesaic.engine.frontend.engine_limits import EngineLimits
from moesaic.engine.frontend.outputs import num_logprobs
from moesaic.engine.frontend.request_options import integer

MAX_SAMPLES = 4096
# The most logprobs of a call over HTTP; each takes about 100 bytes.
MAX_LOGPROBS = 1 << 20


def check_number(prompts: Sequence[Any]) -> None:
    if len(prompts) > MAX_SAMPLES:
        raise ValueError(f"{len(prompts)} prompts at once: give at most {MAX_SAMPLES}")


def check_group(group: Any, num_groups: int) -> None:
    if group is not None and not 0 <= integer("data_parallel_rank", group) < num_groups:
        raise BadParameter(
            "data_parallel_rank",
            f"data_parallel_rank {group} is not one of the {num_groups} groups of this service",
        )


def check_distinct(requests: Sequence[Request]) -> None:
    seen: set[str] = set()
    for request in requests:
        if request.rid in seen:
            raise ValueError(
                f"rid {shown_id(request.rid)} would name two outputs of this call (the samples of "
                "prompt ID are ID, ID-1, ID-2, ...): give each prompt an id that no other prompt "
                "or sample has"
            )
        seen.add(request.rid)


def check_token_ids(ids: Sequence[int], vocab_size: int) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"token id {shown(token)} is out of range: this model has ids 0 to {vocab_size - 1}"
            )


def check_prompt(ids: list[int], limits: EngineLimits) -> None:
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    limits.check_tokens(len(ids))
    check_token_ids(ids, limits.vocab_size)


def check_logprobs(requests: Sequence[Request]) -> None:
    """ValueError if the requested logprobs take too much memory."""
    entries = sum(num_logprobs(request, 0, request.max_new_tokens) for request in requests)
    if entries > MAX_LOGPROBS:
        raise ValueError(
            f"this could give {entries} logprobs (tokens times alternatives plus one), more than "
            f"{MAX_LOGPROBS}: lower the number of tokens, alternatives or prompts"
        )
