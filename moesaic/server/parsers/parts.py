"""What a parser reads and what it gives."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, Protocol


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
    """A piece of the JSON text of a call's arguments."""

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


class ChatParser(Protocol):
    """One for every sample of an answer."""

    def feed(self, text: str) -> list[Part]:
        """`text` is what came since the last call."""

    def finish(self) -> list[Part]:
        """Releases what was held back."""


def call_id() -> str:
    return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """Mistral's templates refuse every id that has not nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


IDS = {"call": call_id, "short": short_id}


class Calls:
    """The calls of one answer so far, and the functions that may be called."""

    def __init__(self, tools: Sequence[Tool], ids: str = "call") -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._new_id = IDS[ids]
        self.count = 0

    def known(self, name: object) -> bool:
        return isinstance(name, str) and name in self._tools

    def parameters(self, name: str) -> dict[str, Any]:
        return self._tools[name].parameters

    def start(self, name: str, own_id: str | None = None) -> ToolStart:
        self.count += 1
        return ToolStart(self.count - 1, own_id or self._new_id(), name)

    def arguments(self, text: str) -> ToolArguments:
        """A piece for the call that was started last."""
        return ToolArguments(self.count - 1, text)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of one kind as one part, and no empty ones."""
    result: list[Part] = []
    told = (part for part in parts if isinstance(part, ToolStart) or part.text)
    for _, group in groupby(told, key=_kind):
        first, *more = group
        if more and not isinstance(first, ToolStart):
            texts = [part.text for part in more if not isinstance(part, ToolStart)]
            first = replace(first, text="".join([first.text, *texts]))
        result.append(first)
    return result


def _kind(part: Part) -> tuple[str, int]:
    """Two calls never share an index, so no two starts are one."""
    index = part.index if isinstance(part, ToolStart | ToolArguments) else 0
    return type(part).__name__, index
