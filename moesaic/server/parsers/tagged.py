"""Parses answers in which markers separate tool calls and reasoning from content.

Whitespace next to a marker is layout and belongs to no part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from moesaic.server.parsers.parts import Calls, Content, Part, Reasoning, ToolStart, joined
from moesaic.server.parsers.readers import READERS, SPACE, Reader
from moesaic.server.parsers.scan import Markers, markers, slices
from moesaic.server.parsers.syntax import CallSyntax, ThinkSyntax

# Yields None when it needs more text.
Steps = Iterator[Part | None]


@dataclass(frozen=True)
class ParserSetup:
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
        self._final = False  # no more text comes
        self._cut = False  # the model did not end the text
        self._forced = False  # the text had to be a call
        self._dropped = False  # the end of the text, inside a marker or a call
        self._in_call = False
        self._thinking = setup.inside
        self._thought = False
        self._answered = False
        self._after_call = False
        self._fresh = setup.inside and setup.split  # no text since the last marker
        self._layout: list[str] = []  # layout, if a marker follows
        self._cached: dict[tuple[bool, ...], Markers] = {}
        self._sentence: tuple[type[Content] | type[Reasoning], Markers] | None = None
        """What text is in the middle of a sentence, and the markers that would end it."""
        self._steps = self._parse()

    def feed(self, text: str) -> list[Part]:
        if (kind := self.kind_within(text)) is not None:
            return [kind(text)]
        self._sentence = None
        self._input.extend(slices(text))
        return joined(self._new_parts())

    def kind_within(self, text: str) -> type[Content] | type[Reasoning] | None:
        """What the text is, if it is whole and only continues what came before. Then nothing
        changes, and it need not be fed."""
        if (found := self._sentence) is None:
            if not self._mid_sentence():
                return None
            kind = Reasoning if self._thinking and self._setup.split else Content
            found = self._sentence = kind, self._active_markers()
        is_plain = text and text[-1] not in SPACE and found[1].none_begins_in(text)
        return found[0] if is_plain else None

    def _mid_sentence(self) -> bool:
        """Nothing is held back and text came before, which is the case for most tokens."""
        held = self._pending or self._layout or self._fresh or self._early
        return not held and not self._in_call

    def finish(self, cut: bool = False, forced: bool = False) -> list[Part]:
        """`cut`: the text ended early, so a call that has begun is not text. `forced`: it had to be
        a call, so the beginning of a marker is not text either."""
        ends = self._setup.calls.ends if self._setup.calls is not None else ()
        if self._after_call and any(end.startswith(self._pending) for end in ends):
            self._pending = ""
        self._final, self._cut, self._forced = True, cut, forced
        found = [*self._new_parts()]
        if cut and (self._dropped or self._in_section):
            self._layout.clear()
            self._dropped = True
        return joined([*found, *self._release()])

    @property
    def cut_call(self) -> bool:
        """The text ended inside what may be a call."""
        return self._dropped and self._setup.calls is not None

    @property
    def _in_section(self) -> bool:
        """The section of calls has begun, and no call yet."""
        section = self._setup.calls.section if self._setup.calls is not None else None
        return section is not None and section[0] in self._layout

    def _new_parts(self) -> Iterator[Part]:
        for part in self._steps:
            if part is None:
                return
            yield part

    @property
    def _at_end(self) -> bool:
        """The pending text is the last."""
        return self._final and not self._input

    def _more(self) -> Steps:
        """Adds to the pending text, unless it is the last."""
        if not self._input and not self._final:
            yield None
        if self._input:
            self._pending += self._input.popleft()

    def _parse(self) -> Steps:
        while True:
            is_last = self._at_end
            if is_last and self._cut and self._expects_call:
                self._drop_begun_marker()
            start, end = self._active_markers().find(self._pending, is_last)
            before, marker = self._pending[:start], self._pending[start:end]
            self._pending = self._pending[end:]
            yield from self._emit(before)
            if marker:
                yield from self._handle_marker(marker)
            elif is_last:
                return
            else:
                yield from self._more()

    @property
    def _expects_call(self) -> bool:
        """Only then the beginning of a marker is no text: elsewhere most models' markers come
        whole, because they are single tokens."""
        after_call = self._calls.count > 0 and self._fresh
        return self._forced or self._in_section or after_call

    def _drop_begun_marker(self) -> None:
        """Special tokens that are ignored come whole: what looks like the start of one is text."""
        active = markers(frozenset(self._active()) - self._setup.ignored)
        start, end = active.find(self._pending)
        if start == end < len(self._pending):
            self._pending, self._dropped = self._pending[:start], True

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

    def _handle_marker(self, marker: str) -> Steps:
        calls, think = self._setup.calls, self._setup.think
        if think is not None and marker == think.open and not self._early:
            yield from self._emit(marker)  # not at the start
        elif think is not None and marker in (think.open, think.close):
            yield from self._set_thinking(marker, marker == think.open)
        elif calls is not None and marker == calls.begin:
            self._in_call = True
            yield from self._call(calls)
            self._in_call = False
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

    def _call(self, calls: CallSyntax) -> Steps:
        """The text after an opening marker: a call, or no call."""
        space: list[str] = []
        while not (body := self._pending.lstrip(SPACE)) and not self._at_end:
            space.append(self._pending)
            self._pending = ""
            yield from self._more()
        text = "".join([*space, self._pending])
        shape = calls.shapes.get(body[0], calls.shapes.get("")) if body else None
        if not body and self._cut:
            self._pending, self._dropped = "", True
        elif shape is None:
            yield from self._refuse_call(calls, text)
        else:
            self._put_back(text)
            yield from self._read_call(calls, READERS[shape](calls, self._calls))

    def _read_call(self, calls: CallSyntax, reader: Reader) -> Steps:
        while reader.rest is None:
            yield from self._more()
            text, self._pending = self._pending, ""
            ended = self._at_end and not text
            for part in reader.finish(self._cut) if ended else reader.feed(text):
                if isinstance(part, ToolStart):
                    self._layout.clear()
                    self._after_call = self._fresh = True
                yield part
        if reader.failed and self._cut:
            self._dropped = True
        elif reader.failed and not reader.any:
            yield from self._refuse_call(calls, reader.rest)
        else:
            self._put_back(reader.rest)

    def _refuse_call(self, calls: CallSyntax, rest: str) -> Iterator[Part]:
        """The opening marker begins no call: it is text, and so is the rest."""
        self._put_back(rest)
        yield from self._emit(calls.begin)

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
