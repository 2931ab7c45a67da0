"""Parts of the router: streams that begin anew, and which server is chosen."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from moesaic.router.args import POLICIES, RouterArgs
from moesaic.router.halves import Call
from moesaic.router.policies import BLOCK, MOST_AHEAD, MOST_BLOCKS, CacheAware, _blocks
from moesaic.router.policies import POLICIES as CLASSES
from moesaic.router.workers import HealthChecks, Worker
from moesaic.server.event_ids import StreamMark
from moesaic.server.replay import Diverged, StreamReplay

# --- streams that begin anew ---


CALLED = ("weather", "time")


def chunk(text: str, **more: Any) -> dict[str, Any]:
    logprobs = {"content": [{"token": letter} for letter in text]}
    choice = {"index": 0, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}
    return {"id": "first", "choices": [choice | {"token_ids": [*map(ord, text)]} | more]}


def call(number: int, text: str, **more: Any) -> dict[str, Any]:
    """A piece of the arguments of a call."""
    called = {"index": number, "function": {"arguments": text} | more}
    if more:
        called |= {"id": f"call {random.random()}", "type": "function"}
    return chunk(text, delta={"tool_calls": [called]})


def pieces(text: str, chooser: random.Random) -> list[str]:
    places = sorted({0, len(text), *(chooser.randint(0, len(text)) for _ in range(4))})
    return [text[a:b] for a, b in pairwise(places)]


def cut(text: str, chooser: random.Random) -> list[dict[str, Any]]:
    """As chunks of any lengths, with a beginning, two calls of tools with the text, and an end."""
    events = [chunk("", delta={"role": "assistant", "content": ""})]
    events += map(chunk, pieces(text, chooser))
    for number, name in enumerate(CALLED):
        events.append(call(number, "", name=name))
        events += [call(number, piece) for piece in pieces(text, chooser)]
    return [*events, chunk("", delta={}, finish_reason="stop")]


def check_whole(got: list[dict[str, Any]], text: str) -> None:
    """The client has everything once."""
    choices = [event["choices"][0] for event in got]
    assert "".join(one["delta"].get("content") or "" for one in choices) == text
    tokens = text * (1 + len(CALLED))
    assert "".join(e["token"] for one in choices for e in one["logprobs"]["content"]) == tokens
    assert "".join(chr(token) for one in choices for token in one["token_ids"]) == tokens
    assert [one["finish_reason"] for one in choices].count("stop") == 1
    assert sum("role" in one["delta"] for one in choices) == 1
    assert len({event["id"] for event in got}) == 1
    calls = [found for one in choices for found in one["delta"].get("tool_calls", ())]
    for number, name in enumerate(CALLED):
        own = [found for found in calls if found["index"] == number]
        assert [found["function"].get("name") for found in own].index(name) == 0
        assert all(("id" in found) == ("name" in found["function"]) for found in own)
        assert sum("id" in found for found in own) == 1
        assert "".join(found["function"]["arguments"] for found in own) == text


@pytest.mark.parametrize("number", range(60))
def test_every_token_comes_once(number: int) -> None:
    chooser = random.Random(number)
    text = "abcdefghijklmnopqrstuvwxyz"[: chooser.randint(1, 26)]
    replay, got = StreamReplay("/v1/chat/completions"), list[dict[str, Any]]()

    def take(events: list[dict[str, Any]]) -> None:
        for event in events:
            if (passed := replay.pass_on(json.dumps(event))) is not None:
                got.append(json.loads(passed))

    for instance in range(3):
        events = [{**event, "id": str(instance)} for event in cut(text, chooser)]
        take(events[: chooser.randint(0, len(events) - 1)] if instance < 2 else events)
        if instance < 2:
            replay.restart()
    check_whole(got, text)


@pytest.mark.parametrize("number", range(40))
def test_another_router_continues(number: int) -> None:
    """With nothing but the id of the last event that the client has, at any place; instances may be
    lost on the way, too."""
    chooser = random.Random(number)
    text = "abcd😀äöü\ufffdefghijklmnop"[: chooser.randint(1, 24)]
    replay, got = StreamReplay("/v1/chat/completions"), list[dict[str, Any]]()
    for attempt in range(4):
        events = [{**event, "id": str(attempt)} for event in cut(text, chooser)]
        for event in events[: chooser.randint(0, len(events) - 1)] if attempt < 3 else events:
            if (passed := replay.pass_on(json.dumps(event))) is not None:
                got.append(json.loads(passed))
        if chooser.random() < 0.5:
            replay.restart()
        else:
            mark = StreamMark.decode(replay.mark.encode())
            replay = StreamReplay.resumed("/v1/chat/completions", mark)
    check_whole(got, text)


def test_another_call_is_noticed() -> None:
    """By a router that has seen the call, and by one that has its digest alone."""
    path = "/v1/chat/completions"
    for others in ([call(0, "", name="time")], [call(0, "", name="weather"), call(0, "no")]):
        replay = StreamReplay(path)
        for event in (call(0, "", name="weather"), call(0, "yes")):
            replay.pass_on(json.dumps(event))
        unseen = StreamReplay.resumed(path, replay.mark)
        replay.restart()
        with pytest.raises(Diverged):
            for event in others:
                replay.pass_on(json.dumps(event))
        end = chunk("", delta={}, finish_reason="stop")
        with pytest.raises(Diverged):
            for event in (*others, end):
                unseen.pass_on(json.dumps(event))


def test_logprobs_without_text_come_once() -> None:
    """A token may end in the middle of a letter, whose text the next one has."""
    begin, first, rest = chunk(""), chunk("a"), [chunk("b", delta={"content": ""}), chunk("c")]
    replay, got = StreamReplay("/v1/chat/completions"), list[str]()
    for events in ([begin, first], [begin, first, *rest]):
        got += filter(None, [replay.pass_on(json.dumps(event)) for event in events])
        replay.restart()
    choices = [json.loads(event)["choices"][0] for event in got]
    assert "".join(e["token"] for one in choices for e in one["logprobs"]["content"]) == "abc"


def test_another_router_notices_another_answer() -> None:
    replay = StreamReplay("/v1/completions")
    replay.pass_on(json.dumps({"choices": [{"index": 1, "text": "one two"}]}))
    other = StreamReplay.resumed("/v1/completions", replay.mark)
    assert other.pass_on(json.dumps({"choices": [{"index": 1, "text": "one"}]})) is None
    with pytest.raises(Diverged):
        other.pass_on(json.dumps({"choices": [{"index": 1, "text": " three"}]}))
    growing = StreamReplay("/generate")
    growing.pass_on(json.dumps({"text": "one two", "output_ids": [1, 2], "meta_info": {}}))
    for text, fits in (("one two three", True), ("one 2 three", False)):
        other = StreamReplay.resumed("/generate", growing.mark)
        first = {"text": text[:3], "output_ids": [1], "meta_info": {}}
        assert other.pass_on(json.dumps(first)) is None
        event = json.dumps({"text": text, "output_ids": [1, 2, 3], "meta_info": {}})
        if fits:
            assert other.pass_on(event) == event
        else:
            with pytest.raises(Diverged):
                other.pass_on(event)


@pytest.mark.parametrize("is_unseen", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_an_answer_that_ends_earlier_is_noticed(path: str, is_unseen: bool) -> None:
    """The client has more than the second instance writes."""

    def event(text: str, reason: str | None = None) -> str:
        end = {"finish_reason": reason}
        if path == "/generate":
            ids = list(range(len(text)))
            return json.dumps({"text": text, "output_ids": ids, "meta_info": end})
        return json.dumps({"choices": [{"index": 0, "text": text, **end}]})

    cases = ("one two", "stop", True), ("one", "length", True), ("one", "stop", False)
    for text, reason, fits in cases:  # an aborted answer ends with length
        replay = StreamReplay(path)
        replay.pass_on(event("one two"))
        if is_unseen:
            replay = StreamReplay.resumed(path, replay.mark)
        else:
            replay.restart()
        if fits:
            assert replay.pass_on(event(text, reason)) is not None
        else:
            with pytest.raises(Diverged):
                replay.pass_on(event(text, reason))


@pytest.mark.parametrize("text", ["x", "ä", "kQ", "!!!!", "kIKh"])
def test_ids_that_no_router_made(text: str) -> None:
    with pytest.raises(ValueError, match="Last-Event-ID is not the id of an event of a stream"):
        StreamMark.decode(text)


def test_seeds_follow_from_ids() -> None:
    seeds = [Call.of("/v1/completions", {"prompt": "x"}, name).body["seed"] for name in "aab"]
    assert seeds[0] == seeds[1] != seeds[2]
    assert Call.of("/v1/completions", {"prompt": "x", "seed": 5}, "a").body["seed"] == 5


def test_growing_answers_never_shrink() -> None:
    replay = StreamReplay("/generate")

    def event(number: int, end: bool = False) -> str:
        meta = {"finish_reason": {"type": "length"} if end else None}
        return json.dumps({"text": "x" * number, "output_ids": [1] * number, "meta_info": meta})

    assert [replay.pass_on(event(n)) is not None for n in (1, 3)] == [True, True]
    replay.restart()
    assert [replay.pass_on(event(n)) is not None for n in (1, 2, 3, 4)] == [False] * 3 + [True]
    assert replay.pass_on(event(4, end=True)) is not None
    replay.restart()
    with pytest.raises(Diverged):
        replay.pass_on(json.dumps({"text": "xy", "output_ids": [1, 2], "meta_info": {}}))


def test_another_answer_is_noticed() -> None:
    replay = StreamReplay("/v1/completions")
    replay.pass_on(json.dumps({"choices": [{"index": 0, "text": "one two"}]}))
    replay.restart()
    replay.pass_on(json.dumps({"choices": [{"index": 0, "text": "one"}]}))
    with pytest.raises(Diverged):
        replay.pass_on(json.dumps({"choices": [{"index": 0, "text": " three"}]}))


@pytest.mark.parametrize("is_unseen", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_token_ids_are_compared_and_cut(path: str, is_unseen: bool) -> None:
    """Also those of answers without a text."""

    def event(first: int, ids: list[int]) -> str:
        if path == "/generate":  # which repeats all of them
            return json.dumps({"text": "", "output_ids": [*range(first), *ids], "meta_info": {}})
        return json.dumps({"choices": [{"index": 0, "text": "", "token_ids": ids}]})

    for ids, left in (([0, 1, 2, 200_000], [200_000]), ([0, 1], None), ([0, 1, 9], Diverged)):
        replay = StreamReplay(path)
        for first, found in ((0, [0]), (1, [1, 2])):
            assert replay.pass_on(event(first, found)) == event(first, found)
        if is_unseen:
            replay = StreamReplay.resumed(path, replay.mark)
        else:
            replay.restart()
        if left is Diverged:
            with pytest.raises(Diverged):
                replay.pass_on(event(0, ids))
        else:
            whole = ids if path == "/generate" else left
            assert replay.pass_on(event(0, ids)) == (left and event(0, whole))


@pytest.mark.parametrize("is_unseen", [False, True])
def test_the_usage_comes_once(is_unseen: bool) -> None:
    """Also if the instance is lost behind it, and before the end of the stream."""
    path, usage = "/v1/completions", json.dumps({"choices": [], "usage": {"total_tokens": 3}})
    text = json.dumps({"choices": [{"index": 0, "text": "ab", "finish_reason": "stop"}]})
    replay = StreamReplay(path)
    assert [replay.pass_on(text), replay.pass_on(usage)] == [text, usage]
    if is_unseen:
        replay = StreamReplay.resumed(path, StreamMark.decode(replay.mark.encode()))
    else:
        replay.restart()
    assert [replay.pass_on(one) for one in (text, usage, "[DONE]")] == [None, None, "[DONE]"]


# --- choices ---


def some(number: int) -> list[Worker]:
    return [Worker(f"http://h:{n}", "both") for n in range(number)]


@pytest.mark.parametrize("name", POLICIES)
def test_policies_use_all_that_are_idle(name: str) -> None:
    policy, workers = CLASSES[name](), some(3)
    assert {policy.choose(workers, f"{n}" * 200).url for n in range(100)} == {
        worker.url for worker in workers
    }
    assert policy.choose(workers[:1], "x") is workers[0]


@pytest.mark.parametrize("name", ["power_of_two", "least_tokens"])
def test_busy_ones_get_less(name: str) -> None:
    policy, workers = CLASSES[name](), some(2)
    with workers[0].serving(100):
        assert {policy.choose(workers, "x").url for _ in range(50)} == {workers[1].url}


def test_a_prefix_stays_where_it_is() -> None:
    policy, workers, stem = CLASSES["cache_aware"](), some(3), "s" * 5 * BLOCK
    first = policy.choose(workers, stem)
    assert {policy.choose(workers, stem + str(n) * BLOCK).url for n in range(20)} == {first.url}
    with ExitStack() as stack:
        for _ in range(MOST_AHEAD + 1):
            stack.enter_context(first.serving(1))
        assert policy.choose(workers, stem) is not first


def test_prefixes_are_forgotten_with_their_server() -> None:
    """Pods come and go, each with an address of its own."""
    policy = CacheAware()
    for number in range(5):
        policy.choose([Worker(f"http://{number}", "both")], "x" * 2 * BLOCK)
    assert len(policy._known) == 0


def test_a_large_prompt_is_read_once_and_does_not_fill_the_index() -> None:
    worker, policy, stem = Worker("http://a", "both"), CacheAware(), "s" * 5 * BLOCK
    large = Call.of("/v1/chat/completions", {"messages": ["x" * BLOCK * (MOST_BLOCKS + 1)]})
    assert large.length == len(json.dumps(large.body["messages"])) < large.size
    assert large.text is large.text and large.body["messages"][0].startswith(large.text[2:])
    policy.choose([worker], stem)
    policy.choose([worker], large.text)
    assert policy._known[worker].keys() >= {*_blocks(stem)}
    assert policy._cached(worker, _blocks(large.text)) == len(large.text) // BLOCK > 100


# --- health ---


def test_what_is_open_on_a_server_that_nothing_reaches_is_moved() -> None:
    """Of a node that is gone: checks fail at once, but no connection that is open breaks off."""

    async def check(worker: Worker) -> None:
        async with aiohttp.ClientSession() as session:
            checks = HealthChecks(RouterArgs(worker_urls=(worker.url,)), [worker], session)
            await checks.check(worker)
            assert not worker.is_healthy and not worker.leaving.is_set()
            await checks.check(worker)

    with socket.socket() as bound:  # nobody listens
        bound.bind(("127.0.0.1", 0))
        worker = Worker("http://127.0.0.1:{1}".format(*bound.getsockname()), "both")
        asyncio.run(check(worker))
    assert worker.leaving.is_set()
