"""Automata of regular expressions, made from the parse trees of Python's `re`.

The parser is a private part of `re`. This is the only module that imports it, and `stop_regex`
imports this module with the first pattern: with a Python whose parser differs, requests with
patterns are refused, and all others work.
"""

from __future__ import annotations

import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from moesaic.engine.text.stop_regex_sets import FLAGS, Fits, one_character

# Characters of all patterns of a request, which are parsed on the event loop.
MAX_LENGTH: Final = 4096
# Their nodes, with the weight of each, sequences and items of sets: each node may be visited for
# every character. Plain characters alone make few states, whose steps are remembered.
MAX_SIZE: Final = 256
WEIGHT: Final = 3
MAX_DEPTH: Final = 32
# A node that leads to more is not left out: the lists of nodes before it would grow.
MAX_SKIPPED: Final = 3
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
# Bits of a character's class that assertions use; the others are for the tests of nodes.
CONTEXT_BITS: Final = 4
# What the parser says of sets that a later version may read in another way.
SET_WARNING: Final = "Possible (nested set|set )"


class Impossible(Exception):
    """The pattern cannot be an automaton; the message says why."""


@dataclass(slots=True, eq=False)
class Node:
    """A state of the automaton. With `takes` it consumes a character whose class has this bit and
    leads to `next`; without, it leads there at once, if the assertion `holds` between the
    characters around it."""

    next: list[Node] = field(default_factory=list)
    takes: int = 0
    holds: Callable[[str, str], bool] | None = None
    pattern: str = ""
    """The pattern that ends here."""
    complete: bool = True
    """Whether `next` has all nodes."""

    @property
    def skipped(self) -> bool:
        """Whether the nodes before it may lead to those after it instead."""
        kind = self.takes or self.holds or self.pattern
        return self.complete and not kind and len(self.next) <= MAX_SKIPPED


@dataclass(frozen=True, eq=False)
class Automaton:
    root: Node
    tests: tuple[Fits, ...]
    has_assertions: bool

    def class_of(self, char: str) -> int:
        """Characters of one class lead to the same nodes: the same nodes take them, and assertions
        cannot tell them apart."""
        bits = self.context_of(char)
        for number, fits in enumerate(self.tests, CONTEXT_BITS):
            bits |= fits(char) << number
        return bits

    def context_of(self, char: str) -> int:
        """What assertions know of a character next to them; it is empty at the ends of a text."""
        if not self.has_assertions:
            return 0
        kinds = (char == "", char == "\n", _is_word(char, False), _is_word(char, True))
        return sum(kind << number for number, kind in enumerate(kinds))


def build(patterns: Sequence[str]) -> Automaton:
    if sum(map(len, patterns)) > MAX_LENGTH:
        raise Impossible(f"the patterns have more than {MAX_LENGTH} characters in all")
    builder = _Builder()
    root = builder.node([builder.pattern(pattern) for pattern in patterns], 1)
    return Automaton(root, tuple(builder.tests), builder.has_assertions)


class _Builder:
    """Makes nodes, the last ones first."""

    def __init__(self) -> None:
        self._left = MAX_SIZE
        self.tests: list[Fits] = []
        self._bits: dict[Any, int] = {}
        self.has_assertions = False

    def pattern(self, pattern: str) -> Node:
        try:
            tree = _parsed(pattern)
        except (re.error, ValueError, OverflowError, RecursionError, Warning) as error:
            why = re.sub("'.*'", "…", str(error))
            raise Impossible(f"it is not a regular expression: {why}") from None
        return self._sequence(tree, tree.state.flags, self.node([], 1, pattern=pattern), 0)

    def node(self, following: Iterable[Node], weight: int = WEIGHT, **kind: Any) -> Node:
        self._spend(weight)
        parts = [node.next if node.skipped else [node] for node in following]
        return Node([*dict.fromkeys(node for part in parts for node in part)], **kind)

    def _spend(self, number: int = 1) -> None:
        self._left -= number
        if self._left < 0:
            raise Impossible("its characters, sets and repetitions are too many: make it shorter")

    def _sequence(self, tree: Any, flags: int, then: Node, depth: int) -> Node:
        self._spend()  # also for a sequence of nothing, which can be repeated too
        if depth > MAX_DEPTH:
            raise Impossible(f"it is nested more than {MAX_DEPTH} levels deep")
        for operation, value in reversed(list(tree)):
            then = self._operation(operation, value, flags, then, depth)
        return then

    def _operation(self, operation: Any, value: Any, flags: int, then: Node, depth: int) -> Node:
        if operation in ONE_CHARACTER:
            plain = operation is sre.LITERAL and not flags & re.IGNORECASE
            bit = self._bit(operation, value, flags)
            return self.node([then], 1 if plain else WEIGHT, takes=bit)
        if operation is sre.AT:
            self.has_assertions = True
            return self.node([then], holds=_assertion(value, flags))
        if operation is sre.BRANCH:
            branches = [self._sequence(tree, flags, then, depth + 1) for tree in value[1]]
            return self.node(branches)
        if operation is sre.SUBPATTERN:
            _, added, removed, tree = value
            kept = flags & ~sre_parser.TYPE_FLAGS if added & sre_parser.TYPE_FLAGS else flags
            return self._sequence(tree, (kept | added) & ~removed, then, depth + 1)
        if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            return self._repeated(value, flags, then, depth + 1)
        raise Impossible(f"it has {NAMES.get(operation, str(operation))}, which takes too long")

    def _repeated(self, value: Any, flags: int, then: Node, depth: int) -> Node:
        least, most, tree = value
        if most is sre.MAXREPEAT:
            loop = self.node([then], complete=False)
            loop.next.append(self._sequence(tree, flags, loop, depth))
            loop.complete = True
            then = loop
        else:
            last = then
            for _ in range(most - least):
                then = self.node([last, self._sequence(tree, flags, then, depth)])
        for _ in range(least):
            then = self._sequence(tree, flags, then, depth)
        return then

    def _bit(self, operation: Any, value: Any, flags: int) -> int:
        """Of the test for a character, which equal ones share."""
        is_set = operation is sre.IN
        key = operation, tuple(value) if is_set else value, flags & FLAGS
        if key not in self._bits:
            self._spend(len(value) if is_set else 0)
            self._bits[key] = 1 << (CONTEXT_BITS + len(self.tests))
            self.tests.append(one_character(*key))
        return self._bits[key]


def _parsed(pattern: str) -> Any:
    """A client's pattern prints no warnings. The filter stays: to restore filters is not safe while
    other threads set theirs."""
    known = [text and text.pattern for action, text, *_ in warnings.filters if action == "ignore"]
    if SET_WARNING not in known:
        warnings.filterwarnings("ignore", SET_WARNING, FutureWarning)
    return sre_parser.parse(pattern)


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
