"""Flags declared once, as fields of frozen dataclasses.

    class ModelArgs:
        GROUP: ClassVar[str] = "Model"
        page_size: int = flag(1, "Tokens in one KV page.", at_least=1)

Such a declaration gives the command line flag, the key of the YAML file, the keyword of the Python
API, the range check, the refusal of what is not built yet, and the line in docs/flags.md.
"""

import dataclasses
import difflib
import inspect
import json
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cache, partial
from typing import Any, Concatenate, ParamSpec, TypeVar, Union, get_args, get_origin


class Built(Enum):
    """How much of a flag works in this version, where no tuple of values says so."""

    ALL = "all"
    ONLY_DEFAULT = "only the default"


ALL = Built.ALL
ONLY_DEFAULT = Built.ONLY_DEFAULT


@dataclass(frozen=True)
class Flag:
    """What a field says beyond its type and default."""

    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str | int, ...] = ()
    same: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # other values, by the choice they mean
    refused: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # why not, and what to do instead
    idle: tuple[str, ...] = ()  # values that only choose how SGLang computes; `why` says the rest
    open: bool = False  # packages may register more values than the choices
    built: Built | tuple[str | int, ...] = ALL
    why: str = ""  # why it is not wholly built; unset: the reason of its group
    instead: str = ""  # what to do until it is built, if `built` does not say it
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    also: tuple[int, ...] = ()  # values outside the range that are allowed, such as -1
    metavar: str = ""
    repeat: bool = False  # a list given as --x A --x B instead of --x A B
    unset: tuple[str | int, ...] = ()  # values that are as good as leaving it out
    suffixes: bool = False  # a whole number may be written as 128k or 1Mi
    rest: str = ""  # several values may be given: the field of those after the first
    json: bool = False  # a text with a JSON object; files and keywords may give the object
    secret: bool = False  # never shown in a message


# Scales of whole numbers; case matters, as for SGLang.
SUFFIXES = {
    letter + "i" * binary: (1024 if binary else 1000) ** power
    for binary, letters in ((False, "kMGT"), (True, "KMGT"))
    for power, letter in enumerate(letters, 1)
}

# Two flags of which more letters differ are not alike.
MOST_LETTERS_APART = 3

# What many flags begin with: two that share no more are not alike.
_START = re.compile("(--)?(no-)?((enable|disable)[-_])?")

T = TypeVar("T")
P = ParamSpec("P")


def _declare(describe: Callable[P, Flag]) -> Callable[Concatenate[T, P], T]:
    """A function that declares a field by its default and the arguments of `describe`."""

    def declare(default: T, /, *args: P.args, **kwargs: P.kwargs) -> T:
        made: T = dataclasses.field(default=default, metadata={"flag": describe(*args, **kwargs)})
        return made

    return declare


flag = _declare(Flag)
not_built = _declare(partial(Flag, built=ONLY_DEFAULT))  # accepted only with its default


@dataclass(frozen=True)
class FlagSpec:
    """A field with its unpacked type."""

    field: str
    kind: type
    optional: bool
    many: bool
    default: Any
    group: str
    flag: Flag

    @property
    def name(self) -> str:
        return "--" + self.field.replace("_", "-")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.flag.aliases)

    def means(self, value: Any) -> str | None:
        """The choice that another name stands for."""
        return self.flag.same.get(value) if isinstance(value, str) else None

    def accepts(self, value: Any) -> bool:
        """Whether the value works in this version."""
        if value == self.default or self.flag.built is ALL or self.means(value) is not None:
            return True
        if value in self.flag.idle:
            return True
        return isinstance(self.flag.built, tuple) and value in self.flag.built


Args = TypeVar("Args")


def _unpack_annotation(annotation: Any) -> tuple[type, bool, bool]:
    """(kind, optional, many) of int, int | None, tuple[int, ...] or tuple[int, ...] | None."""
    optional = get_origin(annotation) in (Union, types.UnionType)
    if optional:
        (annotation,) = (a for a in get_args(annotation) if a is not type(None))
    many = get_origin(annotation) is tuple
    kind = get_args(annotation)[0] if many else annotation
    assert kind in (bool, int, float, str), f"a flag cannot be of type {annotation}"
    return kind, optional, many


def _group_of(cls: type, field: str) -> Mapping[str, Any]:
    """What the class that declares the field says of all its flags: GROUP, and perhaps WHY."""
    for base in reversed(cls.__mro__):
        if field in inspect.get_annotations(base):
            return base.__dict__
    raise AssertionError(f"{cls.__name__} has no field {field}")


def specs(cls: type) -> dict[str, FlagSpec]:
    """The flags of a dataclass by field name, in order of declaration."""
    return _collect(cls)


@cache  # behind `specs`: mypy holds that a type is not hashable
def _collect(cls: type) -> dict[str, FlagSpec]:
    found = {}
    for field in dataclasses.fields(cls):
        kind, optional, many = _unpack_annotation(field.type)
        group, described = _group_of(cls, field.name), field.metadata["flag"]
        why = described.why or group.get("WHY", "")
        if (
            described.built is ONLY_DEFAULT and why and not described.why
        ):  # nothing of the group is built
            described = dataclasses.replace(
                described, instead=described.instead or f"{why}: leave it out"
            )
        found[field.name] = FlagSpec(
            field.name,
            kind,
            optional,
            many,
            field.default,
            group["GROUP"],
            dataclasses.replace(described, why=why),
        )
    return found


@cache
def _fields_by_key(cls: type) -> dict[str, str]:
    """Fields by every accepted key, in underscores."""
    return {
        name.removeprefix("--").replace("-", "_"): spec.field
        for spec in specs(cls).values()
        for name in spec.names
    }


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint to append to a message: the closest known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def nearest_flag(word: str, known: Iterable[str]) -> str:
    """A hint for a flag's name: the only one that begins so, or one with hardly a difference."""
    known = list(known)
    longer = [name for name in known if name.startswith(word)]
    if len(longer) == 1:
        return f"; did you mean {longer[0]}?"
    found = _START.match(word)
    assert found is not None, "it matches the empty text"
    rest = {name[found.end() :]: name for name in known if name.startswith(found[0])}
    close = difflib.get_close_matches(word[found.end() :], rest, n=1, cutoff=0.8)
    alike = close and _letters_apart(word[found.end() :], close[0]) <= MOST_LETTERS_APART
    return f"; did you mean {rest[close[0]]}?" if alike else ""


def _letters_apart(one: str, other: str) -> int:
    """How many letters of the two are not in both."""
    return round((len(one) + len(other)) * (1 - difflib.SequenceMatcher(None, one, other).ratio()))


def has_key(cls: type, key: str) -> bool:
    return key.replace("-", "_") in _fields_by_key(cls)


def find_field(cls: type, key: str) -> str:
    """The field of a file's key or a keyword; KeyError with a hint if there is none."""
    fields = _fields_by_key(cls)
    normal = key.replace("-", "_")
    if normal not in fields:
        raise KeyError(f"{key!r}{nearest_flag(normal, fields)}")
    return fields[normal]


def parse_text(spec: FlagSpec, text: str) -> Any:
    """Convert one word of the command line to the flag's type."""
    try:
        return read_size(text) if spec.flag.suffixes else spec.kind(text)
    except ValueError:
        raise ValueError(f"{spec.name} is {text!r}: give {_kind_words(spec)}") from None


def read_size(text: str) -> int:
    """128k is 128,000, 1.5M is 1,500,000 and 1Ki is 1024; ValueError if it is no such number."""
    number = text.rstrip("kKMGTi")
    scale = SUFFIXES.get(text[len(number) :])
    if scale is None:
        return int(text)
    size = Fraction(number) * scale
    if size.denominator != 1:
        raise ValueError
    return int(size)


def _kind_words(spec: FlagSpec) -> str:
    one, several = {
        bool: ("true or false", "true or false values"),
        int: ("a whole number", "whole numbers"),
        float: ("a number", "numbers"),
        str: ("a text", "texts"),
    }[spec.kind]
    return f"a list of {several}" if spec.many else one


def convert(spec: FlagSpec, value: Any) -> Any:
    """Convert to the field's exact type, or raise ValueError."""
    if value is None or (not spec.many and value in spec.flag.unset):
        return None if spec.optional else spec.default
    if spec.many:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{spec.name} is {value!r}: give {_kind_words(spec)}")
        return tuple(_convert_one(spec, item) for item in value)
    return _convert_one(spec, value)


def _convert_one(spec: FlagSpec, value: Any) -> Any:
    if spec.kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if spec.flag.json and isinstance(value, dict):
        return json.dumps(value)
    if spec.kind is float and type(value) is int:
        return float(value)
    if spec.flag.suffixes and isinstance(value, str):
        return parse_text(spec, value)
    if type(value) is not spec.kind:
        quote = "; quote it in a YAML file" if spec.kind is str else ""
        raise ValueError(f"{spec.name} is {value!r}: give {_kind_words(spec)}{quote}")
    return value


def check(spec: FlagSpec, value: Any) -> None:
    """Raise ValueError if the value is not among the choices or out of range."""
    if value is None and spec.optional:
        return
    for item in value if spec.many else (value,):
        _check_choice(spec, item)
        if spec.flag.json:
            read_json(spec, item)
        if spec.kind in (int, float) and not _in_range(spec.flag, item):
            raise ValueError(f"{spec.name} is {item}: give {range_words(spec.flag)}")


def _check_choice(spec: FlagSpec, value: Any) -> None:
    flag = spec.flag
    if not flag.choices or flag.open or flag.built is ONLY_DEFAULT:  # `unbuilt` reports the last
        return
    if value in flag.choices or spec.means(value) is not None:
        return
    if value in flag.refused:
        raise ValueError(f"{spec.name} is {value!r}: {flag.refused[value]}")
    hint = nearest(str(value), map(str, flag.choices))
    known = ", ".join(map(str, flag.choices))
    raise ValueError(f"{spec.name} is {value!r}: choose one of {known}{hint}")


def read_json(spec: FlagSpec, text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"{spec.name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{spec.name} is {text}: give a JSON object, such as {{}}")
    return found


def json_object(args: object, field: str) -> dict[str, Any]:
    """The object in the value of a JSON flag; empty if it is unset."""
    return read_json(specs(type(args))[field], getattr(args, field))


def _in_range(flag: Flag, value: float) -> bool:
    inside = (
        (flag.at_least is None or value >= flag.at_least)
        and (flag.at_most is None or value <= flag.at_most)
        and (flag.above is None or value > flag.above)
        and (flag.below is None or value < flag.below)
    )
    return inside or value in flag.also


def range_words(flag: Flag) -> str:
    """The range in words: `at least 1, or -1`."""
    bounds = (
        ("at least", flag.at_least),
        ("more than", flag.above),
        ("at most", flag.at_most),
        ("less than", flag.below),
    )
    words = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
    return ", or ".join([words, *map(str, flag.also)])


def build(cls: type[Args], *layers: Mapping[str, Any]) -> Args:
    """Build an instance from field values; later layers override earlier ones."""
    args, wrong = build_and_check(cls, *layers)
    if wrong:
        raise ValueError("; ".join(wrong))
    return args


def build_and_check(cls: type[Args], *layers: Mapping[str, Any]) -> tuple[Args, list[str]]:
    """The instance without the wrong values, and what is wrong with each of these."""
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for layer in layers:
        for field, value in _spread(cls, layer).items():
            spec = specs(cls)[field]
            try:
                found = convert(spec, value)
                check(spec, found)
                values[field] = found
            except ValueError as error:
                wrong.append(str(error))
    return cls(**values), wrong


def _spread(cls: type[Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Moves the values after the first to the flag's other field."""
    found = dict(layer)
    for field, value in layer.items():
        rest = specs(cls)[field].flag.rest
        if rest and isinstance(value, list | tuple) and value:
            found[field], found[rest] = value[0], [*value[1:], *layer.get(rest, ())]
    return found


def fields_of(cls: type[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The values by field of keywords, names or aliases; an unknown keyword is a TypeError."""
    values: dict[str, Any] = {}
    for key, value in kwargs.items():
        try:
            field = find_field(cls, key)
        except KeyError as error:
            raise TypeError(f"unknown argument {error.args[0]}") from None
        if value and values.get(field):
            raise TypeError(f"argument {field!r} is given twice, once as {key!r}: keep one")
        values[field] = values.get(field) or value
    return values


def from_kwargs(cls: type[Args], kwargs: Mapping[str, Any]) -> Args:
    """Build an instance from field names or aliases."""
    return build(cls, fields_of(cls, kwargs))


def show(spec: FlagSpec, value: Any) -> str:
    """The flag with its value, as typed on a command line."""
    if value is True:
        return spec.name
    if spec.flag.secret:
        return f"{spec.name} ***"
    words = " ".join(map(str, value)) if spec.many else value
    return f"{spec.name} {words}"


def without_secrets(args: Args) -> Args:
    """The same arguments without keys, for processes and messages that need none."""
    secret = {spec.field: spec.default for spec in specs(type(args)).values() if spec.flag.secret}
    return dataclasses.replace(args, **secret)  # type: ignore[type-var]


def unbuilt(args: object) -> list[str]:
    """All flags whose value does not work in this version, each with what to do."""
    values = [(spec, getattr(args, spec.field)) for spec in specs(type(args)).values()]
    return [
        f"{show(spec, value)} ({remedy(spec)})" for spec, value in values if not spec.accepts(value)
    ]


def refuse_unbuilt(args: object) -> None:
    """Raise ValueError for all flags whose value does not work in this version."""
    if parts := unbuilt(args):
        raise ValueError("not built yet: " + "; ".join(parts))


def remedy(spec: FlagSpec) -> str:
    """What to do in this version with a flag that is not fully built."""
    if spec.flag.instead:
        return spec.flag.instead
    why = f"{spec.flag.why}: " if spec.flag.why else ""
    if isinstance(spec.flag.built, tuple):
        return f"{why}give {', '.join(map(str, spec.flag.built))}"
    if spec.default is None or spec.default is False:
        return f"{why}leave it out"
    return f"{why}only the default, {spec.default}, is built"


def given(args: Any, *fields: str) -> Iterator[str]:
    """Those of the fields that are set, as typed on a command line."""
    for field in fields:
        if (value := getattr(args, field)) is not None:
            yield show(specs(type(args))[field], value)
