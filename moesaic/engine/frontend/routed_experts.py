"""The routed experts of a request: which are asked for, and how the answer has them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from moesaic.core.foreign_fields import BadParameter
from moesaic.core.redact import shown
from moesaic.core.request import Request
from moesaic.engine.worker.planner import ModelFacts

# The most bytes of a call over HTTP; the answer has nearly three times as many.
MAX_BYTES: Final = 1 << 25
# Experts that are encoded at once: short, as it holds Python's lock, and a multiple of 3, so that
# the texts can be joined.
PIECE: Final = 3 << 16
# Bytes that are encoded in a microsecond.
BYTES_PER_US: Final = 256


def row_bytes(facts: ModelFacts) -> int:
    """Those of one token: a uint16 for each layer and chosen expert."""
    return facts.num_layers * facts.top_k * 2


def first_position(asked: Any, start: int, prompt_len: int) -> int | None:
    """The first position whose experts are requested; None: none are. BadParameter for
    others."""
    if asked not in (None, True, False):
        text = f"return_routed_experts must be true or false, not {shown(asked)}"
        raise BadParameter("return_routed_experts", text)
    if not asked:
        return None
    if not -1 <= start <= prompt_len:
        raise BadParameter(
            "routed_experts_start_len",
            f"routed_experts_start_len {shown(start)} must be -1 (the last prompt token) or from 0 "
            f"to the length of the prompt, which has {prompt_len} tokens",
        )
    return start if start >= 0 else prompt_len - 1


def check_size(requests: Sequence[Request]) -> None:
    """BadParameter if the requested experts take too much memory."""
    asked = [request for request in requests if request.routed_start is not None]
    tokens = sum(_num_tokens(request, request.max_new_tokens) for request in asked)
    most = MAX_BYTES // asked[0].routed_row if asked else 0
    if tokens > most:
        raise BadParameter(
            "return_routed_experts",
            f"return_routed_experts: this could give the experts of {tokens} tokens, more than "
            f"{most}: lower the number of tokens or prompts, or raise routed_experts_start_len",
        )


def encoded(request: Request) -> str:
    """The experts as int32 [tokens, layers, top-k] in base64; fewer tokens after an abort."""
    tokens = _num_tokens(request, request.num_output)
    experts = np.frombuffer(request.routed[: tokens * request.routed_row], np.uint16)
    pieces = (experts[start : start + PIECE] for start in range(0, len(experts), PIECE))
    return "".join(base64.b64encode(piece.astype("<i4").tobytes()).decode() for piece in pieces)


def encoding_time(request: Request) -> int:
    """Estimated microseconds."""
    return len(request.routed) // BYTES_PER_US if request.finish_reason is not None else 0


def _num_tokens(request: Request, num_output: int) -> int:
    """Tokens with routed experts: the last one is not computed."""
    assert request.routed_start is not None
    return max(0, request.prompt_len + num_output - 1 - request.routed_start)
