"""The child process that renders chat templates.

A template is a program by the checkpoint's author that runs on a client's data: no check of either
bounds its work. It imports little besides Jinja.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moesaic.engine.text.limited_child import Answer, serve

MAX_RENDERED: Final = 16 << 20
MAX_MESSAGE: Final = 500
REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
# Templates such as DeepSeek-R1's tell by this that a turn has calls and no text.
ASKS_FOR_NONE: Final = re.compile(r"content\W{0,2}\s+is\s+(not\s+)?none")
# The first byte of an answer; the text or an error follows.
TEXT, INVALID, REFUSED = b"tir"


class TemplateArguments(dict[str, Any]):
    """The arguments of a tool call: some templates use them as values, some as text."""

    def __init__(self, text: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, after: str) -> str:
        return self._text + after

    def __radd__(self, before: str) -> str:
        return before + self._text


class Renderer:
    """Renders templates by name; TemplateError if one is not Jinja."""

    def __init__(self, templates: Mapping[str, str]) -> None:
        self._templates = templates
        self._compiled: dict[str, Template] = {}

    def compile(self, name: str) -> Template:
        if name not in self._compiled:
            self._compiled[name] = _environment().from_string(self._templates[name])
        return self._compiled[name]

    def render(self, name: str, variables: dict[str, Any]) -> str:
        keep_none = ASKS_FOR_NONE.search(self._templates[name]) is not None
        messages = [_with_reasoning(_given(m, keep_none)) for m in variables["messages"]]
        return _joined(self.compile(name).generate({**variables, "messages": messages}))


def _joined(pieces: Iterator[str]) -> str:
    size, found = 0, []
    for piece in pieces:
        size += len(piece)
        found.append(piece)
        if size > MAX_RENDERED:
            raise ValueError(f"the prompt exceeds {MAX_RENDERED} characters: send less")
    return "".join(found)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, unlike the models' training data.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _given(message: Mapping[str, Any], keep_none: bool) -> dict[str, Any]:
    """Leaves out what a client sent as null: most templates print "None" for it, or fail."""
    return {
        key: value
        for key, value in message.items()
        if value is not None or (keep_none and key == "content")
    }


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Gives a turn's reasoning under both names that templates use."""
    for key in REASONING_KEYS:
        if (reasoning := message.get(key)) is not None:
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _begin(data: bytes) -> Answer:
    renderer = Renderer(json.loads(data))
    # Jinja imports parts of itself with the first template: keep that out of its allowance.
    Renderer({"": "{% for a in messages %}{{ a }}{% endfor %}"}).render("", {"messages": [{}]})

    def answer(question: bytes) -> bytes:
        try:
            return _rendered(renderer, question)
        except MemoryError:
            raise
        except Exception as error:
            return _encode(REFUSED, (str(error) or repr(error))[:MAX_MESSAGE])

    return answer


def _rendered(renderer: Renderer, question: bytes) -> bytes:
    asked = json.loads(question)
    name, variables = asked["template"], asked["variables"]
    try:
        renderer.compile(name)
    except TemplateError as error:
        return _encode(INVALID, str(error)[:MAX_MESSAGE])
    for message, call in asked["parsed"]:
        function = variables["messages"][message]["tool_calls"][call]["function"]
        text = function["arguments"]
        function["arguments"] = TemplateArguments(text, json.loads(text or "{}"))
    return _encode(TEXT, renderer.render(name, variables))


def _encode(kind: int, text: str) -> bytes:
    return bytes([kind]) + text.encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    serve(_begin)
