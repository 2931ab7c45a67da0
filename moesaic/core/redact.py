"""Describes clients' values in messages without quoting them: they may be long or secret."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Final

LONGEST_WORD: Final = 40
LONGEST_NUMBER: Final = 10**LONGEST_WORD
LONGEST_ID: Final = 64
LONGEST_QUOTE: Final = 256
ID_SIGNS: Final = str.maketrans("", "", "_-.:")


def shown(value: Any) -> str:
    """A short number or plain word itself; anything else by its type and size."""
    match value:
        case None | bool() | float():
            return repr(value)
        case int():
            return repr(value) if abs(value) <= LONGEST_NUMBER else "a number of very many digits"
        case str() if len(value) <= LONGEST_WORD and (value + "a").replace("_", "").isalnum():
            return repr(value)
        case str():
            return f"a text of {len(value)} characters"
        case bytes():
            return f"{len(value)} bytes"
        case list() | tuple() | Set():
            return f"a list of {len(value)}"
        case Mapping():
            return f"a dict of {len(value)}"
    return f"a value of type {type(value).__name__}"


def quoted(text: str, longest: int = LONGEST_QUOTE) -> str:
    """A name itself, in quotes, whatever its characters: control characters are escaped, and only
    the beginning of a very long one is quoted."""
    if len(text) <= longest:
        return repr(text)
    return f"{text[:longest]!r} … ({len(text)} characters)"


def shown_id(value: str) -> str:
    """A request id itself, unless it is long or does not look like an id."""
    plain = len(value) <= LONGEST_ID and (value.translate(ID_SIGNS) + "a").isalnum()
    return repr(value) if plain else shown(value)
