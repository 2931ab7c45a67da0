"""Converts argument values from the model's text to JSON, typed by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def object_text(value: str) -> str | None:
    """Arguments as the text of a JSON object, or None. Models also write that text as a JSON
    string, or null for no arguments."""
    if value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    if not value.startswith('"'):
        return None
    try:
        text = json.loads(value)
        text.encode()
    except (ValueError, RecursionError):
        return None
    return text if isinstance(text, str) and text.lstrip().startswith("{") else None


def escaped(text: str) -> str:
    """The inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_text(parameters: Mapping[str, Any], key: str) -> bool:
    """Whether the schema allows nothing but a string."""
    return _types(parameters, key) == {"string"}


def fixed_values(schema: Mapping[str, Any]) -> list[Any]:
    """The values that `const` or `enum` allows; empty without them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


def as_json(text: str, parameters: Mapping[str, Any], key: str) -> str:
    """The JSON of a value in plain text: the value if the schema allows its type, else a string."""
    value = _PYTHON.get(text.strip(), text.strip())
    allowed = _types(parameters, key)
    try:
        kind = _TYPES[type(json.loads(value, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return f'"{escaped(text)}"'
    if kind == "integer" and "number" in allowed:
        kind = "number"
    return value if not allowed or kind in allowed else f'"{escaped(text)}"'


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _types(parameters: Mapping[str, Any], key: str) -> set[str]:
    """The types at the top of a parameter's schema; empty for any."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(schema, Mapping):
        return set()
    listed = schema.get("anyOf") or schema.get("oneOf") or [schema]
    kinds: set[str] = set()
    for option in listed if isinstance(listed, list) else [schema]:
        found = _type_of(option) if isinstance(option, Mapping) else set()
        if not found:
            return set()
        kinds |= found
    return kinds


def _type_of(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {name for name in kind if isinstance(name, str)}
    return {_TYPES[type(value)] for value in fixed_values(schema) if type(value) in _TYPES}
