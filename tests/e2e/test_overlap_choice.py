"""Single-batch overlap and the choice at start: over an emulated link, on ranks that compute on the
host and on those that compute as on a GPU, answers are those without overlap."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic import Engine
from moesaic.engine.frontend import core_client
from tests.e2e import chosen_rank
from tests.e2e.test_gpu_ranks import GREEDY, SMALL, WHOLE, groups, model_path, twins
from tests.e2e.test_rank_isolation import prompts

LINK = {"emulate_link": "gbps=1,us=50"}
RANKS = groups(2, "deepep") | WHOLE


def tokens_of(engine: Engine) -> list[list[int]]:
    found = engine.generate(input_ids=prompts(6), sampling_params=GREEDY)
    return [one["output_ids"] for one in found]


def facts_are_plausible(engine: Engine, sizes: list[int]) -> None:
    """On a busy machine there is time for the smallest sizes only."""
    choices = engine.overlap_choices
    found = [c["tokens"] for c in choices if c["kind"] == "decode"]
    assert len(found) > 1 and found == sizes[: len(found)]
    for one in choices:
        assert one["chosen"] in one["measured_ms"]
        assert set(one["measured_ms"]) <= {"off", "sbo", "tbo"}
        assert all(seconds > 0 for seconds in one["measured_ms"].values())
        assert all(0 <= ratio <= 1 for ratio in one["hidden_ratio"].values())
        whole = one["compute_ms"] + one["communication_ms"]
        assert whole == pytest.approx(one["measured_ms"]["off"])
    assert any("tbo" in one["measured_ms"] for one in choices)


def on_hosts(family: str, **flags: Any) -> Engine:
    given = {"model_path": model_path(family), "device": "cpu", "log_level": "warning"}
    return Engine(**{**given, **SMALL, **RANKS, **flags})


FEW = {"max_running_requests": 4, "chunked_prefill_size": 16}


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """Without overlap."""
    with on_hosts("deepseek_v2", **FEW) as engine:
        found = tokens_of(engine)
        assert engine.overlap_choices == []
        for group in engine.get_stats().groups:
            assert group.decode_schedules == {"off": group.decode_steps}
            assert group.prefill_schedules == {"off": group.prefill_steps}
    return found


def test_ranks_on_hosts(wanted: list[list[int]]) -> None:
    """Few sizes, as all are measured at start."""
    with on_hosts("deepseek_v2", overlap="auto", **FEW, **LINK) as engine:
        assert tokens_of(engine) == wanted
        facts_are_plausible(engine, [1, 2])
        info = engine.get_server_info()
        assert info["overlap_choices"] == engine.overlap_choices
        assert info["emulate_link"] == LINK["emulate_link"]
        assert engine.providers["emulated_link"] == "1 GB/s (8 Gbit/s), 50 us"


def test_each_step_has_the_schedule_of_its_size(
    wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes from step to step, as requests come and end, and answers do not."""
    monkeypatch.setattr(core_client, "TARGET", chosen_rank.TARGET)
    with on_hosts("deepseek_v2", overlap="auto", **FEW) as engine:
        assert tokens_of(engine) == wanted
        engine.generate(input_ids=prompts(1)[0], sampling_params=GREEDY)  # one token a step
        groups = engine.get_stats().groups
    for group in groups:
        assert sum(group.decode_schedules.values()) == group.decode_steps
        assert sum(group.prefill_schedules.values()) == group.prefill_steps
    assert {"sbo", "tbo"} <= {name for group in groups for name in group.decode_schedules}
    assert "tbo" in {name for group in groups for name in group.prefill_schedules}


@pytest.mark.slow
def test_steps_with_drafts_are_measured() -> None:
    """They have more tokens than requests may run, and are never split."""
    drafts = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    few = FEW | drafts | {"chunked_prefill_size": 8}
    with on_hosts("deepseek_v2", **few) as engine:
        wanted = tokens_of(engine)
    with on_hosts("deepseek_v2", overlap="auto", **few, **LINK) as engine:
        assert tokens_of(engine) == wanted
        choices = {one["tokens"]: one["measured_ms"] for one in engine.overlap_choices}
    assert list(choices)[:3] == [1, 2, 4]
    assert set(choices[2]) == {"off", "sbo", "tbo"}
    assert set(choices[4]) == set(choices.get(8, choices[4])) == {"off", "sbo"}


@pytest.mark.slow
def test_shared_experts_beside_transfers() -> None:
    with on_hosts("deepseek_v2") as engine:
        wanted = tokens_of(engine)
    with on_hosts("deepseek_v2", overlap="sbo", **LINK) as engine:
        assert tokens_of(engine) == wanted


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_ranks_as_on_a_gpu(family: str) -> None:
    """Also of a family without shared experts."""
    with twins(family, **RANKS) as engine:
        wanted = tokens_of(engine)
    for overlap in ("sbo", "auto"):
        with twins(family, overlap=overlap, **RANKS, **LINK) as engine:
            assert tokens_of(engine) == wanted
            if overlap == "auto":
                facts_are_plausible(engine, [1, 2, 3])
                measured = engine.overlap_choices[0]["measured_ms"]
                assert ("sbo" in measured) == (family == "qwen2_moe")
