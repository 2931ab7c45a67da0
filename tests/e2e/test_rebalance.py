"""Experts that move while an engine answers: no token changes, and operators see what happens."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import Engine
from moesaic.observe.expert_load import expert_loads
from tests.e2e.grid import model_path, prompts
from tests.server.serving import Running, wait_until

FAMILY = model_path("qwen3_moe")


def attention_groups(number: int) -> dict[str, Any]:
    return {
        "tp_size": number,
        "dp_size": number,
        "enable_dp_attention": True,
        "moe_a2a_backend": "deepep",
        "ep_num_redundant_experts": 4,
    }


MESHES: dict[str, dict[str, Any]] = {
    "attention groups": attention_groups(2),
    "deterministic": {"tp_size": 2, "ep_size": 2, "enable_deterministic_inference": True},
    "four attention groups": attention_groups(4),
    "waterfill": attention_groups(4)
    | {"model_path": model_path("qwen2_moe"), "enable_waterfill": True},
}
# test_two_batches.py always compares bits while experts move.
SLOW = ("deterministic", "four attention groups", "waterfill")
CALLS = [
    {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True},
    {"temperature": 0.9, "sampling_seed": 3, "max_new_tokens": 20, "ignore_eos": True},
    {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True, "repetition_penalty": 1.2},
    {"temperature": 0.7, "sampling_seed": 5, "max_new_tokens": 14, "ignore_eos": True},
]


def answers(engine: Engine) -> list[tuple[list[int], list[float]]]:
    found = engine.generate(
        input_ids=prompts()[3 : 3 + len(CALLS)], sampling_params=CALLS, return_logprob=True
    )
    return [
        (one["output_ids"], [value for value, *_ in one["meta_info"]["output_token_logprobs"]])
        for one in found
    ]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MESHES],
)
def mesh(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(mesh: str) -> Iterator[Engine]:
    flags: dict[str, Any] = {
        "model_path": FAMILY,
        "page_size": 4,
        "enable_eplb": True,
        "eplb_algorithm": "deepseek",
        "eplb_rebalance_num_iterations": 3,
        "eplb_max_bytes_per_step": 30_000,
        "expert_distribution_recorder_mode": "stat",
        "expert_distribution_recorder_buffer_size": 5000,
    }
    with Engine(**flags | MESHES[mesh]) as made:
        yield made


@pytest.fixture(scope="module")
def expected(mesh: str) -> Iterator[list[tuple[list[int], list[float]]]]:
    exact, path = mesh == "deterministic", MESHES[mesh].get("model_path", FAMILY)
    with Engine(model_path=path, page_size=4, enable_deterministic_inference=exact) as one_rank:
        yield answers(one_rank)
        with pytest.raises(ValueError, match="start with --enable-eplb"):
            one_rank.rebalance()


def moved_layers(engine: Engine) -> int:
    """Rebalances after which experts had moved, as the first rank counts them."""
    moves = engine.get_stats().ranks[0].moves
    assert moves.aborted == 0
    return moves.rebalances


def test_no_token_changes(
    engine: Engine,
    mesh: str,
    expected: list[tuple[list[int], list[float]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.start_expert_distribution_record()
    rounds = 0
    while moved_layers(engine) < 2:
        found = answers(engine)
        for (ours, logprobs), (theirs, others) in zip(found, expected, strict=True):
            assert ours == theirs
            if mesh == "deterministic":
                assert logprobs == others, "every bit"
            else:
                assert logprobs == pytest.approx(others, abs=1e-4)
        rounds += 1
        assert rounds < 100, engine.rebalance_state()
    stats = engine.get_stats()
    assert sum(rank.moves.bytes for rank in stats.ranks) > 0
    # All pairs of token and expert are counted, whatever slot their expert had: layers have equally
    # many, and experts that moved keep theirs.
    loads = expert_loads(stats)
    assert len({sum(load.experts) for load in loads}) == 1 and sum(loads[0].experts) > 0
    # Nor does a recording lose any: it knows the placement that each pass followed.
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path))
    (file,) = engine.dump_expert_distribution_record()["files"]
    recorded_LE = torch.load(file, weights_only=True)["logical_count"].sum(0)
    assert recorded_LE.tolist() == [load.experts for load in loads]


def test_the_placement_is_told_and_a_warm_up_is_no_load(engine: Engine, mesh: str) -> None:
    answers(engine)  # experts move every few steps
    wait_until(lambda: engine.rebalance_state()[0]["running"] is None)
    placement = engine.get_server_info()["placement"]
    assert placement["version"] > 0, "experts have moved"
    shared = 2 if mesh == "waterfill" else 0  # with a slot on each of four ranks
    redundant = MESHES[mesh].get("ep_num_redundant_experts", 0)
    assert placement["redundant_experts"] == redundant + 3 * shared
    number, routing = engine.get_stats().num_experts, engine.routing_info()
    by_layer = list(zip(*(rank["experts"] for rank in routing["ranks"]), strict=True))
    assert len(by_layer) == routing["num_layers"]
    assert all(set().union(*held) == set(range(number)) for held in by_layer)
    first = placement["experts_of_rank"]
    assert any([*held] != first for held in by_layer), "as it is now, not at the start"
    engine.hold_rebalances()
    wait_until(lambda: engine.rebalance_state()[0]["running"] is None)
    before = engine.rebalance_state()[0]["rebalances"]
    answers(engine)
    assert engine.rebalance_state()[0]["rebalances"] == before, "none while they are held"
    engine.forget_load()
    (state,) = engine.rebalance(dry_run=True)
    assert state["result"]["outcome"].startswith("nothing to plan from: no tokens")


def test_an_idle_engine_moves_when_it_is_asked_to(engine: Engine) -> None:
    for _ in range(10):  # a rebalance that was due may have taken the last tokens
        answers(engine)
        wait_until(lambda: engine.rebalance_state()[0]["running"] is None)
        before = moved_layers(engine)
        (dry,) = engine.rebalance(dry_run=True)
        last = dry["result"]
        if not last["outcome"].startswith("nothing to plan from"):
            break
    assert last["number"] == dry["asked"] and last["dry_run"] and last["outcome"] == "dry run"
    assert last["algorithm"] == "deepseek" and 0 < last["balancedness"] <= 1
    assert last["fetched_bytes"] >= 0 and moved_layers(engine) == before
    (state,) = engine.rebalance()
    assert state["running"] is None and not state["last"]["dry_run"]
    assert state["result"] == state["last"] == state["results"][-1]
    assert state["last"]["outcome"] in ("moved", "nothing to move")
    (empty,) = engine.rebalance()
    assert empty["result"]["outcome"].startswith("nothing to plan from: no tokens")
    with pytest.raises(ValueError, match="dry_run is 'no': give True or False"):
        engine.rebalance(dry_run="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout is -5"):
        engine.rebalance(timeout=-5)
    assert state["last"]["balancedness"] == pytest.approx(last["balancedness"]), "same loads"
    with Running(engine).serve() as running, running.client() as client:
        found = client.get("/rebalance").json()["replicas"]
        assert found[0]["last"] == engine.rebalance_state()[0]["last"] == empty["last"]
        (again,) = client.post("/rebalance", json={"dry_run": True}).json()["replicas"]
        assert again["result"]["dry_run"] and again["result"]["number"] == again["asked"]
        mistaken = client.post("/rebalance?dry_run=true")
        assert mistaken.status_code == 400 and "in the body" in mistaken.text
        refused = client.post("/rebalance", json={"timeout": -1})
        assert refused.status_code == 400 and "between 0 and 600" in refused.text
        text = client.get("/metrics").text
        assert re.search(r'moesaic_eplb_moved_bytes_total{rank="0"} [1-9]', text)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "due", "stages"),
    [
        (model_path("deepseek_v3"), {"eplb_rebalance_num_iterations": 3}, [0, 1]),
        # The first stage has no experts, but knows how many requests have ended.
        ("tiny:deepseek_v3", {"eplb_rebalance_num_requests": 3}, [1]),
    ],
    ids=["both stages", "the last one"],
)
def test_stages_of_a_pipeline_move_experts(
    family: str, due: dict[str, int], stages: list[int]
) -> None:
    """Each among its own ranks, and also where no requests run."""
    with Engine(model_path=family, page_size=4) as one_rank:
        expected = answers(one_rank)
    flags = attention_groups(2) | {"pp_size": 2, "enable_eplb": True, "eplb_algorithm": "deepseek"}
    with Engine(
        model_path=family, page_size=4, eplb_max_bytes_per_step=30_000, **flags, **due
    ) as e:
        for _ in range(100):
            assert [ids for ids, _ in answers(e)] == [ids for ids, _ in expected]
            states = e.rebalance_state()
            assert [state["stage"] for state in states] == stages
            if min(state["rebalances"] for state in states) >= 2:
                break
        else:
            raise AssertionError(states)
        wait_until(lambda: all(state["running"] is None for state in e.rebalance_state()))
        for dry_run in (True, False, True):
            told = e.rebalance(dry_run)
            assert [state["result"]["dry_run"] for state in told] == [dry_run] * len(stages)
            assert all(state["running"] is None for state in told)
        assert all(one["result"]["outcome"].startswith("nothing to plan from") for one in told)
        assert [ids for ids, _ in answers(e)] == [ids for ids, _ in expected]
        stats, info = e.get_stats(), e.get_server_info()["placement"]
        loads = expert_loads(stats)
        assert len({sum(load.experts) for load in loads}) == 1 and sum(loads[0].experts) > 0
        assert (info["num_experts"], info["redundant_experts"]) == (8, 4)
        bytes_of = [rank.moves.bytes for rank in stats.ranks]
        assert [sum(bytes_of[2 * stage : 2 * stage + 2]) > 0 for stage in (0, 1)] == [
            stage in stages for stage in (0, 1)
        ]
