"""/metrics against what the engine itself says, read by Prometheus' own parser."""

from __future__ import annotations

import asyncio
import base64
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moesaic.comm.mesh import Mesh
from moesaic.core.stats import EngineStats, GroupStats
from moesaic.engine.engine import Engine
from moesaic.observe.exposition import exposition
from moesaic.observe.metric_types import ServerStats, Snapshot
from moesaic.observe.metrics import INFO_LABELS, METRICS
from moesaic.observe.requests import RequestWatch
from moesaic.server import live_stats
from tests.server.metric_values import Values, histogram, parsed
from tests.server.serving import served, wait_until

ROOT = Path(__file__).parents[2]
# What --overlap auto measures; the server of these tests has one rank.
OF_SEVERAL_RANKS = (
    "overlap_hidden_ratio",
    "ranks_live",
    "rank_losses_total",
    "rank_returns_total",
    "http_losses_total",
    "supervisor_losses_total",
    "node_takeovers_total",
    "service_loss_seconds_total",
    "membership_change_seconds_total",
    "requests_moved_total",
    "experts_reread_bytes_total",
)


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
    flags = {"max_running_requests": 2, "max_queued_requests": 1, "metric_names": "sglang"}
    flags["expert_balancedness_report_mode"] = "prometheus"
    flags |= {"speculative_algorithm": "NGRAM", "disable_speculative_adaptive": True}
    with engine_with(num_threads=1, **flags) as found:
        yield found


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
    engine.balancedness.report()
    fresh(client, engine)
    text = client.get("/metrics").text
    families = [f for f in text_string_to_metric_families(text) if not f.name.startswith("sglang:")]
    # The parser takes _total off the names of counters.
    names = {metric.full_name.removesuffix("_total"): metric for metric in METRICS}
    assert [family.name for family in families] == list(names)
    for family in families:
        metric = names[family.name]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        if metric.name in OF_SEVERAL_RANKS:
            assert not family.samples
            continue
        assert family.samples, f"{family.name} has no values"
        labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert labels == {frozenset(metric.series.labels)}


def test_values_are_those_of_the_engine(server: tuple[Engine, httpx.Client]) -> None:
    engine, client = server
    before = fresh(client, engine)
    params = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0}
    prompt = list(range(40))
    engine.generate(input_ids=[prompt, [7] * 3], sampling_params=params)
    found = engine.generate(input_ids=prompt, sampling_params=params)
    after = fresh(client, engine)

    def grown(name: str, *labels: str) -> float:
        name = f"moesaic_{name}"
        return after[name][labels] - before.get(name, {}).get(labels, 0)

    assert grown("requests_total", "length") == 3
    # The second answer is drafted from the first, which is the same.
    meta = found["meta_info"]
    assert grown("spec_verified_total", "0") >= meta["spec_verify_ct"] > 0
    accepted = [grown("spec_accepted_tokens_total", "0", str(n)) for n in range(1, 12)]
    drafted = [grown("spec_drafted_tokens_total", "0", str(n)) for n in range(1, 12)]
    assert sum(accepted) >= meta["spec_accept_token_num"] > 4
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True))
    assert accepted == sorted(accepted, reverse=True)
    assert after["moesaic_spec_num_drafts"]["0",] == 11
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


# SGLang 0.5.23's names, types and labels (srt/observability/metrics_collector.py), and ours.
SERVER_LABELS = {"model_name", "engine_type"}
SCHEDULER_LABELS = SERVER_LABELS | {"tp_rank", "pp_rank", "moe_ep_rank", "dp_rank"}
SGLANG = {
    ("num_running_reqs", "gauge", "scheduler"): "requests_running",
    ("num_used_tokens", "gauge", "scheduler"): "kv_cache_used_tokens",
    ("kv_used_tokens", "gauge", "scheduler"): "kv_cache_used_tokens",
    ("max_total_num_tokens", "gauge", "scheduler"): "kv_cache_tokens",
    ("token_usage", "gauge", "scheduler"): "kv_cache_usage_ratio",
    ("full_token_usage", "gauge", "scheduler"): "kv_cache_usage_ratio",
    ("gen_throughput", "gauge", "scheduler"): "generation_throughput",
    ("num_retracted_requests_total", "counter", "scheduler"): "preemptions_total",
    ("realtime_tokens_total", "counter", "scheduler mode"): "computed_tokens_total",
    ("num_queue_reqs", "gauge", "scheduler"): "requests_waiting requests_queued",
    ("cache_hit_rate", "gauge", ""): "cache_hit_ratio",
    ("prompt_tokens_total", "counter", ""): "prompt_tokens_total",
    ("spec_verify_calls_total", "counter", "scheduler"): "spec_verified_total",
    ("spec_accept_length", "gauge", "scheduler"): "spec_accept_length",
    ("spec_accept_rate", "gauge", "scheduler"): "spec_accept_rate",
    ("generation_tokens_total", "counter", ""): "generation_tokens_total",
    ("cached_tokens_total", "counter", "cache_source"): "cached_tokens_total",
    ("num_requests_total", "counter", ""): "requests_total",
    ("num_aborted_requests_total", "counter", ""): "requests_total",
    ("num_transfer_failed_reqs_total", "counter", "scheduler"): "prompts_recomputed_total",
    ("startup_time_seconds", "gauge", "phase"): "startup_seconds",
    ("time_to_first_token_seconds", "histogram", ""): "time_to_first_token_seconds",
    ("inter_token_latency_seconds", "histogram", ""): "inter_token_latency_seconds",
    ("e2e_request_latency_seconds", "histogram", ""): "e2e_request_latency_seconds",
    ("queue_time_seconds", "histogram", ""): "queue_time_seconds",
}


def test_sglang_names_have_the_same_values(server: tuple[Engine, httpx.Client]) -> None:
    engine, client = server
    prompt = list(range(40))
    for _ in range(2):
        engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 12})
    fresh(client, engine)
    text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    theirs = {name: family for name, family in families.items() if name.startswith("sglang:")}
    names = {f"sglang:{name}".removesuffix("_total"): key for key in SGLANG for name in key[:1]}
    assert theirs.keys() == names.keys()
    for name, family in theirs.items():
        (_, kind, labels), ours = names[name], SGLANG[names[name]].split()
        assert family.type == kind
        extra = set(labels.replace("scheduler", "").split())
        full = extra | (SCHEDULER_LABELS if "scheduler" in labels else SERVER_LABELS)
        assert set(family.samples[0].labels) - {"le"} == full
        own = [families[f"moesaic_{one}".removesuffix("_total")] for one in ours]
        assert sums(family) == sums(*own) or name == "sglang:num_aborted_requests"
    assert sums(theirs["sglang:max_total_num_tokens"])["", ""] == engine.limits.cache_tokens
    labels = theirs["sglang:gen_throughput"].samples[0].labels
    assert set(labels.values()) == {"tiny:qwen3_moe", "unified", "0"}
    (aborted,) = theirs["sglang:num_aborted_requests"].samples
    assert aborted.value == parsed(text)["moesaic_requests_total"]["abort",]
    modes = {s.labels["mode"]: s.value for s in theirs["sglang:realtime_tokens"].samples}
    computed = parsed(text)["moesaic_computed_tokens_total"]
    assert modes == {"prefill_compute": computed["0", "prefill"], "decode": computed["0", "decode"]}


def sums(*families: Any) -> dict[tuple[str, str], float]:
    """By the end of a sample's name and its bucket, over all other labels."""
    found: dict[tuple[str, str], float] = {}
    for family in families:
        for sample in family.samples:
            key = (
                sample.name.removeprefix(family.name).replace("_total", ""),
                sample.labels.get("le", ""),
            )
            found[key] = found.get(key, 0.0) + sample.value
    return found


def test_sglang_names_of_groups_and_none_by_default() -> None:
    engine = EngineStats(0.0, [GroupStats(0, running=3), GroupStats(1, running=4)], [])
    mesh = Mesh(tp=4, dp=2, ep=4)
    leaders = {str(group): live_stats.leader_labels(mesh, group) for group in (0, 1)}
    info = dict.fromkeys(INFO_LABELS, "x")
    server = ServerStats({}, histogram(), 0.0, {}, info, model_name="m", leaders=leaders)
    snapshot = Snapshot(engine, [], 0.0, RequestWatch().stats(0), server)
    assert "sglang:" not in exposition(snapshot)
    values = parsed(exposition(snapshot, with_sglang_names=True))["sglang:num_running_reqs"]
    # model_name, engine_type, tp_rank, pp_rank, moe_ep_rank, dp_rank
    assert values == {
        ("m", "unified", "0", "0", "0", "0"): 3,
        ("m", "unified", "2", "0", "2", "1"): 4,
    }


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


def test_what_a_request_has_added_is_there_once_it_has_ended(
    server: tuple[Engine, httpx.Client],
) -> None:
    """Not a second later."""
    engine, client = server
    params = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0}

    def verified() -> float:
        return scrape(client)["moesaic_spec_verified_total"]["0",]

    engine.generate(input_ids=[9] * 20, sampling_params=params)
    for _ in range(3):
        before = verified()
        told = engine.generate(input_ids=[9] * 20, sampling_params=params)["meta_info"]
        assert verified() == before + told["spec_verify_ct"] > before


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
        answers = engine.generate(
            ["one", "two", "three"],
            {"max_new_tokens": 24, "ignore_eos": True},
            return_routed_experts=True,
        )
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
        check_routing(data, answers)


def check_routing(data: dict[str, Any], answers: Any) -> None:
    """Experts have computed the tokens that were routed to them, on the ranks that hold them."""
    routing, number = data["routing"], data["experts"]["number"]
    texts = [answer["meta_info"]["routed_experts"] for answer in answers]
    ids = np.frombuffer(b"".join(map(base64.b64decode, texts)), np.int32)
    experts = ids.reshape(-1, routing["num_layers"], routing["top_k"])
    assert len(experts) == sum(len(word) + 24 - 1 for word in ("one", "two", "three"))
    for layer, load in enumerate(data["experts"]["layers"]):
        counts = np.bincount(experts[:, layer].ravel(), minlength=number)
        assert counts.tolist() == load["experts"]
        held = {str(r): rank["experts"][layer] for r, rank in enumerate(routing["ranks"])}
        assert {r: counts[found].sum() for r, found in held.items()} == load["ranks"]
    assert routing["ranks"] == [
        {"layers": [0, 1], "experts": [[0, 1, 2, 3]] * 2},
        {"layers": [0, 1], "experts": [[4, 5, 6, 7]] * 2},
    ]
