"""The Grafana dashboard, generated from the table of metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from moesaic.observe.metric_types import Metric, MetricKind
from moesaic.observe.metrics import METRICS

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
    metrics: str
    """Names, separated by spaces."""
    width: int = 8
    """Columns, of 24."""
    kind: str = "timeseries"
    """Grafana's type of the panel."""
    stacked: bool = False


ROWS: Final = {
    "Requests": (
        Panel(
            "Throughput", "short", "prompt_tokens_total cached_tokens_total generation_tokens_total"
        ),
        Panel("Queue", "short", "requests_open requests_running requests_waiting requests_queued"),
        Panel("Requests ended", "reqps", "requests_total", stacked=True),
        Panel("Time to first token", "s", "time_to_first_token_seconds", 6),
        Panel("Inter-token latency", "s", "inter_token_latency_seconds", 6),
        Panel("End-to-end latency", "s", "e2e_request_latency_seconds", 6),
        Panel("Queue time", "s", "queue_time_seconds", 6),
    ),
    "Steps": (
        Panel("KV cache", "percentunit", "cache_hit_ratio kv_cache_usage_ratio"),
        Panel("Tokens in the KV cache", "short", "kv_cache_used_tokens kv_cache_tokens"),
        Panel("Batch", "short", "decode_batch_size"),
        Panel("Computed tokens", "short", "computed_tokens_total", 6),
        Panel("Generated tokens per second", "short", "generation_throughput", 6),
        Panel("Steps", "ops", "steps_total", 6),
        Panel("Time in steps", "percentunit", "forward_seconds_total", 6),
        Panel("Steps by schedule of overlap", "ops", "overlap_steps_total"),
        Panel("Communication hidden by overlap", "percentunit", "overlap_hidden_ratio"),
    ),
    "Speculative decoding": (
        Panel("Tokens of a draft", "short", "spec_accept_length spec_num_drafts", 6),
        Panel("Acceptance", "percentunit", "spec_accept_rate", 6),
        Panel("Drafts verified", "ops", "spec_verified_total", 4),
        Panel("Drafted tokens", "short", "spec_drafted_tokens_total", 4),
        Panel("Accepted tokens", "short", "spec_accepted_tokens_total", 4),
    ),
    "Ranks": (
        Panel(
            "Ranks: compute and wait",
            "percentunit",
            "rank_compute_seconds_total rank_wait_seconds_total",
            12,
        ),
        Panel("Step time by rank", "s", "rank_steps_total", 6),
        Panel("Busy by rank", "percentunit", "rank_step_seconds_total", 6),
        Panel("State of ranks", "short", "rank_state", 12, kind="table"),
        Panel("Time in state", "s", "rank_state_seconds", 6),
        Panel("Experts' share of computing", "percentunit", "rank_runner_seconds_total", 6),
        Panel("Live ranks", "short", "ranks_live", 6),
        Panel(
            "Losses and returns",
            "ops",
            "rank_losses_total rank_returns_total http_losses_total supervisor_losses_total "
            "node_takeovers_total",
        ),
        Panel(
            "Time to adopt losses and returns",
            "percentunit",
            "membership_change_seconds_total service_loss_seconds_total",
            6,
        ),
        Panel("Requests moved", "ops", "requests_moved_total", 6),
        Panel("Experts read again", "Bps", "experts_reread_bytes_total", 6),
    ),
    "Experts": (
        Panel("All-to-all bytes", "Bps", "a2a_bytes_total"),
        Panel("All-to-all rows", "short", "a2a_rows_total"),
        Panel("All-to-all time", "percentunit", "a2a_seconds_total"),
        Panel("Balancedness, now", "percentunit", "expert_tokens_total", 12),
        Panel(
            "Balancedness, since the start", "percentunit", "ep_balancedness", 12, kind="bargauge"
        ),
        Panel("Balancedness of passes", "percentunit", "ep_pass_balancedness", 12),
        Panel("Balancedness of passes, by layer", "percentunit", "ep_layer_pass_balancedness", 12),
        Panel("Rebalances", "ops", "eplb_rebalances_total eplb_aborted_total"),
        Panel("Experts moved", "Bps", "eplb_moved_bytes_total"),
        Panel("Time in which experts move", "percentunit", "eplb_move_seconds_total"),
    ),
    "Server": (
        Panel("Errors", "ops", "preemptions_total failed_steps_total http_refused_total"),
        Panel(
            "Prompts of other instances", "ops", "prompts_arrived_total prompts_recomputed_total"
        ),
        Panel("HTTP responses", "reqps", "http_requests_total"),
        Panel("Event loop lag", "s", "event_loop_lag_seconds event_loop_lag_max_seconds"),
        Panel("Server", "short", "info", 12, kind="table"),
        Panel("Startup", "s", "startup_seconds", 6, kind="stat"),
        Panel("Age of values", "s", "stats_age_seconds", 6, kind="stat"),
    ),
}
# PromQL of metrics for which a panel shows neither the rate, the value nor the quantiles.
EXPRESSIONS: Final = {
    "requests_open": "sum({name})",
    "requests_running": "sum({name})",
    "requests_waiting": "sum({name})",
    "kv_cache_used_tokens": "sum({name})",
    "kv_cache_tokens": "sum({name})",
    "generation_throughput": "sum({name})",
    "rank_steps_total": "rate(moesaic_rank_step_seconds_total) / rate({name})",
    "rank_runner_seconds_total": "rate({name}) / rate(moesaic_rank_compute_seconds_total)",
    "expert_tokens_total": "avg by (layer) (rate({name})) / max by (layer) (rate({name}))",
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
    metrics = [metric for metric in METRICS if metric.name in panel.metrics.split()]
    targets = [query for metric in metrics for query in queries(metric, len(metrics) == 1)]
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
                "expr": _complete(expr),
                "legendFormat": legend,
                "instant": panel.kind in INSTANT_KINDS,
                "format": "table" if panel.kind == "table" else "time_series",
            }
            for index, (expr, legend) in enumerate(targets)
        ],
    }


def queries(metric: Metric, alone: bool) -> Iterator[tuple[str, str]]:
    """The queries and legends of a metric that is alone in its panel or not."""
    name = metric.full_name
    short = metric.name.removesuffix("_total").removesuffix("_seconds").replace("_", " ")
    by = [label for label in metric.series.labels if label not in metric.series.hidden]
    legend = " ".join(f"{{{{{label}}}}}" for label in by) or short
    if by and not alone:
        legend = f"{short} {legend}"
    aggregated = f" by ({', '.join(by)})" if by else ""
    if metric.kind is MetricKind.HISTOGRAM:
        for quantile in QUANTILES:
            rate = f"sum by (le) (rate({name}_bucket))"
            yield f"histogram_quantile({quantile}, {rate})", f"P{quantile * 100:g}"
    elif metric.name in EXPRESSIONS:
        yield EXPRESSIONS[metric.name].format(name=name), legend
    elif metric.kind is MetricKind.COUNTER:
        yield f"sum{aggregated} (rate({name}))", legend
    else:
        yield f"max{aggregated} ({name})", legend


def _complete(expr: str) -> str:
    """Restricts every metric to the selected servers, and every rate to Grafana's interval."""
    selected = re.sub(r"moesaic_\w+", rf"\g<0>{{{SELECTOR}}}", expr)
    return re.sub(r"(?<=rate\()[^)]+", r"\g<0>[$__rate_interval]", selected)
