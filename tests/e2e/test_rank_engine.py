"""What callers can do with an engine on ranks: the same as with one in their own process."""

import asyncio
import math
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moesaic import Engine, SamplingParams
from moesaic.balance.files import read_loads
from moesaic.core.request import Request
from moesaic.engine.frontend.expert_records import FOLDER_VARIABLE
from moesaic.engine.frontend.inflight import _add
from moesaic.engine.schedule.request_state import RequestState
from tests import trace_format
from tests.e2e import recorded
from tests.e2e.grid import model_path, prompts
from tests.e2e.names import check_that_a_name_is_free
from tests.server.serving import wait_until

MESHES = {
    "attention groups": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "pipeline": {"tp_size": 2, "pp_size": 2, "chunked_prefill_size": 16},
}
FAMILY = model_path("qwen3_moe")


@pytest.fixture(scope="module", params=MESHES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    flags = {**MESHES[request.param], "expert_distribution_recorder_mode": "per_token"}
    with Engine(model_path=FAMILY, page_size=4, **flags) as made:
        yield made


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Engine]:
    with Engine(model_path=FAMILY, page_size=4) as made:
        yield made


def settled(engine: Engine) -> dict[str, Any]:
    """Its figures once nothing runs any more."""
    for _ in range(1200):
        info = engine.get_server_info()
        if info["running"] + info["waiting"] == 0:
            return info
        time.sleep(0.05)
    raise AssertionError(info)


def test_sampling_stops_logprobs_and_penalties(engine: Engine, one_rank: Engine) -> None:
    params = [
        {"temperature": 0.9, "sampling_seed": 3, "max_new_tokens": 10},
        {"temperature": 0, "max_new_tokens": 12, "repetition_penalty": 1.3, "ignore_eos": True},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "sampling_seed": 5, "max_new_tokens": 9},
        {"temperature": 0, "max_new_tokens": 0},
        {"temperature": 0, "max_new_tokens": 20, "min_new_tokens": 7, "frequency_penalty": 0.5},
        {"temperature": 0.7, "n": 3, "sampling_seed": 8, "max_new_tokens": 6},
    ]
    found, expected = (
        each.generate(
            input_ids=prompts()[7 : 7 + len(params)],
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=2,
        )
        for each in (engine, one_rank)
    )
    assert isinstance(found, list) and isinstance(expected, list) and len(found) == 8
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["output_ids"] == theirs["output_ids"] and ours["text"] == theirs["text"]
        for key in ("input_token_logprobs", "output_token_logprobs"):
            pairs = zip(ours["meta_info"][key], theirs["meta_info"][key], strict=True)
            for (value, token, _), (other, same, _) in pairs:
                assert token == same and value == pytest.approx(other, abs=1e-4)
        assert len(ours["meta_info"]["output_top_logprobs"]) == len(ours["output_ids"])
        assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]


def test_a_stop_string_ends_the_request_on_its_rank(engine: Engine, one_rank: Engine) -> None:
    whole = one_rank.generate("Mosaic", {"temperature": 0, "max_new_tokens": 40})
    stop = whole["text"][10:13]
    call = {"temperature": 0, "max_new_tokens": 4000, "stop": [stop], "ignore_eos": True}
    found, expected = (each.generate("Mosaic", call) for each in (engine, one_rank))
    for key in ("text", "output_ids"):
        assert found[key] == expected[key]
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert settled(engine)["pages_used"] == 0


def test_a_pattern_ends_the_request_on_its_rank(engine: Engine, one_rank: Engine) -> None:
    whole = one_rank.generate("Mosaic", {"temperature": 0, "max_new_tokens": 12})["text"]
    pattern = re.escape(whole[4:6]) + "(.)" + re.escape(whole[7]) + "|never"
    found = re.search(pattern, whole, re.DOTALL)
    assert found is not None
    call = {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True, "stop": "never"}
    call |= {"stop_regex": f"(?s){pattern}"}
    for each in (engine, one_rank):
        answer = each.generate("Mosaic", call)
        assert answer["text"] == whole[: found.start()]
        reason = {"type": "stop", "matched": f"(?s){pattern}"}
        assert answer["meta_info"]["finish_reason"] == reason
    kept = one_rank.generate("Mosaic", call | {"no_stop_trim": True})
    assert kept["text"] == whole[: found.end()]
    assert settled(engine)["pages_used"] == 0


def test_only_equal_keys_share_cached_pages(engine: Engine) -> None:
    """A prompt of 41 tokens finds ten pages of four: its last token is always computed."""
    prompt = [*range(60, 101)]

    def cached(**keys: Any) -> int:
        answer = engine.generate(
            input_ids=prompt,
            sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            data_parallel_rank=0,
            **keys,
        )
        outputs.append(answer["output_ids"])
        number = answer["meta_info"]["cached_tokens"]
        details = {"device": number, "host": 0} if number else None
        assert answer["meta_info"]["cached_tokens_details"] == details
        return int(number)

    outputs: list[list[int]] = []
    engine.flush_cache()
    assert [cached(), cached(extra_key=None), cached(extra_key="", cache_salt="")] == [0, 40, 40]
    assert [cached(extra_key="a"), cached(extra_key="a"), cached(cache_salt="a")] == [0, 40, 0]
    assert [cached(extra_key="ab"), cached(extra_key="a", cache_salt="b")] == [0, 0]
    assert [cached(extra_key="a", cache_salt="b"), cached()] == [40, 40]
    assert outputs == [outputs[0]] * 10
    call = {"input_ids": [prompt] * 2, "extra_key": ["a", "z"], "data_parallel_rank": [0, 0]}
    pair = engine.generate(sampling_params={"max_new_tokens": 1}, **call)
    assert [answer["meta_info"]["cached_tokens"] for answer in pair] == [40, 0]


def test_logprobs_of_chosen_tokens(engine: Engine, one_rank: Engine) -> None:
    """At every position, in the order of the ids, beside the most likely ones."""
    call: dict[str, Any] = {
        "input_ids": [prompts()[7][:12], prompts()[8][:9]],
        "sampling_params": {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    vocabulary = one_rank.limits.vocab_size
    ids = [[9, 5, 9], [*range(vocabulary)]]
    for each in (engine, one_rank):
        answers = each.generate(top_logprobs_num=3, token_ids_logprob=ids, **call)
        for prompt, asked, answer in zip(call["input_ids"], ids, answers, strict=True):
            meta = answer["meta_info"]
            rows = [meta["input_token_ids_logprobs"], meta["output_token_ids_logprobs"]]
            assert rows[0][0] is None and [len(row) for row in rows] == [len(prompt), 5]
            for row in rows[0][1:] + rows[1]:
                assert [token for _, token, _ in row] == asked
            assert [len(row) for row in meta["output_top_logprobs"]] == [3] * 5
        known = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
        for row, (value, token, _) in zip(rows[0][1:] + rows[1], known, strict=True):
            assert row[token][0] == pytest.approx(value, abs=1e-6)
            assert sum(math.exp(logprob) for logprob, _, _ in row) == pytest.approx(1, abs=1e-4)
        shared = each.generate(token_ids_logprob=[7], **call)
        lengths = [len(answer["meta_info"]["output_token_ids_logprobs"]) for answer in shared]
        assert lengths == [5, 5] and "output_top_logprobs" not in shared[0]["meta_info"]
    plain = engine.generate("x", {"max_new_tokens": 1}, token_ids_logprob=[7])
    assert "output_token_ids_logprobs" not in plain["meta_info"]


def test_streams_grow_and_may_be_left(engine: Engine) -> None:
    call = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}
    stream = engine.generate(input_ids=[5, 6, 7], sampling_params=call, stream=True)
    lengths = [len(next(stream)["output_ids"]) for _ in range(5)]
    assert lengths == [1, 2, 3, 4, 5]
    stream.close()
    assert settled(engine)["pages_used"] == 0


def test_a_name_may_be_used_again_at_once(engine: Engine, one_rank: Engine) -> None:
    """Also where the rank does not know yet that the first request has ended."""
    stop = one_rank.generate("Mosaic", {"temperature": 0, "max_new_tokens": 9})["text"][2:5]
    long = {"temperature": 0, "max_new_tokens": 500, "ignore_eos": True}
    for _ in range(5):
        first = engine.generate("Mosaic", {**long, "stop": [stop]}, rid="same")
        assert first["meta_info"]["finish_reason"]["type"] == "stop"
        second = engine.generate("Mosaic", {**long, "max_new_tokens": 3}, rid="same")
        assert second["meta_info"]["id"] == "same" and len(second["output_ids"]) == 3


def test_what_cannot_be_sent_fails_alone(engine: Engine) -> None:
    heard: list[Any] = []
    params = SamplingParams(max_new_tokens=3)
    request = Request("odd", [1, 2], params, 2**80, 3, -1)  # no message can carry this seed
    engine._thread.submit(lambda core: _add(core, [RequestState(request, None, heard.append)]))
    engine._thread.submit(lambda core: 1 // 0)
    out = engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 3})
    assert len(out["output_ids"]) >= 1 and not engine.fault
    assert heard[-1].finished and "could not be added" in request.finish_reason.message


def test_abort_from_another_thread(engine: Engine) -> None:
    def abort() -> None:
        wait_until(lambda: engine.get_server_info()["running"] == 1)
        engine.abort("mine")

    other = threading.Thread(target=abort)
    other.start()
    call = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}
    out = engine.generate(input_ids=[1, 2], sampling_params=call, rid="mine")
    other.join()
    assert out["meta_info"]["finish_reason"]["type"] == "abort"
    assert settled(engine)["pages_used"] == 0


def test_tasks_are_served_together(engine: Engine, one_rank: Engine) -> None:
    async def ask(each: Engine) -> list[Any]:
        calls = [
            each.async_generate(
                input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 5}
            )
            for prompt in prompts()
        ]
        return await asyncio.gather(*calls)

    found, expected = (asyncio.run(ask(each)) for each in (engine, one_rank))
    assert [out["output_ids"] for out in found] == [out["output_ids"] for out in expected]


def test_figures_of_groups_and_ranks(engine: Engine) -> None:
    engine.flush_cache()
    info = settled(engine)
    assert len(info["groups"]) == engine.mesh.num_groups
    assert [rank["rank"] for rank in info["ranks"]] == list(range(engine.mesh.world))
    assert info["steps"] == sum(group["steps"] for group in info["groups"])
    for rank in info["ranks"]:
        assert rank["computed"] > 0 and rank["waited"] > 0 and rank["weight_bytes"] > 0
    engine.generate(input_ids=list(range(50)), sampling_params={"max_new_tokens": 1})
    assert settled(engine)["pages_cached"] == 12
    assert engine.flush_cache() == 12


@pytest.mark.parametrize(
    "method", ["round_robin", pytest.param("total_tokens", marks=pytest.mark.slow)]
)
def test_requests_are_spread_over_groups(method: str) -> None:
    """Four long and four short ones, by turns, over two groups."""
    call = {"temperature": 0, "ignore_eos": True}
    with Engine(model_path=FAMILY, dp_size=2, page_size=4, load_balance_method=method) as engine:
        engine.generate(
            input_ids=[[n] * (40 if n % 2 == 0 else 4) for n in range(8)],
            sampling_params={**call, "max_new_tokens": 2},
        )
        pages = [group["pages_cached"] for group in engine.get_server_info()["groups"]]
        engine.flush_cache()
        engine.generate(
            input_ids=[[n] * 8 for n in range(3)],
            sampling_params={**call, "max_new_tokens": 1},
            data_parallel_rank=[1, 1, 0],
        )
        chosen = [group["pages_cached"] for group in engine.get_server_info()["groups"]]
        with pytest.raises(ValueError, match="data_parallel_rank 2 is not one of the 2 groups"):
            engine.generate(input_ids=[1], data_parallel_rank=2)
    assert chosen == [2, 4]
    if method == "round_robin":
        assert pages == [4 * 10, 4 * 1]
    else:
        assert abs(pages[0] - pages[1]) <= 11


DELAYED = {"enable_prefill_delayer": True, "prefill_delayer_max_delay_passes": 4}
APART = {"disable_mixed_chunk": True, "chunked_prefill_size": 16, "max_step_ms": 1.0}


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([DELAYED | APART], id="together"),
        pytest.param([DELAYED, APART], id="alone", marks=pytest.mark.slow),
    ],
)
def test_how_prompts_are_scheduled_changes_no_answer(flags: list[dict[str, Any]]) -> None:
    """Prompts arrive while others decode, in one group more than in the other."""
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 12}
    asked = [[n + 1] * (5 + 17 * n % 90) for n in range(10)]

    def answers(**more: Any) -> list[list[int]]:
        mesh = MESHES["attention groups"] | {"page_size": 4, "enable_deterministic_inference": True}
        with Engine(model_path=FAMILY, **mesh, **more) as engine:

            async def ask(number: int) -> list[int]:
                await asyncio.sleep(0.02 * number)
                rank = int(number % 3 == 0)
                found = await engine.async_generate(
                    input_ids=asked[number], sampling_params=params, data_parallel_rank=rank
                )
                return found["output_ids"]

            async def ask_all() -> list[list[int]]:
                return await asyncio.gather(*map(ask, range(len(asked))))

            return asyncio.run(ask_all())

    expected = answers()
    for each in flags:
        assert answers(**each) == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tp_size": 4, "ep_size": 3}, "--ep-size is 3: give a divisor of --tp-size 4"),
        ({"tp_size": 3}, "num_attention_heads 8 .* cannot be split over 3 .*: 2 and 4 can be"),
        (
            {"tp_size": 16, "ep_size": 8},
            "num_attention_heads 8 .* cannot be split over 16 ranks of attention: 8 can be",
        ),
        ({"pp_size": 5}, "--pp-size 5 is more than the model's 4 layers"),
        ({"tp_size": 2, "node_rank": 1, "nnodes": 2, "dist_init_addr": "h:1"}, "runs on node 0"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_ranks_start(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Engine(model_path=FAMILY, **flags)


def test_every_rank_tells_what_it_did(engine: Engine, tmp_path: Path) -> None:
    """Those of later stages, too, while they step."""
    engine.start_profile(tmp_path)
    before = engine.get_stats()
    engine.generate(
        input_ids=prompts()[:6],
        sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
    )
    after = engine.get_stats()
    trace = trace_format.read(Path(engine.stop_profile()))
    steps = trace.facts["steps"]["0"]
    prompted, generated = (
        sum(getattr(group, name) for group in after.groups)
        - sum(getattr(group, name) for group in before.groups)
        for name in ("prompt_tokens", "generated_tokens")
    )
    assert generated == 6 * 12
    routed: dict[int, int] = {}
    for old, new in zip(before.ranks, after.ranks, strict=True):
        assert new.steps - old.steps == len(steps) > 0
        assert {event.args["step"] for event in trace.of(new.rank + 1, "step")} == set(steps)
        for layer, was, now in zip(new.layers, old.expert_tokens, new.expert_tokens, strict=True):
            routed[layer] = routed.get(layer, 0) + sum(now) - sum(was)
    assert routed == dict.fromkeys(range(4), 2 * (prompted + generated - 6))


def test_all_ranks_record_their_tokens(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of experts count once; stages have records of their own layers."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    sequences = recorded.record(engine, prompts()[:5], 3)
    found = engine.dump_expert_distribution_record()
    assert len(found["files"]) == engine.mesh.world
    recorded.check_tokens(found, recorded.oracle_of(FAMILY), sequences)
    recorded.check_counts(found, recorded.oracle_of(FAMILY), sequences, tmp_path)
    with pytest.raises(ValueError, match=r"lacks the passes of ranks .*: give the folder"):
        read_loads(Path(found["files"][0]))


def test_a_name_is_free_when_its_request_is_over(engine: Engine) -> None:
    check_that_a_name_is_free(engine)
