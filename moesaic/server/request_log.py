"""--log-requests: a line for every request that has ended."""

from __future__ import annotations

import json
import logging
from typing import Final

import msgspec

from moesaic.config import ServerArgs
from moesaic.engine.frontend.outputs import RequestUpdate

logger = logging.getLogger(__name__)

# What levels below 3 show of a prompt or an answer.
SHORT: Final = 200


def log_request(args: ServerArgs, piece: RequestUpdate, prompt: str | None) -> None:
    """Level 0: figures; 1: and sampling parameters; 2: and the beginnings of texts; 3: all of
    them. A prompt that came as token ids is shown as such."""
    request, level = piece.request, args.log_requests_level
    reason = request.finish_reason
    assert reason is not None
    words = [
        f"request {request.rid}: {request.prompt_len} prompt tokens, "
        f"{request.num_output} generated, {reason.type}"
    ]
    if reason.message:
        words.append(f"message {reason.message!r}")
    if request.finished is not None:
        words.append(f"e2e {request.finished - request.created:.3f} s")
    if request.first_token is not None:
        words.append(f"ttft {request.first_token - request.created:.3f} s")
    if level >= 1:
        words.append(f"sampling {_plain(msgspec.json.encode(request.params).decode())}")
    if level >= 2:
        given = prompt if prompt is not None else repr(request.prompt_ids)
        words.append(f"prompt {_text(given, level)}, answer {_text(piece.text, level)}")
    logger.info("%s", ", ".join(words))


def _plain(text: str) -> str:
    """JSON without what a terminal or a reader of lines would obey."""
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1].replace("\x7f", "\\u007f")


def _text(text: str, level: int) -> str:
    """On one line, whatever it holds."""
    short = level < 3 and len(text) > SHORT
    return repr(text[:SHORT]) + f" … ({len(text)} characters)" if short else repr(text)
