"""What a caller of the engine relies on besides parity: sampling, stopping, streaming, threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import Engine
from moesaic.models.tiny import make_tiny_checkpoint
from tests.oracle import CASES, Oracle, build, load, make_prompts

EOS = 2
GREEDY = {"temperature": 0, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 60, "ignore_eos": True}

Answer = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(CASES["qwen3_moe"], tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(load(folder))


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[list[int]]:
    return make_prompts(oracle.model.config.vocab_size, seed=3)


def make_engine(folder: Path, **changes: Any) -> Engine:
    settings = {
        "model_path": str(folder),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_total_tokens": 16384,
    }
    return Engine(**(settings | changes))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with make_engine(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def text_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One token a byte, so that characters and stop strings are spread over several tokens."""
    folder = make_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("text"))
    with make_engine(folder, skip_tokenizer_init=False) as engine:
        yield engine


def one(engine: Engine, prompt: list[int], params: dict[str, Any], **options: Any) -> Answer:
    answer = engine.generate(input_ids=prompt, sampling_params=params, **options)
    assert isinstance(answer, dict)
    return answer


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def check_idle(engine: Engine) -> None:
    """Nothing runs, and no page belongs to anybody but the prefix cache."""
    info = engine.get_server_info()
    assert (info["running"], info["waiting"], info["pages_used"]) == (0, 0, 0)


def test_a_seed_decides_whatever_else_is_in_the_batch(
    folder: Path, engine: Engine, prompts: list[list[int]]
) -> None:
    params = [
        SAMPLED | {"max_new_tokens": 12, "sampling_seed": seed} for seed in range(len(prompts))
    ]
    alone = [one(engine, *pair)["output_ids"] for pair in zip(prompts, params, strict=True)]
    crowd = engine.generate(input_ids=prompts, sampling_params=params)
    tight_settings = {"max_total_tokens": 512, "chunked_prefill_size": 32}
    with make_engine(folder, disable_radix_cache=True, **tight_settings) as tight:
        squeezed = tight.generate(input_ids=prompts, sampling_params=params)
    assert [a["output_ids"] for a in crowd] == alone
    assert sum(a["meta_info"]["total_retractions"] for a in squeezed) > 0
    assert [a["output_ids"] for a in squeezed] == alone
    assert one(engine, prompts[0], params[1])["output_ids"] != alone[0]


def test_without_a_seed_samples_differ(engine: Engine, prompts: list[list[int]]) -> None:
    params = SAMPLED | {"max_new_tokens": 24}
    drawn = {tuple(one(engine, prompts[0], params)["output_ids"]) for _ in range(4)}
    assert len(drawn) == 4


def filtered(probs: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    """What should remain of a distribution, by the definitions of the three filters."""
    ordered, order = probs.sort(descending=True)
    before = ordered.cumsum(0) - ordered
    keep = before < params.get("top_p", 1.0)
    keep &= torch.arange(len(probs)) < params.get("top_k", len(probs))
    keep &= ordered >= params.get("min_p", 0.0) * ordered[0]
    left = torch.zeros_like(probs).index_put((order[keep],), ordered[keep])
    return left / left.sum()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 1.7, "top_k": 6},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.1},
    ],
    ids=lambda p: "_".join(p),
)
def test_samples_follow_the_distribution(
    engine: Engine, oracle: Oracle, prompts: list[list[int]], params: dict[str, Any]
) -> None:
    draws = 1500
    sampling = params | {"max_new_tokens": 1, "n": draws, "sampling_seed": 1, "ignore_eos": True}
    answers = engine.generate(input_ids=prompts[3], sampling_params=sampling)
    counts = Counter(answer["output_ids"][0] for answer in answers)
    logits = oracle.logits(prompts[3])[-1]
    expected = filtered((logits / params["temperature"]).softmax(-1), params)
    assert all(expected[token] > 0 for token in counts)
    seen = torch.tensor([counts[token] / draws for token in range(len(expected))])
    assert 0.5 * (seen - expected).abs().sum() < 0.08


def test_several_samples_of_a_prompt(engine: Engine, prompts: list[list[int]]) -> None:
    params = SAMPLED | {"max_new_tokens": 16, "sampling_seed": 5}
    single = one(engine, prompts[0], params)
    answers = engine.generate(
        input_ids=prompts[:2], sampling_params=[params | {"n": 3}, params | {"n": 2}]
    )
    assert isinstance(answers, list)
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [
        len(p) for p in [prompts[0]] * 3 + [prompts[1]] * 2
    ]
    assert answers[0]["output_ids"] == single["output_ids"]
    assert len({tuple(a["output_ids"]) for a in answers}) == 5
    assert len({a["meta_info"]["id"] for a in answers}) == 5


def check_top(
    row: list[tuple[float, int, str | None]], logprobs: torch.Tensor, number: int
) -> None:
    top = logprobs.topk(number)
    assert [token for _, token, _ in row] == top.indices.tolist()
    torch.testing.assert_close(
        torch.tensor([logprob for logprob, _, _ in row]), top.values, atol=1e-4, rtol=0
    )


def test_top_logprobs(engine: Engine, oracle: Oracle) -> None:
    prompt = make_prompts(320, seed=11, lengths=[70])[0]
    answer = one(
        engine,
        prompt,
        SAMPLED | {"max_new_tokens": 12, "sampling_seed": 3},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=4,
    )
    meta, output = answer["meta_info"], answer["output_ids"]
    logprobs = oracle.all_logprobs(prompt + output)
    assert meta["input_top_logprobs"][0] is None
    assert len(meta["input_top_logprobs"]) == len(prompt)
    for position, row in enumerate(meta["input_top_logprobs"][1:]):
        check_top(row, logprobs[position], 4)
    assert len(meta["output_top_logprobs"]) == 12
    for position, row in enumerate(meta["output_top_logprobs"]):
        check_top(row, logprobs[len(prompt) - 1 + position], 4)


def test_output_logprobs_of_sampled_tokens(
    engine: Engine, oracle: Oracle, prompts: list[list[int]]
) -> None:
    """They are the model's own, before temperature and filters."""
    params = {"temperature": 1.3, "top_k": 20, "max_new_tokens": 20, "ignore_eos": True}
    answer = one(engine, prompts[2], params | {"sampling_seed": 2}, return_logprob=True)
    output = answer["output_ids"]
    expected = oracle.logprobs(prompts[2] + output)[len(prompts[2]) - 1 :]
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in entries] == output
    got = torch.tensor([logprob for logprob, _, _ in entries])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert got.min() < -1, "every token was nearly certain: this would pass at any temperature"


def test_logprobs_from_the_middle_of_a_prompt(engine: Engine, oracle: Oracle) -> None:
    prompt = make_prompts(320, seed=12, lengths=[90])[0]
    params = GREEDY | {"max_new_tokens": 2}
    answer = one(engine, prompt, params, return_logprob=True, logprob_start_len=60)
    entries = answer["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in entries] == prompt[60:]
    assert entries[0][0] is None
    got = torch.tensor([logprob for logprob, _, _ in entries[1:]])
    torch.testing.assert_close(got, oracle.logprobs(prompt)[60:], atol=1e-4, rtol=0)


def test_stop_token_ids(engine: Engine, prompts: list[list[int]]) -> None:
    full = one(engine, prompts[4], GREEDY | {"max_new_tokens": 40})["output_ids"]
    stop = full[10]
    params = GREEDY | {"max_new_tokens": 40, "stop_token_ids": [stop]}
    answer = one(engine, prompts[4], params)
    assert answer["output_ids"] == full[: full.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_end_of_sequence(engine: Engine, prompts: list[list[int]]) -> None:
    forced = {"temperature": 0, "max_new_tokens": 9, "logit_bias": {EOS: 1000.0}}
    ended = one(engine, prompts[0], forced)
    assert ended["output_ids"] == [EOS]
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    ignored = one(engine, prompts[0], forced | {"ignore_eos": True})
    assert ignored["output_ids"] == [EOS] * 9
    assert ignored["meta_info"]["finish_reason"] == {"type": "length", "length": 9}


def test_min_new_tokens(engine: Engine, prompts: list[list[int]]) -> None:
    forced = {"temperature": 0, "max_new_tokens": 9, "logit_bias": {EOS: 1000.0}}
    answer = one(engine, prompts[0], forced | {"min_new_tokens": 5})
    assert len(answer["output_ids"]) == 6
    assert answer["output_ids"].index(EOS) == 5
    both = one(engine, prompts[0], GREEDY | {"min_new_tokens": 9, "max_new_tokens": 9})
    assert len(both["output_ids"]) == 9


def test_no_new_tokens(engine: Engine, oracle: Oracle) -> None:
    prompt = make_prompts(320, seed=13, lengths=[50])[0]
    params = GREEDY | {"max_new_tokens": 0}
    answer = one(engine, prompt, params, return_logprob=True, logprob_start_len=0)
    assert answer["output_ids"] == []
    assert answer["meta_info"]["completion_tokens"] == 0
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    entries = answer["meta_info"]["input_token_logprobs"]
    got = torch.tensor([logprob for logprob, _, _ in entries[1:]])
    torch.testing.assert_close(got, oracle.logprobs(prompt), atol=1e-4, rtol=0)


def test_repetition_penalty_is_that_of_transformers(
    engine: Engine, oracle: Oracle, prompts: list[list[int]]
) -> None:
    prompt = prompts[5]
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        expected = oracle.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            repetition_penalty=1.6,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
    params = GREEDY | {"max_new_tokens": 24}
    assert one(engine, prompt, params | {"repetition_penalty": 1.6})["output_ids"] == expected
    assert one(engine, prompt, params)["output_ids"] != expected


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_additive_penalties(
    engine: Engine, oracle: Oracle, prompts: list[list[int]], name: str
) -> None:
    """Both take from the logits of what was emitted: by its count, or once."""
    params = GREEDY | {"max_new_tokens": 40}
    plain = one(engine, prompts[6], params)["output_ids"]
    output = one(engine, prompts[6], params | {name: 1.9})["output_ids"]
    logits = oracle.logits(prompts[6] + output)[len(prompts[6]) - 1 : -1]
    for position, token in enumerate(output):
        counts = torch.bincount(torch.tensor(output[:position], dtype=torch.long), minlength=320)
        taken = counts if name == "frequency_penalty" else (counts > 0)
        assert token == int((logits[position] - 1.9 * taken).argmax())
    assert output != plain


def test_one_answer_or_a_list(engine: Engine, prompts: list[list[int]]) -> None:
    params = GREEDY | {"max_new_tokens": 4}
    single = engine.generate(input_ids=prompts[0], sampling_params=params)
    listed = engine.generate(input_ids=[prompts[0]], sampling_params=params)
    assert isinstance(single, dict)
    assert isinstance(listed, list)
    assert [a["output_ids"] for a in listed] == [single["output_ids"]]
    assert single["text"] == ""
    assert single["meta_info"]["e2e_latency"] > 0


def test_the_context_ends_an_answer(folder: Path, prompts: list[list[int]]) -> None:
    prompt = (prompts[0] + prompts[1] + prompts[2] + [5] * 60)[:60]
    with make_engine(folder, context_length=80) as short:
        answer = one(short, prompt, GREEDY | {"max_new_tokens": None})
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert len(answer["output_ids"]) == 20


def test_streaming(engine: Engine, prompts: list[list[int]]) -> None:
    params = GREEDY | {"max_new_tokens": 20}
    whole = one(engine, prompts[0], params, return_logprob=True)
    pieces = list(
        engine.generate(
            input_ids=prompts[0], sampling_params=params, stream=True, return_logprob=True
        )
    )
    assert [len(piece["output_ids"]) for piece in pieces] == list(range(1, 21))
    for piece in pieces:
        length = len(piece["output_ids"])
        assert piece["output_ids"] == whole["output_ids"][:length]
        assert len(piece["meta_info"]["output_token_logprobs"]) == length
    reasons = [piece["meta_info"]["finish_reason"] for piece in pieces]
    assert reasons[:-1] == [None] * 19
    assert reasons[-1] == {"type": "length", "length": 20}


def test_streaming_several_prompts(engine: Engine, prompts: list[list[int]]) -> None:
    params = GREEDY | {"max_new_tokens": 10}
    whole = engine.generate(input_ids=prompts[:3], sampling_params=params)
    last: dict[int, list[int]] = {}
    for piece in engine.generate(input_ids=prompts[:3], sampling_params=params, stream=True):
        index, ids = piece["index"], piece["output_ids"]
        assert ids[: len(last.get(index, []))] == last.get(index, [])
        last[index] = ids
    assert [last[index] for index in range(3)] == [a["output_ids"] for a in whole]


def test_streamed_text_only_grows(text_engine: Engine) -> None:
    params = SAMPLED | {"max_new_tokens": 200, "sampling_seed": 4}
    whole = text_engine.generate(prompt="Grüße, 世界", sampling_params=params)
    before = ""
    for piece in text_engine.generate(prompt="Grüße, 世界", sampling_params=params, stream=True):
        assert piece["text"].startswith(before)
        before = piece["text"]
    assert before == whole["text"]
    assert len(before) > 50


def test_stop_string_over_several_tokens(text_engine: Engine) -> None:
    params = SAMPLED | {"max_new_tokens": 120, "sampling_seed": 4}
    text = text_engine.generate(prompt="abc", sampling_params=params)["text"]
    stop = text[40:44]
    start = text.index(stop)
    with_stop = params | {"stop": ["never appears", stop]}
    answer = text_engine.generate(prompt="abc", sampling_params=with_stop)
    assert answer["text"] == text[:start]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = text_engine.generate(prompt="abc", sampling_params=with_stop | {"no_stop_trim": True})
    assert kept["text"].startswith(text[: start + len(stop)])
    assert len(kept["output_ids"]) < 120


def test_async_calls_run_together(engine: Engine, prompts: list[list[int]]) -> None:
    params = GREEDY | {"max_new_tokens": 24}
    expected = [one(engine, prompt, params)["output_ids"] for prompt in prompts[:8]]

    async def main() -> list[list[int]]:
        calls = [engine.async_generate(input_ids=p, sampling_params=params) for p in prompts[:8]]
        return [answer["output_ids"] for answer in await asyncio.gather(*calls)]

    steps = engine.get_server_info()["steps"]
    assert asyncio.run(main()) == expected
    # One after the other they would take 8 x 24 steps for the answers alone.
    assert engine.get_server_info()["steps"] - steps < 4 * 24


def test_async_streaming(engine: Engine, prompts: list[list[int]]) -> None:
    params = GREEDY | {"max_new_tokens": 12}
    expected = one(engine, prompts[0], params)["output_ids"]

    async def read() -> list[list[int]]:
        stream = await engine.async_generate(
            input_ids=prompts[0], sampling_params=params, stream=True
        )
        return [piece["output_ids"] async for piece in stream]

    async def main() -> list[list[list[int]]]:
        return await asyncio.gather(read(), read())

    for pieces in asyncio.run(main()):  # a reader that is late gets several tokens at once
        assert pieces[-1] == expected and len(pieces) > 1
        assert pieces == [expected[: len(piece)] for piece in pieces]
        assert [len(piece) for piece in pieces] == sorted({len(piece) for piece in pieces})


def test_a_cancelled_task_stops_its_request(engine: Engine, prompts: list[list[int]]) -> None:
    async def main() -> None:
        params = GREEDY | {"max_new_tokens": 400}
        task = asyncio.create_task(
            engine.async_generate(input_ids=prompts[0], sampling_params=params)
        )
        while not task.done() and engine.get_server_info()["running"] == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until(lambda: engine.get_server_info()["running"] == 0)
    check_idle(engine)


def test_abort_while_running(engine: Engine, prompts: list[list[int]]) -> None:
    params = GREEDY | {"max_new_tokens": 200}
    last: Answer = {}
    for piece in engine.generate(input_ids=prompts[7], sampling_params=params, stream=True):
        last = piece
        if len(piece["output_ids"]) == 5:
            engine.abort(piece["meta_info"]["id"])
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 5 <= len(last["output_ids"]) < 200
    check_idle(engine)
    engine.abort("nobody has this id")
    whole = one(engine, prompts[7], GREEDY | {"max_new_tokens": 5})
    assert whole["output_ids"] == last["output_ids"][:5]


def test_a_dropped_stream_stops_its_request(engine: Engine, prompts: list[list[int]]) -> None:
    params = GREEDY | {"max_new_tokens": 400}
    stream = engine.generate(input_ids=prompts[8], sampling_params=params, stream=True)
    assert isinstance(stream, Iterator)
    next(stream)
    assert engine.get_server_info()["running"] == 1
    del stream
    wait_until(lambda: engine.get_server_info()["running"] == 0)
    check_idle(engine)


def test_calls_from_several_threads(
    engine: Engine, oracle: Oracle, prompts: list[list[int]]
) -> None:
    params = GREEDY | {"max_new_tokens": 16}

    def call(index: int) -> list[Answer]:
        answers = engine.generate(input_ids=prompts[index : index + 3], sampling_params=params)
        assert isinstance(answers, list)
        return answers

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(call, range(12)))
    for index, answers in enumerate(results):
        for prompt, answer in zip(prompts[index : index + 3], answers, strict=True):
            assert len(answer["output_ids"]) == 16
            assert oracle.greedy_divergence(prompt, answer["output_ids"]) is None
    check_idle(engine)


def test_after_shutdown(folder: Path, prompts: list[list[int]]) -> None:
    with make_engine(folder) as engine:
        assert len(one(engine, prompts[0], GREEDY | {"max_new_tokens": 3})["output_ids"]) == 3
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate(input_ids=prompts[0], sampling_params=GREEDY)
    engine.shutdown()


def test_shutdown_ends_who_waits(folder: Path, prompts: list[list[int]]) -> None:
    engine = make_engine(folder)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            engine.generate(input_ids=prompts[0], sampling_params=GREEDY | {"max_new_tokens": 400})
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: engine.get_server_info()["running"] == 1)
    engine.shutdown()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert len(raised) == 1
    assert "shut down" in str(raised[0])


def test_the_prefix_cache_is_used_and_flushed(engine: Engine, oracle: Oracle) -> None:
    prompt = make_prompts(320, seed=14, lengths=[200])[0]
    params = GREEDY | {"max_new_tokens": 8}
    first, second = one(engine, prompt, params), one(engine, prompt, params)
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] >= 184
    assert first["output_ids"] == second["output_ids"]
    assert oracle.greedy_divergence(prompt, second["output_ids"]) is None
    assert engine.flush_cache() > 0
    assert one(engine, prompt, params)["meta_info"]["cached_tokens"] == 0
