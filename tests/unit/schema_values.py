"""What the tests of JSON schemas share: compilers of schemas, and which values a schema accepts."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
from llguidance import LLMatcher

from moesaic.core.sampling import Grammar
from moesaic.engine.text.grammar import Compiler
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.models.tiny import materialise

TOKENIZER = Tokenizer.from_folder(materialise("tiny:qwen3_moe"))
CLOSED, OPEN = (Compiler(TOKENIZER, 258, [256], open_objects) for open_objects in (False, True))


@functools.lru_cache
def matcher_of(schema: str, compiler: Compiler) -> LLMatcher:
    return compiler.matcher(Grammar("json_schema", schema))


def accepts(schema: Any, value: Any, compiler: Compiler = CLOSED) -> bool:
    """The grammar has a fixed order of properties, so any order counts."""
    matcher = matcher_of(json.dumps(schema), compiler)
    return any(after.is_accepting() for after in _after(matcher, value))


def _after(matcher: LLMatcher, value: Any) -> Iterator[LLMatcher]:
    """The states of the grammar after this value, one for each order."""
    if isinstance(value, dict):
        for opened in _after_text(matcher, "{"):
            yield from _after_members(opened, value, "")
    elif isinstance(value, list):
        states = list(_after_text(matcher, "["))
        for number, one in enumerate(value):
            begun = [m for state in states for m in _after_text(state, "," if number else "")]
            states = [m for state in begun for m in _after(state, one)]
        for state in states:
            yield from _after_text(state, "]")
    else:
        yield from _after_text(matcher, json.dumps(value))


def _after_members(matcher: LLMatcher, left: dict[str, Any], comma: str) -> Iterator[LLMatcher]:
    if not left:
        yield from _after_text(matcher, "}")
    for name, value in left.items():
        rest = {other: left[other] for other in left if other != name}
        for named in _after_text(matcher, f"{comma}{json.dumps(name)}:"):
            for state in _after(named, value):
                yield from _after_members(state, rest, ",")


def _after_text(matcher: LLMatcher, text: str) -> Iterator[LLMatcher]:
    ids = TOKENIZER.encode(text, add_special_tokens=False) if text else []
    if matcher.validate_tokens(ids) == len(ids):
        after = matcher.deep_copy()
        after.consume_tokens(ids)
        yield after


def is_valid(schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)
