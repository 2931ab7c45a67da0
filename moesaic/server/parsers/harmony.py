"""gpt-oss: an answer is a sequence of messages, each with a channel and optionally a recipient.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator

from moesaic.server.parsers.parts import Calls, Content, Part, Reasoning, joined
from moesaic.server.parsers.readers import MAX_HEADER, SPACE
from moesaic.server.parsers.scan import markers, slices
from moesaic.server.parsers.syntax import HARMONY_MARKERS

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
FUNCTIONS = "functions."
# Only at the start of an answer, because the prompt ends with the role.
RECIPIENT_FIRST = "to=" + FUNCTIONS
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")

# Yields parts and returns whether the pending text may have more.
Steps = Generator[Part, None, bool]


class HarmonyParser:
    def __init__(self, calls: Calls, split: bool, ignored: frozenset[str] = frozenset()) -> None:
        self._calls = calls
        self._split = split
        outside = ignored | HARMONY_MARKERS
        self._between = markers(outside)
        self._at_start = markers(outside | {RECIPIENT_FIRST})
        self._within = markers(ignored | {START, CHANNEL, *ENDS})
        self._pending = ""
        self._step: Callable[[bool], Steps] = self._gap
        self._header = ""
        self._first = True  # nothing has been read
        self._bare = False  # text without a channel came before
        self._body: type[Reasoning] | type[Content] | None = None  # None: a call's arguments
        self._raw = False  # this message is passed on unchanged
        self._empty = True
        self.cut_call = False  # the text ended inside what may be a call

    def kind_within(self, text: str) -> type[Content] | type[Reasoning] | None:
        """See TaggedParser: here every text is fed."""
        return None

    def feed(self, text: str) -> list[Part]:
        return joined(self._run(text, final=False))

    def finish(self, cut: bool = False, forced: bool = False) -> list[Part]:
        """`cut`: the text ended early, so a header or call that has begun is not text. `forced`: it
        had to be a call, so the beginning of a marker is not text either."""
        in_header = self._step == self._in_header
        in_call = self._step == self._in_body and self._body is None
        dropped = cut and (forced or in_header or in_call)
        self.cut_call = dropped and (self._pending != "" or in_header) and self._calls.possible
        return [] if dropped else joined(self._run("", final=True))

    def _run(self, text: str, final: bool) -> Iterator[Part]:
        for part in [""] if final else slices(text):
            self._pending += part
            while (yield from self._step(final)):
                pass

    def _gap(self, final: bool) -> Steps:
        """Between messages; text here has no channel."""
        begun = self._pending.lstrip(SPACE)[: len(RECIPIENT_FIRST)]
        may_address = self._first and RECIPIENT_FIRST.startswith(begun)
        active = self._at_start if may_address else self._between
        start, end = active.find(self._pending, final)
        before, marker = self._pending[:start], self._pending[start:end]
        self._pending = self._pending[end:]
        content = before if self._bare else before.lstrip(SPACE)
        if content:
            self._bare, self._first = True, False
            yield Content(content)
        if marker in (START, CHANNEL, RECIPIENT_FIRST):
            self._header, self._first = marker, False
            self._step = self._in_header
        return start != end

    def _in_header(self, final: bool) -> Steps:
        cut = self._pending.find(MESSAGE, 0, MAX_HEADER)
        header = self._pending[:MAX_HEADER] if cut < 0 else self._pending[:cut]
        if any(stop in header for stop in (START, *ENDS)) or (
            cut < 0 and (final or len(self._pending) >= MAX_HEADER)
        ):
            yield Content(self._header)
            self._bare = True
            self._step = self._gap
            return True
        if cut < 0:
            return False
        self._pending = self._pending[cut + len(MESSAGE) :]
        yield from self._begin(self._header + header)
        self._step = self._in_body
        return True

    def _begin(self, header: str) -> Iterator[Part]:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        to = recipient[1] if recipient is not None else ""
        self._raw, self._empty = False, True
        if to.startswith(FUNCTIONS) and self._calls.known(to.removeprefix(FUNCTIONS)):
            self._body = None
            yield self._calls.start(to.removeprefix(FUNCTIONS))
        elif channel is not None and channel[1] == "analysis":
            self._body = Reasoning if self._split else Content
            self._raw = not self._split
        else:
            self._body = Content
            self._raw = to != ""
        if self._raw:
            yield Content(header + MESSAGE)

    def _in_body(self, final: bool) -> Steps:
        start, end = self._within.find(self._pending, final)
        before, marker = self._pending[:start], self._pending[start:end]
        if before:
            self._empty = False
            yield self._calls.arguments(before) if self._body is None else self._body(before)
        self._pending = self._pending[start if marker in (START, CHANNEL) else end :]
        if marker in (START, CHANNEL, *ENDS):
            if marker in ENDS and self._raw:
                yield Content(marker)
            if self._body is None and self._empty:
                yield self._calls.arguments("{}")
            self._bare = False
            self._step = self._gap
        return marker != ""
