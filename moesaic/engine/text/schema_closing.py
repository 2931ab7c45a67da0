"""Closes the objects of a JSON schema: they have no properties that the schema does not name.

Schemas that describe one value together (`allOf`, `$ref` with siblings, branches beside
`properties`) are closed together, as by `unevaluatedProperties`: each by itself would refuse the
properties of the others. The same holds for a property or item that several of them describe, and
schemas that are not enforced (`then`, `dependentSchemas`, ...) count for what they name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from moesaic.engine.text.schema_parts import (
    APPLIED,
    DEFINED,
    DESCRIBING,
    INNER,
    PARTS,
    DescribedValue,
    Key,
    Schema,
    is_definition,
    is_relevant,
    mapped,
    parts_of,
    resolved,
    strings,
)

# Parts of schemas and names of properties that are gathered to close objects.
MAX_NAMES: Final = 20_000
OBJECT_NAMES: Final = ("properties", "patternProperties")
NO_OTHERS: Final = {"additionalProperties": False}


class Closing:
    """`document` is what references lead into; `open_objects`: only those objects are closed that
    have `unevaluatedProperties: false`."""

    def __init__(self, document: Schema, open_objects: bool) -> None:
        self._document, self._open_objects = document, open_objects
        self._values: dict[Key, DescribedValue] = {}
        self._copies: dict[str, Any] = {}
        self._names: dict[tuple[str, Key], str] = {}
        self._is_document = True
        self._num_names = 0

    def closed(self, schema: Schema) -> dict[str, Any]:
        """A schema of the document. Its references lead to copies; those of the document itself
        may lead to its definitions."""
        self._is_document = schema is self._document
        found: dict[str, Any] = self._whole(schema)
        if self._is_document:
            found = mapped(found, DEFINED, self._whole)
        return {**found, PARTS: self._copies} if self._copies else found

    def _whole(self, schema: Any, _: str = "") -> Any:
        """The schema of a value that no other schema describes."""
        if not is_relevant(schema):
            return dict(schema) if isinstance(schema, dict) else schema
        if self._has_whole_branches(schema):
            found = mapped(schema, APPLIED, self._whole)
            return self._with_reference(found, "whole", (), self._whole)
        value = self._value([schema])
        return self._with_closing(self._part(schema, value), value)

    def _has_whole_branches(self, schema: Schema) -> bool:
        """Whether each branch, or the target of the reference, says all about the value."""
        applied = [key for key in ("$ref", *APPLIED) if key in schema]
        if len(applied) != 1 or applied == ["allOf"] or not DESCRIBING.isdisjoint(schema):
            return False
        branches = schema[applied[0]]
        if applied == ["$ref"]:
            branches = [resolved(self._document, schema["$ref"])]
        required = {*strings(schema.get("required"))}
        if not required or not isinstance(branches, list):
            return True
        values = [self._value([one]) for one in branches if is_relevant(one)]
        return all(not one.is_closed or one.properties.keys() >= required for one in values)

    def _part(self, schema: Any, value: DescribedValue) -> Any:
        """The schema of a value that others describe, too."""
        if not isinstance(schema, dict):
            return schema

        def inner(one: Any, place: str) -> Any:
            key, _, name = place.partition(".")
            members = self._members(value, key.partition("[")[0], name, schema)
            return self._whole(one) if len(members) < 2 else self._part(one, self._value(members))

        found = mapped(mapped(schema, INNER, inner), APPLIED, lambda one, _: self._part(one, value))
        if isinstance(found.get("unevaluatedProperties"), bool):
            del found["unevaluatedProperties"]
        return self._with_reference(found, "part", value.key, lambda one: self._part(one, value))

    def _with_reference(
        self, found: dict[str, Any], kind: str, key: Key, change: Callable[[Any], Any]
    ) -> dict[str, Any]:
        """Its `$ref` leads to a changed copy, unless the target itself is changed like that."""
        reference = found.get("$ref")
        target = resolved(self._document, reference)
        is_changed = kind == "whole" and self._is_document and is_definition(reference)
        if target is None or is_changed:
            return found
        return {**found, "$ref": self._copied(f"{kind} {reference}", key, lambda: change(target))}

    def _copied(self, what: str, key: Key, make: Callable[[], Any]) -> str:
        if (what, key) not in self._names:
            name = self._names[what, key] = str(len(self._names))
            self._copies[name] = make()
        return f"#/{PARTS}/{self._names[what, key]}"

    def _value(self, members: Sequence[Schema]) -> DescribedValue:
        key = tuple(sorted(id(one) for one in members))
        if key not in self._values:
            asked = any(one.get("unevaluatedProperties") is False for one in members)
            value = DescribedValue(key, is_closable=asked or not self._open_objects)
            seen: set[tuple[str, bool]] = set()
            for one in members:
                for part, is_certain in parts_of(self._document, one, seen):
                    self._count(1)
                    value.add(part, is_certain)
            self._values[key] = value
        return self._values[key]

    def _members(
        self, value: DescribedValue, key: str, name: str, part: Schema | None = None
    ) -> list[Schema]:
        found = value.members(part or {}, key, name)
        self._count(max(0, len(found) - 1) + len(value.patterns) // 8)
        return found

    def _count(self, number: int) -> None:
        self._num_names += number
        if self._num_names > MAX_NAMES:
            raise ValueError("a JSON schema combines too many schemas and properties: simplify it")

    def _with_closing(self, found: dict[str, Any], value: DescribedValue) -> dict[str, Any]:
        closing = self._closing(value)
        all_of = found.get("allOf", [])
        own = {key: found[key] for key in OBJECT_NAMES if key in found}
        is_valid = isinstance(all_of, list) and all(isinstance(one, dict) for one in own.values())
        if not closing or not is_valid:
            return found  # llguidance refuses an invalid one
        inner = [one for key in OBJECT_NAMES for one in closing.get(key, {}).values()]
        is_plain = value.is_closed and "items" not in closing and all(one is True for one in inner)
        if not is_plain or any(key in found for key in ("$ref", *APPLIED)):
            return {**found, "allOf": [*all_of, closing]}
        names = {key: {**closing[key], **own.get(key, {})} for key in OBJECT_NAMES}
        return {**found, **{key: names[key] for key in names if names[key]}, **NO_OTHERS}

    def _closing(self, value: DescribedValue) -> dict[str, Any]:
        """The schema that keeps other properties out of the value, and out of what several of its
        schemas describe within it."""
        found: dict[str, Any] = {}
        self._count(len(value.properties) + len(value.patterns))
        for key, names in zip(OBJECT_NAMES, (value.properties, value.patterns), strict=True):
            inner = {name: self._inner_closing(self._members(value, key, name)) for name in names}
            inner = {n: one for n, one in inner.items() if value.is_closed or one is not True}
            if inner or value.is_closed:
                found[key] = inner
        if (items := self._inner_closing(self._members(value, "items", ""))) is not True:
            found["items"] = items
        return found | NO_OTHERS if value.is_closed else found

    def _inner_closing(self, members: Sequence[Schema]) -> Any:
        """True also below itself: llguidance does not combine schemas without end."""
        if len(members) < 2:
            return True
        value = self._value(members)
        reference = self._copied("closing", value.key, lambda: self._closing(value))
        return {"$ref": reference} if self._copies.get(reference.rpartition("/")[2]) else True
