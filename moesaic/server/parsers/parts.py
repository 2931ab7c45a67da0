"""The inputs and outputs of parsers."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class ToolStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """A fragment of the JSON of a call's arguments."""

    index: int
    text: str


Part = Reasoning | Content | ToolStart | ToolArguments


@dataclass(frozen=True)
class Tool:
    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True)
class NamedTool:
    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class Calls:
    """The calls of one answer, and the functions that it may call."""

    def __init__(self, tools: Sequence[Tool], short_ids: bool = False) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._short_ids = short_ids
        self.count = 0

    @property
    def possible(self) -> bool:
        return bool(self._tools)

    def known(self, name: object) -> bool:
        return isinstance(name, str) and name in self._tools

    def parameters(self, name: str) -> dict[str, Any]:
        return self._tools[name].parameters

    def start(self, name: str, own_id: str | None = None) -> ToolStart:
        self.count += 1
        return ToolStart(self.count - 1, own_id or self._new_id(), name)

    def _new_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return "call_" + secrets.token_hex(12)

    def arguments(self, text: str) -> ToolArguments:
        return ToolArguments(self.count - 1, text)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Joins adjacent parts of one kind and drops empty ones."""
    result: list[Part] = []
    parts = (part for part in parts if isinstance(part, ToolStart) or part.text)
    for _, group in groupby(parts, key=_kind):
        first, *more = group
        if more and not isinstance(first, ToolStart):
            texts = [part.text for part in more if not isinstance(part, ToolStart)]
            first = replace(first, text="".join([first.text, *texts]))
        result.append(first)
    return result


def _kind(part: Part) -> tuple[str, int]:
    """Calls have different indices, so two starts are never joined."""
    index = part.index if isinstance(part, ToolStart | ToolArguments) else 0
    return type(part).__name__, index
