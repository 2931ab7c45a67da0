"""Writes docs/metrics.md and the Grafana dashboard from the table of metrics:
`python -m moesaic.observe.metrics_docs docs/metrics.md deploy/grafana/moesaic.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moesaic.observe.grafana import dashboard
from moesaic.observe.metric_types import Metric, MetricSource, SglangName
from moesaic.observe.metrics import METRICS

HEAD = """\
# Metrics

`make docs` writes this page from `moesaic/observe/metrics.py`; a test compares the two.

`GET /metrics` answers in Prometheus' text format. It is always on and needs no key;
`--enable-metrics` is accepted for compatibility and changes nothing. Requests and HTTP are counted
in the server's own process. A scrape queries schedulers and ranks, at most once a second unless
requests have ended since: what a request has added is there once it has ended. If they do not
answer within 2 s, it returns their last values, and `moesaic_stats_age_seconds` shows their age.

    moesaic serve tiny:qwen3_moe &
    curl -s localhost:30000/metrics | grep time_to_first_token

[deploy/prometheus.yml](../deploy/prometheus.yml) is an example of a scrape configuration,
[deploy/grafana/moesaic.json](../deploy/grafana/moesaic.json) a dashboard to import into Grafana
(Dashboards, New, Import). [The server's own page](dashboard.md) needs neither.

A `group` is a scheduler with its own requests (one per data-parallel group and per copy of the
model); a `rank` is a process.

`--metric-names sglang` adds [SGLang's names](#sglangs-names), so that its dashboards work.

The server writes the text format itself. `prometheus-client` would keep the values in a global
registry, and ours are a snapshot of other processes; the tests parse the output with it.
"""


SGLANG = """
## SGLang's names

    moesaic serve tiny:qwen3_moe --metric-names sglang &
    curl -s localhost:30000/metrics | grep sglang:

A name has the values of our metric in its row, summed over labels that SGLang does not have. All
have the labels `model_name` and `engine_type` (`unified`); those of schedulers also have `dp_rank`,
the number of the group, and `tp_rank`, `pp_rank` and `moe_ep_rank` of the rank that leads it. There
is no `is_streaming`.

- Histograms keep [our buckets](#buckets), which are not SGLang's: quantiles work with any.
- `sglang:cache_hit_rate` is over the time since the start; SGLang's is over the last prompts.
- `sglang:num_queue_reqs` has a series for every scheduler, and one without `dp_rank` for the
  server's own queue: sum them.

| name | kind | ours |
|---|---|---|
"""


def markdown() -> str:
    parts = [HEAD]
    for source in MetricSource:
        parts.append(f"\n## {source.value}\n\n| name | kind | labels | meaning |\n")
        parts.append("|---|---|---|---|\n")
        parts += [_row(metric) for metric in METRICS if metric.series.source is source]
    return "".join(parts) + _buckets() + _sglang_names()


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.series.labels)
    return f"| `{metric.full_name}` | {metric.kind.value} | {labels} | {metric.help} |\n"


def _buckets() -> str:
    lines = ["\n## Buckets\n\nUpper bounds in seconds; the last bucket has no bound.\n\n"]
    for metric in METRICS:
        if metric.series.buckets:
            bounds = ", ".join(f"{bound:g}" for bound in metric.series.buckets)
            lines.append(f"- `{metric.full_name}`: {bounds}\n")
    return "".join(lines)


def _sglang_names() -> str:
    by_name: dict[str, list[tuple[SglangName, Metric]]] = {}
    for metric in METRICS:
        for name in metric.sglang:
            by_name.setdefault(name.full_name, []).append((name, metric))
    rows = []
    for full_name, found in sorted(by_name.items()):
        kind, parts = found[0][1].kind.value, ", ".join(_part(*part) for part in found)
        rows.append(f"| `{full_name}` | {kind} | {parts} |\n")
    return SGLANG + "".join(rows)


def _part(name: SglangName, metric: Metric) -> str:
    """The samples of ours that a name has, and the labels that it gives them."""
    only = f" with `{name.only}`" if name.only else ""
    labels = "".join(f' as `{label}="{value}"`' for label, value in name.labels.items())
    return f"`{metric.full_name}`{only}{labels}"


def grafana_json() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
    Path(sys.argv[2]).write_text(grafana_json(), encoding="utf-8")
