"""Joins the parts of chats so that tests can compare them."""

import json
from collections.abc import Sequence
from typing import Any

from moesaic.server.parsers.parts import Part, ToolArguments, ToolStart

Calls = list[tuple[str, Any]]


def parts_of(parser: Any, pieces: Sequence[str]) -> list[Part]:
    return [part for piece in pieces for part in parser.feed(piece)] + parser.finish()


def summed(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """Joins neighbours and drops ids: (kind, text) and ("call", name)."""
    result: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case ToolStart(index, _, name):
                assert index == sum(kind == "call" for kind, _ in result)
                result.append(("call", name))
            case _:
                kind = type(part).__name__
                assert part.text, "an empty part"
                if isinstance(part, ToolArguments):
                    assert part.index == sum(k == "call" for k, _ in result) - 1
                if result and result[-1][0] == kind:
                    result[-1] = (kind, result[-1][1] + part.text)
                else:
                    result.append((kind, part.text))
    return result


def calls_of(items: Sequence[tuple[str, str]]) -> Calls:
    calls: Calls = []
    for kind, text in items:
        if kind == "call":
            calls.append((text, ""))
        elif kind == "ToolArguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return [(name, parsed(arguments)) for name, arguments in calls]


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
