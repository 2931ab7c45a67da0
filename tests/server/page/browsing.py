"""What the tests of the page share: a server with a tiny model, made-up answers, and how to ask."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moesaic.engine.engine import Engine
from tests.server.serving import served

MODEL = "tiny:qwen3_moe,num_hidden_layers=3"


@contextmanager
def engine_with(**flags: Any) -> Iterator[tuple[Engine, str]]:
    with (
        Engine(model_path=MODEL, num_threads=1, log_level="warning", **flags) as engine,
        served(engine) as url,
    ):
        yield engine, url


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def events(*pieces: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"


def said(text: str) -> str:
    return events(chunk({"content": text}), chunk({}, "stop"))


Answer = str | tuple[int, dict[str, Any]]


class MadeUpAnswers:
    """Answers in the form of OpenAI's API: a stream, or a status with the message of an error."""

    def __init__(self, page: Any, *answers: Answer) -> None:
        self.sent: list[dict[str, Any]] = []
        self._answers = list(answers)
        page.route("**/v1/chat/completions", self._answer)

    def _answer(self, route: Any) -> None:
        self.sent.append(route.request.post_data_json)
        answer = self._answers.pop(0)
        if isinstance(answer, str):
            route.fulfill(body=answer, content_type="text/event-stream")
        else:
            route.fulfill(status=answer[0], json={"error": answer[1]})

    @property
    def conversations(self) -> list[list[str]]:
        return [[message["content"] for message in body["messages"]] for body in self.sent]


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector("#send", state="visible")


def change(page: Any, path: str, new: Callable[[dict[str, Any]], None]) -> None:
    """Changes what the server says at a path, before the page has it."""

    def answer(route: Any) -> None:
        body = route.fetch().json()
        new(body)
        route.fulfill(json=body)

    page.route(path, answer)


def boxes(page: Any, selector: str) -> list[dict[str, float]]:
    """Where the elements are in the window."""
    script = "all => all.map(one => one.getBoundingClientRect().toJSON())"
    found: list[dict[str, float]] = page.eval_on_selector_all(selector, script)
    return found


def close(page: Any) -> None:
    """The page polls: a handler of its requests may be at work."""
    page.unroute_all(behavior="ignoreErrors")
    page.close()
