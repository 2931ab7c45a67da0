"""/metrics against what the engine itself says, read by Prometheus' own parser; and what is made of
the table: docs and dashboard."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moesaic.core.request import FinishReason, Request
from moesaic.core.sampling import SamplingParams
from moesaic.core.stats import EngineStats, GroupStats, RankStats, TrafficStats
from moesaic.engine.engine import Engine
from moesaic.observe.expert_load import expert_loads
from moesaic.observe.exposition import exposition
from moesaic.observe.grafana import ROWS
from moesaic.observe.metrics import METRICS, Metric, MetricKind, ServerStats, Snapshot
from moesaic.observe.metrics_docs import grafana_json, markdown
from moesaic.observe.requests import Distribution, Histogram, RequestWatch
from moesaic.server import live_stats
from tests.server.serving import served, wait_until

ROOT = Path(__file__).parents[2]
Values = dict[str, dict[tuple[str, ...], float]]


@contextmanager
def engine_with(**flags: Any) -> Iterator[tuple[Engine, httpx.Client]]:
    with (
        Engine(model_path="tiny:qwen3_moe", log_level="warning", **flags) as engine,
        served(engine) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield engine, client


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Engine, httpx.Client]]:
    with engine_with(num_threads=1, max_running_requests=2, max_queued_requests=1) as found:
        yield found


def parsed(text: str) -> Values:
    """By the names of samples, by the values of their labels in the table's order."""
    found: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def scrape(client: httpx.Client) -> Values:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parsed(response.text)


def fresh(client: httpx.Client, engine: Engine) -> Values:
    """Once everything that the engine has generated is in what ranks have told."""
    wanted = engine.request_stats().generated_tokens

    def up_to_date() -> bool:
        tokens = scrape(client).get("moesaic_computed_tokens_total", {})
        return sum(n for (_, phase), n in tokens.items() if phase == "decode") >= wanted

    wait_until(up_to_date)
    return scrape(client)


def test_all_of_the_table_and_nothing_else(server: tuple[Engine, httpx.Client]) -> None:
    engine, client = server
    engine.generate("hello", {"max_new_tokens": 4})
    fresh(client, engine)
    families = list(text_string_to_metric_families(client.get("/metrics").text))
    # The parser takes _total off the names of counters.
    names = {metric.full_name.removesuffix("_total"): metric for metric in METRICS}
    assert [family.name for family in families] == list(names)
    for family in families:
        metric = names[family.name]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        assert family.samples, f"{family.name} has no values"
        labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert labels == {frozenset(metric.series.labels)}


def test_values_are_those_of_the_engine(server: tuple[Engine, httpx.Client]) -> None:
    engine, client = server
    before = fresh(client, engine)
    params = {"max_new_tokens": 12, "ignore_eos": True}
    prompt = list(range(40))
    engine.generate(input_ids=[prompt, [7] * 3], sampling_params=params)
    engine.generate(input_ids=prompt, sampling_params=params)
    after = fresh(client, engine)

    def grown(name: str, *labels: str) -> float:
        name = f"moesaic_{name}"
        return after[name][labels] - before.get(name, {}).get(labels, 0)

    assert grown("requests_total", "length") == 3
    assert grown("requests_total", "error") == 0
    assert grown("generation_tokens_total") == 36
    assert grown("prompt_tokens_total") == 83
    # Two whole pages of 16 of the prompt that came again.
    assert grown("cached_tokens_total") == 32
    assert grown("computed_tokens_total", "0", "decode") == 36
    assert grown("computed_tokens_total", "0", "prefill") == 83 - 32
    assert grown("time_to_first_token_seconds_count") == 3
    assert grown("queue_time_seconds_count") == 3
    assert grown("e2e_request_latency_seconds_count") == 3
    assert grown("inter_token_latency_seconds_count") == 33
    assert grown("e2e_request_latency_seconds_bucket", "+Inf") == 3
    assert grown("e2e_request_latency_seconds_sum") >= grown("time_to_first_token_seconds_sum")
    assert grown("time_to_first_token_seconds_sum") >= grown("queue_time_seconds_sum") > 0
    steps = grown("steps_total", "0", "prefill") + grown("steps_total", "0", "decode")
    assert steps == grown("rank_steps_total", "0")
    # Every token that was computed went to two experts of eight, in both layers.
    computed = 83 - 32 + 36 - 3
    assert grown("expert_tokens_total", "0", "0") == grown("expert_tokens_total", "1", "0")
    assert grown("expert_tokens_total", "0", "0") == 2 * computed
    assert after["moesaic_ep_balancedness"] == {("0",): 1.0, ("1",): 1.0}
    assert after["moesaic_requests_running"] == {("0",): 0}
    info = next(iter(after["moesaic_info"]))
    assert info[2:4] == ("one rank", "none")


def test_http_is_counted_by_route_and_status(server: tuple[Engine, httpx.Client]) -> None:
    engine, client = server
    before = scrape(client)["moesaic_http_requests_total"]
    refused = scrape(client)["moesaic_http_refused_total"][()]
    body = {"text": "x", "sampling_params": {"max_new_tokens": 2}}
    client.post("/generate", json=body)
    client.post("/generate", content=b"{")
    client.get("/no/such/path")
    client.get("/generate")
    go_on = threading.Event()
    engine._thread.submit(lambda core: go_on.wait(30))
    full = body | {"text": ["a", "b", "c"]}
    with ThreadPoolExecutor() as pool:
        filling = pool.submit(client.post, "/generate", json=full)
        wait_until(lambda: len(engine._inflight) == 3)
        assert client.post("/generate", json=body).status_code == 429
        go_on.set()
        assert filling.result().status_code == 200
    with client.stream("POST", "/generate", json=body | {"stream": True}) as response:
        response.read()
    after = scrape(client)
    grown = {
        key: number - before.get(key, 0)
        for key, number in after["moesaic_http_requests_total"].items()
        if key[0] != "/metrics" and number != before.get(key, 0)
    }
    assert grown == {
        ("/generate", "200"): 3,
        ("/generate", "400"): 1,
        ("/generate", "429"): 1,
        ("other", "404"): 1,
        ("other", "405"): 1,
    }
    assert after["moesaic_http_refused_total"][()] - refused == 1


def test_a_scrape_does_not_wait_for_a_busy_engine(
    server: tuple[Engine, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, client = server
    monkeypatch.setattr(live_stats, "POLL_TIMEOUT", 0.05)
    engine.generate("old", {"max_new_tokens": 2})
    known = fresh(client, engine)["moesaic_steps_total"]
    go_on = threading.Event()
    engine._thread.submit(lambda core: go_on.wait(30))
    try:
        wait_until(lambda: scrape(client)["moesaic_stats_age_seconds"][()] > 1.5)
        values = scrape(client)
        assert values["moesaic_steps_total"] == known
        assert values["moesaic_http_requests_total"]["/metrics", "200"] > 0
    finally:
        go_on.set()
    wait_until(lambda: scrape(client)["moesaic_stats_age_seconds"][()] < 1)


def test_readings_are_compared_and_not_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def ask() -> EngineStats:
        """Eight tokens in four steps each time, by two groups together."""
        nonlocal asked
        asked += 1
        groups = [
            GroupStats(group, generated_tokens=4 * asked, prefill_steps=asked, decode_steps=asked)
            for group in (0, 1)
        ]
        return EngineStats(time.time(), groups[: 3 - asked], [])

    async def main() -> list[float]:
        poll = live_stats.EnginePoll(ask)
        found = []
        for period in (1000, 1000, 0):
            monkeypatch.setattr(live_stats, "POLL_SECONDS", period)
            await poll.refresh()
            found.append(poll.batch)
        assert len(poll.stats.groups) == 1
        return found

    assert asyncio.run(main()) == [2.0, 2.0, 2.0]
    assert asked == 2


def test_the_loop_is_watched(server: tuple[Engine, httpx.Client]) -> None:
    _, client = server
    count = scrape(client)["moesaic_event_loop_lag_seconds_count"][()]
    wait_until(lambda: scrape(client)["moesaic_event_loop_lag_seconds_count"][()] > count + 5)


def test_a_loop_that_was_held_up_shows() -> None:
    async def main() -> live_stats.LagMonitor:
        watch = live_stats.LagMonitor()
        task = asyncio.create_task(watch.run())
        await asyncio.sleep(0.05)
        time.sleep(0.3)
        await asyncio.sleep(0.05)
        task.cancel()
        return watch

    watch = asyncio.run(main())
    assert watch.max > 0.2
    late = [bound > 0.2 for bound in (*watch.distribution.bounds, math.inf)]
    assert sum(n for n, is_late in zip(watch.distribution.counts, late, strict=True) if is_late)


@pytest.mark.slow
def test_ranks() -> None:
    flags: dict[str, Any] = dict.fromkeys(("tp_size", "ep_size", "dp_size"), 2)
    flags |= {"enable_dp_attention": True, "moe_a2a_backend": "deepep"}
    with engine_with(**flags) as (engine, client):
        engine.generate(["one", "two", "three"], {"max_new_tokens": 24, "ignore_eos": True})
        values = fresh(client, engine)
        assert set(values["moesaic_requests_running"]) == {("0",), ("1",)}
        assert set(values["moesaic_rank_compute_seconds_total"]) == {("0",), ("1",)}
        assert min(values["moesaic_rank_compute_seconds_total"].values()) > 0
        assert values["moesaic_a2a_bytes_total"]["0", "deepep_low_latency", "dispatch"] > 0
        assert values["moesaic_a2a_seconds_total"]["1", "deepep_normal", "combine"] > 0
        assert values["moesaic_queue_time_seconds_count"][()] == 3
        tokens = values["moesaic_expert_tokens_total"]
        for layer in ("0", "1"):
            loads = [tokens[layer, rank] for rank in ("0", "1")]
            expected = sum(loads) / 2 / max(loads)
            assert values["moesaic_ep_balancedness"][layer,] == pytest.approx(expected)
        data = client.get("/dashboard/data").json()
        assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
        for load in data["experts"]["layers"]:
            assert sum(load["experts"]) == sum(load["ranks"].values())


def histogram(*values: float) -> Distribution:
    found = Histogram((1.0, 2.0, 4.0))
    for value in values:
        found.add(value)
    return found.copy()


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
    info = dict.fromkeys(
        ("version", "model", "mesh", "a2a_backend", "mode", "runner_backend"), ugly
    )
    traffic = {ugly: TrafficStats(dispatch_bytes=3)}
    engine = EngineStats(0.0, [GroupStats(0)], [RankStats(0, ugly, traffic=traffic)])
    server = ServerStats({(ugly, 200): 2}, histogram(), 0.0, {ugly: 1.5}, info)
    values = parsed(exposition(Snapshot(engine, [], 0.0, RequestWatch().stats(0), server)))
    assert values["moesaic_info"] == {(ugly,) * 6: 1}
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
