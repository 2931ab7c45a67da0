"""--log-requests: one line for each request that ends."""

from __future__ import annotations

import json
import logging
from typing import Final

import msgspec

from moesaic.config import ServerArgs
from moesaic.engine.frontend.outputs import RequestUpdate

logger = logging.getLogger(__name__)

# Characters of a prompt or an answer that levels below 3 log.
SHORT: Final = 200


def log_request(args: ServerArgs, update: RequestUpdate, prompt: str | None) -> None:
    """Logs counts and times; level 1 adds parameters, 2 the beginnings of texts, 3 whole texts."""
    request, level = update.request, args.log_requests_level
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
        words.append(f"prompt {_text(given, level)}, answer {_text(update.text, level)}")
    logger.info("%s", ", ".join(words))


def _plain(text: str) -> str:
    """JSON with control characters and line ends escaped."""
    escaped = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
    return escaped.replace("\x7f", "\\u007f")


def _text(text: str, level: int) -> str:
    short = level < 3 and len(text) > SHORT
    return repr(text[:SHORT]) + f" … ({len(text)} characters)" if short else repr(text)
