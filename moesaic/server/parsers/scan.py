"""Finds markers and JSON values in streamed text, in linear time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import lru_cache
from typing import Final

# What a detokenizer writes for the bytes of a character that is not complete: one or one per byte.
HALVES: Final = ("\ufffd", "\ufffd" * 2, "\ufffd" * 3)


class Markers:
    """Finds the first of several fixed texts, even if the text so far ends inside one."""

    def __init__(self, texts: Iterable[str]) -> None:
        ordered = sorted(set(texts), key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._prefixes = frozenset(prefix for text in ordered for prefix in _prefixes(text))
        self._longest = max(map(len, self._prefixes), default=0)
        self._firsts = frozenset(prefix[0] for prefix in self._prefixes)

    def none_begins_in(self, text: str) -> bool:
        return self._firsts.isdisjoint(text)

    def find(self, text: str, final: bool = False) -> tuple[int, int]:
        """(start, end) of the first marker; without one, both are where one may begin."""
        found = self._pattern.search(text) if self._pattern is not None else None
        if found is not None:
            start, end = found.span()
            # At the end of the text this may be the beginning of a longer marker.
            if final or end < len(text) or found.group() not in self._prefixes:
                return start, end
            return start, start
        safe = len(text) if final else self._safe(text)
        return safe, safe

    def _safe(self, text: str) -> int:
        for length in range(min(len(text), self._longest), 0, -1):
            if text[-length:] in self._prefixes:
                return len(text) - length
        return len(text)


def _prefixes(text: str) -> Iterator[str]:
    """What the text so far may end with if it ends inside this text, even inside a character."""
    for length, char in enumerate(text):
        if length:
            yield text[:length]
        if len(char.encode()) > 1:
            yield from (text[:length] + half for half in HALVES)


markers = lru_cache(maxsize=256)(Markers)


def slices(text: str, size: int = 4096) -> list[str]:
    """Splits long text: the rest is copied at every marker, which would take quadratic time."""
    return [text[start : start + size] for start in range(0, len(text), size)]


class Json(Enum):
    OPEN = "open"
    DONE = "done"
    BROKEN = "broken"


# The structure of JSON, and characters that it forbids; words are not checked.
_STRUCTURE = re.compile(r'["{}\[\]]|[^ \t\r\n,:0-9A-Za-z+\-."{}\[\]]')
_QUOTE = re.compile(r'["\\]')
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]*")
_CLOSERS = {"{": "}", "[": "]"}


class JsonValue:
    """Follows one JSON value to its end, without recursion."""

    def __init__(self) -> None:
        self.state = Json.OPEN
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self._started = False

    def feed(self, text: str, start: int) -> int:
        """The index behind the value in `text`; of a broken one, of the first invalid character."""
        position = start
        while position < len(text) and self.state is Json.OPEN:
            if self._escaped:
                self._escaped = False
                position += 1
            elif not self._started:
                position = self._begin(text, position)
            elif self._in_string:
                position = self._string(text, position)
            elif self._closers:
                position = self._structure(text, position)
            else:
                position = self._scalar(text, position)
        return position

    def _begin(self, text: str, position: int) -> int:
        self._started = True
        if text[position] in _CLOSERS:
            self._closers.append(_CLOSERS[text[position]])
        elif text[position] == '"':
            self._in_string = True
        else:
            end = self._scalar(text, position)
            if end == position:
                self.state = Json.BROKEN
            return end
        return position + 1

    def _scalar(self, text: str, position: int) -> int:
        found = _SCALAR.match(text, position)
        end = found.end() if found is not None else position
        if end < len(text):
            self.state = Json.DONE
        return end

    def _string(self, text: str, position: int) -> int:
        found = _QUOTE.search(text, position)
        if found is None:
            return len(text)
        if found.group() == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self._close_if_outermost()
        return found.end()

    def _structure(self, text: str, position: int) -> int:
        found = _STRUCTURE.search(text, position)
        if found is None:
            return len(text)
        char = found.group()
        if char == '"':
            self._in_string = True
        elif char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
        elif char == self._closers[-1]:
            self._closers.pop()
            self._close_if_outermost()
        else:
            self.state = Json.BROKEN
            return found.start()
        return found.end()

    def _close_if_outermost(self) -> None:
        if not self._closers:
            self.state = Json.DONE
