"""Readers of one tool call each, from its opening marker on; one for every shape."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, NoReturn, TypeVar

from moesaic.server.parsers.parts import Calls, Content, Part
from moesaic.server.parsers.scan import Json, JsonValue, Markers, markers
from moesaic.server.parsers.syntax import CallShape, CallSyntax
from moesaic.server.parsers.values import as_json, escaped, is_text, object_text

SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")
# The longest name; this also bounds what is held back.
MAX_HEADER = 512
ARGUMENT_KEYS = ("arguments", "parameters")

Result = TypeVar("Result")
# Yields when it needs more text.
Steps = Generator[None, None, Result]


class _NotACall(Exception):
    """The text since the last call is not a call."""


class _CallEnds(Exception):
    """The call ends here, complete or not."""


class Reader:
    """Reads text until `rest` is set: the text that is not part of the call. If the reader has
    failed, this is all text since the last call that it started."""

    def __init__(self, syntax: CallSyntax, calls: Calls) -> None:
        self.rest: str | None = None
        self.failed = False
        self.any = False  # a call was started
        self._syntax = syntax
        self._calls = calls
        self._parts: list[Part] = []
        self._text, self._position = "", 0
        self._unconfirmed: list[str] = []
        self._started = self._cut = False
        self._steps = self._read()

    def feed(self, text: str) -> list[Part]:
        if not self._started:
            self._unconfirmed.append(text)
        self._text, self._position = self._unread + text, 0
        try:
            next(self._steps)
        except (StopIteration, _CallEnds):
            self.rest = self._unread
        except _NotACall:
            self._fail()
        return self._drain()

    def finish(self, cut: bool) -> list[Part]:
        """The text has ended: the call is what there is of it. `cut`: the model did not end it, so
        text that was held back may be part of a marker."""
        self.rest, self._cut = "", cut
        if cut:
            self._position = len(self._text)
        try:
            self._end_of_text()
        except _NotACall:
            self._fail()
        return self._drain()

    def _read(self) -> Steps[None]:
        raise NotImplementedError

    def _end_of_text(self) -> None:
        raise NotImplementedError

    @property
    def _unread(self) -> str:
        return self._text[self._position :]

    def _next_char(self) -> Steps[str]:
        """Skips whitespace; the character after it stays unread."""
        while True:
            found = _SPACES.match(self._text, self._position)
            assert found is not None
            self._position = found.end()
            if self._position < len(self._text):
                return self._text[self._position]
            yield

    def _read_json(self, take: Callable[[str], None]) -> Steps[bool]:
        """Gives `take` the text of one JSON value, piece by piece; returns whether it is valid."""
        value = JsonValue()
        while value.state is Json.OPEN:
            while self._position == len(self._text):
                yield
            end = value.feed(self._text, self._position)
            take(self._text[self._position : end])
            self._position = end
        return value.state is Json.DONE

    def _read_until(self, ends: Markers, take: Callable[[str], None]) -> Steps[None]:
        """Gives `take` the text before one of the markers, piece by piece."""
        while True:
            pending = self._unread
            start, end = ends.find(pending)
            take(pending[:start])
            self._position += end
            if start < end:
                return
            yield

    def _start(self, name: str, own_id: str | None = None) -> None:
        self._started = self.any = True
        self._unconfirmed.clear()
        self._parts.append(self._calls.start(name, own_id))

    def _arguments(self, text: str) -> None:
        self._parts.append(self._calls.arguments(text))

    def _pass_on(self) -> Steps[None]:
        """Passes on arguments that are JSON. Invalid JSON is passed on up to the end of the call:
        the model wrote it as arguments."""
        if not (yield from self._read_json(self._arguments)):
            yield from self._read_until(markers(frozenset(self._syntax.ends)), self._arguments)
            raise _CallEnds

    def _fail(self) -> None:
        self.failed, self.rest = True, "".join(self._unconfirmed)

    def _drain(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


class HeaderReader(Reader):
    """name, separator, JSON."""

    def __init__(self, syntax: CallSyntax, calls: Calls) -> None:
        super().__init__(syntax, calls)
        self._header: re.Match[str] | None = None

    def _read(self) -> Steps[None]:
        self._header = yield from self._read_header()
        if (yield from self._next_char()) != "{":
            raise _NotACall
        self._start_call(self._header)
        yield from self._pass_on()

    def _read_header(self) -> Steps[re.Match[str]]:
        separator = self._syntax.separator
        stops = self._syntax.markers - {separator, *self._syntax.inner}
        limit = MAX_HEADER + len(separator)
        while True:
            header, end, _ = self._text[:limit].partition(separator)
            if any(stop in header for stop in stops) or (not end and len(self._text) >= limit):
                raise _NotACall
            if end:
                break
            yield
        found = re.fullmatch(self._syntax.header, header.strip(SPACE))
        if found is None or not self._calls.known(found["name"]):
            raise _NotACall
        self._position = len(header) + len(separator)
        return found

    def _start_call(self, header: re.Match[str]) -> None:
        self._start(header["name"], header.groupdict().get("id"))

    def _end_of_text(self) -> None:
        if self._header is None:
            raise _NotACall
        if not self._started:
            self._start_call(self._header)
        self._arguments(self._unread)


class ObjectReader(Reader):
    """{"name": …, "arguments": {…}}, or a list of them."""

    def __init__(self, syntax: CallSyntax, calls: Calls) -> None:
        super().__init__(syntax, calls)
        self._name: str | None = None
        self._buffer: list[str] = []  # the value that is being read
        self._early_arguments: str | None = None  # arguments that came before the name
        self._in_early_arguments = False
        self._open = False  # the call of this object has started

    def _read(self) -> Steps[None]:
        if (yield from self._next_char()) != "[":
            yield from self._read_object()
            return
        separator = ","
        while separator == ",":
            self._position += 1
            yield from self._read_object()
            # The text may have to be returned until the next call is certain.
            self._started, self._unconfirmed = False, [self._unread]
            separator = yield from self._next_char()
        if separator != "]":
            raise _NotACall
        self._position += 1

    def _read_object(self) -> Steps[None]:
        self._name = self._early_arguments = None
        self._open, key = False, ""
        yield from self._expect("{")
        while (yield from self._next_char()) != "}" or key:
            key = yield from self._read_key()
            yield from self._read_value(key)
            if (yield from self._next_char()) == "}":
                break
            yield from self._expect(",")
        self._position += 1
        if not self._open:
            if self._name is None:
                raise _NotACall
            self._start_object(self._name)
            self._arguments("{}" if self._early_arguments is None else self._early_arguments)

    def _read_key(self) -> Steps[str]:
        if (yield from self._next_char()) != '"':
            self._abandon()
        key = _decoded((yield from self._read_whole()))
        yield from self._expect(":")
        return str(key or "")

    def _read_value(self, key: str) -> Steps[None]:
        first = yield from self._next_char()
        is_arguments = key in ARGUMENT_KEYS and not self._open
        if is_arguments and first == "{" and self._name is not None:
            self._start_object(self._name)
            yield from self._pass_on()
            return
        self._in_early_arguments = is_arguments
        value = yield from self._read_whole()
        self._in_early_arguments = False
        if key == "name" and self._name is None:
            name = _decoded(value)
            if not self._calls.known(name):
                self._abandon()
            self._name = str(name)
        elif is_arguments:
            self._early_arguments = object_text(value)
            if self._early_arguments is None:
                self._abandon()

    def _read_whole(self) -> Steps[str]:
        self._buffer = []
        if not (yield from self._read_json(self._buffer.append)):
            self._abandon()
        return "".join(self._buffer)

    def _expect(self, char: str) -> Steps[None]:
        if (yield from self._next_char()) != char:
            self._abandon()
        self._position += 1

    def _start_object(self, name: str) -> None:
        self._open = True
        self._start(name)

    def _abandon(self) -> NoReturn:
        """This is not a call; a call that has started cannot be revoked."""
        raise _CallEnds if self._open else _NotACall

    def _end_of_text(self) -> None:
        if self._open:
            self._arguments(self._unread)
            return
        if self._name is None:
            raise _NotACall
        self._start_object(self._name)
        self._arguments(self._early_arguments or "")
        if self._in_early_arguments and not self._cut:
            self._parts.append(Content("".join(self._buffer)))


class XmlReader(Reader):
    """name><parameter=key>value</parameter>…</function>; the JSON is written here."""

    PARAMETER, END, CLOSE = "<parameter=", "</function>", "</parameter>"

    def __init__(self, syntax: CallSyntax, calls: Calls) -> None:
        super().__init__(syntax, calls)
        self._schema: Mapping[str, Any] = {}
        self._in_value = False
        self._text_only = False
        self._buffer: list[str] = []

    def _read(self) -> Steps[None]:
        name = yield from self._read_word("")
        if name is None or not self._calls.known(name):
            raise _NotACall
        self._start(name)
        self._schema = self._calls.parameters(name)
        self._arguments("{")
        separator = ""
        while (key := (yield from self._read_key())) is not None:
            self._arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._read_value(key)
            separator = ", "
        self._arguments("}")

    def _read_key(self) -> Steps[str | None]:
        """None after the last parameter; text that is no parameter is not part of the call."""
        yield from self._next_char()
        while any(
            marker.startswith(self._unread) and marker != self._unread
            for marker in (self.PARAMETER, self.END)
        ):
            yield
        if self._unread.startswith(self.PARAMETER):
            return (yield from self._read_word(self.PARAMETER))
        if self._unread.startswith(self.END):
            self._position += len(self.END)
        return None

    def _read_word(self, prefix: str) -> Steps[str | None]:
        """Reads the prefix and the word after it, up to a bracket; None if the word is too long."""
        while True:
            start = self._position + len(prefix)
            cut = self._text.find(">", start, start + MAX_HEADER)
            if cut >= 0:
                break
            if len(self._text) >= start + MAX_HEADER:
                return None
            yield
        self._position = cut + 1
        return self._text[start:cut].strip()

    def _read_value(self, key: str) -> Steps[None]:
        self._text_only, self._buffer, self._in_value = is_text(self._schema, key), [], True
        self._arguments('"' if self._text_only else "")
        while self._position == len(self._text):
            yield
        if self._text.startswith("\n", self._position):
            self._position += 1
        ends = markers(frozenset(("\n" + self.CLOSE, self.CLOSE)))
        yield from self._read_until(ends, self._part_of_value)
        self._in_value = False
        whole = '"' if self._text_only else as_json("".join(self._buffer), self._schema, key)
        self._arguments(whole)

    def _part_of_value(self, text: str) -> None:
        if self._text_only:
            self._arguments(escaped(text))
        else:
            self._buffer.append(text)

    def _end_of_text(self) -> None:
        if not self._started:
            raise _NotACall
        if self._in_value:
            self._part_of_value(self._unread)
            self._arguments("".join(self._buffer))


READERS: Mapping[CallShape, type[Reader]] = {
    CallShape.OBJECT: ObjectReader,
    CallShape.HEADER: HeaderReader,
    CallShape.XML: XmlReader,
}


def _decoded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
