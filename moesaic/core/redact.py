"""Values in messages: what a client sent may be long, or secret, and is described, not repeated."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Final

LONGEST_WORD: Final = 40
LONGEST_NUMBER: Final = 10**LONGEST_WORD
LONGEST_ID: Final = 64
ID_SIGNS: Final = str.maketrans("", "", "_-.:")


def shown(value: Any) -> str:
    """A short number or a plain word as it is, anything else by its kind and size."""
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


def shown_id(value: str) -> str:
    """The id of a request as it is, unless it is long or looks like anything but an id."""
    plain = len(value) <= LONGEST_ID and (value.translate(ID_SIGNS) + "a").isalnum()
    return repr(value) if plain else shown(value)
