"""Answers in which markers set tool calls and reasoning apart from content.

Whitespace that touches a marker is layout: it belongs to no part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from moesaic.server.parsers.parts import Calls, Content, Part, Reasoning, ToolStart, joined
from moesaic.server.parsers.readers import READERS, SPACE, Reader, ReaderState
from moesaic.server.parsers.scan import Markers, markers, slices
from moesaic.server.parsers.syntax import CallSyntax, ThinkSyntax

# Gives parts and returns whether there may be more to do with the text at hand.
Steps = Generator[Part, None, bool]


@dataclass(frozen=True)
class ParserSetup:
    """What the parsers of one request have in common."""

    calls: CallSyntax | None
    think: ThinkSyntax | None
    inside: bool  # the answer begins within the reasoning
    split: bool  # give reasoning apart; else it stays in the content as it came
    noise: frozenset[str] = frozenset()  # special tokens that mean nothing here


class TaggedParser:
    def __init__(self, setup: ParserSetup, calls: Calls) -> None:
        self._setup = setup
        self._calls = calls
        self._input = deque[str]()
        self._pending = ""
        self._reader: Reader | None = None
        self._opened: list[str] | None = None  # whitespace behind an opening marker
        self._thinking = setup.inside
        self._thought = False
        self._answered = False
        self._after_call = False
        self._fresh = setup.inside and setup.split  # no text since the last marker
        self._held: list[str] = []  # layout, if a marker follows
        self._known: dict[tuple[bool, ...], Markers] = {}

    def feed(self, text: str) -> list[Part]:
        plain = text and self._mid_sentence() and text[-1] not in SPACE
        if plain and self._wanted().none_begins_in(text):
            return [self._part(text)]
        return joined(self._run(text, final=False))

    def _mid_sentence(self) -> bool:
        """Nothing is held back and text stands before: most tokens come here."""
        held = self._pending or self._held or self._fresh or self._early
        return not held and self._reader is None and self._opened is None

    def finish(self) -> list[Part]:
        return joined(self._end())

    def _run(self, text: str, final: bool) -> Iterator[Part]:
        self._input.extend(slices(text))
        while (yield from self._work(final and not self._input)) or self._next():
            pass

    def _next(self) -> bool:
        if not self._input:
            return False
        self._pending += self._input.popleft()
        return True

    def _work(self, final: bool) -> Steps:
        if self._reader is not None:
            return (yield from self._read(self._reader))
        if self._opened is not None:
            return (yield from self._choose_reader(self._opened))
        return (yield from self._scan(final))

    def _end(self) -> Iterator[Part]:
        ends = self._setup.calls.ends if self._setup.calls is not None else ()
        if self._after_call and any(end.startswith(self._pending) for end in ends):
            self._pending = ""
        yield from self._run("", final=True)
        while self._reader is not None or self._opened is not None:
            if self._reader is not None:
                yield from self._parts_of(self._reader.finish())
                yield from self._leave(self._reader)
            elif self._opened is not None:
                yield from self._refuse_call("".join(self._opened))
            yield from self._run("", final=True)
        yield from self._release()

    def _scan(self, final: bool) -> Steps:
        """Text up to the next marker, and the marker."""
        start, end = self._wanted().find(self._pending, final)
        before, marker = self._pending[:start], self._pending[start:end]
        self._pending = self._pending[end:]
        yield from self._say(before)
        if not marker:
            return False
        yield from self._act_on(marker)
        return True

    def _wanted(self) -> Markers:
        """The markers that count where the parser stands; kept, as there may be many."""
        standing = (self._thinking, self._early, self._after_call)
        if standing not in self._known:
            self._known[standing] = markers(frozenset(self._active()))
        return self._known[standing]

    @property
    def _early(self) -> bool:
        """Reasoning can begin only before anything was said."""
        return not (self._answered or self._thought)

    def _active(self) -> Iterator[str]:
        setup = self._setup
        yield from setup.noise
        if setup.think is not None:
            if self._thinking:
                yield setup.think.close
            if self._early:
                yield setup.think.open
        if setup.calls is not None and self._may_call():
            yield setup.calls.begin
            yield from setup.calls.section or ()
            if self._after_call:
                yield from setup.calls.ends

    def _may_call(self) -> bool:
        think = self._setup.think
        return not self._thinking or (think is not None and think.ends_at_call)

    def _act_on(self, marker: str) -> Iterator[Part]:
        calls, think = self._setup.calls, self._setup.think
        if think is not None and marker == think.open and not self._early:
            yield from self._say(marker)  # text came before it
        elif think is not None and marker in (think.open, think.close):
            yield from self._turn(marker, marker == think.open)
        elif calls is not None and marker == calls.begin:
            self._opened = []
        elif calls is not None and calls.section is not None and marker == calls.section[0]:
            self._held.append(marker)
        elif calls is not None and calls.section is not None and marker == calls.section[1]:
            if not self._calls.count:
                yield from self._say(marker)
            self._fresh = self._fresh or self._calls.count > 0
        elif calls is not None and marker in calls.ends:
            self._after_call = False
            self._fresh = True

    def _turn(self, marker: str, thinking: bool) -> Iterator[Part]:
        if self._setup.split:
            layout = "".join(self._held)
            self._held.clear()
            if layout.strip(SPACE):
                yield self._part(layout)
            self._fresh = True
        else:
            yield from self._say(marker)
        self._thinking, self._thought = thinking, False

    def _choose_reader(self, space: list[str]) -> Steps:
        assert self._setup.calls is not None
        body = self._pending.lstrip(SPACE)
        space.append(self._pending[: len(self._pending) - len(body)])
        self._pending = body
        if not body:
            return False
        shapes = self._setup.calls.shapes
        shape = shapes.get(body[0], shapes.get(""))
        if shape is None:
            yield from self._refuse_call("".join(space) + body)
        else:
            self._opened = None
            self._again("".join(space) + body)
            self._reader = READERS[shape](self._setup.calls, self._calls)
        return True

    def _read(self, reader: Reader) -> Steps:
        text, self._pending = self._pending, ""
        yield from self._parts_of(reader.feed(text))
        if reader.state is ReaderState.READING:
            return False
        yield from self._leave(reader)
        return True

    def _parts_of(self, parts: list[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, ToolStart):
                self._held.clear()
                self._after_call = self._fresh = True
            yield part

    def _leave(self, reader: Reader) -> Iterator[Part]:
        self._reader = None
        if reader.state is ReaderState.FAILED and not reader.any:
            yield from self._refuse_call(reader.rest)
        else:
            self._again(reader.rest)

    def _refuse_call(self, rest: str) -> Iterator[Part]:
        """What follows the opening marker is no call: the marker is text, and so is the rest."""
        assert self._setup.calls is not None
        self._opened = None
        self._again(rest)
        yield from self._say(self._setup.calls.begin)

    def _again(self, text: str) -> None:
        """Text that was taken and is to be looked at once more, before what is still to come."""
        self._pending = ""
        self._input.extendleft(reversed(slices(text)))

    def _say(self, text: str) -> Iterator[Part]:
        raw = self._thinking and not self._setup.split
        if self._fresh and not raw:
            text = text.lstrip(SPACE)
        body = text if raw else text.rstrip(SPACE)
        if body:
            self._fresh = False
            self._thought = self._thinking
            self._answered = self._answered or not self._thinking
            yield from self._release()
            yield self._part(body)
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def _release(self) -> Iterator[Part]:
        if self._held:
            yield self._part("".join(self._held))
            self._held.clear()

    def _part(self, text: str) -> Part:
        return Reasoning(text) if self._thinking and self._setup.split else Content(text)
