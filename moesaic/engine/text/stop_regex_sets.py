"""Whether a character fits an element of a parsed regular expression, exactly as `re` has it.

`re` compiles a set of characters in time that grows with the width of its ranges. Here the time
grows with the number of its items only.
"""

from __future__ import annotations

import re
import re._casefix as sre_casefix  # type: ignore[import-not-found]
import re._constants as sre  # type: ignore[import-not-found]
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

# The flags that decide whether a character fits.
FLAGS: Final = re.IGNORECASE | re.ASCII | re.DOTALL
CATEGORIES: Final = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}
# Capitals that are not the capital of their own small letter.
OTHER_CAPITALS: Final = "\u0130\u03f4\u1e9e\u2126\u212a\u212b"
LAST_BMP: Final = 0xFFFF
# Beyond it, versions of `re` differ in sets that ignore case: whether a capital there stands for
# its small letter, and whether a range has the letters of the other case with (?a), too.
LOWERS_LITERALS: Final = re.match("(?i)[\U00010400x]", "\U00010428") is not None
ASCII_HAS_OTHER_CASE: Final = re.match("(?ai)[\U00010400-\U00010401]", "\U00010428") is not None

Fits = Callable[[str], bool]


def one_character(operation: Any, value: Any, flags: int) -> Fits:
    """The test for LITERAL, NOT_LITERAL, ANY or IN. It gets one character."""
    if operation is sre.ANY:
        return (lambda _: True) if flags & re.DOTALL else "\n".__ne__
    if operation is sre.IN:
        return _in_set(value, flags)
    literal = chr(value)
    if not flags & re.IGNORECASE:
        return literal.__eq__ if operation is sre.LITERAL else literal.__ne__
    variants = case_variants(literal, bool(flags & re.ASCII))
    if operation is sre.LITERAL:
        return variants.__contains__
    return lambda char: char not in variants


@lru_cache(maxsize=4096)
def case_variants(char: str, is_ascii: bool) -> frozenset[str]:
    """The characters that equal this one where case is ignored, and itself."""
    if is_ascii:
        return frozenset((char, char.lower(), char.upper()) if char.isascii() else char)
    lower = _lower(char, False)
    lowers = {lower, *map(chr, sre_casefix._EXTRA_CASES.get(ord(lower), ()))}
    cases = {case for each in lowers for case in (each, each.upper(), each.title())}
    capitals = {each for each in OTHER_CAPITALS if _lower(each, False) in lowers}
    return frozenset({char} | {case for case in cases if len(case) == 1} | capitals)


def _lower(char: str, is_ascii: bool) -> str:
    return char if is_ascii and not char.isascii() else char.lower()[0]


@dataclass(frozen=True, slots=True)
class _Ranges:
    """Characters as sorted codes at which they begin and end, in turn."""

    bounds: tuple[int, ...]

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> _Ranges:
        bounds = list[int]()
        for first, last in sorted(ranges):
            if bounds and first <= bounds[-1]:
                bounds[-1] = max(bounds[-1], last + 1)
            else:
                bounds += first, last + 1
        return cls(tuple(bounds))

    def __contains__(self, char: str) -> bool:
        return bisect_right(self.bounds, ord(char)) % 2 == 1


def _in_set(items: list[tuple[Any, Any]], flags: int) -> Fits:
    is_ascii = bool(flags & re.ASCII)
    literals, ranges, categories = (
        [value for kind, value in items if kind is wanted]
        for wanted in (sre.LITERAL, sre.RANGE, sre.CATEGORY)
    )
    negated = (sre.NEGATE, None) in items
    if len(literals) + len(ranges) + len(categories) + negated != len(items):
        raise TypeError(f"a set with {items} is unknown")
    if flags & re.IGNORECASE:
        in_ranges = _ignoring_case(literals, ranges, is_ascii)
    else:
        in_ranges = _Ranges.of([*zip(literals, literals, strict=True), *ranges]).__contains__
    matches = [_category(category, is_ascii) for category in categories]

    def fits(char: str) -> bool:
        return (in_ranges(char) or any(match(char) for match in matches)) is not negated

    return fits


@lru_cache
def _category(category: Any, is_ascii: bool) -> Callable[[str], Any]:
    return re.compile(CATEGORIES[category], re.ASCII if is_ascii else 0).match


def _ignoring_case(literals: list[int], ranges: list[tuple[int, int]], is_ascii: bool) -> Fits:
    """`re` compares all cases of a character with what a set has up to LAST_BMP, but only its small
    letter with literals beyond, and that one and its capital with ranges that end beyond."""
    every = [*zip(literals, literals, strict=True), *ranges]
    near = _Ranges.of((first, min(last, LAST_BMP)) for first, last in every if first <= LAST_BMP)
    wide = _Ranges.of(each for each in ranges if each[1] > LAST_BMP)
    far = {chr(literal) for literal in literals if literal > LAST_BMP}
    if LOWERS_LITERALS:
        far = {_lower(literal, is_ascii) for literal in far}
    has_other_case = ASCII_HAS_OTHER_CASE or not is_ascii

    def fits(char: str) -> bool:
        if any(case in near for case in case_variants(char, is_ascii)):
            return True
        lower = _lower(char, is_ascii)
        if lower in far or lower in wide:
            return True
        return has_other_case and lower.upper()[0] in wide

    return fits
