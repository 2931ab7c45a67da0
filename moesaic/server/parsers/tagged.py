"""Parses answers in which markers separate tool calls and reasoning from content.

Whitespace next to a marker is layout and belongs to no part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from moesaic.server.parsers.parts import Calls, Content, Part, Reasoning, ToolStart, joined
from moesaic.server.parsers.readers import READERS, SPACE, Reader
from moesaic.server.parsers.scan import Markers, markers, slices
from moesaic.server.parsers.syntax import CallSyntax, ThinkSyntax

# Yields parts and returns whether the pending text may have more.
Steps = Generator[Part, None, bool]


@dataclass(frozen=True)
class ParserSetup:
    """What all parsers of a request share."""

    calls: CallSyntax | None
    think: ThinkSyntax | None
    inside: bool  # the answer begins inside the reasoning
    split: bool  # separate the reasoning; otherwise it stays in the content unchanged
    ignored: frozenset[str] = frozenset()  # special tokens that are no markers


class TaggedParser:
    def __init__(self, setup: ParserSetup, calls: Calls) -> None:
        self._setup = setup
        self._calls = calls
        self._input = deque[str]()
        self._pending = ""
        self._reader: Reader | None = None
        self._opened: list[str] | None = None  # whitespace after an opening marker
        self._thinking = setup.inside
        self._thought = False
        self._answered = False
        self._after_call = False
        self._fresh = setup.inside and setup.split  # no text since the last marker
        self._layout: list[str] = []  # layout, if a marker follows
        self._cached: dict[tuple[bool, ...], Markers] = {}

    def feed(self, text: str) -> list[Part]:
        plain = text and self._mid_sentence() and text[-1] not in SPACE
        if plain and self._active_markers().none_begins_in(text):
            return [self._part(text)]
        return joined(self._run(text, final=False))

    def _mid_sentence(self) -> bool:
        """Nothing is held back and text came before, which is the case for most tokens."""
        held = self._pending or self._layout or self._fresh or self._early
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
                yield from self._close_reader(self._reader)
            elif self._opened is not None:
                yield from self._refuse_call("".join(self._opened))
            yield from self._run("", final=True)
        yield from self._release()

    def _scan(self, final: bool) -> Steps:
        """Text up to the next marker, and the marker."""
        start, end = self._active_markers().find(self._pending, final)
        before, marker = self._pending[:start], self._pending[start:end]
        self._pending = self._pending[end:]
        yield from self._emit(before)
        if not marker:
            return False
        yield from self._handle_marker(marker)
        return True

    def _active_markers(self) -> Markers:
        """The markers that apply in the current state, cached."""
        state = (self._thinking, self._early, self._after_call)
        if state not in self._cached:
            self._cached[state] = markers(frozenset(self._active()))
        return self._cached[state]

    @property
    def _early(self) -> bool:
        """Reasoning can begin only before any other text."""
        return not (self._answered or self._thought)

    def _active(self) -> Iterator[str]:
        setup = self._setup
        yield from setup.ignored
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

    def _handle_marker(self, marker: str) -> Iterator[Part]:
        calls, think = self._setup.calls, self._setup.think
        if think is not None and marker == think.open and not self._early:
            yield from self._emit(marker)  # not at the start
        elif think is not None and marker in (think.open, think.close):
            yield from self._set_thinking(marker, marker == think.open)
        elif calls is not None and marker == calls.begin:
            self._opened = []
        elif calls is not None and calls.section is not None and marker == calls.section[0]:
            self._layout.append(marker)
        elif calls is not None and calls.section is not None and marker == calls.section[1]:
            if not self._calls.count:
                yield from self._emit(marker)
            self._fresh = self._fresh or self._calls.count > 0
        elif calls is not None and marker in calls.ends:
            self._after_call = False
            self._fresh = True

    def _set_thinking(self, marker: str, thinking: bool) -> Iterator[Part]:
        if self._setup.split:
            layout = "".join(self._layout)
            self._layout.clear()
            if layout.strip(SPACE):
                yield self._part(layout)
            self._fresh = True
        else:
            yield from self._emit(marker)
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
            self._put_back("".join(space) + body)
            self._reader = READERS[shape](self._setup.calls, self._calls)
        return True

    def _read(self, reader: Reader) -> Steps:
        text, self._pending = self._pending, ""
        yield from self._parts_of(reader.feed(text))
        if reader.rest is None:
            return False
        yield from self._close_reader(reader)
        return True

    def _parts_of(self, parts: list[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, ToolStart):
                self._layout.clear()
                self._after_call = self._fresh = True
            yield part

    def _close_reader(self, reader: Reader) -> Iterator[Part]:
        self._reader = None
        if reader.failed and not reader.any:
            yield from self._refuse_call(reader.rest or "")
        else:
            self._put_back(reader.rest or "")

    def _refuse_call(self, rest: str) -> Iterator[Part]:
        """The opening marker begins no call: it is text, and so is the rest."""
        assert self._setup.calls is not None
        self._opened = None
        self._put_back(rest)
        yield from self._emit(self._setup.calls.begin)

    def _put_back(self, text: str) -> None:
        """Puts text back in front of the remaining input."""
        self._pending = ""
        self._input.extendleft(reversed(slices(text)))

    def _emit(self, text: str) -> Iterator[Part]:
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
            self._layout.append(text[len(body) :])

    def _release(self) -> Iterator[Part]:
        if self._layout:
            yield self._part("".join(self._layout))
            self._layout.clear()

    def _part(self, text: str) -> Part:
        return Reasoning(text) if self._thinking and self._setup.split else Content(text)
