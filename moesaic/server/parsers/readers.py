"""Readers of one tool call each, from its opening marker on; one for every shape."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Any

from moesaic.server.parsers.parts import Calls, Content, Part
from moesaic.server.parsers.scan import Json, JsonValue, markers
from moesaic.server.parsers.syntax import CallShape, CallSyntax
from moesaic.server.parsers.values import as_json, escaped, is_text, object_text

SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")
# The longest name; this also bounds what is held back.
MAX_HEADER = 512
ARGUMENT_KEYS = ("arguments", "parameters")


class ReaderState(Enum):
    READING = "reading"
    DONE = "done"
    FAILED = "failed"


class Reader:
    """Reads text until it is done or has failed; `rest` is then the text that is not part of the
    call. A failed reader returns all text since the last call that it started."""

    def __init__(self, syntax: CallSyntax, calls: Calls) -> None:
        self.state = ReaderState.READING
        self.rest = ""
        self.any = False  # a call was started
        self._syntax = syntax
        self._calls = calls
        self._parts: list[Part] = []
        self._unconfirmed: list[str] = []
        self._returned = ""  # text of earlier feeds that is not part of the call
        self._started = False
        self._step: Callable[[str, int], int] = self._first

    def feed(self, text: str) -> list[Part]:
        if not self._started:
            self._unconfirmed.append(text)
        position = 0
        while position < len(text) and self.state is ReaderState.READING:
            position = self._step(text, position)
        if self.state is ReaderState.DONE:
            self.rest = self._returned + text[position:]
        elif self.state is ReaderState.FAILED:
            self.rest = "".join(self._unconfirmed)
        return self._drain()

    def finish(self) -> list[Part]:
        """The text has ended: the call is what there is of it."""
        self._end_of_text()
        if self.state is ReaderState.FAILED:
            self.rest = "".join(self._unconfirmed)
        return self._drain()

    def _first(self, text: str, position: int) -> int:
        raise NotImplementedError

    def _end_of_text(self) -> None:
        raise NotImplementedError

    def _start(self, name: str, own_id: str | None = None) -> None:
        self._started = self.any = True
        self._unconfirmed.clear()
        self._parts.append(self._calls.start(name, own_id))

    def _arguments(self, text: str) -> None:
        self._parts.append(self._calls.arguments(text))

    def _fail(self, position: int) -> int:
        self.state = ReaderState.FAILED
        return position

    def _done(self, position: int) -> int:
        self.state = ReaderState.DONE
        return position

    def _drain(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


class _WithJson(Reader):
    """Passes on arguments that are JSON."""

    def __init__(self, syntax: CallSyntax, calls: Calls) -> None:
        super().__init__(syntax, calls)
        self._value = JsonValue()
        self._ends = markers(frozenset(syntax.ends))
        self._tail = ""

    def _pass_on(self, text: str, position: int) -> int:
        end = self._value.feed(text, position)
        self._arguments(text[position:end])
        if self._value.state is Json.BROKEN:
            self._step = self._pass_broken
        elif self._value.state is Json.DONE:
            return self._after_arguments(end)
        return end

    def _pass_broken(self, text: str, position: int) -> int:
        """Invalid JSON is passed on, too: the model wrote it as arguments."""
        pending = self._tail + text[position:]
        start, end = self._ends.find(pending)
        self._arguments(pending[:start])
        self._tail = pending[start:] if start == end else ""
        return len(text) if start == end else self._done(len(text) - len(pending) + end)

    def _after_arguments(self, position: int) -> int:
        return self._done(position)


class HeaderReader(_WithJson):
    """name, separator, JSON."""

    def __init__(self, syntax: CallSyntax, calls: Calls) -> None:
        super().__init__(syntax, calls)
        self._seen = ""
        self._name = ""
        self._id: str | None = None

    def _first(self, text: str, position: int) -> int:
        before = len(self._seen)
        self._seen += text[position:]
        separator = self._syntax.separator
        limit = MAX_HEADER + len(separator)
        cut = self._seen.find(separator, 0, limit)
        header = self._seen[:limit] if cut < 0 else self._seen[:cut]
        if any(stop in header for stop in self._stops) or (cut < 0 and len(self._seen) >= limit):
            return self._fail(position)
        if cut < 0:
            return len(text)
        found = re.fullmatch(self._syntax.header, header.strip(SPACE))
        if found is None or not self._calls.known(found["name"]):
            return self._fail(position)
        self._name, self._id = found["name"], found.groupdict().get("id")
        self._step = self._opening
        return position + cut + len(separator) - before

    @property
    def _stops(self) -> frozenset[str]:
        inner = {self._syntax.separator, *self._syntax.inner}
        return self._syntax.markers - inner

    def _opening(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        if position == len(text):
            return position
        if text[position] != "{":
            return self._fail(position)
        self._start(self._name, self._id)
        self._step = self._pass_on
        return position

    def _end_of_text(self) -> None:
        if self._step == self._opening:
            self._start(self._name, self._id)
        elif not self._started:
            self._fail(0)
        self._arguments(self._tail)


class ObjectReader(_WithJson):
    """{"name": …, "arguments": {…}}, or a list of them."""

    def __init__(self, syntax: CallSyntax, calls: Calls) -> None:
        super().__init__(syntax, calls)
        self._in_list = False
        self._begin_object()

    def _begin_object(self) -> None:
        self._key = ""
        self._name: str | None = None
        self._buffer: list[str] = []
        self._early_arguments: str | None = None  # arguments that came before the name
        self._open = False  # the call of this object has started

    def _first(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        if position == len(text):
            return position
        if text[position] == "[" and not self._in_list:
            self._in_list = True
            return position + 1
        if text[position] != "{":
            return self._fail(position)
        self._step = self._key_or_end
        return position + 1

    def _key_or_end(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        if position == len(text):
            return position
        if text[position] == "}" and not self._key:
            return self._end_of_object(position + 1)
        if text[position] != '"':
            return self._abandon(position)
        self._begin_value(self._in_key)
        return position

    def _in_key(self, text: str, position: int) -> int:
        return self._collect(text, position, self._key_read)

    def _key_read(self, text: str, position: int) -> int:
        self._key = str(_decoded("".join(self._buffer)) or "")
        self._step = self._colon
        return position

    def _colon(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        if position == len(text):
            return position
        if text[position] != ":":
            return self._abandon(position)
        self._step = self._value_begins
        return position + 1

    def _value_begins(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        if position == len(text):
            return position
        self._begin_value(self._in_value)
        is_arguments = self._key in ARGUMENT_KEYS and not self._open
        if is_arguments and text[position] == "{" and self._name is not None:
            self._start_object(self._name)
            self._step = self._pass_on
        return position

    def _in_value(self, text: str, position: int) -> int:
        return self._collect(text, position, self._value_read)

    def _value_read(self, text: str, position: int) -> int:
        value = "".join(self._buffer)
        self._step = self._comma
        if self._key == "name" and self._name is None:
            name = _decoded(value)
            if not self._calls.known(name):
                return self._abandon(position)
            self._name = str(name)
        elif self._key in ARGUMENT_KEYS and not self._open:
            self._early_arguments = object_text(value)
            if self._early_arguments is None:
                return self._abandon(position)
        return position

    def _after_arguments(self, position: int) -> int:
        self._step = self._comma
        return position

    def _comma(self, text: str, position: int) -> int:
        position = _skip_space(text, position)
        if position == len(text):
            return position
        if text[position] == "}":
            return self._end_of_object(position + 1)
        if text[position] != ",":
            return self._abandon(position)
        self._step = self._key_or_end
        return position + 1

    def _end_of_object(self, position: int) -> int:
        if not self._open:
            if self._name is None:
                return self._fail(position)
            self._start_object(self._name)
            self._arguments("{}" if self._early_arguments is None else self._early_arguments)
        if not self._in_list:
            return self._done(position)
        self._step = self._next_object
        self._started = False
        return position

    def _next_object(self, text: str, position: int) -> int:
        # The text may have to be returned until the next call is certain.
        if not self._unconfirmed:
            self._unconfirmed.append(text[position:])
        position = _skip_space(text, position)
        if position == len(text):
            return position
        if text[position] == "]":
            return self._done(position + 1)
        if text[position] != ",":
            return self._fail(position)
        self._begin_object()
        self._step = self._first
        return position + 1

    def _start_object(self, name: str) -> None:
        self._open = True
        self._start(name)

    def _begin_value(self, step: Callable[[str, int], int]) -> None:
        self._value = JsonValue()
        self._buffer = []
        self._step = step

    def _collect(self, text: str, position: int, then: Callable[[str, int], int]) -> int:
        end = self._value.feed(text, position)
        self._buffer.append(text[position:end])
        if self._value.state is Json.BROKEN:
            return self._abandon(end)
        return then(text, end) if self._value.state is Json.DONE else end

    def _abandon(self, position: int) -> int:
        """This is not a call; a call that has started cannot be revoked."""
        return self._done(position) if self._open else self._fail(position)

    def _end_of_text(self) -> None:
        if self._open:
            self._arguments(self._tail)
        elif self._name is not None:
            self._start_object(self._name)
            self._arguments(self._early_arguments or "")
            if self._key in ARGUMENT_KEYS and self._step == self._in_value:
                self._parts.append(Content("".join(self._buffer)))
        else:
            self._fail(0)


class XmlReader(Reader):
    """name><parameter=key>value</parameter>…</function>; the JSON is written here."""

    PARAMETER, END, CLOSE = "<parameter=", "</function>", "</parameter>"

    def __init__(self, syntax: CallSyntax, calls: Calls) -> None:
        super().__init__(syntax, calls)
        self._seen = ""
        self._schema: Mapping[str, Any] = {}
        self._count = 0
        self._key = ""
        self._text_only = False
        self._buffer: list[str] = []

    def _first(self, text: str, position: int) -> int:
        return self._until_bracket(text, position, self._named, self._fail)

    def _named(self, name: str) -> bool:
        if not self._calls.known(name):
            return False
        self._start(name)
        self._schema = self._calls.parameters(name)
        self._arguments("{")
        self._step = self._between
        return True

    def _between(self, text: str, position: int) -> int:
        if not self._seen:
            position = _skip_space(text, position)
        before = len(self._seen)
        self._seen += text[position : position + len(self.PARAMETER) - before]
        for marker, then in ((self.PARAMETER, self._key_part), (self.END, None)):
            if self._seen.startswith(marker):
                self._seen = ""
                if then is None:
                    return self._closed(position + len(marker) - before)
                self._step = then
                return position + len(marker) - before
        if self.PARAMETER.startswith(self._seen) or self.END.startswith(self._seen):
            return len(text)
        # This is not a parameter: the call ends and the text is content.
        self._returned = self._seen[:before]
        return self._closed(position)

    def _closed(self, position: int) -> int:
        self._arguments("}")
        return self._done(position)

    def _key_part(self, text: str, position: int) -> int:
        before = self._seen
        return self._until_bracket(text, position, self._keyed, partial(self._no_key, before))

    def _no_key(self, before: str, position: int) -> int:
        self._returned = self.PARAMETER + before
        return self._closed(position)

    def _keyed(self, key: str) -> bool:
        self._key = key
        self._arguments((", " if self._count else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._count += 1
        self._text_only = is_text(self._schema, key)
        self._buffer = []
        self._arguments('"' if self._text_only else "")
        self._step = self._value_begins
        return True

    def _value_begins(self, text: str, position: int) -> int:
        self._step = self._in_value
        return position + 1 if text[position] == "\n" else position

    def _in_value(self, text: str, position: int) -> int:
        pending = self._seen + text[position:]
        start, end = markers(frozenset(("\n" + self.CLOSE, self.CLOSE))).find(pending)
        self._part_of_value(pending[:start])
        if start == end:
            self._seen = pending[start:]
            return len(text)
        self._seen = ""
        if self._text_only:
            self._arguments('"')
        else:
            self._arguments(as_json("".join(self._buffer), self._schema, self._key))
        self._step = self._between
        return len(text) - len(pending) + end

    def _part_of_value(self, text: str) -> None:
        if self._text_only:
            self._arguments(escaped(text))
        else:
            self._buffer.append(text)

    def _until_bracket(
        self, text: str, position: int, then: Callable[[str], bool], otherwise: Callable[[int], int]
    ) -> int:
        before = len(self._seen)
        self._seen += text[position:]
        cut = self._seen.find(">", 0, MAX_HEADER)
        if cut < 0:
            return otherwise(position) if len(self._seen) >= MAX_HEADER else len(text)
        word, self._seen = self._seen[:cut], ""
        return position + cut + 1 - before if then(word.strip()) else otherwise(position)

    def _end_of_text(self) -> None:
        if not self._started:
            self._fail(0)
        elif self._step == self._in_value:
            self._part_of_value(self._seen)
            self._arguments("".join(self._buffer))


READERS: Mapping[CallShape, type[Reader]] = {
    CallShape.OBJECT: ObjectReader,
    CallShape.HEADER: HeaderReader,
    CallShape.XML: XmlReader,
}


def _skip_space(text: str, position: int) -> int:
    found = _SPACES.match(text, position)
    return position if found is None else found.end()


def _decoded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
