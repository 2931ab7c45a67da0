"""JSON schemas as the grammar takes them: which objects are closed, and what is not enforced.

The oracle is jsonschema, with `unevaluatedProperties: false` where an object is to be closed."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import itertools
import json
import pathlib
import re
import uuid
from typing import Any, Literal

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from moesaic.core.sampling import Grammar
from moesaic.engine.text.json_schema import (
    FORMATS,
    UNENFORCED,
    UNENFORCED_PATTERN,
    prepare,
    strict,
)
from moesaic.engine.text.json_schema import KEYWORDS as SCHEMA_KEYWORDS
from moesaic.engine.text.schema_closing import MAX_NAMES
from tests.unit.schema_values import CLOSED, OPEN, accepts, is_valid

INTEGER = {"type": "integer"}
A: Any = {"type": "object", "properties": {"a": INTEGER}}
B: Any = {"type": "object", "properties": {"b": INTEGER}}
DEFS: Any = {"$defs": {"A": A}}
REF: Any = {"$ref": "#/$defs/A"}
EITHER = [{"required": ["a"]}, {"required": ["b"]}]
NO: Any = {"unevaluatedProperties": False}
# Schemas, and the same as jsonschema has to read them.
SCHEMAS: dict[str, tuple[Any, Any]] = {
    "properties": (A, A | NO),
    "no properties": ({"type": "object"}, {"type": "object"}),
    "empty properties": ({"type": "object", "properties": {}}, {"type": "object"} | NO),
    "required too": (
        A | {"required": ["b"]},
        {"type": "object", "properties": {"a": INTEGER, "b": {}}, "required": ["b"]} | NO,
    ),
    "dict": ({"type": "object", "additionalProperties": INTEGER},) * 2,
    "said to be open": (A | {"additionalProperties": True}, A),
    "said to be unevaluated": (A | {"unevaluatedProperties": True}, A),
    "said to be closed": (A | {"additionalProperties": False}, A | NO),
    "patterns": (
        {"type": "object", "patternProperties": {"^[ac]$": INTEGER}},
        {"type": "object", "patternProperties": {"^[ac]$": INTEGER}} | NO,
    ),
    "allOf": ({"allOf": [A, B]}, {"allOf": [A, B]} | NO),
    "allOf beside": (A | {"allOf": [B]}, A | {"allOf": [B]} | NO),
    "allOf of a reference": (DEFS | B | {"allOf": [REF]}, DEFS | B | {"allOf": [REF]} | NO),
    "a reference": (DEFS | REF, DEFS | REF | NO),
    "a reference beside": (DEFS | REF | B, DEFS | REF | B | NO),
    "an open part": (
        {"allOf": [A, {"additionalProperties": INTEGER}]},
        {"allOf": [A, {"additionalProperties": INTEGER}]},
    ),
    "anyOf": (
        {"anyOf": [A | {"required": ["a"]}, B | {"required": ["b"]}, {"type": "null"}]},
        {"anyOf": [A | {"required": ["a"]} | NO, B | {"required": ["b"]} | NO, {"type": "null"}]},
    ),
    "anyOf of what is required": (
        A | {"anyOf": EITHER},
        {"type": "object", "properties": {"a": INTEGER, "b": {}}, "anyOf": EITHER} | NO,
    ),
    "inner": (
        {"type": "object", "properties": {"a": A, "b": {"allOf": [A, B]}}, "required": ["a"]},
        {
            "type": "object",
            "properties": {"a": A | NO, "b": {"allOf": [A, B]} | NO},
            "required": ["a"],
        }
        | NO,
    ),
    "recursive": (
        {"type": "object", "properties": {"a": {"$ref": "#"}, "b": INTEGER}},
        {"type": "object", "properties": {"a": {"$ref": "#"}, "b": INTEGER}} | NO,
    ),
}
INNER: Any = [1, "x", {}, {"a": 1}, {"a": 1, "b": 2}, {"c": 1}]
VALUES = [
    None,
    {},
    *({name: one} for name in "abc" for one in INNER),
    *({"a": one, "b": other} for one, other in itertools.product(INNER[:4], INNER[:2])),
    *({"a": 1, "b": 1, "c": one} for one in INNER[:2]),
    *({name: 1, "c": 1} for name in "ab"),
]


@pytest.mark.parametrize("name", SCHEMAS)
def test_objects_are_closed(name: str) -> None:
    schema, closed = SCHEMAS[name]
    for value in VALUES:
        for compiler, meant in ((CLOSED, closed), (OPEN, schema)):
            assert accepts(schema, value, compiler) == is_valid(meant, value), value


def test_a_reference_is_closed_or_part_of_another() -> None:
    schema = {
        "type": "object",
        "properties": {"whole": REF, "part": {"allOf": [REF, B]}, "self": {"$ref": "#/$defs/N"}},
        "$defs": {
            "A": A,
            "N": {"allOf": [REF, {"properties": {"n": {"$ref": "#/$defs/N"}}}]},
        },
    }
    assert accepts(schema, {"whole": {"a": 1}, "part": {"a": 1, "b": 2}})
    assert accepts(schema, {"self": {"a": 1, "n": {"a": 1, "n": {}}}})
    for bad in ({"whole": {"b": 1}}, {"part": {"c": 1}}, {"self": {"n": {"c": 1}}}, {"c": 1}):
        assert not accepts(schema, bad)
        assert accepts(schema, bad, OPEN)


def test_branches_beside_properties_invent_none() -> None:
    schema = A | {"oneOf": [B | {"required": ["b"]}, {"required": ["c"]}]}
    for value in ({"a": 1, "b": 2}, {"a": 1, "c": []}):
        assert accepts(schema, value) and is_valid(schema, value)
    assert not accepts(schema, {"a": 1, "b": 2, "d": 1})


EXAMPLES: dict[str, Any] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "not": {"not": {"const": 1}},
    "contains": {"type": "array", "contains": {}},
    "minContains": {"type": "array", "minContains": 1},
    "maxContains": {"type": "array", "maxContains": 1},
    "propertyNames": {"propertyNames": {"maxLength": 3}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {}}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "if": {"if": {}},
    "then": {"then": {}},
    "else": {"else": {}},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": INTEGER},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "format": {"type": "string", "format": "path"},
    "pattern": {"type": "string", "pattern": "^(?!a)b$"},
    "oneOf": {"oneOf": [{"minimum": 1}, {"maximum": 9}]},
}


@pytest.mark.parametrize("keyword", EXAMPLES)
def test_what_is_not_enforced(keyword: str) -> None:
    """llguidance refuses it, so it is left out; a strict schema is refused."""
    schema = {"type": "object", "properties": {"x": EXAMPLES[keyword]}}
    found = prepare(schema)
    (ignored,) = found.ignored
    assert ignored.split()[0] == keyword and ignored.endswith(" at $.properties.x")
    CLOSED.matcher(Grammar("json_schema", json.dumps(schema)))
    assert prepare(strict(schema)).ignored == []
    words = "look-around" if keyword == "pattern" else re.escape(keyword)
    with pytest.raises(ValueError, match=words):
        text = json.dumps(strict(schema)).replace('"path"', '"format"')
        CLOSED.matcher(Grammar("json_schema", text))


def test_the_table_is_complete() -> None:
    assert {*UNENFORCED, "unevaluatedProperties", "format", "pattern", "oneOf"} == {*EXAMPLES}
    for name in FORMATS:
        schema = {"type": "string", "format": name}
        assert prepare(schema).ignored == []
        CLOSED.matcher(Grammar("json_schema", json.dumps(strict(schema))))


def test_keywords_without_effect_are_not_named() -> None:
    schema = {
        "properties": {
            "uniqueItems": {"uniqueItems": False, "dependentRequired": {}},
            "not": {"const": {"not": 1}, "default": {"format": "x"}},
            "number": {"type": "integer", "format": "int32"},
            "same": {"oneOf": [{"type": "string"}, {"type": "null"}]},
        }
    }
    assert prepare(schema).ignored == []
    assert schema["properties"]["not"] == prepare(schema).schema["properties"]["not"]


@pytest.mark.parametrize(
    "pattern", [r"a\b", r"\Bx", r"(a)\1", r"(?<=a)b", r"a(?!b)", r"\\\bx", "\n(?=a)", r"\k<n>"]
)
def test_patterns_that_are_not_enforced(pattern: str) -> None:
    assert UNENFORCED_PATTERN.match(pattern)
    with pytest.raises(ValueError, match=r"."):
        CLOSED.matcher(Grammar("json_schema", json.dumps(strict({"pattern": pattern}))))


@pytest.mark.parametrize("pattern", [r"\\b", r"a\\\\1", r"(?:a)", r"[=!]", r"\d+\.", r"\(?=a"])
def test_patterns_that_are_enforced(pattern: str) -> None:
    assert not UNENFORCED_PATTERN.match(pattern)
    CLOSED.matcher(Grammar("json_schema", json.dumps(strict({"pattern": pattern}))))


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = pydantic.Field(ge=0, le=9)


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"


class Everything(pydantic.BaseModel):
    tags: set[str]
    path: pathlib.Path
    raw: bytes
    network: ipaddress.IPv4Network
    when: datetime.datetime
    id: uuid.UUID
    pet: Cat | Dog = pydantic.Field(discriminator="kind")
    counts: dict[str, int]
    sizes: dict[Literal["s", "m"], int]
    pair: tuple[int, str]
    parent: Everything | None = None


def test_pydantic_models() -> None:
    schema = Everything.model_json_schema()
    ignored = [
        ("uniqueItems", "tags"),
        ("format", "path"),
        ("format", "raw"),
        ("format", "network"),
        ("oneOf (taken as anyOf)", "pet"),
        ("propertyNames", "sizes"),
    ]
    place = "$.$defs.Everything.properties"
    assert prepare(schema).ignored == [f"{word} at {place}.{name}" for word, name in ignored]
    value = {
        "tags": ["a"],
        "path": "/tmp",
        "raw": "x",
        "network": "10.0.0.0/8",
        "when": "2026-11-17T12:00:00Z",
        "id": "12345678-1234-5678-1234-567812345678",
        "pet": {"kind": "cat", "lives": 3},
        "counts": {"any": 1},
        "sizes": {"s": 1},
        "pair": [1, "a"],
        "parent": None,
    }
    Everything.model_validate(value)
    assert accepts(schema, value)
    assert accepts(schema, value | {"parent": value})
    for bad in (
        {"pet": {"kind": "cat", "lives": 10}},
        {"pet": {"kind": "cat", "lives": 1, "age": 2}},
        {"counts": {"any": "x"}},
        {"other": 1},
        {"parent": {"a": 1}},
    ):
        assert not accepts(schema, value | bad), bad


def test_large_schemas_are_refused() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="nested too deeply"):
        prepare(deep)
    names = {f"p{n}": {} for n in range(MAX_NAMES // 10)}
    many = {"$defs": {"A": {"properties": names}}, "items": [{"allOf": [REF]}] * 11}
    with pytest.raises(ValueError, match="too many schemas and properties: simplify it"):
        prepare(many)
    for odd in (True, 5, None, [], {"properties": 5, "allOf": {}, "required": "x", "$ref": 7}):
        prepare(odd)


KEYWORDS = [*EXAMPLES, *SCHEMA_KEYWORDS, "$ref", "type", "required", "const", "enum"]
WRONG_VALUES: list[Any] = [None, 1, "x", [], {}, [1]]
BESIDE: list[Any] = [
    {},
    A,
    A | {"allOf": [B]},
    {"patternProperties": {"x": {}}},
    {"$ref": "#/items", "items": A},
    {"oneOf": [{"required": ["k"], "properties": {"k": {"const": n}}} for n in (1, 2)]},
]


@pytest.mark.parametrize("keyword", [*KEYWORDS, "unevaluatedProperties", "x-guidance"])
def test_values_of_wrong_types_are_taken_or_refused(keyword: str) -> None:
    for beside, value in itertools.product(BESIDE, WRONG_VALUES):
        schema = beside | {keyword: value}
        for one in (schema, {"items": schema}, strict(schema)):
            with contextlib.suppress(ValueError):
                CLOSED.matcher(Grammar("json_schema", json.dumps(one)))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        *((A | {"allOf": odd}, "allOf must be an array") for odd in (None, 1, "x", {}, {"a": A})),
        *(
            ({"patternProperties": {"x": {}}, "properties": odd}, "properties must be an object")
            for odd in (None, 1, "x", [], [1])
        ),
    ],
    ids=str,
)
def test_containers_of_wrong_types_are_refused(schema: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        CLOSED.matcher(Grammar("json_schema", json.dumps(schema)))


LEAVES = st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["string", "#", "#/a/0"])
ODD = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner),
    max_leaves=12,
)


@given(schema=ODD)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_odd_schemas_are_prepared_or_refused(schema: Any) -> None:
    before = json.dumps(schema)
    found = prepare(schema)
    assert json.dumps(schema) == before
    # Preparing it once more finds nothing left to ignore but the unions.
    assert {one.split()[0] for one in prepare(found.schema).ignored} <= {"oneOf"}


def test_options_of_the_schema_are_kept() -> None:
    options = {"whitespace_flexible": False}
    found = prepare(A | {"x-guidance": options}).schema
    assert found["x-guidance"] == options | {"lenient": False, "coerce_one_of": True}
    assert strict(A | {"x-guidance": options})["x-guidance"] == options | {"lenient": False}
    assert LLMatcher.grammar_from_json_schema(json.dumps(found))
