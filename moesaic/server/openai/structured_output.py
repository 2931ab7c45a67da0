"""Structured output: the fields of OpenAI, SGLang and vLLM that constrain an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from moesaic.core.sampling import MAX_GRAMMAR_BYTES, Grammar
from moesaic.engine.text.json_schema import prepare, strict
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.openai.request_types import CommonBody, ResponseFormat, StructuredOutputs

# The kind of grammar of each field; vLLM's choices become a regular expression.
FIELDS: Final = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "guided_choice": "choice",
}
STRUCTURED: Final = {
    "json": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "choice": "choice",
}
ANY_OBJECT: Final = {"type": "object"}
META: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """A grammar and the field of the request that asked for it."""

    field: str
    grammar: Grammar

    @property
    def params(self) -> dict[str, str]:
        return {self.grammar.kind: self.grammar.text}

    @property
    def warnings(self) -> list[str]:
        if self.grammar.kind != "json_schema":
            return []
        try:
            schema = json.loads(self.grammar.text)
        except (ValueError, RecursionError):
            return []
        return ignored(self.field, schema)


def ignored(field: str, schema: Any) -> list[str]:
    """Warnings for the keywords that are not enforced. An invalid schema is refused later."""
    with suppress(ValueError):
        return [f"{field}: ignored {what}" for what in prepare(schema).ignored]
    return []


def requested_grammar(body: CommonBody) -> OutputGrammar | None:
    found = [_grammar(*entry) for entry in _requested(body) if entry[2] not in (None, "", [])]
    if len(found) > 1:
        names = " and ".join(grammar.field for grammar in found)
        raise Refusal(400, f"{names} exclude each other: give one", found[1].field)
    return found[0] if found else None


async def check_grammar(context: Context, requested: OutputGrammar, client: Hashable) -> None:
    """Raises a Refusal that names the field if the engine cannot enforce the grammar. Callers check
    the client's grammar first and by itself, so that the same input has the same result whatever
    the model's own format adds."""
    field, grammar = requested.field, requested.grammar
    if (size := len(grammar.text.encode())) > MAX_GRAMMAR_BYTES:
        fix = f"it has {size} bytes, give at most {MAX_GRAMMAR_BYTES}"
        raise Refusal(400, f"{field} is not possible: {fix}", field)
    try:
        await context.engine.check_grammar(grammar, client)
    except ValueError as error:
        why = str(error).removeprefix(f"{grammar.kind} is not possible: ")
        raise Refusal(400, f"{field} is not possible: {why}", field) from None
    except RuntimeError as error:
        raise context.refusal(error) from error


def _requested(body: CommonBody) -> Iterator[tuple[str, str, Any]]:
    """Fields, the kinds of their grammars, and their values, None if not given."""
    for field, kind in FIELDS.items():
        yield field, kind, getattr(body, field)
    if body.response_format is not None:
        yield "response_format", "json_schema", _schema(body.response_format)
    if body.structured_outputs is not None:
        yield "structured_outputs", *_structured(body.structured_outputs)


def _schema(requested: ResponseFormat) -> Any:
    """None for any text."""
    if requested.type == "text":
        return None
    if requested.type == "json_object":
        return ANY_OBJECT
    if requested.json_schema is None:
        text = "response_format of type json_schema needs json_schema with a schema"
        raise Refusal(400, text, "response_format")
    schema = requested.json_schema.schema
    schema = ANY_OBJECT if schema is None else schema
    return strict(schema) if requested.json_schema.strict else schema


def _structured(given: StructuredOutputs) -> tuple[str, Any]:
    values = {kind: getattr(given, name) for name, kind in STRUCTURED.items()}
    requested = [(kind, value) for kind, value in values.items() if value is not None]
    if given.json_object:
        requested.append(("json_schema", ANY_OBJECT))
    if len(requested) != 1:
        text = f"structured_outputs needs one of {', '.join(STRUCTURED)}, and has {len(requested)}"
        raise Refusal(400, text, "structured_outputs")
    return requested[0]


def _grammar(field: str, kind: str, value: Any) -> OutputGrammar:
    if kind == "choice":
        kind, value = "regex", _choice_pattern(field, value)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return OutputGrammar(field, Grammar(kind, text))


def _choice_pattern(field: str, choices: Sequence[str]) -> str:
    if not choices or not all(choices):
        raise Refusal(400, f"{field} needs at least one text, and no empty one", field)
    literals = (META.sub(r"\\\g<0>", choice).replace("\n", r"\n") for choice in choices)
    return f"({'|'.join(literals)})"
