"""Regular expressions that end an answer, matched while it grows.

Python's `re` may take exponential time, and it cannot continue a search. Here a pattern becomes an
automaton: a character costs at most a few visits of each node, and none if the automaton was in the
same state before a character of the same class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from moesaic.core.foreign_fields import BadParameter

if TYPE_CHECKING:
    from moesaic.engine.text.stop_regex_nodes import Automaton, Node

# Patterns whose steps are remembered, the threads in the steps of one, and its characters. A thread
# takes about 200 bytes.
NUM_REMEMBERED: Final = 16
MAX_REMEMBERED: Final = 16_384
MAX_CHARACTERS: Final = 4096


@dataclass(frozen=True, slots=True)
class Match:
    start: int
    end: int
    pattern: str


Threads = dict["Node", int]
"""Nodes that the text so far leads to, with the earliest position at which a match may begin: in a
state, its place among the different positions. The earliest come first."""


@dataclass(frozen=True, slots=True, eq=False)
class State:
    threads: Threads
    num_starts: int


NO_THREADS: Final = State({}, 0)


class Step(NamedTuple):
    """What a character does to a state. Positions are places among those of the state before, the
    position before the character and the one after it."""

    state: State
    starts: tuple[int, ...]
    end: tuple[int, str] | None
    """Where the match that ends here begins, and its pattern."""


class StopPatterns:
    """Finds the match that ends first in a growing text, and of those that end together the
    longest. An assertion at the end holds as if the text ended there."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._automaton = _compiled(tuple(patterns))
        self._state, self._starts = NO_THREADS, list[int]()
        self._last = ""
        self.length = 0

    @property
    def earliest(self) -> int:
        """The first position that may belong to a match that has not ended yet."""
        return self._starts[0] if self._starts else self.length

    def copy(self) -> StopPatterns:
        other = object.__new__(StopPatterns)
        other._automaton, other._state, other._starts = self._automaton, self._state, self._starts
        other._last, other.length = self._last, self.length
        return other

    def feed(self, piece: str) -> Match | None:
        """The first match; there is nothing to feed after it."""
        steps = _steps(self._automaton)
        for char in piece:
            step = steps.step(self._state, self._last, char)
            starts = [*self._starts, self.length, self.length + 1]
            self._last, self.length = char, self.length + 1
            if step.end is not None:
                start, pattern = step.end
                return Match(starts[start], self.length, pattern)
            self._state, self._starts = step.state, [starts[place] for place in step.starts]
        return None


class _Steps:
    """Remembers the steps of an automaton for all texts."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._first = _reached({automaton.root: 0}, "", "")
        self._classes: dict[str, int] = {}
        self._states: dict[frozenset[tuple[Node, int]], State] = {}
        self._steps: dict[tuple[State, int, int], Step] = {}
        self._size = 0

    def step(self, state: State, before: str, char: str) -> Step:
        key = state, self._automaton.context_of(before), self._class_of(char)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._new_step(state, before, char)
            self._size += len(state.threads) + len(found.state.threads) + 1
            if self._size > MAX_REMEMBERED:
                self._states.clear()
                self._steps.clear()
                self._size = 0
        return found

    def _class_of(self, char: str) -> int:
        found = self._classes.get(char)
        if found is None:
            if len(self._classes) >= MAX_CHARACTERS:
                self._classes.clear()
            found = self._classes[char] = self._automaton.class_of(char)
        return found

    def _new_step(self, state: State, before: str, char: str) -> Step:
        moved, reached = self._moved(state, before, char)
        starts = tuple(dict.fromkeys(moved.values()))
        places = {start: place for place, start in enumerate(starts)}
        following = {node: places[start] for node, start in moved.items()}
        known = NO_THREADS
        if following:
            key = frozenset(following.items())
            known = self._states.setdefault(key, State(following, len(starts)))
        ends = [(start, node.pattern) for node, start in reached.items() if node.pattern]
        return Step(known, starts, min(ends, default=None))

    def _moved(self, state: State, before: str, char: str) -> tuple[Threads, Threads]:
        """The threads after a character, and all nodes that they reach if the text ends there."""
        kinds, now = self._class_of(char), state.num_starts
        if not self._automaton.has_assertions:
            # What a node reaches does not depend on the characters around it.
            threads = {**state.threads, **{n: now for n in self._first if n not in state.threads}}
            reached = _reached(_advanced(threads, kinds), char, "")
            return {node: start for node, start in reached.items() if node.takes}, reached
        from moesaic.engine.text.stop_regex_nodes import LAST_NEWLINE

        root = self._automaton.root
        threads = {**state.threads, root: now}
        moved = ending = _advanced(_reached(threads, before, char), kinds)
        if char == "\n":  # `$` holds before it if it is the last character
            ending = _advanced(_reached(threads, before, LAST_NEWLINE), kinds)
        return moved, _reached({**ending, root: now + 1}, char, "")


@lru_cache(maxsize=NUM_REMEMBERED)
def _steps(automaton: Automaton) -> _Steps:
    """Texts do not keep these, so that the memory does not grow with the number of requests."""
    return _Steps(automaton)


def check_stop_patterns(patterns: Sequence[str]) -> None:
    """BadParameter if one cannot be used."""
    if patterns and _ends_at_once(_compiled(tuple(patterns)).root):
        raise _impossible("it matches an empty text, and so would end every answer at once")


def _reached(threads: Threads, before: str, after: str) -> Threads:
    """The given nodes, and those that they lead to without a character."""
    found: Threads = {}
    waiting = [*reversed(threads.items())]
    while waiting:
        node, start = waiting.pop()
        if node in found or (node.holds is not None and not node.holds(before, after)):
            continue
        found[node] = start
        if not node.takes:
            for following in node.next:
                waiting.append((following, start))
    return found


def _advanced(threads: Threads, kinds: int) -> Threads:
    """The nodes behind those that take a character of this class."""
    found: Threads = {}
    for node, start in threads.items():
        if node.takes & kinds:
            for following in node.next:
                found.setdefault(following, start)
    return found


def _ends_at_once(root: Node) -> bool:
    return any(node.pattern for node in _reached({root: 0}, "", ""))


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> Automaton:
    try:
        from moesaic.engine.text.stop_regex_nodes import Impossible, build
    except (ImportError, AttributeError) as error:
        raise _unknown_parser() from error
    try:
        return build(patterns)
    except Impossible as error:
        raise _impossible(str(error)) from None
    except (AttributeError, TypeError, LookupError, ValueError) as error:
        raise _unknown_parser() from error


def _impossible(why: str) -> BadParameter:
    return BadParameter("stop_regex", f"stop_regex is not possible: {why}")


def _unknown_parser() -> BadParameter:
    return _impossible(
        "the parser of this Python's re is unknown here: use stop, or another version of Python"
    )
