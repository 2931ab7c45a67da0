"""--log-requests and --enable-request-time-stats-logging: lines for each request that ends; and
which HTTP requests --log-level-http logs."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path
from typing import Any, Final

import msgspec

from moesaic.config import ServerArgs
from moesaic.core.request import Request
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.engine.frontend.outputs import RequestUpdate

logger = logging.getLogger(__name__)
"""Lines of --log-requests, which may have other targets than the log."""
time_logger = logging.getLogger("moesaic.server.request_times")

# Characters of a prompt or an answer that levels below 3 log.
SHORT: Final = 200


@dataclass(frozen=True)
class CallLog:
    """Logs the requests of one call."""

    args: ServerArgs
    call: GenerateInput

    def add(self, update: RequestUpdate) -> None:
        """Logs counts and times; level 1 adds parameters, 2 the beginnings of texts, 3 whole
        texts."""
        if self.args.enable_request_time_stats_logging:
            time_logger.info("%s", _times(update.request))
        if not self.args.log_requests:
            return
        level = self.args.log_requests_level
        prompt = self._prompts[update.index] if level >= 2 and self._prompts else None
        if self.args.log_requests_format == "json":
            logger.info("%s", _plain(json.dumps(_object(update, prompt, level))))
        else:
            logger.info("%s", _text_line(update, prompt, level))

    @cached_property
    def _prompts(self) -> list[str] | None:
        return self.call.output_prompts()


def _times(request: Request) -> str:
    """The seconds of a request's phases; those that it never began are left out."""
    queued, first, end = request.queue_seconds, request.first_token, request.finished
    words = [] if queued is None else [f"queue {queued:.3f} s"]
    if queued is not None and first is not None:
        words.append(f"prefill {first - request.created - queued:.3f} s")
    if first is not None and end is not None:
        words.append(f"decode {end - first:.3f} s")
    return f"request {request.rid} took: {', '.join(words) or 'no step'}"


def _text_line(update: RequestUpdate, prompt: str | None, level: int) -> str:
    request = update.request
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
    return ", ".join(words)


def _object(update: RequestUpdate, prompt: str | None, level: int) -> dict[str, Any]:
    request = update.request
    assert request.finish_reason is not None
    found: dict[str, Any] = {
        "rid": request.rid,
        "prompt_tokens": request.prompt_len,
        "completion_tokens": request.num_output,
        "finish_reason": request.finish_reason.to_dict(),
    }
    if request.finished is not None:
        found["e2e_latency"] = round(request.finished - request.created, 6)
    if request.first_token is not None:
        found["ttft"] = round(request.first_token - request.created, 6)
    if level >= 1:
        found["sampling_params"] = msgspec.to_builtins(request.params)
    if level >= 2:
        most = None if level >= 3 else SHORT
        given = prompt if prompt is not None else repr(request.prompt_ids)
        found |= {"prompt": given[:most], "answer": update.text[:most]}
    return found


def _plain(text: str) -> str:
    """JSON with control characters and line ends escaped."""
    escaped = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
    return escaped.replace("\x7f", "\\u007f")


def _text(text: str, level: int) -> str:
    short = level < 3 and len(text) > SHORT
    return repr(text[:SHORT]) + f" … ({len(text)} characters)" if short else repr(text)


def set_up_request_log(args: ServerArgs) -> None:
    """Sends the lines of --log-requests to its targets instead of the log; ValueError if a folder
    cannot be written to."""
    for target in args.log_requests_target or ():
        handler = _handler(target)
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s"))
        if args.log_requests_format == "json":
            handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def _handler(target: str) -> logging.Handler:
    if target == "stdout":
        return logging.StreamHandler(sys.stdout)
    folder = Path(target)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return PrivateFileHandler(folder / "requests.log", when="midnight", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--log-requests-target {target}: {error.strerror}") from None


class PrivateFileHandler(TimedRotatingFileHandler):
    """A file per day that only the server's user may read."""

    def _open(self) -> Any:
        os.close(os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT, 0o600))
        return super()._open()


class AccessFilter(logging.Filter):
    """Leaves out HTTP requests of some paths; uvicorn's record has the path as third argument."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        super().__init__()
        self._prefixes = tuple(prefixes)

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args
        path = arguments[2] if isinstance(arguments, tuple) and len(arguments) > 2 else ""
        return not (self._prefixes and str(path).startswith(self._prefixes))
