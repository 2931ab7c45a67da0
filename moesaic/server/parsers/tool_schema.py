"""Schemas of tools' arguments, which are always an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesaic.engine.text.schema_parts import resolved
from moesaic.server.errors import Refusal


def check_tool_schema(tool: str, schema: Any, field: str = "parameters") -> None:
    """Refusal if no object fits the schema. `field`: the schema's name on the route."""
    try:
        is_possible = _allows_object(schema, schema, {})
    except RecursionError:
        text = f"tool {tool!r}: {field} has too long a chain of references: give a shorter one"
        raise Refusal(400, text, "tools") from None
    if not is_possible:
        text = f'{field} must describe an object: give a schema of "type": "object"'
        raise Refusal(400, f"tool {tool!r}: {text}", "tools")


def object_form(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without the values that are not objects."""
    return {"type": "object", **schema} | {"type": "object"}


def _allows_object(root: Any, schema: Any, known: dict[str, bool]) -> bool:
    """`known`: the results for references; a cycle is taken to allow one. What is malformed beside
    `type` is left to the grammar's own check."""
    if not isinstance(schema, dict):
        return schema is not False
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        return False
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and not any(isinstance(value, dict) for value in values):
        return False
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = True
            known[reference] = _allows_object(root, resolved(root, reference), known)
        if not known[reference]:
            return False
    return all(
        combine(_allows_object(root, part, known) for part in parts)
        for key, combine in (("anyOf", any), ("oneOf", any), ("allOf", all))
        if isinstance(parts := schema.get(key), list)
    )
