"""docs/metrics.md and the Grafana dashboard from the table:
`python -m moesaic.observe.metrics_docs docs/metrics.md deploy/grafana/moesaic.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moesaic.observe.grafana import dashboard
from moesaic.observe.metrics import METRICS, Metric

HEAD = """\
# Metrics

Written by `make docs` from `moesaic/observe/metrics.py`; a test compares the two.

`GET /metrics` answers in Prometheus' text format. It is always on and needs no key;
`--enable-metrics` is accepted for compatibility and changes nothing. Requests and HTTP are counted
in the server's own process. Schedulers and ranks are asked when somebody scrapes, at most once a
second; if they do not answer within 2 s, their last values are given, and
`moesaic_stats_age_seconds` tells how old those are.

    moesaic serve tiny:qwen3_moe &
    curl -s localhost:30000/metrics | grep time_to_first_token

[deploy/prometheus.yml](../deploy/prometheus.yml) is an example of a scrape,
[deploy/grafana/moesaic.json](../deploy/grafana/moesaic.json) a dashboard to import into Grafana
(Dashboards, New, Import). For a look without either there is [the server's own page](dashboard.md).

`group` is a scheduler with requests of its own (one for each part of DP attention and each copy of
the model), `rank` a process.
"""


def markdown() -> str:
    parts = [HEAD]
    for source in dict.fromkeys(metric.source for metric in METRICS):
        parts.append(f"\n## Counted by {_who(source)}\n\n| name | kind | labels | meaning |\n")
        parts.append("|---|---|---|---|\n")
        parts += [_row(metric) for metric in METRICS if metric.source == source]
    return "".join(parts) + _buckets()


def _who(source: str) -> str:
    return f"the {source}" if source != "requests" else "whoever waits for requests"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.full_name}` | {metric.kind.value} | {labels} | {metric.help} |\n"


def _buckets() -> str:
    lines = ["\n## Buckets\n\nUpper bounds in seconds; one without a bound follows.\n\n"]
    for metric in METRICS:
        if metric.buckets:
            bounds = ", ".join(f"{bound:g}" for bound in metric.buckets)
            lines.append(f"- `{metric.full_name}`: {bounds}\n")
    return "".join(lines)


def grafana_json() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
    Path(sys.argv[2]).write_text(grafana_json(), encoding="utf-8")
