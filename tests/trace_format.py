"""A strict reader of the trace event format, as far as our traces use it.

Written from the format's public description: complete events ("X") with ts and dur in microseconds,
metadata events ("M"), one lane for each pid and tid, in which spans nest.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}
# A time is a double of microseconds: nanoseconds are exact in it, sums are not.
ROUNDING = 0.0005


@dataclass(frozen=True)
class Event:
    name: str
    pid: int
    tid: int
    begin: float
    end: float
    args: dict[str, int]


@dataclass(frozen=True)
class TraceFile:
    processes: dict[int, str]
    events: list[Event]
    facts: dict[str, Any]

    def of(self, pid: int, name: str) -> list[Event]:
        return [event for event in self.events if event.pid == pid and event.name == name]


def read(path: Path) -> TraceFile:
    """AssertionError for whatever does not follow the format."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        data = json.load(file, parse_constant=_refuse)
    assert data.keys() == {"displayTimeUnit", "otherData", "traceEvents"}
    assert data["displayTimeUnit"] in ("ms", "ns")
    processes: dict[int, str] = {}
    lanes: set[tuple[int, int]] = set()
    events = []
    for item in data["traceEvents"]:
        assert type(item["pid"]) is int and type(item["tid"]) is int, item
        if item["ph"] == "M":
            assert item.keys() == {"ph", "name", "pid", "tid", "args"}, item
            assert item["args"].keys() == {METADATA[item["name"]]}, item
            if item["name"] == "process_name":
                assert item["pid"] not in processes, "a process has one name"
                processes[item["pid"]] = item["args"]["name"]
            if item["name"] == "thread_name":
                assert (item["pid"], item["tid"]) not in lanes, "a thread has one name"
                lanes.add((item["pid"], item["tid"]))
            continue
        events.append(_event(item))
    for event in events:
        assert event.pid in processes and (event.pid, event.tid) in lanes, event
    _check_nesting(events)
    return TraceFile(processes, events, data["otherData"])


def _event(item: dict[str, Any]) -> Event:
    assert item.keys() == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}, item
    assert item["ph"] == "X" and item["name"] and item["cat"], item
    assert isinstance(item["ts"], float | int) and item["ts"] >= 0, item
    assert isinstance(item["dur"], float | int) and item["dur"] >= 0, item
    assert all(type(value) is int for value in item["args"].values()), item
    end = item["ts"] + item["dur"]
    return Event(item["name"], item["pid"], item["tid"], item["ts"], end, item["args"])


def _check_nesting(events: list[Event]) -> None:
    """In a lane, a span lies within another or beside it; the file has them in order."""
    lanes: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        lanes[event.pid, event.tid].append(event)
    for lane in lanes.values():
        open_spans: list[Event] = []
        last = 0.0
        for event in lane:
            assert event.begin >= last, f"not in order: {event}"
            last = event.begin
            while open_spans and open_spans[-1].end <= event.begin + ROUNDING:
                open_spans.pop()
            if open_spans:
                assert event.end <= open_spans[-1].end + ROUNDING, (open_spans[-1], event)
            open_spans.append(event)


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
