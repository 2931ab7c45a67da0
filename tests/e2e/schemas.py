"""Random JSON schemas of bounded size, each made from one number."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
NAMES = ("id", "name", "größe", "tags", "x-1", "a b", "oneOf", 'quo"te', "deep", "kind")
WORDS = ("red", "green", "ßüß", 'with "quotes"', "line\nbreak", "日本", "")
PATTERNS = ("^[a-f0-9]{4}$", "^(yes|no)$", "^[A-Z][a-z]{1,5}$", "^\\d{3}-\\d{2}$", "^x?y{2,4}z$")
FORMATS = ("date", "uuid", "ipv4", "date-time", "time")


def schema_of(number: int) -> Schema:
    """An object with everything that is asked of structured output somewhere in the family."""
    source = random.Random(number)
    return _root(source) if number % 4 else _with_definitions(source)


def _root(source: random.Random) -> Schema:
    return _object(source, depth=2)


def _with_definitions(source: random.Random) -> Schema:
    """A reference to a part, and a list that refers to itself; without white space."""
    link = {
        "type": "object",
        "properties": {
            "value": _scalar(source),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/link"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {
        "x-guidance": {"whitespace_flexible": False},
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {"part": _object(source, depth=1), "link": link},
        "type": "object",
        "properties": {
            "part": {"$ref": "#/$defs/part"},
            "more": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2},
            "list": {"$ref": "#/$defs/link"},
        },
        "required": source.sample(["part", "list", "more"], 2),
        "additionalProperties": False,
    }


def _any(source: random.Random, depth: int) -> Schema:
    if depth == 0:
        return _scalar(source)
    made = source.choice((_scalar, _object, _array, _union, _tagged, _either))
    return made(source) if made is _scalar else made(source, depth - 1)


def _object(source: random.Random, depth: int) -> Schema:
    names = source.sample(NAMES, source.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(source, depth) for name in names},
        "required": source.sample(names, source.randint(0, len(names))),
        "additionalProperties": False,
    }
    chance = source.random()
    if chance < 0.1:  # llguidance counts properties only where all named ones are required
        schema |= {"required": names, "additionalProperties": _scalar(source)}
        schema["maxProperties"] = len(names) + 1
    elif chance < 0.25:
        schema["patternProperties"] = {"^[p-s]{2}$": _scalar(source)}
    return schema


def _array(source: random.Random, depth: int) -> Schema:
    least = source.randint(0, 2)
    if source.random() < 0.3:
        return {
            "type": "array",
            "prefixItems": [_any(source, depth), _scalar(source)],
            "items": False,
            "minItems": 2,
        }
    most = least + source.randint(0, 2)
    return {"type": "array", "items": _any(source, depth), "minItems": least, "maxItems": most}


def _union(source: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(source, depth) for _ in range(source.randint(2, 3))]}


def _either(source: random.Random, depth: int) -> Schema:
    return {"oneOf": [_string(source), _array(source, depth), {"type": "boolean"}, _number(source)]}


def _tagged(source: random.Random, depth: int) -> Schema:
    """As pydantic writes unions that a field tells apart."""
    options = []
    for tag in ("circle", "square"):
        option = _object(source, depth)
        option["properties"]["kind"] = {"const": tag}
        option["required"] = sorted({"kind", *option["required"]})
        options.append(option)
    return {"oneOf": options}


def _scalar(source: random.Random) -> Schema:
    return source.choice((_string, _number, _integer, _enum, _const, _other))(source)


def _string(source: random.Random) -> Schema:
    kind = source.randrange(3)
    if kind == 0:
        return {"type": "string", "pattern": source.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": source.choice(FORMATS)}
    least = source.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + source.randint(0, 5)}


def _integer(source: random.Random) -> Schema:
    low = source.randint(-1000, 1000)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + source.randint(0, 500)}
    if source.random() < 0.3:
        schema["multipleOf"] = source.choice((2, 5, 10))
        schema["maximum"] = low + 500
    return schema


def _number(source: random.Random) -> Schema:
    low = round(source.uniform(-50, 50), 2)
    limits = ("minimum", "maximum") if source.random() < 0.5 else ("exclusiveMinimum", "maximum")
    return {"type": "number", limits[0]: low, limits[1]: round(low + source.uniform(1, 20), 2)}


def _enum(source: random.Random) -> Schema:
    return {"enum": [*source.sample(WORDS, 3), source.randint(0, 99), None]}


def _const(source: random.Random) -> Schema:
    return {"const": source.choice((*WORDS, 7, -1.5, True, None, [1, "a"], {"b": [None]}))}


def _other(source: random.Random) -> Schema:
    return {"type": source.choice(("boolean", "null", ["boolean", "null"]))}
