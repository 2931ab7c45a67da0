"""Requests whose prompts one instance computes and another continues, against one that does both.
Instances are real: each with a supervisor and ranks as processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from typing import Any

import httpx
import openai
import pytest

from bench.http_server import free_port
from moesaic import Engine
from moesaic.engine.frontend.core_client import CoreClient
from moesaic.router.args import RouterArgs
from tests.e2e.grid import model_path, prompts
from tests.server.routers import routed
from tests.server.serving import served, wait_until

SAME: dict[str, Any] = {
    "log_level": "error",
    "num_threads": 1,
    "enable_deterministic_inference": True,
    "dist_timeout": 30,  # two cores may be shared with other work: it only ends what hangs
}
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


@dataclass
class Pair:
    """Two instances, and how to ask both."""

    prefill: Engine
    decode: Engine
    port: int
    rooms: Iterator[int] = field(default_factory=lambda: count(1 << 40, 16))

    def where(self, number: int | None = None) -> dict[str, Any]:
        """For one prompt, or for as many."""
        room: Any = next(self.rooms)
        if number is not None:
            room = [room, *(next(self.rooms) for _ in range(number - 1))]
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": room,
        }

    def generate(self, **call: Any) -> Any:
        """The decode instance's answers; the prefill instance must answer, too."""
        with ThreadPoolExecutor(1) as pool:
            halves = self.where(len(call["input_ids"])) | call
            first = pool.submit(lambda: self.prefill.generate(**halves))
            found = self.decode.generate(**halves)
            firsts: Any = first.result(60)
        for one, whole in zip(firsts, found, strict=True):
            assert one["output_ids"] == whole["output_ids"][:1]
        return found

    def counts(self) -> tuple[int, int, int]:
        """Prompts that have arrived, those computed after all, and tokens of these."""
        groups = self.decode.get_stats().groups
        return (
            sum(group.prompts_arrived for group in groups),
            sum(group.prompts_recomputed for group in groups),
            sum(group.prompt_tokens for group in groups),
        )

    def check_idle(self) -> None:
        for engine in (self.prefill, self.decode):
            wait_until(lambda engine=engine: engine.get_server_info()["rooms"] == [])
            wait_until(lambda engine=engine: engine.get_server_info()["pages_used"] == 0)


def start(stack: ExitStack, family: str, prefill: dict[str, Any], decode: dict[str, Any]) -> Pair:
    port, path = free_port(), model_path(family)
    there = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": port}
    first = Engine(apart=True, model_path=path, **SAME, **there, **prefill)
    stack.enter_context(first)
    here = {"disaggregation_mode": "decode", **decode}
    second = stack.enter_context(Engine(apart=True, model_path=path, **SAME, **here))
    return Pair(first, second, port)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Engine]:
    with Engine(model_path=model_path("qwen3_moe"), **SAME) as made:
        yield made


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Neither their meshes nor their pages are alike, and not all requests fit at once."""
    with ExitStack() as stack:
        prefill = {"tp_size": 2, "page_size": 4, "chunked_prefill_size": 16}
        prefill |= {"max_running_requests": 4}
        decode = {"pp_size": 2, "page_size": 16, "max_total_tokens": 320}
        decode |= {"disaggregation_decode_enable_radix_cache": True}
        yield start(stack, "qwen3_moe", prefill, decode)


def without_times(outputs: list[dict[str, Any]]) -> list[Any]:
    left_out = {"id", "e2e_latency", "ttft", "total_retractions"}
    left_out |= {"cached_tokens", "cached_tokens_details"}
    return [
        {
            **output,
            "meta_info": {k: v for k, v in output["meta_info"].items() if k not in left_out},
        }
        for output in outputs
    ]


def test_answers_are_those_of_one_instance(pair: Pair, one_rank: Engine) -> None:
    """To the bit: tokens, logprobs of prompts and answers, and routed experts."""
    params: list[dict[str, Any]] = [
        {"temperature": 0.9, "sampling_seed": n, "max_new_tokens": 4 + n, "ignore_eos": True}
        for n in range(len(prompts()))
    ]
    params[1] |= {"n": 2}
    params[2] |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    params[3] |= {"min_new_tokens": 3, "ignore_eos": False}
    params[4] |= {"max_new_tokens": 1}
    params[5] |= {"max_new_tokens": 0}
    call: dict[str, Any] = {
        "input_ids": prompts(),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [3, 7],
        "return_routed_experts": True,
    }
    with ThreadPoolExecutor(1) as pool:
        halves = pair.where(len(prompts())) | call
        first = pool.submit(lambda: pair.prefill.generate(**halves))
        found: Any = pair.decode.generate(**halves)
        first.result(60)
    expected: Any = one_rank.generate(**call)
    assert without_times(found) == without_times(expected)
    pair.check_idle()
    arrived, recomputed, _ = pair.counts()
    assert (arrived, recomputed) == (16, 0)  # one has no answer, one has two


def test_no_prompt_is_computed_twice(pair: Pair, one_rank: Engine) -> None:
    """The decode instance computes none, and takes what it has cached from its own cache."""
    before = pair.counts()
    for _ in range(2):
        found = pair.generate(input_ids=prompts()[9:12], sampling_params=GREEDY)
        expected: Any = one_rank.generate(input_ids=prompts()[9:12], sampling_params=GREEDY)
        assert without_times(found) == without_times(expected)
    assert pair.counts() == (before[0] + 6, before[1], before[2])
    pair.check_idle()


def test_a_half_that_does_not_come(
    pair: Pair, one_rank: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode instance computes the prompt itself; a prefill instance waits without a rank."""
    before, expected = pair.counts(), one_rank.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)
    with ThreadPoolExecutor(1) as pool:
        call = {"input_ids": [5, 6, 7], "sampling_params": GREEDY}
        answer = pool.submit(lambda: pair.decode.generate(**call, **pair.where()))
        wait_until(lambda: len(pair.prefill.get_server_info()["rooms"]) == 1)
        [theirs] = pair.prefill.get_server_info()["rooms"]
        [ours] = pair.decode.get_rooms()
        assert theirs["phase"] == "waits for its request" and theirs["room"] == ours["room"]
        assert (ours["phase"], ours["peer"]) == ("waits for prefill", f"127.0.0.1:{pair.port}")
        with monkeypatch.context() as silent:  # ranks that do not answer in time
            silent.setattr(pair.decode._thread, "query", lambda what: [])
            [told] = pair.decode.get_rooms()
        assert told == ours | {"phase": "waits for its rank", "seconds": told["seconds"]}
        found: Any = answer.result(60)
    assert without_times([found]) == without_times([expected])  # type: ignore[list-item]
    assert pair.counts()[:2] == (before[0], before[1] + 1)
    waits = pair.prefill.generate(rid="alone", stream=True, **call, **pair.where())
    thread = threading.Thread(target=lambda: list(waits))
    thread.start()
    wait_until(lambda: len(pair.prefill.get_server_info()["rooms"]) == 1)
    [room] = pair.prefill.get_server_info()["rooms"]
    assert (room["phase"], room["peer"]) == ("waits for decode", None)
    assert pair.prefill.abort("alone") == 1
    thread.join(60)
    assert not thread.is_alive()
    pair.check_idle()


def test_halves_of_other_prompts_do_not_meet(pair: Pair, one_rank: Engine) -> None:
    """Same room, same number of tokens: the answer, and what stays cached, are of its own."""
    before, where = pair.counts(), pair.where()
    own, other = [[*range(n, n + 40)] for n in (30, 31)]
    with ThreadPoolExecutor(1) as pool:
        call = {"sampling_params": GREEDY}
        answer = pool.submit(lambda: pair.decode.generate(input_ids=own, **call, **where))
        with pytest.raises(RuntimeError, match="the instances got different prompts"):
            pair.prefill.generate(input_ids=other, **call, **where)
        found: Any = answer.result(60)
    expected: Any = one_rank.generate(input_ids=own, sampling_params=GREEDY)
    again: Any = pair.decode.generate(input_ids=own, sampling_params=GREEDY)
    assert found["output_ids"] == again["output_ids"] == expected["output_ids"]
    assert pair.counts()[:2] == (before[0], before[1] + 1)
    pair.check_idle()


def test_an_aborted_answer_ends_both_halves(pair: Pair) -> None:
    call: dict[str, Any] = {"input_ids": [prompts()[9]] * 6, **pair.where(6), "rid": "both"}
    params = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
    stream: Any = pair.decode.generate(stream=True, sampling_params={"max_new_tokens": 200}, **call)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: pair.prefill.generate(sampling_params=params, **call))
        next(stream)
        stream.close()
        assert len(first.result(60)) == 6
    pair.check_idle()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bootstrap_room": -1}, "bootstrap_room is -1: give a number from 0"),
        ({"bootstrap_room": "x"}, "bootstrap_room must be made of integers"),
        ({"bootstrap_room": 1, "bootstrap_port": 0}, "bootstrap_port is 0: give one of 1 to"),
        ({"bootstrap_room": 1}, "bootstrap_host is None: give the host of the prefill"),
        ({"bootstrap_room": 1, "bootstrap_host": "a..b"}, "bootstrap_host is 'a..b': give the"),
    ],
)
def test_bad_rooms(pair: Pair, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pair.decode.generate(input_ids=[1], **fields)
    for rooms in (7, [7, 7]):
        with pytest.raises(ValueError, match="2 prompts need 2 different rooms: give a list"):
            pair.decode.generate(input_ids=[[1], [2]], bootstrap_room=rooms)


def test_one_server_has_no_rooms(one_rank: Engine) -> None:
    with pytest.raises(ValueError, match="this server does both halves: leave it out"):
        one_rank.generate(input_ids=[1], bootstrap_room=1, bootstrap_host="x")


def test_ports_that_are_taken(pair: Pair) -> None:
    flags = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": pair.port}
    text = f"--disaggregation-bootstrap-port {pair.port}: cannot listen at 127.0.0.1"
    with pytest.raises(ValueError, match=text):
        Engine(apart=True, model_path=model_path("qwen3_moe"), **SAME, **flags)


def test_the_router_makes_one_server_of_them(pair: Pair, one_rank: Engine) -> None:
    """The openai client, streams and all; and what an instance tells of its rooms."""
    with ExitStack() as stack:
        urls = [stack.enter_context(served(one)) for one in (pair.prefill, pair.decode, one_rank)]
        prefill, decode, alone = urls
        flags = {"prefill": (f"{prefill} {pair.port}",), "decode": (decode,)}
        args = RouterArgs(pd_disaggregation=True, **flags)
        _, http = stack.enter_context(routed(args))
        call: dict[str, Any] = {
            "model": "default",
            "messages": [{"role": "user", "content": "Mosaic"}],
            "temperature": 0.9,
            "seed": 5,
            "max_tokens": 12,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "extra_body": {"ignore_eos": True},
        }
        expected = client_of_url(alone).chat.completions.create(**call)
        before = pair.counts()
        found = client_of_url(str(http.base_url)).chat.completions.create(**call)
        assert found.choices == expected.choices and found.usage == expected.usage
        stream = client_of_url(str(http.base_url)).chat.completions.create(**call, stream=True)
        texts = ["", ""]
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in expected.choices]
        body = {"text": ["One", "Two"], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
        answers = [httpx.post(f"{url}/generate", json=body, timeout=60).json() for url in urls[2:]]
        pairs = zip(http.post("/generate", json=body).json(), answers[0], strict=True)
        assert all(one["output_ids"] == other["output_ids"] for one, other in pairs)
        assert pair.counts() == (before[0] + 6, *before[1:])
        state = httpx.get(f"{decode}/pd_state", timeout=60).json()
        assert state == {"disaggregation_mode": "decode", "rooms": []}
    pair.check_idle()


def test_halves_come_in_opposite_orders(pair: Pair, one_rank: Engine) -> None:
    """More than the prefill instance runs, and than the decode instance has pages for: neither
    waits for what the other one has not begun."""
    bodies = [
        {"input_ids": [*range(n, n + 90)], "sampling_params": GREEDY, **pair.where()}
        for n in range(10)
    ]
    before = pair.counts()
    with ExitStack() as stack:
        urls = [stack.enter_context(served(one)) for one in (pair.prefill, pair.decode)]
        pool = stack.enter_context(ThreadPoolExecutor(2 * len(bodies)))

        def send(url: str, body: dict[str, Any]) -> Any:
            time.sleep(0.02)  # in this order
            return pool.submit(lambda: httpx.post(f"{url}/generate", json=body, timeout=60).json())

        firsts = [send(urls[0], body) for body in reversed(bodies)]
        wait_until(lambda: len(pair.prefill.get_server_info()["rooms"]) == len(bodies))
        answers = [send(urls[1], body) for body in bodies]
        found = [answer.result(60)["output_ids"] for answer in answers]
        assert [first.result(60)["output_ids"] for first in firsts] == [
            ids[:1] for ids in reversed(found)
        ]
    call: dict[str, Any] = {"input_ids": [body["input_ids"] for body in bodies]}
    expected: Any = one_rank.generate(**call, sampling_params=GREEDY)
    assert found == [one["output_ids"] for one in expected]
    assert pair.counts()[:2] == (before[0] + len(bodies), before[1])
    pair.check_idle()


def client_of_url(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="-", max_retries=0)


def test_a_prefill_instance_dies(pair: Pair, one_rank: Engine) -> None:
    """The last test of the pair: its ranks are killed while prompts are computed and sent."""
    lines = [[*range(n, n + 90)] for n in range(8)]
    # The decode instance has pages for two prompts at a time: others wait for their answers.
    call: dict[str, Any] = {"input_ids": lines}
    call["sampling_params"] = GREEDY | {"max_new_tokens": 24}
    expected: Any = one_rank.generate(**call)
    core = pair.prefill._thread._core
    assert isinstance(core, CoreClient)
    with ThreadPoolExecutor(1) as pool:
        halves, arrived = call | pair.where(len(lines)), pair.counts()[0]
        first = pool.submit(lambda: pair.prefill.generate(**halves))
        answers = pool_of_one(lambda: pair.decode.generate(**halves))
        wait_until(lambda: pair.counts()[0] > arrived)
        os.kill(core.service.pid, signal.SIGKILL)
        assert without_times(answers()) == without_times(expected)
        assert {one["meta_info"]["finish_reason"]["type"] for one in first.result(60)} >= {"abort"}
    assert pair.counts()[1] > 1
    found: Any = pair.decode.generate(**call | {"input_ids": lines[0]}, **pair.where())
    assert without_times([found]) == without_times(expected[:1])
    wait_until(lambda: pair.decode.get_server_info()["rooms"] == [])


def pool_of_one(work: Any) -> Any:
    """Its result, waited for when it is called."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return lambda: future.result(90)


@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
@pytest.mark.timeout(300)
def test_caches_that_are_read_by_nixl(one_rank: Engine) -> None:
    """Meshes and pages differ; one instance asks for NIXL, the other takes what it is offered."""
    nixl = {"disaggregation_transfer_backend": "nixl"}
    call: dict[str, Any] = {"input_ids": prompts(), "sampling_params": GREEDY}
    expected: Any = one_rank.generate(return_logprob=True, **call)
    with ExitStack() as stack:
        prefill = {"tp_size": 2, "page_size": 4, "chunked_prefill_size": 16, **nixl}
        pair = start(stack, "qwen3_moe", prefill, {"page_size": 16})
        for _ in range(2):
            found = pair.generate(return_logprob=True, **call)
            assert without_times(found) == without_times(expected)
        assert pair.counts()[:2] == (2 * len(prompts()), 0)
        used = pair.prefill.get_server_info()["kv_transports"]
        assert set(used.values()) == {"nixl"}, used
        pair.check_idle()


DPA = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": "deepep"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "prefill", "decode"),
    [
        ("deepseek_v3", {**DPA, "deepep_mode": "normal"}, {"pp_size": 2, "page_size": 3}),
        ("deepseek_v3", {"tp_size": 4}, {**DPA, "deepep_mode": "low_latency", "page_size": 8}),
        (
            "deepseek_v3",
            {"tp_size": 2, "moe_a2a_backend": "deepep", "overlap": "tbo"},
            {"tp_size": 2, "moe_a2a_backend": "ascend_fuseep", "deepep_mode": "low_latency"},
        ),
        ("gpt_oss", {"pp_size": 4, "chunked_prefill_size": 16}, {"tp_size": 4, "page_size": 5}),
        ("mixtral", {"tp_size": 8}, {"tp_size": 2, "dp_size": 2}),
        ("qwen2_moe", {"tp_size": 2, "pp_size": 2}, {"speculative_algorithm": "NGRAM"}),
    ],
)
def test_other_layouts(family: str, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    call: dict[str, Any] = {"input_ids": prompts(), "sampling_params": GREEDY}
    with Engine(model_path=model_path(family), **SAME) as engine:
        expected: Any = engine.generate(return_logprob=True, **call)
    with ExitStack() as stack:
        pair = start(stack, family, prefill, decode)
        found = pair.generate(return_logprob=True, **call)
        assert without_times(found) == without_times(expected)
        assert pair.counts()[:2] == (len(prompts()), 0)
        pair.check_idle()
