"""What is computed of measurements, and what is made of the table of metrics: names, docs and
dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moesaic.core.request import FinishReason, Request
from moesaic.core.sampling import SamplingParams
from moesaic.core.stats import EngineStats, GroupStats, RankStats, TrafficStats
from moesaic.observe.expert_load import expert_loads
from moesaic.observe.exposition import exposition
from moesaic.observe.grafana import ROWS
from moesaic.observe.metric_types import Metric, MetricKind, ServerStats, Snapshot
from moesaic.observe.metrics import INFO_LABELS, METRICS
from moesaic.observe.metrics_docs import grafana_json, markdown
from moesaic.observe.requests import RequestWatch
from tests.server.metric_values import histogram, parsed

ROOT = Path(__file__).parents[2]


def test_quantiles() -> None:
    values = histogram(1.0, 1.5, 2.0, 3.0)
    assert values.counts == (1, 2, 1, 0)
    assert (values.count, values.total) == (4, 7.5)
    # In the bucket from 1 to 2 the second of two values lies at its end.
    assert values.quantile(0.75) == 2.0
    assert values.quantile(0.5) == 1.5
    assert histogram(9.0).quantile(0.5) == 4.0
    assert histogram().quantile(0.5) is None
    assert values.since(histogram(1.5)).counts == (1, 1, 1, 0)


def test_balancedness_of_ranks() -> None:
    def rank(number: int, experts: list[int], tokens: list[int]) -> RankStats:
        return RankStats(
            number, f"rank {number}", layers=[3], experts=[experts], expert_tokens=[tokens]
        )

    # Expert 1 is there twice.
    stats = EngineStats(0.0, [], [rank(0, [0, 1], [5, 7]), rank(1, [1, 2], [1, 3])], 3)
    (load,) = expert_loads(stats)
    assert (load.layer, load.experts, load.ranks) == (3, [5, 8, 3], {0: 12, 1: 4})
    assert load.balancedness == pytest.approx((12 + 4) / 2 / 12)
    stats = EngineStats(0.0, [], [rank(0, [0, 1], [4, 6]), rank(1, [0, 1], [4, 6])], 2)
    assert expert_loads(stats, ranks_per_expert=2)[0].experts == [4, 6]
    idle = EngineStats(0.0, [], [rank(0, [0], [0])], 1)
    assert expert_loads(idle)[0].balancedness is None


def test_a_request_is_measured_where_it_ends() -> None:
    watch = RequestWatch()

    def request(finish: FinishReason, seconds: float) -> Request:
        made = Request("r", [1, 2, 3], SamplingParams(), 0, 8, 0, created=100.0)
        made.finish_reason, made.finished = finish, 100.0 + seconds
        return made

    done = request(FinishReason("stop"), 2.0)
    done.queue_seconds, done.cached_tokens = 0.25, 2
    watch.first_token(done, 100.5)
    assert watch.stats(1).answering == 1
    done.first_token = 100.5
    for gap in (0.004, 0.2, 9.0):
        watch.next_token(gap)
    watch.end(done)
    watch.end(request(FinishReason("abort", message="m"), 3.0))
    watch.end(request(FinishReason("abort", message="m", failed=True), 3.0))
    stats = watch.stats(0)
    assert stats.ended == {"stop": 1, "length": 0, "abort": 1, "error": 1}
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (3, 2, 4)
    assert (stats.answering, stats.open) == (0, 0)
    assert (stats.queue.total, stats.time_to_first_token.total) == (0.25, 0.5)
    assert (stats.end_to_end.total, stats.end_to_end.count) == (2.0, 1)
    assert stats.inter_token.total == pytest.approx(9.204)
    assert (stats.inter_token.count, stats.inter_token.counts[-1]) == (3, 1)


def test_labels_are_escaped() -> None:
    ugly = 'a\\b"c\nd{e="f"}'
    info = dict.fromkeys(INFO_LABELS, ugly)
    traffic = {ugly: TrafficStats(dispatch_bytes=3)}
    engine = EngineStats(0.0, [GroupStats(0)], [RankStats(0, ugly, traffic=traffic)])
    server = ServerStats({(ugly, 200): 2}, histogram(), 0.0, {ugly: 1.5}, info)
    values = parsed(exposition(Snapshot(engine, [], 0.0, RequestWatch().stats(0), server)))
    assert values["moesaic_info"] == {(ugly,) * len(INFO_LABELS): 1}
    assert values["moesaic_http_requests_total"] == {(ugly, "200"): 2}
    assert values["moesaic_a2a_bytes_total"]["0", ugly, "dispatch"] == 3
    assert values["moesaic_startup_seconds"] == {(ugly,): 1.5}


def test_names_are_as_prometheus_wants_them() -> None:
    names = [metric.full_name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"moesaic_[a-z0-9_]+", metric.full_name)
        assert metric.full_name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        series = metric.series
        assert bool(series.buckets) == (metric.kind is MetricKind.HISTOGRAM)
        assert list(series.buckets) == sorted(set(series.buckets))
        assert set(series.hidden) <= set(series.labels)
        assert metric.help.endswith(".") and series.source


def test_docs_and_dashboard_are_up_to_date() -> None:
    assert (ROOT / "docs/metrics.md").read_text("utf-8") == markdown(), "run make docs"
    committed = (ROOT / "deploy/grafana/moesaic.json").read_text("utf-8")
    assert committed == grafana_json(), "run make docs"
    for metric in METRICS:
        assert f"| `{metric.full_name}` |" in markdown()


def exported(metric: Metric) -> set[str]:
    ends = ("_bucket", "_sum", "_count") if metric.kind is MetricKind.HISTOGRAM else ("",)
    return {metric.full_name + end for end in ends}


def test_the_dashboard_asks_for_nothing_else() -> None:
    board = json.loads(grafana_json())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    used: set[str] = set()
    for panel in panels:
        assert panel["targets"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            used |= set(re.findall(r"moesaic_\w+", target["expr"]))
            assert target["expr"].count("(") == target["expr"].count(")")
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    known = set().union(*map(exported, METRICS))
    assert used <= known
    assert [metric.name for metric in METRICS if not exported(metric) & used] == []
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    shown = [name for row in ROWS.values() for panel in row for name in panel.metrics.split()]
    assert sorted(shown) == sorted(metric.name for metric in METRICS)
    assert board["templating"]["list"][0]["type"] == "datasource"


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(grafana_json())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
