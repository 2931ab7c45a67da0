"""Metrics in Prometheus' text exposition format 0.0.4.

prometheus-client is not used: it keeps values in a global registry, and ours are a snapshot of
other processes. The tests parse this output with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain
from typing import Final

from moesaic.observe.metric_types import GROUP, Metric, SglangName, Snapshot
from moesaic.observe.metrics import METRICS
from moesaic.observe.requests import Distribution

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# SGLang's word for an engine that serves prompts and decodes.
ENGINE_TYPE: Final = "unified"

LabelPairs = list[tuple[str, str]]


def exposition(
    snapshot: Snapshot, with_sglang_names: bool = False, metrics: Iterable[Metric] = METRICS
) -> str:
    lines = [line for metric in metrics for line in _lines(metric, snapshot)]
    if with_sglang_names:
        lines += _sglang_lines(snapshot, metrics)
    return "".join(lines)


def _lines(metric: Metric, snapshot: Snapshot) -> Iterator[str]:
    yield from _head(metric.full_name, metric)
    for values, value in metric.series.read(snapshot):
        labels = list(zip(metric.series.labels, values, strict=True))
        yield from _sample(metric.full_name, labels, value)


def _sglang_lines(snapshot: Snapshot, metrics: Iterable[Metric]) -> Iterator[str]:
    """The metrics by SGLang's names; the lines of a name must follow each other."""
    by_name: dict[str, list[str]] = {}
    for metric in metrics:
        for name in metric.sglang:
            lines = by_name.setdefault(name.full_name, list(_head(name.full_name, metric)))
            for labels, value in sglang_samples(metric, name, snapshot):
                lines += _sample(name.full_name, labels, value)
    return chain.from_iterable(by_name.values())


def sglang_samples(
    metric: Metric, name: SglangName, snapshot: Snapshot
) -> Iterator[tuple[LabelPairs, float | Distribution]]:
    """One sample for each group, the sum over our other labels; a histogram has no labels."""
    found: dict[str, list[float | Distribution]] = {}
    is_grouped = metric.series.labels[:1] == (GROUP,)
    for values, value in metric.series.read(snapshot):
        if name.only in ("", *values):
            found.setdefault(values[0] if is_grouped else "", []).append(value)
    server = snapshot.server
    for group, parts in found.items():
        ours = {"model_name": server.model_name, "engine_type": ENGINE_TYPE}
        labels = {**ours, **server.leaders.get(group, {}), **name.labels}
        numbers = [part for part in parts if not isinstance(part, Distribution)]
        yield list(labels.items()), sum(numbers) if numbers else parts[0]


def _head(name: str, metric: Metric) -> Iterator[str]:
    yield f"# HELP {name} {_escaped(metric.help)}\n"
    yield f"# TYPE {name} {metric.kind.value}\n"


def _sample(name: str, labels: LabelPairs, value: float | Distribution) -> Iterator[str]:
    if isinstance(value, Distribution):
        yield from _histogram(name, labels, value)
    else:
        yield _line(name, labels, value)


def _histogram(name: str, labels: LabelPairs, value: Distribution) -> Iterator[str]:
    totals = list(accumulate(value.counts))
    bounds = (*map(_number, value.bounds), "+Inf")
    for bound, total in zip(bounds, totals, strict=True):
        yield _line(f"{name}_bucket", [*labels, ("le", bound)], total)
    yield _line(f"{name}_sum", labels, value.total)
    yield _line(f"{name}_count", labels, totals[-1])


def _line(name: str, labels: LabelPairs, value: float) -> str:
    inner = ",".join(f'{label}="{_escaped(text, quote=True)}"' for label, text in labels)
    return f"{name}{{{inner}}} {_number(value)}\n" if inner else f"{name} {_number(value)}\n"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


def _escaped(text: str, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
