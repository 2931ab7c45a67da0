"""The Grafana dashboard, generated from the table of metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from moesaic.observe.metrics import METRICS, Metric, MetricKind

QUANTILES: Final = (0.5, 0.95, 0.99)
WIDTH: Final = 24
HEIGHT: Final = 8
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
# The dashboard's variable that selects one server or all.
SELECTOR: Final = 'instance=~"$instance"'


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    """Grafana's name of the unit."""
    width: int = 8
    """Columns, of 24."""
    kind: str = "timeseries"
    """Grafana's type of the panel."""
    stacked: bool = False


ROWS: Final = {
    "Requests": (
        Panel("Throughput", "short"),
        Panel("Queue", "short"),
        Panel("Requests ended", "reqps", stacked=True),
        Panel("Time to first token", "s", 6),
        Panel("Inter-token latency", "s", 6),
        Panel("End-to-end latency", "s", 6),
        Panel("Queue time", "s", 6),
    ),
    "Steps": (
        Panel("KV cache", "percentunit"),
        Panel("Batch", "short"),
        Panel("Computed tokens", "short"),
        Panel("Steps", "ops", 12),
        Panel("Time in steps", "percentunit", 12),
    ),
    "Ranks": (
        Panel("Ranks: compute and wait", "percentunit", 12),
        Panel("Step time by rank", "s", 6),
        Panel("Busy by rank", "percentunit", 6),
        Panel("State of ranks", "short", 12, kind="table"),
        Panel("Time in state", "s", 6),
        Panel("Experts' share of computing", "percentunit", 6),
    ),
    "Experts": (
        Panel("All-to-all bytes", "Bps"),
        Panel("All-to-all rows", "short"),
        Panel("All-to-all time", "percentunit"),
        Panel("Balancedness, now", "percentunit", 12),
        Panel("Balancedness, since the start", "percentunit", 12, kind="bargauge"),
    ),
    "Server": (
        Panel("Errors", "ops"),
        Panel("HTTP responses", "reqps"),
        Panel("Event loop lag", "s"),
        Panel("Server", "short", 12, kind="table"),
        Panel("Startup", "s", 6, kind="stat"),
        Panel("Age of values", "s", 6, kind="stat"),
    ),
}
INSTANT_KINDS: Final = ("stat", "bargauge", "table")
DATA_SOURCE_VARIABLE: Final = {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": "prometheus",
}
INSTANCE_VARIABLE: Final = {
    "name": "instance",
    "label": "Server",
    "type": "query",
    "datasource": SOURCE,
    "query": {"query": "label_values(moesaic_info, instance)", "refId": "instance"},
    "refresh": 2,
    "multi": True,
    "includeAll": True,
    "current": {"text": "All", "value": "$__all"},
}


def dashboard() -> dict[str, Any]:
    return {
        "uid": "moesaic",
        "title": "Moesaic",
        "description": "Written by `make docs` from the table of metrics.",
        "tags": ["moesaic"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "time": {"from": "now-15m", "to": "now"},
        "refresh": "5s",
        "annotations": {"list": []},
        "templating": {"list": [DATA_SOURCE_VARIABLE, INSTANCE_VARIABLE]},
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for title, panels in ROWS.items():
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}
        number, y, x = number + 1, y + 1, 0
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            yield _panel(number, panel, {"x": x, "y": y, "w": panel.width, "h": HEIGHT})
            number, x = number + 1, x + panel.width
        y += HEIGHT


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    metrics = [metric for metric in METRICS if metric.panel == panel.title]
    targets = [query for metric in metrics for query in queries(metric, panel)]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none"}
        defaults["custom"] = {"fillOpacity": 12, "showPoints": "never", "stacking": stacking}
    elif panel.kind == "bargauge":
        defaults["max"] = 1
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": "\n\n".join(f"`{metric.full_name}`: {metric.help}" for metric in metrics),
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": expr,
                "legendFormat": legend,
                "instant": panel.kind in INSTANT_KINDS,
                "format": "table" if panel.kind == "table" else "time_series",
            }
            for index, (expr, legend) in enumerate(targets)
        ],
    }


def queries(metric: Metric, panel: Panel) -> Iterator[tuple[str, str]]:
    name = metric.full_name
    short = metric.name.removesuffix("_total").removesuffix("_seconds").replace("_", " ")
    by = metric.series.by
    legend = " ".join(f"{{{{{label}}}}}" for label in by) or short
    if by and sum(other.panel == panel.title for other in METRICS) > 1:
        legend = f"{short} {legend}"
    aggregated = f" by ({', '.join(by)})" if by else ""
    if metric.kind is MetricKind.HISTOGRAM:
        for quantile in QUANTILES:
            rate = f"sum by (le) (rate({name}_bucket{{{SELECTOR}}}[$__rate_interval]))"
            yield f"histogram_quantile({quantile}, {rate})", f"P{quantile * 100:g}"
    elif metric.expr:
        yield _selected(metric.expr.format(name=name)), legend
    elif metric.kind is MetricKind.COUNTER:
        yield f"sum{aggregated} (rate({name}{{{SELECTOR}}}[$__rate_interval]))", legend
    else:
        yield f"max{aggregated} ({name}{{{SELECTOR}}})", legend


def _selected(expr: str) -> str:
    """Restricts every metric in the expression to the selected servers."""
    for metric in METRICS:
        expr = expr.replace(f"{metric.full_name}[", f"{metric.full_name}{{{SELECTOR}}}[")
        expr = expr.replace(f"{metric.full_name})", f"{metric.full_name}{{{SELECTOR}}})")
    return expr
