"""JSON schemas as nested data: their keywords, references, and which schemas describe one value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard
from urllib.parse import unquote

Schema = Mapping[str, Any]
Key = tuple[int, ...]

DEFINED: Final = ("$defs", "definitions")
# Copies of the schemas to which a `$ref` leads.
PARTS: Final = "$parts"
NAMED: Final = ("properties", "patternProperties", *DEFINED, PARTS)
ITEMS: Final = ("items", "prefixItems", "additionalItems")
# Keywords with schemas for parts of the value, and for the value itself.
INNER: Final = ("properties", "patternProperties", "additionalProperties", *ITEMS)
APPLIED: Final = ("allOf", "anyOf", "oneOf")
# Keywords that name properties which an object has in some cases only.
CONDITIONAL: Final = ("if", "then", "else")
DEPENDENT: Final = ("dependentSchemas", "dependentRequired", "dependencies")
UNKNOWN: Final = ("$dynamicRef", "$recursiveRef")
OBJECT: Final = (
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
)
DESCRIBING: Final = frozenset(
    (*OBJECT, *ITEMS, *CONDITIONAL, *DEPENDENT, *UNKNOWN, "contains", "unevaluatedItems")
)
RELEVANT: Final = DESCRIBING | {*APPLIED, "$ref", "required"}
LITERAL: Final = re.compile(r"\^([A-Za-z0-9_-]*)([*?{]?)")


def mapped(
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


def strings(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def steps_of(reference: Any) -> list[str] | None:
    """The keys that lead to the target of a reference within the document."""
    if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
        return None
    steps = unquote(reference).split("/")[1:]
    return [step.replace("~1", "/").replace("~0", "~") for step in steps]


def is_definition(reference: Any) -> bool:
    """Whether it leads to the document or to one of its definitions."""
    steps = steps_of(reference)
    return steps is not None and (not steps or (len(steps) == 2 and steps[0] in DEFINED))


def resolved(root: Schema, reference: Any) -> Any:
    """The schema that a reference within the document leads to, or None."""
    steps = steps_of(reference)
    found: Any = None if steps is None else root
    for name in steps or ():
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def is_relevant(schema: Any) -> TypeGuard[Schema]:
    """Whether it can say which properties a value, or something within it, has."""
    return isinstance(schema, dict) and not RELEVANT.isdisjoint(schema)


def parts_of(
    root: Schema, schema: Any, seen: set[tuple[str, bool]], is_certain: bool = True
) -> Iterator[tuple[Schema, bool]]:
    """The schema and all that describe the same value, each with whether it is enforced: schemas
    below `if`, `then` and the like are not."""
    if not isinstance(schema, dict):
        return
    yield schema, is_certain
    for key in APPLIED:
        for part in schema[key] if isinstance(schema.get(key), list) else ():
            yield from parts_of(root, part, seen, is_certain)
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference, is_certain) not in seen:
        seen.add((reference, is_certain))
        target = resolved(root, reference)
        open_part = {"additionalProperties": True}
        yield from parts_of(root, open_part if target is None else target, seen, is_certain)
    for part in _conditional(schema):
        yield from parts_of(root, part, seen, False)


def _conditional(schema: Schema) -> Iterator[Any]:
    for key in CONDITIONAL:
        yield schema.get(key)
    for key in DEPENDENT:
        given = schema.get(key)
        for one in given.values() if isinstance(given, dict) else ():
            yield {"required": one} if isinstance(one, list) else one
    if any(key in schema for key in UNKNOWN):
        yield {"additionalProperties": True}


@dataclass
class DescribedValue:
    """What several schemas say together about the properties and items of one value.

    Schemas of properties and items are kept if they are relevant. `members` has all those that may
    describe the same inner value; a pattern and a name count as the same in case of doubt."""

    key: Key
    is_closable: bool
    properties: dict[str, list[Schema]] = field(default_factory=dict)
    patterns: dict[str, list[Schema]] = field(default_factory=dict)
    prefixes: dict[str, str] = field(default_factory=dict)
    """The characters with which the matches of each pattern begin."""
    others: list[tuple[Schema, Schema]] = field(default_factory=list)
    """Each schema with `additionalProperties`, and that keyword's schema."""
    items: list[Schema] = field(default_factory=list)
    is_object: bool = False
    is_open: bool = False
    """One of the schemas says which other properties there may be."""

    @property
    def is_closed(self) -> bool:
        return self.is_closable and self.is_object and not self.is_open

    def add(self, part: Schema, is_certain: bool) -> None:
        for key, found in (("properties", self.properties), ("patternProperties", self.patterns)):
            given = part.get(key)
            for name, one in given.items() if isinstance(given, dict) else ():
                found.setdefault(name, []).extend([one] if is_relevant(one) else [])
            self.is_object = self.is_object or (isinstance(given, dict) and is_certain)
        self.prefixes |= {one: _prefix(one) for one in _under(part, "patternProperties")}
        for name in strings(part.get("required")):
            self.properties.setdefault(name, [])
        other = part.get("additionalProperties")
        if is_relevant(other):
            self.others.append((part, other))
        for key in (*ITEMS, "contains"):
            given = part.get(key)
            self.items += filter(is_relevant, given if isinstance(given, list) else [given])
        says_others = "additionalProperties" in part and (is_certain or other is not False)
        says_open = part.get("unevaluatedProperties", False) is not False
        self.is_open = self.is_open or says_others or says_open

    def members(self, part: Schema, key: str, name: str) -> list[Schema]:
        """The schemas of the value that one of the described schemas has at this place."""
        match key:
            case "properties":
                found = [*self.properties.get(name, ()), *self._matching(name)]
                found += [one for other, one in self.others if name not in _under(other, key)]
            case "patternProperties":
                prefix = self.prefixes.get(name, "")
                named = (of for one, of in self.properties.items() if one.startswith(prefix))
                found = [*_joined(named), *self._matching(prefix, is_prefix=True)]
                found += [one for other, one in self.others if name not in _under(other, key)]
            case "additionalProperties":
                own = _under(part, "properties").keys() | _under(part, "patternProperties").keys()
                both = (*self.properties.items(), *self.patterns.items())
                found = [one for _, one in self.others]
                found += _joined(of for one, of in both if one not in own)
            case _:
                found = self.items if key in ITEMS else []
        return list({id(one): one for one in found}.values())

    def _matching(self, name: str, is_prefix: bool = False) -> Iterator[Schema]:
        """Schemas of patterns that may match this name, or one that begins like this."""
        for pattern, of in self.patterns.items():
            prefix = self.prefixes[pattern]
            if of and (name.startswith(prefix) or (is_prefix and prefix.startswith(name))):
                yield from of


def _joined(found: Iterable[list[Schema]]) -> Iterator[Schema]:
    return (one for several in found for one in several)


def _under(part: Schema, key: str) -> Schema:
    found = part.get(key)
    return found if isinstance(found, dict) else {}


def _prefix(pattern: str) -> str:
    """The characters with which all matches of a pattern begin, as far as that is easily seen."""
    found = LITERAL.match(pattern)
    if found is None or "|" in pattern:
        return ""
    return found[1][:-1] if found[2] else found[1]
