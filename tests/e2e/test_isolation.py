"""What goes wrong in one request stays there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic import Engine, SamplingParams
from moesaic.core.request import Request
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.schedule.plan import StepPlan
from moesaic.engine.schedule.request_state import RequestState
from moesaic.models.tiny import FAMILIES, make_tiny_checkpoint
from tests.e2e.names import check_that_a_name_is_free
from tests.e2e.poison_rank import POISONS, Poison

POISON = 5
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, "logit_bias": {POISON: -100}}


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that turns one token into NaN."""
    folder = make_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("poisoned"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def engine(poisoned: Path) -> Iterator[Engine]:
    with Engine(model_path=str(poisoned), max_total_tokens=256, page_size=4) as engine:
        yield engine


def prompts() -> list[list[int]]:
    return [[7 + i, 20, 30 + i, 40] * (3 + i) for i in range(6)]


def ids(outputs: Any) -> list[list[int]]:
    return [output["output_ids"] for output in outputs]


def test_numbers_that_are_not_finite_fail_their_request_alone(engine: Engine) -> None:
    alone = [engine.generate(input_ids=prompt, sampling_params=GREEDY) for prompt in prompts()]
    engine.flush_cache()
    bad = [10, 11, 12, 13, POISON, 14, 15, 16, 17]
    for _ in range(3):
        streams = [
            engine.generate(input_ids=p, sampling_params=GREEDY, stream=True) for p in prompts()
        ]
        started = [next(stream) for stream in streams]
        assert len(started) == len(streams)
        with pytest.raises(RuntimeError, match="not finite"):
            engine.generate(input_ids=bad, sampling_params=GREEDY)
        with pytest.raises(RuntimeError, match="not finite"):
            score = {"max_new_tokens": 0}
            engine.generate(
                input_ids=bad, sampling_params=score, return_logprob=True, logprob_start_len=0
            )
        assert ids([list(stream)[-1] for stream in streams]) == ids(alone)
    info = engine.get_server_info()
    assert info["pages_used"] == 0 and info["running"] == info["waiting"] == 0
    # Pages before the bad token are as good as any; the pages after it are of use to nobody.
    prompt = [*bad[:4], 20, 21]
    shared = engine.generate(input_ids=prompt, sampling_params=GREEDY)
    engine.flush_cache()
    fresh = engine.generate(input_ids=prompt, sampling_params=GREEDY)
    assert shared["output_ids"] == fresh["output_ids"]


BREAKING = {
    "plain": {},
    "chunks": {"chunked_prefill_size": 16, "page_size": 4},
    # Not all requests fit at once: some are retracted, or wait.
    "few pages": {"max_total_tokens": 96, "page_size": 4, "chunked_prefill_size": 24},
}


@pytest.fixture(
    scope="module",
    params=["plain", pytest.param("chunks", marks=pytest.mark.slow), "few pages"],
)
def breaking(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(model_path="tiny:qwen3_moe", **BREAKING[request.param]) as made:
        Poison(made._core.runner)
        yield made


@pytest.mark.parametrize("name", POISONS)
def test_a_request_that_breaks_a_step_ends_alone(breaking: Engine, name: str) -> None:
    safe = {**GREEDY, "logit_bias": dict.fromkeys(POISONS.values(), -100.0)}
    chooses = {**safe, "logit_bias": {POISONS[name]: 100.0}}
    alone = [breaking.generate(input_ids=prompt, sampling_params=safe) for prompt in prompts()]
    for place in (0, 3):
        breaking.flush_cache()
        calls = [(prompt, safe) for prompt in prompts()]
        calls[place:place] = [([7, 8, 9], chooses), ([50, POISONS[name], 51], safe)]
        outputs = breaking.generate(
            input_ids=[prompt for prompt, _ in calls], sampling_params=[p for _, p in calls]
        )
        assert isinstance(outputs, list)
        bad = [outputs.pop(place), outputs.pop(place)]
        assert ids(outputs) == ids(alone) and ids(bad) == [[POISONS[name]], []]
        for answer in bad:
            reason = answer["meta_info"]["finish_reason"]
            assert reason["type"] == "abort"
            assert f"ZeroDivisionError('poison in {name}')" in reason["message"]
    info = breaking.get_server_info()
    assert info["pages_used"] == 0 and info["running"] == info["waiting"] == 0


def test_logprobs_of_prompts_are_not_lost_nor_doubled(breaking: Engine) -> None:
    safe = {**GREEDY, "logit_bias": dict.fromkeys(POISONS.values(), -100.0)}
    scored = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    alone = [breaking.generate(input_ids=p, sampling_params=safe, **scored) for p in prompts()]
    breaking.flush_cache()
    bad = [50, POISONS["router"], 51]
    outputs = breaking.generate(input_ids=[*prompts(), bad], sampling_params=safe, **scored)
    assert isinstance(outputs, list) and outputs.pop()["output_ids"] == []
    for output, expected in zip(outputs, alone, strict=True):
        for key in ("input_token_logprobs", "output_token_logprobs"):
            pairs = zip(output["meta_info"][key], expected["meta_info"][key], strict=True)
            for (logprob, token, _), (other, same, _) in pairs:
                assert token == same and logprob == pytest.approx(other, abs=1e-4)


def test_an_error_that_follows_no_request_harms_nobody(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a step of many fails, as one that is out of memory would."""
    expected = ids(engine.generate(input_ids=prompts(), sampling_params=GREEDY))
    before = engine.get_server_info()["failed_steps"]
    begin, sizes = ModelRunner.begin, list[int]()

    def fail_if_large(self: ModelRunner, plan: StepPlan, *rest: Any) -> Any:
        sizes.append(plan.num_sequences)
        if plan.num_sequences > 2:
            raise MemoryError("made up")
        return begin(self, plan, *rest)

    monkeypatch.setattr(ModelRunner, "begin", fail_if_large)
    assert ids(engine.generate(input_ids=prompts(), sampling_params=GREEDY)) == expected
    failed = sum(size > 2 for size in sizes)
    assert failed == engine.get_server_info()["failed_steps"] - before > 0


def test_steps_that_always_fail_end_every_request_and_not_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def fail(self: ModelRunner, plan: StepPlan, *rest: Any) -> Any:
        steps.append(plan.num_sequences)
        raise ZeroDivisionError("made up")

    monkeypatch.setattr(ModelRunner, "begin", fail)
    outputs = engine.generate(input_ids=prompts(), sampling_params=GREEDY)
    assert isinstance(outputs, list)
    for output in outputs:
        assert "made up" in output["meta_info"]["finish_reason"]["message"]
    assert len(steps) <= 2 * len(outputs) - 1
    monkeypatch.undo()
    assert len(engine.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"]) == 12
    assert engine.get_server_info()["pages_used"] == 0


def test_pages_of_others_leave_no_trace(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages come back full of NaN before every use: what was in them must not matter."""
    expected = engine.generate(input_ids=prompts(), sampling_params=GREEDY)
    engine.flush_cache()
    engine._core.runner.cache.keys[:, 1:].fill_(torch.nan)
    engine._core.runner.cache.values[:, 1:].fill_(torch.nan)
    assert ids(engine.generate(input_ids=prompts(), sampling_params=GREEDY)) == ids(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_runs(family: str, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(family, tmp_path)
    answers = {}
    for dtype in ("float32", "float16"):
        with Engine(model_path=str(folder), dtype=dtype, page_size=4) as engine:
            answers[dtype] = engine.generate(
                input_ids=prompts(),
                sampling_params=GREEDY,
                return_logprob=True,
                logprob_start_len=0,
            )
    for full, half in zip(answers["float32"], answers["float16"], strict=True):
        pairs = zip(
            full["meta_info"]["input_token_logprobs"][1:],
            half["meta_info"]["input_token_logprobs"][1:],
            strict=True,
        )
        assert max(abs(a[0] - b[0]) for a, b in pairs) < 0.15


def test_request_properties() -> None:
    request = Request("r", [1, 2, 3], SamplingParams(), 0, 4, 0)
    assert not request.is_decoding and request.remaining_tokens == 4
    request.num_computed = 3
    request.token_ids.append(9)
    assert request.is_decoding and request.output_ids == [9] and request.remaining_tokens == 3


def running(engine: Engine) -> int:
    info = engine.get_server_info()
    return int(info["running"]) + int(info["waiting"])


@pytest.mark.parametrize(
    "arguments",
    [
        {"logprob_start_len": 1.0},
        {"logprob_start_len": "1"},
        {"top_logprobs_num": 2.5},
        {"top_logprobs_num": True},
        {"input_ids": [[1], 2]},
        {"input_ids": 3},
        {"input_ids": [1.5]},
        {"sampling_params": "x"},
        {"sampling_params": {"n": 10**9}},
        {"rid": ""},
        {"prompt": 5, "input_ids": None},
        {"prompt": {"a": 1}, "input_ids": None},
        {"prompt": "a\ud800b", "input_ids": None},
    ],
    ids=str,
)
def test_wrong_types_are_refused_before_submission(engine: Engine, arguments: Any) -> None:
    call = {"input_ids": [1, 2, 3], "return_logprob": True, **arguments}
    with pytest.raises(ValueError, match=r"must|mixes|more than|surrogates"):
        engine.generate(**call)
    assert running(engine) == 0
    assert engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 1})["output_ids"]


def test_arrays_and_tensors_are_token_ids(engine: Engine) -> None:
    expected = ids(engine.generate(input_ids=[[7, 8, 9], [20, 21]], sampling_params=GREEDY))
    for rows in ([torch.tensor([7, 8, 9]), torch.tensor([20, 21])], [(7, 8, 9), [20, 21]]):
        assert ids(engine.generate(input_ids=rows, sampling_params=GREEDY)) == expected
    one = engine.generate(input_ids=torch.tensor([7, 8, 9]), sampling_params=GREEDY)
    assert one["output_ids"] == expected[0]


def test_an_error_in_the_engine_itself_ends_requests_but_not_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("made up")

    monkeypatch.setattr(engine._core.planner.scheduler, "schedule", fail)
    with pytest.raises(RuntimeError, match="made up"):
        engine.generate(input_ids=[1, 2], sampling_params=GREEDY)
    monkeypatch.undo()
    assert len(engine.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"]) == 12
    assert engine.get_server_info()["pages_used"] == 0


def test_a_listener_that_raises_harms_nobody(engine: Engine) -> None:
    calls = []

    def listen(progress: Any) -> None:
        calls.append(progress)
        raise ZeroDivisionError("made up")

    params = SamplingParams(temperature=0, max_new_tokens=3, ignore_eos=True)
    request = Request("listener", [1, 2, 3], params, 0, 3, -1)
    engine._thread.submit(lambda core: core.add(RequestState(request, None, listen, 1)))
    other = engine.generate(input_ids=[1, 2], sampling_params=GREEDY)
    assert len(other["output_ids"]) == 12 and calls[-1].finished and running(engine) == 0


def test_a_stream_that_nobody_reads_costs_nothing(engine: Engine) -> None:
    stream = engine.generate(input_ids=[1, 2], sampling_params=GREEDY, stream=True)
    assert running(engine) == 0
    del stream
    stream = engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 200}, stream=True)
    next(stream)
    stream.close()
    assert running(engine) == 0


def test_requests_are_aborted_by_the_name_they_were_given(engine: Engine) -> None:
    long = {"max_new_tokens": 240, "ignore_eos": True, "temperature": 0}
    stream = engine.generate(input_ids=[1, 2], sampling_params=long, stream=True, rid="mine")
    assert next(stream)["meta_info"]["id"] == "mine"
    with pytest.raises(ValueError, match="in use"):
        engine.generate(input_ids=[1, 2], rid="mine")
    other = engine.generate(input_ids=[1, 2], sampling_params=GREEDY, stream=True, rid="mine-0-1")
    next(other)
    assert [engine.abort(name) for name in ("min", "mine-1", "mine")] == [0, 0, 1]
    assert list(other)[-1]["meta_info"]["finish_reason"]["type"] == "length"
    last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] < 240
    with pytest.raises(ValueError, match="one request"):
        engine.abort(["mine"])  # type: ignore[arg-type]


CLASHES: list[tuple[Any, Any, str]] = [
    ({"n": 2}, ["a", "a-1"], "rid 'a-1' would name two outputs"),
    ([{"n": 1}, {"n": 3}], ["b-2", "b"], "rid 'b-2' would name two outputs"),
    ({}, ["same", "same"], "rid 'same' would name two outputs"),
    ({}, ["a"], "rid has 1 ids for 2 prompts"),
    ({"n": 2}, ["a", "b", "c", "d"], "rid has 4 ids for 2 prompts"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("params", "rid", "told"), CLASHES, ids=str)
def test_ids_that_would_clash_are_refused(
    engine: Engine, params: Any, rid: list[str], told: str, stream: bool
) -> None:
    """Else one of two answers would never come."""
    call = {"input_ids": [[1, 2], [3, 4]], "sampling_params": params, "rid": rid, "stream": stream}
    with pytest.raises(ValueError, match=told):
        engine.generate(**call)
    with pytest.raises(ValueError, match=told):
        asyncio.run(engine.async_generate(**call))
    assert running(engine) == 0


def test_samples_and_prompts_of_a_call_have_ids_of_their_own(engine: Engine) -> None:
    def ids_of(prompts: Any, rid: Any) -> list[str]:
        params = {"n": 2, "max_new_tokens": 1, "ignore_eos": True}
        answers = engine.generate(input_ids=prompts, sampling_params=params, rid=rid)
        return [answer["meta_info"]["id"] for answer in answers]

    two = [[1, 2], [3, 4]]
    assert ids_of([1, 2], "a") == ids_of([[1, 2]], "a") == ["a", "a-1"]
    assert ids_of(two, ["a", "b"]) == ["a", "a-1", "b", "b-1"]
    assert ids_of(two, "a") == ["a-0", "a-0-1", "a-1", "a-1-1"]
    first, other, second, last = ids_of(two, None)
    assert (other, last) == (f"{first}-1", f"{second}-1") and first != second


def test_queue_limit_counts_what_cannot_run(poisoned: Path) -> None:
    with Engine(model_path=str(poisoned), max_running_requests=2, max_queued_requests=1) as engine:
        fits = engine.generate(input_ids=[[1], [2], [3]], sampling_params=GREEDY)
        assert [len(answer["output_ids"]) for answer in fits] == [12] * 3
        with pytest.raises(RuntimeError, match="--max-queued-requests 1"):
            engine.generate(input_ids=[[1], [2], [3], [4]], sampling_params=GREEDY)
        assert engine.generate(input_ids=[1], sampling_params=GREEDY)["output_ids"]


def test_a_config_that_cuts_layers_off_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint("mixtral", tmp_path)
    config = folder / "config.json"
    config.write_text(
        config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 1')
    )
    with pytest.raises(ValueError, match=r"not in the model model\.layers\.1\."):
        Engine(model_path=str(folder))


def test_tiny_models_by_name() -> None:
    with Engine(model_path="tiny:mixtral") as engine:
        assert (
            engine.generate("hello", {"max_new_tokens": 3})["meta_info"]["completion_tokens"] >= 1
        )


def test_a_name_is_free_when_its_request_is_over(engine: Engine) -> None:
    check_that_a_name_is_free(engine)
