"""Automata of regular expressions, made from the parse trees of Python's `re`.

The parser is a private part of `re`. This is the only module that imports it, and `stop_regex`
imports this module with the first pattern: with a Python whose parser differs, requests with
patterns are refused, and all others work.
"""

from __future__ import annotations

import re
import re._compiler as sre_compiler  # type: ignore[import-not-found]
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

# Nodes and sequences of all patterns of a request. Each node may be visited for every character.
MAX_SIZE: Final = 256
MAX_DEPTH: Final = 32
# What an assertion gets as the character after it: a newline that is the text's last character.
LAST_NEWLINE: Final = "\n."
NAMES: Final = {
    sre.GROUPREF: "a reference to a group",
    sre.GROUPREF_EXISTS: "a reference to a group",
    sre.ASSERT: "look-around",
    sre.ASSERT_NOT: "look-around",
    sre.ATOMIC_GROUP: "an atomic group",
    sre.POSSESSIVE_REPEAT: "a possessive repetition",
}
ONE_CHARACTER: Final = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)

Taker = Callable[[str], Any]


class Impossible(Exception):
    """The pattern cannot be an automaton; the message says why."""


@dataclass(slots=True, eq=False)
class Node:
    """A state of the automaton. With `takes` it consumes a character and leads to `next`; without,
    it leads there at once, if the assertion `holds` between the characters around it."""

    next: list[Node] = field(default_factory=list)
    takes: Taker | None = None
    holds: Callable[[str, str], bool] | None = None
    pattern: str = ""
    """The pattern that ends here."""


@dataclass(frozen=True, eq=False)
class Automaton:
    root: Node
    takers: tuple[Taker, ...]
    has_assertions: bool

    def class_of(self, char: str) -> int:
        """Characters of one class lead to the same nodes: the same nodes take them, and assertions
        cannot tell them apart."""
        bits = self.context_of(char)
        for number, takes in enumerate(self.takers, 4):
            bits |= bool(takes(char)) << number
        return bits

    def context_of(self, char: str) -> int:
        """What assertions know of a character next to them; it is empty at the ends of a text."""
        if not self.has_assertions:
            return 0
        kinds = (char == "", char == "\n", _is_word(char, False), _is_word(char, True))
        return sum(kind << number for number, kind in enumerate(kinds))


def build(patterns: Sequence[str]) -> Automaton:
    builder = _Builder()
    root = builder.node([builder.pattern(pattern) for pattern in patterns])
    return Automaton(root, (*builder.takers.values(),), builder.has_assertions)


class _Builder:
    """Makes nodes, the last ones first."""

    def __init__(self) -> None:
        self._left = MAX_SIZE
        self.takers: dict[str, Taker] = {}
        self.has_assertions = False

    def pattern(self, pattern: str) -> Node:
        try:
            tree = sre_parser.parse(pattern)
        except (re.error, ValueError, OverflowError, RecursionError, Warning) as error:
            why = re.sub("'.*'", "…", str(error))
            raise Impossible(f"it is not a regular expression: {why}") from None
        return self._sequence(tree, tree.state.flags, self.node([], pattern=pattern), 0)

    def node(self, following: Iterable[Node], **kind: Any) -> Node:
        self._spend()
        return Node([*following], **kind)

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Impossible("its repetitions and alternatives are too many: make it shorter")

    def _sequence(self, tree: Any, flags: int, then: Node, depth: int) -> Node:
        self._spend()  # also for a sequence of nothing, which can be repeated too
        if depth > MAX_DEPTH:
            raise Impossible(f"it is nested more than {MAX_DEPTH} levels deep")
        for operation, value in reversed(list(tree)):
            then = self._operation(operation, value, flags, then, depth)
        return then

    def _operation(self, operation: Any, value: Any, flags: int, then: Node, depth: int) -> Node:
        if operation in ONE_CHARACTER:
            return self.node([then], takes=self._taker(operation, value, flags))
        if operation is sre.AT:
            self.has_assertions = True
            return self.node([then], holds=_assertion(value, flags))
        if operation is sre.BRANCH:
            branches = [self._sequence(tree, flags, then, depth + 1) for tree in value[1]]
            return self.node(branches)
        if operation is sre.SUBPATTERN:
            _, added, removed, tree = value
            return self._sequence(tree, (flags | added) & ~removed, then, depth + 1)
        if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            return self._repeated(value, flags, then, depth + 1)
        raise Impossible(f"it has {NAMES.get(operation, str(operation))}, which takes too long")

    def _repeated(self, value: Any, flags: int, then: Node, depth: int) -> Node:
        least, most, tree = value
        if most is sre.MAXREPEAT:
            loop = self.node([then])
            loop.next.append(self._sequence(tree, flags, loop, depth))
            then = loop
        else:
            last = then
            for _ in range(most - least):
                then = self.node([last, self._sequence(tree, flags, then, depth)])
        for _ in range(least):
            then = self._sequence(tree, flags, then, depth)
        return then

    def _taker(self, operation: Any, value: Any, flags: int) -> Taker:
        key = repr((operation, value, flags))
        if key not in self.takers:
            self.takers[key] = _taker(operation, value, flags)
        return self.takers[key]


def _taker(operation: Any, value: Any, flags: int) -> Taker:
    """Whether a character fits; `re` decides except about plain ones."""
    if operation is sre.LITERAL and not flags & re.IGNORECASE:
        return chr(value).__eq__
    state = sre_parser.State()
    state.flags = flags
    tree = sre_parser.SubPattern(state, [(operation, value)])
    matched: Taker = sre_compiler.compile(tree, flags).match
    return matched


def _assertion(where: Any, flags: int) -> Callable[[str, str], bool]:
    """Gets the characters before and after, empty at the ends of the text."""
    is_ascii = bool(flags & re.ASCII)

    def is_boundary(before: str, after: str) -> bool:
        return _is_word(before, is_ascii) != _is_word(after, is_ascii)

    lines = bool(flags & re.MULTILINE)
    if where is sre.AT_BEGINNING and lines:
        return lambda before, _: before in ("", "\n")
    if where in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
        return lambda before, _: not before
    if where is sre.AT_END:
        ends = ("", LAST_NEWLINE, "\n") if lines else ("", LAST_NEWLINE)
        return lambda _, after: after in ends
    if where is sre.AT_END_STRING:
        return lambda _, after: not after
    if where is sre.AT_BOUNDARY:
        return is_boundary
    if where is sre.AT_NON_BOUNDARY:
        return lambda before, after: not is_boundary(before, after)
    raise TypeError(f"{where} is unknown")


def _is_word(char: str, is_ascii: bool) -> bool:
    return (char.isalnum() or char == "_") and (char.isascii() or not is_ascii)
