"""Single-batch overlap and the choice at start: over an emulated link, on ranks that compute on the
host and on those that compute as on a GPU, answers are those without overlap."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic import Engine
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


def test_ranks_on_hosts() -> None:
    """Few sizes, as all are measured at start."""
    few = {"max_running_requests": 4, "chunked_prefill_size": 16}
    with on_hosts("deepseek_v2", **few) as engine:
        wanted = tokens_of(engine)
        assert engine.overlap_choices == []
    with on_hosts("deepseek_v2", overlap="auto", **few, **LINK) as engine:
        assert tokens_of(engine) == wanted
        facts_are_plausible(engine, [1, 2])
        info = engine.get_server_info()
        assert info["overlap_choices"] == engine.overlap_choices
        assert info["emulate_link"] == LINK["emulate_link"]
        assert engine.providers["emulated_link"] == "1 GB/s (8 Gbit/s), 50 us"


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
