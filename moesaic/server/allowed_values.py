"""The values that a field of a body allows, for msgspec's message about another one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec
from msgspec.inspect import LiteralType, StructType, Type, UnionType, type_info

# Longer lists do not help in a message.
LONGEST_LIST: Final = 320
_ENUM: Final = re.compile(r"^Invalid enum value .* - at `\$([^`]*)`$", re.DOTALL)
_STEP: Final = re.compile(r"\.(\w+)|\[[^\]]*\]")
# Where msgspec's types of lists, tuples and dicts have the type of their items.
_ITEMS: Final = ("item_type", "value_type")


def allowed_values(message: str, kind: type[msgspec.Struct]) -> str:
    """What to append to a message about a value that is not allowed; nothing to other messages.

    `Invalid enum value 'any' - at `$.tool_choice`` gets `: give auto, none or required`.
    """
    if not (found := _ENUM.match(message)):
        return ""
    types: list[Type] = [type_info(kind)]
    for step in _STEP.finditer(found[1]):
        types = list(_below(types, step[1]))
    values = [str(value) for one in _plain(types) for value in _literals(one)]
    listed = " or ".join(filter(None, (", ".join(values[:-1]), *values[-1:])))
    return f": give {listed}" if listed and len(listed) <= LONGEST_LIST else ""


def _plain(types: Iterable[Type]) -> Iterator[Type]:
    """The types, with the members of unions instead of these."""
    for one in types:
        if isinstance(one, UnionType):
            yield from _plain(one.types)
        else:
            yield one


def _below(types: Iterable[Type], field: str | None) -> Iterator[Type]:
    """The types of a field of these, or of their items."""
    for one in _plain(types):
        if field is None:
            yield from (getattr(one, name) for name in _ITEMS if hasattr(one, name))
        elif isinstance(one, StructType):
            yield from (each.type for each in one.fields if each.encode_name == field)


def _literals(one: Type) -> Iterable[Any]:
    return one.values if isinstance(one, LiteralType) else ()
