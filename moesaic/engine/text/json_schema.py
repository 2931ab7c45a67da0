"""JSON schemas as llguidance gets them: without what it cannot enforce, and with closed objects.

An object with `properties` has no others unless its schema says `additionalProperties`, as with
SGLang's default backend.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from moesaic.engine.text.schema_closing import Closing
from moesaic.engine.text.schema_parts import (
    APPLIED,
    DEFINED,
    INNER,
    PARTS,
    Schema,
    is_definition,
    mapped,
    resolved,
    steps_of,
    strings,
)

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
KEYWORDS: Final = (*INNER, *DEFINED, PARTS, *APPLIED)
OPTIONS: Final = "x-guidance"
MAX_IGNORED: Final = 32


class PreparedSchema(NamedTuple):
    schema: Any
    ignored: list[str]
    """What is not enforced, such as `uniqueItems at $.properties.tags`; the first MAX_IGNORED."""


def prepare(
    schema: Any, open_objects: bool = False, document: Schema | None = None
) -> PreparedSchema:
    """`open_objects`: objects may have other properties, by the letter of the standard. `document`:
    what the schema's references lead into, if that is not the schema. ValueError if the schema is
    too deep or too large."""
    if not isinstance(schema, dict):
        return PreparedSchema(schema, [])
    options = _options(schema)
    lenient = options.get("lenient") is not False
    root = schema if document is None else document
    stripping = _Stripping(root)
    try:
        found = Closing(root, open_objects).closed(schema)
        if lenient:
            stripping.stripped(schema, "$")
            found = _Stripping(found).stripped(found, "$")
    except RecursionError:
        raise ValueError("a JSON schema is nested too deeply: give one with fewer levels") from None
    found[OPTIONS] = {**options, "lenient": False, "coerce_one_of": lenient}
    return PreparedSchema(found, list(stripping.ignored))


def strict(schema: Any) -> Any:
    """A schema that is refused if one of its keywords cannot be enforced."""
    if not isinstance(schema, dict):
        return schema
    return {**schema, OPTIONS: {**_options(schema), "lenient": False}}


def _options(schema: Schema) -> dict[str, Any]:
    options = schema.get(OPTIONS)
    return options if isinstance(options, dict) else {}


@dataclass(frozen=True)
class _Stripping:
    root: Schema
    ignored: dict[str, None] = field(default_factory=dict)
    """In the order in which they were found."""
    followed: set[str] = field(default_factory=set)

    def stripped(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        found = {key: value for key, value in schema.items() if _is_enforced(schema, key)}
        for key in schema:
            if key not in found and schema[key] != UNENFORCED.get(key, ...):
                self._ignore(key, path)
        if isinstance(schema.get("oneOf"), list) and not self._are_disjoint(schema["oneOf"]):
            self._ignore("oneOf (taken as anyOf)", path)
        self._follow(schema.get("$ref"))
        return mapped(found, KEYWORDS, lambda one, place: self.stripped(one, f"{path}.{place}"))

    def _follow(self, reference: Any) -> None:
        """Finds what is ignored in a target that is below none of the KEYWORDS."""
        if isinstance(reference, str) and reference not in self.followed:
            self.followed.add(reference)
            if not is_definition(reference):
                path = ".".join(["$", *(steps_of(reference) or ())])
                self.stripped(resolved(self.root, reference), path)

    def _ignore(self, what: str, path: str) -> None:
        if len(self.ignored) < MAX_IGNORED:
            self.ignored[f"{what} at {path}"] = None

    def _are_disjoint(self, branches: list[Any]) -> bool:
        """Whether a value fits one branch at most: by its type, or by a property that all have."""
        found = [
            resolved(self.root, b["$ref"]) if isinstance(b, dict) and "$ref" in b else b
            for b in branches
        ]
        if not all(isinstance(one, dict) for one in found):
            return False
        kinds = [one.get("type") for one in found]
        if all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds):
            return not {"integer", "number"} <= set(kinds)
        names = strings(found[0].get("required")) if found else ()
        return any(_tells_apart(found, name) for name in names)


def _is_enforced(schema: Schema, key: str) -> bool:
    value = schema[key]
    match key:
        case "format":
            kinds = schema.get("type", "string")
            is_text = "string" in ([kinds] if isinstance(kinds, str) else strings(kinds))
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
        if not isinstance(value, dict) or name not in strings(required):
            return False
        values = [value["const"]] if "const" in value else value.get("enum")
        texts = {json.dumps(one) for one in values} if isinstance(values, list) else seen
        if not texts or seen & texts:
            return False
        seen |= texts
    return True
