"""Closed objects of JSON schemas whose parts describe one value together.

The oracle is jsonschema: what it calls valid, and has only properties that the schema names, is
accepted."""

from __future__ import annotations

import json
import random
from typing import Any, Generic, Literal, TypeVar

import pydantic
import pytest

from moesaic.core.sampling import Grammar
from moesaic.engine.text.json_schema import prepare, strict
from tests.unit.schema_values import CLOSED, OPEN, accepts, is_valid

INTEGER = {"type": "integer"}
UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


def an_object(*required: str, **properties: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": properties}
    return found | ({"required": [*required]} if required else {})


X, Y = an_object(x=INTEGER), an_object(y=INTEGER)
NODE = "#/components/schemas/N"
BASE = {"$defs": {"B": an_object(o=X)}}
THEN = {"if": an_object(kind={"const": "a"}), "then": an_object("x", x=INTEGER)}
# A schema, values that are valid and named, and values with a name that no part of it has there.
TOGETHER: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "a property of two parts": (
        BASE | {"allOf": [{"$ref": "#/$defs/B"}, an_object(o=Y)]},
        [{"o": {"x": 1}}, {"o": {"y": 1}}, {"o": {"x": 1, "y": 2}}],
        [{"o": {"z": 1}}, {"p": 1}],
    ),
    "a required property of two parts": (
        BASE | {"allOf": [{"$ref": "#/$defs/B"}, an_object("o", o=Y)]},
        [{"o": {"x": 1}}, {"o": {"x": 1, "y": 2}}],
        [{"o": {"z": 1}}],
    ),
    "three levels": (
        {"allOf": [an_object(a=an_object(o=X)), an_object(a=an_object(o=Y))]},
        [{"a": {"o": {"x": 1, "y": 2}}}],
        [{"a": {"o": {"z": 1}}}, {"a": {"x": 1}}],
    ),
    "a property in branches": (
        an_object(o=X) | {"anyOf": [an_object(o=Y), an_object("k", k=INTEGER)]},
        [{"o": {"x": 1, "y": 2}}, {"k": 1, "o": {"x": 1}}],
        [{"o": {"z": 1}}],
    ),
    "an open object with a property of two parts": (
        {"allOf": [an_object(o=X) | {"additionalProperties": True}, an_object(o=Y)]},
        [{"o": {"x": 1, "y": 2}}, {"p": 1}],
        [{"o": {"z": 1}}],
    ),
    "items of two parts": (
        {"allOf": [{"type": "array", "items": X}, {"prefixItems": [Y], "items": Y}]},
        [[{"x": 1, "y": 2}]],
        [[{"z": 1}]],
    ),
    "what an array contains": (
        {"type": "array", "items": X, "contains": an_object("y", y=INTEGER)},
        [[{"x": 1}, {"x": 1, "y": 2}]],
        [[{"z": 1}]],
    ),
    "values of two parts": (
        {"type": "object", "allOf": [{"additionalProperties": X}, {"additionalProperties": Y}]},
        [{"k": {"x": 1, "y": 2}}],
        [],
    ),
    "a property and a pattern": (
        an_object(k_1=X, other=X) | {"patternProperties": {"^k_": Y}},
        [{"k_1": {"x": 1, "y": 2}, "other": {"x": 1}}, {"k_2": {"y": 1}}],
        [{"k_1": {"z": 1}}, {"other": {"y": 1}}],
    ),
    "a property that only `required` names": (
        {"$defs": {"X": X}, "$ref": "#/$defs/X", "required": ["y"]},
        [{"x": 1, "y": 2}],
        [{"x": 1, "y": 2, "z": 3}],
    ),
    "then": (
        an_object("kind", kind={"enum": ["a", "b"]}) | THEN,
        [{"kind": "a", "x": 1}, {"kind": "b"}],
        [{"kind": "a", "x": 1, "z": 1}],
    ),
    "then beside branches": (
        THEN | {"oneOf": [an_object("kind", kind={"const": kind}) for kind in "ab"]},
        [{"kind": "a", "x": 1}, {"kind": "b"}],
        [{"kind": "a", "x": 1, "z": 1}],
    ),
    "else in a property": (
        an_object(o=X) | {"if": {"required": ["p"]}, "else": an_object(o=an_object("y", y={}))},
        [{"o": {"x": 1, "y": 2}}],
        [{"o": {"z": 1}}],
    ),
    "conditions in conditions": (
        an_object(kind={})
        | {"if": True, "then": {"allOf": [THEN | {"else": {"$ref": "#/e"}}]}, "e": Y},
        [{"kind": "a", "x": 1}, {"kind": "b", "y": 1}],
        [{"z": 1}],
    ),
    "a condition below itself": (
        an_object(kind={}, child={"$ref": "#"})
        | {"if": an_object(child={"required": ["kind"]}), "then": X},
        [{"x": 1, "child": {"kind": 1, "child": {"kind": 2, "x": 3}}}],
        [{"child": {"z": 1}}],
    ),
    "dependencies": (
        X
        | {"dependentSchemas": {"x": an_object("a", a={})}, "dependentRequired": {"a": ["b"]}}
        | {"dependencies": {"x": ["c"], "c": an_object(d={})}},
        [{"x": 1, "a": 1, "b": 2, "c": 3, "d": 4}],
        [{"z": 1}],
    ),
    "other properties by a schema": (
        X | {"unevaluatedProperties": INTEGER},
        [{"x": 1, "z": 1}],
        [],
    ),
    "components": (
        {"$ref": NODE, "components": {"schemas": {"N": an_object(tags=UNIQUE, n={"$ref": NODE})}}},
        [{"tags": ["a"], "n": {"tags": ["b"]}}],
        [{"z": 1}, {"n": {"z": 1}}],
    ),
    "a part of components": (
        {"allOf": [{"$ref": "#/components/X"}, Y], "components": {"X": X}},
        [{"x": 1, "y": 2}],
        [{"z": 1}],
    ),
    "the schema of another property": (
        an_object(a=X, b={"$ref": "#/properties/a"}) | {"allOf": [an_object(a=Y)]},
        [{"a": {"x": 1, "y": 2}, "b": {"x": 1}}],
        [{"b": {"y": 1}}, {"b": {"z": 1}}],
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_parts_are_closed_together(name: str) -> None:
    schema, good, bad = TOGETHER[name]
    for value in good:
        assert is_valid(schema, value) and accepts(schema, value, OPEN), value
        assert accepts(schema, value), value
    for value in bad:
        assert not accepts(schema, value), value


def test_targets_of_references_are_stripped() -> None:
    schema = TOGETHER["components"][0]
    assert prepare(schema).ignored == ["uniqueItems at $.components.schemas.N.properties.tags"]
    assert len(prepare(an_object(a=UNIQUE, b={"$ref": "#/properties/a"})).ignored) == 1
    with pytest.raises(ValueError, match=r"uniqueItems.*drop strict"):
        CLOSED.matcher(Grammar("json_schema", json.dumps(strict(schema))))


Tree = dict[str, Any]
"""Properties of an object: None for a number, or a tree, or a list with a tree for each item."""


def a_tree(rng: random.Random, depth: int) -> Tree:
    found: Tree = {}
    for name in rng.sample("abcd", rng.randint(1, 3)):
        kind = rng.randrange(3) if depth else 0
        found[name] = a_tree(rng, depth - 1) if kind else None
        if kind == 2:
            found[name] = [found[name]]
    return found


class Splitting:
    """Makes several schemas that describe a tree together."""

    def __init__(self, rng: random.Random, conditional: bool) -> None:
        self.rng, self.conditional = rng, conditional
        self.definitions: dict[str, Any] = {}

    def schemas(self, tree: Any, number: int) -> list[Any]:
        if tree is None:
            return [INTEGER] * number
        if isinstance(tree, list):
            items = self.schemas(tree[0], number)
            return [{"type": "array", "items": one} for one in items]
        found = [an_object() for _ in range(number)]
        for name, inner in tree.items():
            chosen = self.rng.sample(found, self.rng.randint(1, number))
            parts = self.schemas(inner, len(chosen))
            for one, part in zip(chosen, parts, strict=True):
                one["properties"][name] = part
                if self.rng.random() < 0.3:
                    one["required"] = [*one.get("required", ()), name]
        return [self.joined(one, tree) for one in found]

    def joined(self, schema: Any, tree: Tree) -> Any:
        """The schema in one of the ways to write it, some of which split it once more."""
        kind = self.rng.randrange(7 if self.conditional else 4)
        if kind == 0:
            return schema
        if kind in (1, 2):
            name = str(len(self.definitions))
            self.definitions[name] = schema
            return {"$ref": f"#/{'$defs' if kind == 1 else 'components'}/{name}"}
        if kind == 3:
            return an_object() | {"allOf": [schema]}
        if kind == 4:
            return an_object() | {"dependentSchemas": {next(iter(tree)): schema}}
        return an_object() | {"if": kind == 5, ("then" if kind == 5 else "else"): schema}


def an_instance(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: an_instance(inner) for name, inner in tree.items()}
    return [an_instance(tree[0])] if isinstance(tree, list) else 1


def with_others(value: Any) -> list[Any]:
    """The value with one property more, in each of its objects."""
    if isinstance(value, list):
        return [[one] for one in with_others(value[0])]
    if not isinstance(value, dict):
        return []
    inner = [value | {name: o} for name, one in value.items() for o in with_others(one)]
    return [value | {"z": 1}, *inner]


@pytest.mark.parametrize("conditional", [False, True])
def test_trees_that_several_schemas_describe(conditional: bool) -> None:
    for seed in range(75):
        rng = random.Random(seed)
        tree, splitting = a_tree(rng, 2), Splitting(rng, conditional)
        parts = splitting.schemas(tree, rng.randint(1, 3))
        defined = splitting.definitions
        schema = {"allOf": parts, "$defs": defined, "components": defined}
        value = an_instance(tree)
        assert is_valid(schema, value) and accepts(schema, value), (seed, schema)
        others = with_others(value)
        for one in others[:1] if conditional else others:
            assert not accepts(schema, one), (seed, schema, one)


class Being(pydantic.BaseModel):
    name: str
    tags: set[str] = set()


class Cat(Being):
    kind: Literal["cat"] = "cat"
    lives: int | None = None


class Dog(Being):
    kind: Literal["dog"] = "dog"
    owner: Being | None = None


Thing = TypeVar("Thing")


class Page(pydantic.BaseModel, Generic[Thing]):
    items: list[Thing]
    next: str | None = None


class Shop(Being):
    model_config = pydantic.ConfigDict(title="A shop")
    pets: list[Cat | Dog]
    best: Cat | Dog = pydantic.Field(discriminator="kind", description="the best one")
    stock: dict[str, list[Cat]] = {}
    page: Page[Being]
    parent: Shop | None = None


CAT = Cat(name="a", lives=3)
SHOP = Shop(
    name="s",
    pets=[CAT, Dog(name="b", owner=Being(name="c", tags={"x"}))],
    best=Dog(name="d"),
    stock={"any": [CAT]},
    page=Page[Being](items=[Being(name="e")]),
    parent=Shop(name="t", pets=[], best=CAT, page=Page[Being](items=[])),
)
TEMPLATE = "#/components/schemas/{model}"


def in_components(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"components": {"schemas": schema.pop("$defs")}}


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_models_of_pydantic(mode: Literal["validation", "serialization"]) -> None:
    value = SHOP.model_dump(mode="json")
    known = Shop.model_json_schema(mode=mode)
    other = in_components(Shop.model_json_schema(mode=mode, ref_template=TEMPLATE))
    derived = known | {"$ref": "#/$defs/Shop", "allOf": [an_object(best=an_object(age=INTEGER))]}
    for schema in (known, other, derived):
        assert is_valid(schema, value) and accepts(schema, value)
        for bad in (value | {"z": 1}, value | {"best": value["best"] | {"z": 1}}):
            assert not accepts(schema, bad)
    assert accepts(derived, value | {"best": value["best"] | {"age": 3}})
    assert not accepts(known, value | {"best": value["best"] | {"age": 3}})
