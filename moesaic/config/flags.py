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
import os
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
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
    open: bool = False  # packages may register more values than the choices
    built: Built | tuple[str | int, ...] = ALL
    instead: str = ""  # what to do until it is built, if `built` does not say it
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    also: tuple[int, ...] = ()  # values outside the range that are allowed, such as -1
    metavar: str = ""
    repeat: bool = False  # a list given as --x A --x B instead of --x A B
    secret: bool = False  # never shown in a message


T = TypeVar("T")
P = ParamSpec("P")


def _declare(describe: Callable[P, Flag]) -> Callable[Concatenate[T, P], T]:
    """A function that declares a field by its default and the arguments of `describe`."""

    def declare(default: T, /, *args: P.args, **kwargs: P.kwargs) -> T:
        field: T = dataclasses.field(default=default, metadata={"flag": describe(*args, **kwargs)})
        return field

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

    def accepts(self, value: Any) -> bool:
        """Whether the value works in this version."""
        if value == self.default or self.flag.built is ALL:
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


def _group_of(cls: type, field: str) -> str:
    for base in reversed(cls.__mro__):
        if field in inspect.get_annotations(base):
            return str(base.__dict__["GROUP"])
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
        found[field.name] = FlagSpec(
            field.name, kind, optional, many, field.default, group, described
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


def find_field(cls: type, key: str) -> str:
    """The field of a file's key or a keyword; KeyError with a hint if there is none."""
    fields = _fields_by_key(cls)
    normal = key.replace("-", "_")
    if normal not in fields:
        raise KeyError(f"{key!r}{nearest(normal, fields)}")
    return fields[normal]


def parse_text(spec: FlagSpec, text: str) -> Any:
    """Convert one word of the command line to the flag's type."""
    try:
        return spec.kind(text)
    except ValueError:
        raise ValueError(f"{spec.name} is {text!r}: give {_kind_words(spec)}") from None


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
    if value is None and spec.optional:
        return None
    if spec.many:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{spec.name} is {value!r}: give {_kind_words(spec)}")
        return tuple(_convert_one(spec, item) for item in value)
    return _convert_one(spec, value)


def _convert_one(spec: FlagSpec, value: Any) -> Any:
    if spec.kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if spec.kind is float and type(value) is int:
        return float(value)
    if type(value) is not spec.kind:
        quote = "; quote it in a YAML file" if spec.kind is str else ""
        raise ValueError(f"{spec.name} is {value!r}: give {_kind_words(spec)}{quote}")
    return value


def check(spec: FlagSpec, value: Any) -> None:
    """Raise ValueError if the value is not among the choices or out of range."""
    if value is None and spec.optional:
        return
    for item in value if spec.many else (value,):
        if spec.flag.choices and item not in spec.flag.choices and not spec.flag.open:
            hint = nearest(str(item), map(str, spec.flag.choices))
            known = ", ".join(map(str, spec.flag.choices))
            raise ValueError(f"{spec.name} is {item!r}: choose one of {known}{hint}")
        if spec.kind in (int, float) and not _in_range(spec.flag, item):
            raise ValueError(f"{spec.name} is {item}: give {range_words(spec.flag)}")


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
    values: dict[str, Any] = {}
    for layer in layers:
        for field, value in layer.items():
            spec = specs(cls)[field]
            values[field] = convert(spec, value)
            check(spec, values[field])
    return cls(**values)


def from_kwargs(cls: type[Args], kwargs: Mapping[str, Any]) -> Args:
    """Build an instance from field names or aliases; an unknown keyword is a TypeError."""
    values: dict[str, Any] = {}
    for key, value in kwargs.items():
        try:
            field = find_field(cls, key)
        except KeyError as error:
            raise TypeError(f"unknown argument {error.args[0]}") from None
        if field in values:
            raise TypeError(f"argument {field!r} is given twice, once as {key!r}: keep one")
        values[field] = value
    return build(cls, values)


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


def refuse_unbuilt(args: object) -> None:
    """Raise ValueError for all flags whose value does not work in this version."""
    values = [(spec, getattr(args, spec.field)) for spec in specs(type(args)).values()]
    parts = [
        f"{show(spec, value)} ({remedy(spec)})" for spec, value in values if not spec.accepts(value)
    ]
    if parts:
        raise ValueError("not built yet: " + "; ".join(parts))


def remedy(spec: FlagSpec) -> str:
    """What to do in this version with a flag that is not fully built."""
    if spec.flag.instead:
        return spec.flag.instead
    if isinstance(spec.flag.built, tuple):
        return "works now: " + ", ".join(map(str, spec.flag.built))
    if spec.default is None or spec.default is False:
        return "leave it out"
    return f"only the default, {spec.default}, is built"
