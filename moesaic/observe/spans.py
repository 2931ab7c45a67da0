"""Spans of time in a ring buffer, on the clock that all processes of a machine share. While
recording is off, an instrumented place costs one test of `on`."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

CAPACITY: Final = 200_000
# Kind, layer, step, tokens, begin, end, bytes, thread.
RECORD: Final = struct.Struct("<hhiiqqqq")


class SpanKind(IntEnum):
    """The activity of a span; a trace shows its name in lower case."""

    STEP = 0
    PLAN = 1
    """Planning, and agreement on the plan with the other ranks."""
    ATTENTION = 2
    ROUTER = 3
    DISPATCH = 4
    EXPERTS = 5
    COMBINE = 6
    LOGITS = 7
    SAMPLE = 8
    WAIT = 9
    TOKENISE = 10
    SUBMIT = 11
    DETOKENISE = 12
    MOVE = 13
    """Experts move between ranks."""


class Span(NamedTuple):
    """Times are in nanoseconds; `layer` is -1 outside the layers."""

    kind: int
    layer: int
    step: int
    tokens: int
    begin: int
    end: int
    nbytes: int
    thread: int


class Spans:
    """The last `capacity` spans of a recording. Any thread may add spans."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.on = False
        self.step = 0
        self.first = 0
        """The first step that may be recorded completely."""
        self._capacity = capacity
        self._data = bytearray()
        self._written = 0
        self._left: int | None = None
        self._from = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        self._data = bytearray(RECORD.size * self._capacity)
        self._written, self._left = 0, None
        self.first = self.step + 1
        self.on = True

    def end_after(self, steps: int, first: int) -> None:
        """Ends the recording after `steps` steps from `first` on, some of which may have ended."""
        with self._lock:
            kept = unpack(self.read(0, self.count))
            over = sum(span.kind == SpanKind.STEP and span.step >= first for span in kept)
            self._left, self._from = steps - over, first
            self.on = self.on and over < steps

    def stop(self) -> None:
        self.on = False

    def free(self) -> None:
        self.on = False
        self._data, self._written = bytearray(), 0

    def begin_step(self, number: int) -> None:
        self.step = number

    def clock(self) -> int:
        """The current time, as the begin of a span; 0 while recording is off."""
        return time.monotonic_ns() if self.on else 0

    def add(
        self,
        kind: SpanKind,
        begin: int,
        layer: int = -1,
        tokens: int = 0,
        nbytes: int = 0,
        end: int = 0,
    ) -> None:
        """Records a span from `begin` to `end`, by default now; nothing if `begin` is 0."""
        if not begin or not self.on:
            return
        end, thread = end or time.monotonic_ns(), threading.get_ident()
        with self._lock:
            place = self._written % self._capacity * RECORD.size
            self._written += 1
            RECORD.pack_into(
                self._data, place, kind, layer, self.step, tokens, begin, end, nbytes, thread
            )
            if kind == SpanKind.STEP and self._left is not None and self.step >= self._from:
                self._left -= 1
                self.on = self._left > 0

    @property
    def count(self) -> int:
        """Spans in the buffer."""
        return min(self._written, len(self._data) // RECORD.size)

    @property
    def lost(self) -> int:
        """Spans that were overwritten."""
        return self._written - self.count

    @property
    def oldest_step(self) -> int:
        """The step of the oldest span in the buffer, which must not be empty."""
        return next(unpack(self.read(0, 1))).step

    def read(self, first: int, number: int) -> bytes:
        """Packed spans of the buffer, the oldest first."""
        size, stop = RECORD.size, min(self.count, first + number)
        oldest = self._written % self._capacity if self.lost else 0
        return b"".join(
            self._data[place * size : (place + 1) * size]
            for place in ((oldest + i) % self._capacity for i in range(first, stop))
        )


def unpack(data: bytes) -> Iterator[Span]:
    return map(Span._make, RECORD.iter_unpack(data))
