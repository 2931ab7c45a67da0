"""What an engine on four ranks tells of itself: statistics that add up, and traces on one clock."""

import asyncio
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from moesaic import Engine
from moesaic.core.stats import EngineStats
from moesaic.engine.frontend import balancedness
from moesaic.engine.frontend.expert_records import FOLDER_VARIABLE
from moesaic.engine.frontend.profiler import trace_folder
from moesaic.server.app import make_app
from moesaic.server.errors import Refusal
from moesaic.server.profile import folder_for
from tests import trace_format
from tests.e2e import recorded
from tests.e2e.grid import model_path
from tests.server.metric_values import parsed
from tests.trace_format import Event

MODEL = model_path("deepseek_v3")
TOP_K, LAYERS = 2, 4
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    flags = {"tp_size": 4, "ep_size": 4, "dp_size": 2, "enable_dp_attention": True}
    flags["expert_distribution_recorder_mode"] = "per_token"
    flags["expert_balancedness_report_mode"] = "both"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balancedness, "REPORT_SECONDS", 3600.0)  # tests ask for reports themselves
        with Engine(model_path=MODEL, moe_a2a_backend="deepep", **flags) as made:
            yield made


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Engine]:
    with Engine(model_path=MODEL) as made:
        yield made


def prompts(number: int, first: int) -> list[list[int]]:
    """No two begin alike, so that nothing is cached."""
    return [[first + i, *range(30 + 3 * i)] for i in range(number)]


def tokens_by_expert(stats: EngineStats) -> dict[tuple[int, int], int]:
    """Of each layer and logical expert, over all ranks."""
    found: dict[tuple[int, int], int] = {}
    for rank in stats.ranks:
        for layer, experts, tokens in zip(
            rank.layers, rank.experts, rank.expert_tokens, strict=True
        ):
            for expert, count in zip(experts, tokens, strict=True):
                found[layer, expert] = found.get((layer, expert), 0) + count
    return found


def test_statistics_add_up(engine: Engine, one_rank: Engine) -> None:
    asked, new = prompts(5, 100), 7
    found = []
    for each in (engine, one_rank):
        before = each.get_stats()
        each.generate(input_ids=asked, sampling_params={**GREEDY, "max_new_tokens": new})
        after = each.get_stats()
        check_totals(before, after, asked, new)
        old, now = tokens_by_expert(before), tokens_by_expert(after)
        found.append({key: count - old[key] for key, count in now.items()})
    # The last token of an answer is not computed.
    computed = sum(map(len, asked)) + len(asked) * (new - 1)
    layers = sorted({layer for layer, _ in found[0]})
    assert len(found[0]) == len(layers) * engine.get_stats().num_experts
    for layer in layers:
        routed = sum(count for (number, _), count in found[0].items() if number == layer)
        assert routed == computed * TOP_K
    assert found[0] == found[1]


def check_totals(before: EngineStats, after: EngineStats, asked: list[list[int]], new: int) -> None:
    def grown(name: str) -> float:
        old, now = (sum(getattr(group, name) for group in s.groups) for s in (before, after))
        return float(now - old)

    assert grown("prompt_tokens") == sum(map(len, asked)) and grown("cached_tokens") == 0
    assert grown("generated_tokens") == len(asked) * new
    assert grown("decode_steps") >= new - 1 and grown("prefill_steps") >= 1
    assert grown("decode_seconds") > 0 and grown("prefill_seconds") > 0
    assert [group.group for group in after.groups] == list(range(len(after.groups)))
    assert all(g.running == g.waiting == g.pages_used == 0 < g.pages_total for g in after.groups)
    for rank in after.ranks:
        spent = rank.compute_seconds + rank.wait_seconds
        assert 0 < rank.runner_seconds < spent
        assert rank.steps > 0 and rank.pid > 0
        moved = rank.traffic.values()
        assert sum(traffic.dispatches for traffic in moved) == rank.steps * len(rank.layers)
        assert 0 < sum(t.dispatch_seconds + t.combine_seconds for t in moved) < spent


def test_cached_tokens_are_told_apart(engine: Engine) -> None:
    prompt = [[9, 8, 7] * 20]
    engine.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 2})
    before = engine.get_stats()
    for _ in range(2):  # groups take turns
        engine.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 2})
    after = engine.get_stats()
    cached, computed = (
        sum(getattr(b, name) - getattr(a, name) for a, b in zip(before.groups, after.groups))  # noqa: B905
        for name in ("cached_tokens", "prompt_tokens")
    )
    assert cached >= 48 and cached + computed == 2 * len(prompt[0])


def test_all_ranks_answer_while_they_step(engine: Engine) -> None:
    """A request that does not end by itself keeps them busy."""
    first = threading.Event()

    def consume() -> None:
        for _ in engine.generate(
            input_ids=[1, 2, 3],
            sampling_params={**GREEDY, "max_new_tokens": 1900},
            stream=True,
            rid="long",
        ):
            first.set()

    reader = threading.Thread(target=consume)
    reader.start()
    try:
        assert first.wait(60)
        told = [engine.get_stats() for _ in range(5)]
    finally:
        engine.abort("long")
        reader.join()
    for stats in told:
        assert [len(rank.expert_tokens) for rank in stats.ranks] == [
            len(told[0].ranks[0].layers)
        ] * 4
        assert sum(group.running for group in stats.groups) == 1
    assert told[0].ranks[3].steps <= told[-1].ranks[3].steps


def record(engine: Engine, folder: Path, steps: int) -> trace_format.TraceFile:
    engine.start_profile(folder, num_steps=steps)
    engine.generate(
        input_ids=prompts(4, 150), sampling_params={**GREEDY, "max_new_tokens": steps + 8}
    )
    for _ in range(1200):
        if found := list(folder.glob("*.trace.json.gz")):
            break
        threading.Event().wait(0.05)
    assert engine.stop_profile() == str(found[0])
    with pytest.raises(ValueError, match="no profile is being recorded"):
        engine.stop_profile()
    return trace_format.read(found[0])


def test_a_trace_has_all_ranks_on_one_clock(engine: Engine, tmp_path: Path) -> None:
    trace = record(engine, tmp_path, 6)
    assert trace.processes == {0: "engine"} | {r + 1: engine.mesh.describe(r) for r in range(4)}
    steps = trace.facts["steps"]["0"]
    assert len(steps) == 6 and steps == sorted(set(steps))
    assert not trace.facts["spans_lost"] and not trace.facts["ranks_missing"]
    layers = engine.get_stats().ranks[0].layers
    expected = {(step, layer) for step in steps for layer in layers}
    for rank in range(4):
        whole = {event.args["step"]: event for event in trace.of(rank + 1, "step")}
        assert sorted(whole) == steps
        for name in ("router", "dispatch", "experts", "combine"):
            events = trace.of(rank + 1, name)
            assert {(e.args["step"], e.args["layer"]) for e in events} == expected, (rank, name)
            assert all(within(event, whole[event.args["step"]]) for event in events)
        attended = {(e.args["step"], e.args["layer"]) for e in trace.of(rank + 1, "attention")}
        assert attended == {(step, layer) for step in steps for layer in range(LAYERS)}
        for name in ("plan", "logits"):
            assert {e.args["step"] for e in trace.of(rank + 1, name)} == set(steps)
    check_overlap(trace, expected)
    assert {"tokenise", "submit"} <= {e.name for e in trace.events if e.pid == 0}
    sampled = [e.args["step"] for rank in (0, 2) for e in trace.of(rank + 1, "sample")]
    assert set(sampled) == set(steps) and not trace.of(2, "sample")


def within(inner: Event, outer: Event) -> bool:
    return outer.begin <= inner.begin and inner.end <= outer.end


def check_overlap(trace: trace_format.TraceFile, expected: set[tuple[int, int]]) -> None:
    """Nobody leaves the exchange of a layer before everybody has come to it."""
    for step, layer in expected:
        spans = [
            [
                e
                for e in trace.of(rank + 1, "dispatch")
                if (e.args["step"], e.args["layer"]) == (step, layer)
            ]
            for rank in range(4)
        ]
        begins = [min(e.begin for e in events) for events in spans]
        ends = [max(e.end for e in events) for events in spans]
        assert max(begins) <= min(ends), (step, layer)


def test_one_rank_gives_the_same_shape(engine: Engine, one_rank: Engine, tmp_path: Path) -> None:
    trace = record(one_rank, tmp_path, 3)
    assert trace.processes == {0: "engine", 1: "rank 0"} and len(trace.of(1, "step")) == 3
    many, one = engine.get_server_info(), one_rank.get_server_info()
    assert many.keys() == one.keys()
    lacks = {"operation", "beat_age", "state_age", "progress"}
    assert many["ranks"][0].keys() - one["ranks"][0].keys() <= lacks | many["groups"][0].keys() | {
        "vocab_size",
        "cache_tokens",
        "max_running",
        "eos_ids",
        "num_experts",
        "num_layers",
        "top_k",
    }
    experts = [expert for rank in many["placement"]["experts_of_rank"] for expert in rank]
    assert experts == one["placement"]["experts_of_rank"][0] == list(range(len(experts)))
    assert many["memory"]["expert_bytes"] == one["memory"]["expert_bytes"] > 0
    assert many["providers"]["a2a"] == "deepep" and many["providers"]["a2a_provider"] == "native"
    assert many["providers"]["reasons"] and many["memory"]["buffer_bytes"] > 0


def test_profiles_over_http(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESAIC_PROFILER_DIR", str(tmp_path))

    async def talk() -> None:
        transport = httpx.ASGITransport(app=make_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await converse(client, tmp_path)

    asyncio.run(talk())


async def refuse_a_file(post: Any, root: Path) -> None:
    """The name is a client's, and a line break in it would forge a line of the log."""
    (root / "file").write_text("")
    answer = await post("/start_profile", {"output_dir": "file/a\n[2030] all is well"})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and "cannot be written to" in message
    assert message.isprintable() and r"a\n[2030]" in message


async def converse(client: httpx.AsyncClient, root: Path) -> None:
    async def post(path: str, body: Any = None) -> httpx.Response:
        return await client.post(path, json=body) if body is not None else await client.post(path)

    wrong = [
        ({"output_dir": "/etc"}, "output_dir"),
        ({"output_dir": "../elsewhere"}, "output_dir"),
        ({"output_dir": "a\0b"}, "output_dir"),
        ({"activities": ["CPU", "MEM"]}, "activities"),
        ({"num_steps": -1}, "num_steps"),
        ({"num_steps": "100001"}, "num_steps"),
        ({"num_steps": "many"}, "num_steps"),
        ({"start_step": "3"}, "start_step"),
        ({"profile_by_stage": True, "num_steps": 5}, "profile_by_stage"),
        ({"with_stack": True}, "with_stack"),
        ({"start_step": 3}, "start_step"),
    ]
    for body, param in wrong:
        answer = await post("/start_profile", body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, body
    await refuse_a_file(post, root)
    # SGLang's bench_serving --profile sends these, and a folder of its own.
    begun = {
        "activities": ["CPU", "GPU"],
        "num_steps": None,
        "profile_by_stage": False,
        "profile_stages": None,
        "output_dir": str(root / "mine"),
        "profile_prefix": None,
    }
    off = {"with_stack": False, "start_step": "0", "merge_profiles": True, "num_steps": "0"}
    answer = await post("/start_profile", begun | off)
    assert answer.status_code == 200 and answer.json()["output_dir"] == str(root / "mine")
    assert (await post("/start_profile")).status_code == 409
    generated = {"input_ids": [5, 6, 7], "sampling_params": {**GREEDY, "max_new_tokens": 4}}
    assert (await post("/generate", generated)).status_code == 200
    stopped = (await post("/stop_profile", {})).json()
    assert stopped.keys() == {"path", "steps"} and stopped["steps"] >= 4
    again = await post("/stop_profile", {})
    assert again.status_code == 400
    assert again.json()["error"]["message"] == "no profile is being recorded: start one first"
    path = Path(stopped["path"])
    assert path.parent == root / "mine"
    trace = trace_format.read(path)
    assert all(len(trace.of(rank + 1, "step")) == 4 for rank in range(4))
    assert {e.name for e in trace.events if e.pid == 0} == {"tokenise", "submit", "detokenise"}
    assert not list(root.glob("*.gz"))
    assert (await client.get("/start_profile")).json()["output_dir"] == str(root)
    assert (await client.get("/stop_profile")).json()["steps"] == 0
    assert (await client.get("/start_profile", headers={"Origin": "x"})).status_code == 403


def test_experts_are_recorded_over_http(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts of odd lengths, and steps in which a group has no tokens."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    asked, oracle = [[3], [201, 5, 9], *prompts(2, 210)], recorded.oracle_of(MODEL)

    async def talk() -> None:
        transport = httpx.ASGITransport(app=make_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            engine.flush_cache()
            started = await client.get("/start_expert_distribution_record")
            assert started.json() == {"message": "Start recording the expert distribution."}
            sent = {"input_ids": asked, "sampling_params": {**GREEDY, "max_new_tokens": 5}}
            answers = (await client.post("/generate", json=sent)).json()
            stopped = await client.post("/stop_expert_distribution_record")
            assert stopped.json() == {"message": "Stop recording the expert distribution."}
            found = (await client.post("/dump_expert_distribution_record")).json()
            assert found["message"] == "Dump expert distribution record."
            sequences = [p + a["output_ids"] for p, a in zip(asked, answers, strict=True)]
            recorded.check_tokens(found, oracle, sequences)
            recorded.check_counts(found, oracle, sequences, tmp_path)
            again = (await client.get("/dump_expert_distribution_record")).json()
            assert again["passes"] == 0 and again["warning"].startswith("no pass was recorded")
            path = "/start_expert_distribution_record"
            assert (await client.get(path, headers={"Origin": "x"})).status_code == 403

    asyncio.run(talk())


def test_the_balance_of_passes_is_reported(
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    engine.balancedness.report()
    recorded.record(engine, prompts(3, 230), 4)
    found = engine.dump_expert_distribution_record()
    with caplog.at_level(logging.INFO, "moesaic"):
        engine.balancedness.report()
    told = engine.balancedness.exported
    assert told is not None and str(told) in caplog.text
    contents = [torch.load(path, weights_only=True)["records"] for path in found["files"]]
    for layer, value in told.layers.items():
        loads = [[int(one["global_physical_count"][layer].sum()) for one in c] for c in contents]
        shares = [sum(ranks) / 4 / max(ranks) for ranks in zip(*loads, strict=True)]
        assert value == pytest.approx(sum(shares) / len(shares)) and value < 1
    assert sorted(told.layers) == engine.get_stats().ranks[0].layers

    async def scrape() -> str:
        transport = httpx.ASGITransport(app=make_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get("/metrics")).text

    values = parsed(asyncio.run(scrape()))
    assert values["moesaic_ep_pass_balancedness"] == {(): pytest.approx(told.mean)}
    assert len(values["moesaic_ep_layer_pass_balancedness"]) == len(told.layers)


def test_a_dump_while_requests_run(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dumps one after the other have every pass once, and steps go on meanwhile."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    ids: list[int] = []
    dumps = []
    engine.start_expert_distribution_record()
    for output in engine.generate(
        input_ids=[2, 4, 6],
        sampling_params={**GREEDY, "max_new_tokens": 16},
        stream=True,
    ):
        ids = output["output_ids"]
        if len(dumps) < 2:
            dumps.append(engine.dump_expert_distribution_record())
    engine.stop_expert_distribution_record()
    dumps.append(engine.dump_expert_distribution_record())
    assert sum(dump["passes"] for dump in dumps) == len(ids) == 16
    recorded.check_counts_of(dumps, recorded.oracle_of(MODEL), [[2, 4, 6, *ids]])


def test_traces_are_private(
    one_rank: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the working directory, and not for others to read."""
    work, state = tmp_path / "work", tmp_path / "state"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.delenv("MOESAIC_PROFILER_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(state))
    one_rank.start_profile()
    path = Path(one_rank.stop_profile())
    assert path.parent == state / "moesaic" / "profile" and not list(work.iterdir())
    assert path.stat().st_mode & 0o777 == 0o600
    made = (state, state / "moesaic", path.parent)
    assert [folder.stat().st_mode & 0o777 for folder in made] == [0o700] * 3
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    root = tmp_path / ".cache/moesaic/profile"
    assert trace_folder() == root and trace_folder(str(work)) == work
    assert folder_for("mine", root) == folder_for(f"{root}/mine", root) == root / "mine"
    assert folder_for("", root) == folder_for(None, root) == root
    long = root.joinpath(*["folder" * 30] * 3)
    assert folder_for(str(long), root) == long
    with pytest.raises(Refusal, match="not the name of a folder"):
        folder_for("a/" * 2049, root)
    root.mkdir(parents=True)
    (root / "out").symlink_to(work)
    for outside in ("out/there", f"{root}/out", f"{root}-2", f"{root}/../x"):
        with pytest.raises(Refusal, match="or start the server with another --profile-dir"):
            folder_for(outside, root)


def test_nothing_to_stop(one_rank: Engine, tmp_path: Path) -> None:
    with Engine(model_path="tiny:qwen3_moe") as fresh:
        with pytest.raises(ValueError, match="start one first"):
            fresh.stop_profile()
        blocked = tmp_path / "file"
        blocked.write_text("")
        with pytest.raises(ValueError, match=re.escape(str(blocked))):
            fresh.start_profile(blocked)
        fresh.start_profile(tmp_path, num_steps=10**6)  # given up with the engine
