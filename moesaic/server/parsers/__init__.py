"""How a model's text is read: reasoning, content and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of the JSON text."""

    index: int
    text: str


Part = Reasoning | Content | ToolStart | ToolArguments


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool


@dataclass(frozen=True, slots=True)
class NamedTool:
    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ChatParser(Protocol):
    """One a choice, fed its text as it grows."""

    def feed(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """Releases what was held back."""
        ...


class PlainText:
    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []


@dataclass(frozen=True, slots=True)
class Format:
    """`tools`, `reasoning`: how the model writes them, or None. `skip_special_tokens`: what
    sampling parameters must say so that the marks are seen."""

    tools: str | None = None
    reasoning: str | None = None
    skip_special_tokens: bool = True

    def parser(self, tools: Sequence[Tool], thinking: bool, split_reasoning: bool) -> ChatParser:
        return PlainText()

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        response: dict[str, str] | None,
        thinking: bool,
    ) -> dict[str, str]:
        """Sampling parameters that force what was asked for."""
        return response or {}


def choose_format(
    tool_call_parser: str | None, reasoning_parser: str | None, model_type: str
) -> Format:
    return Format()
