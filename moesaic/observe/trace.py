"""Writes spans for ui.perfetto.dev and chrome://tracing: gzipped JSON in the trace event format."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from moesaic.observe.spans import Span, SpanKind

MICROSECOND: Final = 1000
EVENTS_PER_WRITE: Final = 1000
# Fast rather than small: a trace is written while ranks compute.
COMPRESSION: Final = 1


@dataclass(frozen=True)
class Track:
    """The spans of one process."""

    number: int
    name: str
    spans: Sequence[Span]
    ahead: int = 0
    """Nanoseconds that its clock is ahead of the writer's."""


def write_trace(path: Path, tracks: Sequence[Track], facts: Mapping[str, Any]) -> None:
    """Times are relative to the first span. The file gets its name when it is complete."""
    start = min((span.begin - track.ahead for track in tracks for span in track.spans), default=0)
    partial = path.with_name(f".{path.name}.partial")
    encode = msgspec.json.encode
    try:
        # Readable by the user only; O_EXCL does not follow another user's link.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as raw, gzip.GzipFile("", "wb", COMPRESSION, raw) as file:
            head = encode({"displayTimeUnit": "ms", "otherData": facts})
            file.write(head[:-1] + b',"traceEvents":[')
            events, before = _events(tracks, start), b"\n"
            while batch := list(islice(events, EVENTS_PER_WRITE)):
                file.write(before + encode(batch)[1:-1])
                before = b",\n"
            file.write(b"\n]}\n")
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _events(tracks: Sequence[Track], start: int) -> Iterator[dict[str, Any]]:
    for track in tracks:
        yield _metadata("process_name", track.number, 0, name=track.name)
        yield _metadata("process_sort_index", track.number, 0, sort_index=track.number)
        lanes = {span.thread: 0 for span in track.spans}
        for lane, thread in enumerate(lanes, 1):
            lanes[thread] = lane
            name = f"thread {lane}" if lane > 1 else "main"
            yield _metadata("thread_name", track.number, lane, name=name)
        # An enclosing span comes before its inner ones.
        for span in sorted(track.spans, key=lambda span: (span.begin, -span.end)):
            yield _event(track, lanes[span.thread], span, start)


def _metadata(what: str, process: int, thread: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _event(track: Track, lane: int, span: Span, start: int) -> dict[str, Any]:
    args = {"step": span.step, "tokens": span.tokens}
    if span.layer >= 0:
        args["layer"] = span.layer
    if span.nbytes:
        args["bytes"] = span.nbytes
    kind = SpanKind(span.kind)
    return {
        "ph": "X",
        "name": kind.name.lower(),
        "cat": "layer" if span.layer >= 0 else "step",
        "pid": track.number,
        "tid": lane,
        "ts": (span.begin - track.ahead - start) / MICROSECOND,
        "dur": (span.end - span.begin) / MICROSECOND,
        "args": args,
    }
