"""SGLang's frontend language, with this server for its runtime."""

from __future__ import annotations

import re
from typing import Any

import pytest
import sglang as sgl


@pytest.fixture(scope="module", autouse=True)
def backend(house: Any) -> Any:
    endpoint = sgl.RuntimeEndpoint(house.url)
    sgl.set_default_backend(endpoint)
    return endpoint


@sgl.function
def complete(s: Any, prompt: str, **options: Any) -> None:
    s += prompt + sgl.gen("answer", max_tokens=300, temperature=0, **options)


def test_gen(problems: Any) -> None:
    for problem in problems:
        assert complete.run(prompt=problem["rendered"])["answer"] == problem["reply"]


def test_batch(problems: Any) -> None:
    states = complete.run_batch([{"prompt": p["rendered"]} for p in problems], num_threads=3)
    assert [state["answer"] for state in states] == [p["reply"] for p in problems]


def test_stop(problem: Any) -> None:
    state = complete.run(prompt=problem["rendered"], stop="####")
    assert state["answer"] == problem["reply"].partition("####")[0]
    meta = state.get_meta_info("answer")
    assert meta["prompt_tokens"] == problem["prompt_tokens"]
    assert meta["finish_reason"] == {"type": "stop", "matched": "####"}


def test_stream(problem: Any) -> None:
    state = complete.run(prompt=problem["rendered"], stream=True)
    pieces = list(state.text_iter("answer"))
    assert "".join(pieces) == problem["reply"] and len(pieces) > 1


def test_regex(problems: Any) -> None:
    # The number of the phone book: four digits, here without the mark that the model puts first.
    state = complete.run(prompt=problems[2]["rendered"] + "####", regex=r" [0-9]{4}")
    assert "####" + state["answer"] == problems[2]["reply"]
    state = complete.run(prompt=problems[2]["rendered"], regex=r"[a-z]{3,5}!")
    assert re.fullmatch(r"[a-z]{3,5}!", state["answer"])


def test_typed_gen(problems: Any) -> None:
    @sgl.function
    def phone(s: Any, prompt: str) -> None:
        s += prompt + "#### " + sgl.gen_int("number", max_tokens=6, temperature=0)

    found = phone.run(prompt=problems[2]["rendered"])["number"]
    assert int(found) == int(problems[2]["reply"].removeprefix("#### "))


def test_select(problems: Any) -> None:
    right = problems[2]["reply"].removeprefix("#### ")

    @sgl.function
    def choose(s: Any, prompt: str) -> None:
        s += prompt + "#### " + sgl.select("number", ["7423", right, "1964"])

    assert choose.run(prompt=problems[2]["rendered"])["number"] == right


def test_fork(problems: Any) -> None:
    @sgl.function
    def both(s: Any, prompt: str) -> None:
        s += prompt
        forks = s.fork(2)
        forks += sgl.gen("answer", max_tokens=300, temperature=0)
        s += forks[0]["answer"] + forks[1]["answer"]

    problem = problems[3]
    assert both.run(prompt=problem["rendered"]).text() == problem["rendered"] + 2 * problem["reply"]


def test_logprobs(given: Any) -> None:
    pair = given["continuations"][0]
    state = complete.run(prompt=pair["context"], return_logprob=True, stop="House")
    logprobs = [entry[0] for entry in state.get_meta_info("answer")["output_token_logprobs"]]
    assert sum(logprobs) == pytest.approx(pair["logprob"], abs=1e-3)


def test_operations(backend: Any, house: Any) -> None:
    assert backend.get_model_name() == house.model
    assert sgl.get_server_info()["model_path"] == house.model
    sgl.flush_cache()
