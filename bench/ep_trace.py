"""What the engines of bench/ep.py recorded: steps of all ranks together, and what hosts did."""

from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moesaic.observe.spans import Span, SpanKind


@dataclass(frozen=True)
class Recorded:
    """A track of a trace: `spans` of one rank."""

    rank: int
    spans: list[Span]


def read_trace(path: Path) -> list[Recorded]:
    """The ranks' tracks; the first one is of the process that asks them."""
    kinds = {kind.name.lower(): kind for kind in SpanKind}
    found: dict[int, list[Span]] = defaultdict(list)
    for event in msgspec.json.decode(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if event["ph"] != "X" or event["pid"] == 0:
            continue
        args, begin = event["args"], round(event["ts"] * 1e3)
        end = begin + round(event["dur"] * 1e3)
        place = (args.get("layer", -1), args["step"], args["tokens"])
        span = Span(kinds[event["name"]], *place, begin, end, 0, event["tid"])
        found[event["pid"] - 1].append(span)
    return [Recorded(rank, spans) for rank, spans in sorted(found.items())]


def joined(ranks: Sequence[Recorded]) -> list[Span]:
    """Steps of all ranks together: the tokens of all, until the last has ended."""
    steps: dict[int, list[Span]] = defaultdict(list)
    for span in (span for rank in ranks for span in rank.spans):
        if span.kind == SpanKind.STEP:
            steps[span.step].append(span)
    return [
        first._replace(
            tokens=sum(one.tokens for one in same),
            begin=min(one.begin for one in same),
            end=max(one.end for one in same),
        )
        for same in steps.values()
        for first in same[:1]
    ]


def host_ms(ranks: Sequence[Recorded], batch: int) -> dict[str, float]:
    """Of a rank in a step in which all requests decode."""
    decoding = {span.step for span in joined(ranks) if span.tokens == batch}
    total: dict[str, float] = defaultdict(float)
    for span in (span for rank in ranks for span in rank.spans):
        if span.step in decoding and span.kind != SpanKind.STEP:
            total[SpanKind(span.kind).name.lower()] += (span.end - span.begin) / 1e6
    return {name: ms / len(decoding) / len(ranks) for name, ms in total.items()}
