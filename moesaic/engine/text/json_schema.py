"""JSON schemas as llguidance gets them: without what it cannot enforce, and with closed objects.

An object with `properties` has no others unless its schema says `additionalProperties`, as with
SGLang's default backend. Parts of a schema that apply to one value (`allOf`, `$ref` with siblings,
branches beside `properties`) are closed together, as by `unevaluatedProperties`: each by itself
would refuse the properties of the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

Schema = Mapping[str, Any]

# Keywords that llguidance refuses, and the values with which they have no effect.
UNENFORCED: Final[Mapping[str, Any]] = {
    "uniqueItems": False,
    "not": False,
    "contains": ...,
    "minContains": ...,
    "maxContains": ...,
    "propertyNames": True,
    "dependentRequired": {},
    "dependentSchemas": {},
    "dependencies": {},
    "if": ...,
    "then": ...,
    "else": ...,
    "unevaluatedItems": True,
    "$dynamicRef": ...,
    "$recursiveRef": ...,
}
FORMATS: Final = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split()
)
# Look-around, word boundaries and references to groups.
UNENFORCED_PATTERN: Final = re.compile(r"(?:\\[^bB1-9k]|[^\\])*?(?:\(\?<?[=!]|\\[bB1-9k])", re.S)
NAMED: Final = ("properties", "patternProperties", "$defs", "definitions")
# Keywords with schemas for parts of the value, and for the value itself.
INNER: Final = (*NAMED, "additionalProperties", "items", "prefixItems", "additionalItems")
APPLIED: Final = ("allOf", "anyOf", "oneOf")
OBJECT: Final = (
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
)
OPTIONS: Final = "x-guidance"
# Copies of the schemas to which a `$ref` leads, with open objects.
PARTS: Final = "$parts"
MAX_IGNORED: Final = 32
# Parts of schemas and names of properties that are gathered to close objects.
MAX_NAMES: Final = 20_000


class PreparedSchema(NamedTuple):
    schema: Any
    ignored: list[str]
    """What is not enforced, such as `uniqueItems at $.properties.tags`; the first MAX_IGNORED."""


def prepare(schema: Any, open_objects: bool = False) -> PreparedSchema:
    """`open_objects`: objects may have other properties, by the letter of the standard. ValueError
    if the schema is too deep or too large."""
    if not isinstance(schema, dict):
        return PreparedSchema(schema, [])
    options = _options(schema)
    lenient = options.get("lenient") is not False
    stripping = _Stripping(schema)
    try:
        found = stripping.stripped(schema, "$") if lenient else schema
        found = _Closing(found, open_objects).closed()
    except RecursionError:
        raise ValueError("a JSON schema is nested too deeply: give one with fewer levels") from None
    found[OPTIONS] = {**options, "lenient": False, "coerce_one_of": lenient}
    return PreparedSchema(found, stripping.ignored)


def strict(schema: Any) -> Any:
    """A schema that is refused if one of its keywords cannot be enforced."""
    if not isinstance(schema, dict):
        return schema
    return {**schema, OPTIONS: {**_options(schema), "lenient": False}}


def _options(schema: Schema) -> dict[str, Any]:
    options = schema.get(OPTIONS)
    return options if isinstance(options, dict) else {}


def _mapped(
    schema: Schema, keys: tuple[str, ...], change: Callable[[Any, str], Any]
) -> dict[str, Any]:
    """A copy in which the schemas under these keywords are changed; `change` gets their places."""
    found = dict(schema)
    for key in keys:
        value = found.get(key)
        if isinstance(value, list):
            found[key] = [change(one, f"{key}[{n}]") for n, one in enumerate(value)]
        elif isinstance(value, dict) and key in NAMED:
            found[key] = {name: change(one, f"{key}.{name}") for name, one in value.items()}
        elif isinstance(value, dict):
            found[key] = change(value, key)
    return found


def _strings(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _resolved(root: Schema, reference: Any) -> Any:
    """The schema that a reference within the document leads to, or None."""
    if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
        return None
    found: Any = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


@dataclass(frozen=True)
class _Stripping:
    root: Schema
    ignored: list[str] = field(default_factory=list)

    def stripped(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        found = {key: value for key, value in schema.items() if _is_enforced(schema, key)}
        for key in schema:
            if key not in found and schema[key] != UNENFORCED.get(key, ...):
                self._ignore(key, path)
        if isinstance(schema.get("oneOf"), list) and not self._are_disjoint(schema["oneOf"]):
            self._ignore("oneOf (taken as anyOf)", path)
        return _mapped(
            found, (*INNER, *APPLIED), lambda one, place: self.stripped(one, f"{path}.{place}")
        )

    def _ignore(self, what: str, path: str) -> None:
        if len(self.ignored) < MAX_IGNORED:
            self.ignored.append(f"{what} at {path}")

    def _are_disjoint(self, branches: list[Any]) -> bool:
        """Whether a value fits one branch at most: by its type, or by a property that all have."""
        found = [
            _resolved(self.root, b["$ref"]) if isinstance(b, dict) and "$ref" in b else b
            for b in branches
        ]
        if not all(isinstance(one, dict) for one in found):
            return False
        kinds = [one.get("type") for one in found]
        if all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds):
            return not {"integer", "number"} <= set(kinds)
        names = _strings(found[0].get("required")) if found else ()
        return any(_tells_apart(found, name) for name in names)


def _is_enforced(schema: Schema, key: str) -> bool:
    value = schema[key]
    match key:
        case "format":
            kinds = schema.get("type", "string")
            is_text = "string" in ([kinds] if isinstance(kinds, str) else _strings(kinds))
            return not is_text or (isinstance(value, str) and value in FORMATS)
        case "pattern":
            return not (isinstance(value, str) and UNENFORCED_PATTERN.match(value))
        case "unevaluatedProperties":  # a boolean opens or closes the object
            return isinstance(value, bool)
    return key not in UNENFORCED


def _tells_apart(branches: list[Schema], name: str) -> bool:
    seen: set[str] = set()
    for branch in branches:
        required, properties = branch.get("required"), branch.get("properties")
        value = properties.get(name) if isinstance(properties, dict) else None
        if not isinstance(value, dict) or name not in _strings(required):
            return False
        values = [value["const"]] if "const" in value else value.get("enum")
        texts = {json.dumps(one) for one in values} if isinstance(values, list) else seen
        if not texts or seen & texts:
            return False
        seen |= texts
    return True


@dataclass
class _Names:
    """The properties that the parts of a schema name together."""

    properties: dict[str, Any] = field(default_factory=dict)
    patterns: dict[str, Any] = field(default_factory=dict)
    is_object: bool = False
    is_open: bool = False
    """One of the parts says which other properties there may be."""


class _Closing:
    def __init__(self, root: Schema, open_objects: bool) -> None:
        self._root, self._open_objects = root, open_objects
        self._parts: dict[str, Any] = {}
        self._part_names: dict[str, str] = {}
        self._num_names = 0

    def closed(self) -> dict[str, Any]:
        found: dict[str, Any] = self._whole(self._root)
        return {**found, PARTS: self._parts} if self._parts else found

    def _whole(self, schema: Any, _: str = "") -> Any:
        """The schema of a value that no other schema describes."""
        if not isinstance(schema, dict):
            return schema
        applied = [key for key in ("$ref", *APPLIED) if key in schema]
        if len(applied) == 1 and applied != ["allOf"] and not any(key in schema for key in OBJECT):
            return _mapped(schema, (*INNER, *APPLIED), self._whole)
        return self._with_closing(self._part(schema), schema)

    def _part(self, schema: Any, _: str = "") -> Any:
        """The schema of a value that others describe, too."""
        if not isinstance(schema, dict):
            return schema
        found = _mapped(_mapped(schema, INNER, self._whole), APPLIED, self._part)
        if isinstance(found.get("unevaluatedProperties"), bool):
            del found["unevaluatedProperties"]
        if _resolved(self._root, schema.get("$ref")) is not None:
            found["$ref"] = self._part_reference(schema["$ref"])
        return found

    def _part_reference(self, reference: str) -> str:
        if reference not in self._part_names:
            name = self._part_names[reference] = str(len(self._part_names))
            self._parts[name] = self._part(_resolved(self._root, reference))
        return f"#/{PARTS}/{self._part_names[reference]}"

    def _with_closing(self, found: dict[str, Any], schema: Schema) -> dict[str, Any]:
        names = _Names()
        for part in self._parts_of(schema, set()):
            self._num_names += 1
            _add_names(names, part)
        self._num_names += len(names.properties) + len(names.patterns)
        if self._num_names > MAX_NAMES:
            raise ValueError("a JSON schema combines too many schemas and properties: simplify it")
        asked = schema.get("unevaluatedProperties") is False or not self._open_objects
        properties, all_of = found.get("properties", {}), found.get("allOf", [])
        is_valid = isinstance(properties, dict) and isinstance(all_of, list)
        if names.is_open or not names.is_object or not asked or not is_valid:
            return found  # llguidance refuses an invalid one
        if not any(key in schema for key in ("$ref", *APPLIED)):
            properties = {**names.properties, **properties}
            return {**found, "properties": properties, "additionalProperties": False}
        closing = {"properties": names.properties, "patternProperties": names.patterns}
        return {**found, "allOf": [*all_of, {**closing, "additionalProperties": False}]}

    def _parts_of(self, schema: Any, seen: set[str]) -> Iterator[Schema]:
        """The schema and all that apply to the same value."""
        if not isinstance(schema, dict):
            return
        yield schema
        for key in APPLIED:
            for part in schema[key] if isinstance(schema.get(key), list) else ():
                yield from self._parts_of(part, seen)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            target = _resolved(self._root, reference)
            yield from self._parts_of(
                {"additionalProperties": True} if target is None else target, seen
            )


def _add_names(names: _Names, part: Schema) -> None:
    for key, found in (("properties", names.properties), ("patternProperties", names.patterns)):
        if isinstance(given := part.get(key), dict):
            names.is_object = True
            found.update(dict.fromkeys(given, True))
    names.properties.update(dict.fromkeys(_strings(part.get("required")), True))
    says_open = part.get("unevaluatedProperties") is True
    names.is_open = names.is_open or says_open or "additionalProperties" in part
