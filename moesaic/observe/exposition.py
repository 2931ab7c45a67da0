"""Metrics in Prometheus' text exposition format 0.0.4.

prometheus-client is not used: it keeps values in a global registry, and ours are a snapshot of
other processes. The tests parse this output with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final

from moesaic.observe.metrics import METRICS, Metric, Snapshot
from moesaic.observe.requests import Distribution

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def exposition(snapshot: Snapshot, metrics: Iterable[Metric] = METRICS) -> str:
    return "".join(line for metric in metrics for line in _lines(metric, snapshot))


def _lines(metric: Metric, snapshot: Snapshot) -> Iterator[str]:
    name = metric.full_name
    yield f"# HELP {name} {_escaped(metric.help)}\n"
    yield f"# TYPE {name} {metric.kind.value}\n"
    for values, value in metric.series.read(snapshot):
        labels = list(zip(metric.series.labels, values, strict=True))
        if isinstance(value, Distribution):
            yield from _histogram(name, labels, value)
        else:
            yield _line(name, labels, value)


def _histogram(name: str, labels: list[tuple[str, str]], value: Distribution) -> Iterator[str]:
    totals = list(accumulate(value.counts))
    bounds = (*map(_number, value.bounds), "+Inf")
    for bound, total in zip(bounds, totals, strict=True):
        yield _line(f"{name}_bucket", [*labels, ("le", bound)], total)
    yield _line(f"{name}_sum", labels, value.total)
    yield _line(f"{name}_count", labels, totals[-1])


def _line(name: str, labels: list[tuple[str, str]], value: float) -> str:
    inner = ",".join(f'{label}="{_escaped(text, quote=True)}"' for label, text in labels)
    return f"{name}{{{inner}}} {_number(value)}\n" if inner else f"{name} {_number(value)}\n"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


def _escaped(text: str, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
