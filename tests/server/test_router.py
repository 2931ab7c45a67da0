"""The router in front of equal servers: clients see one server, also when one of them is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import Request

from moesaic import Engine
from moesaic.engine.frontend.core_client import CoreClient
from moesaic.router.app import Router
from moesaic.router.args import RouterArgs
from moesaic.server.app import ROUTES
from moesaic.server.bodies import MAX_BODY
from moesaic.server.routes import ADMIN
from tests.server.routers import routed
from tests.server.serving import Listening, held, served, wait_until

FLAGS: dict[str, Any] = {
    "log_level": "error",
    "num_threads": 1,
    "enable_deterministic_inference": True,
}
CHAT: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "Hello"}],
    "temperature": 0.8,
    "seed": 3,
    "max_tokens": 24,
    "extra_body": {"ignore_eos": True},
}

CALL: dict[str, Any] = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object",
                    "properties": {"town": {"type": "string", "maxLength": 40}},
                    "required": ["town"],
                },
            },
        }
    ],
    "tool_choice": "required",
    "chat_template_kwargs": {"enable_thinking": False},
    "max_tokens": 60,
}


def client_of(client: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="-", max_retries=0)


class Servers:
    """Two, and a router."""

    def __init__(self, stack: ExitStack, apart: bool = False) -> None:
        made = [Engine(model_path="tiny:qwen3_moe", apart=apart, **FLAGS) for _ in "ab"]
        self.engines = [stack.enter_context(engine) for engine in made]
        self.urls = tuple(stack.enter_context(served(engine)) for engine in self.engines)
        args = RouterArgs(worker_urls=self.urls, policy="round_robin", retry_max_retries=2)
        self.router, self.client = stack.enter_context(routed(args))
        self.openai = client_of(self.client)

    def kill(self, number: int) -> None:
        """The supervisor, and the ranks with it."""
        core = self.engines[number]._thread._core
        assert isinstance(core, CoreClient)
        os.kill(core.service.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


def chunks_of(servers: Servers, **more: Any) -> list[Any]:
    return list(servers.openai.chat.completions.create(**CHAT, stream=True, **more))


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_clients_see_one_server(servers: Servers) -> None:
    direct = openai.OpenAI(base_url=f"{servers.urls[0]}/v1", api_key="-")
    expected = direct.chat.completions.create(**CHAT).choices
    for _ in range(2):  # each server in turn
        found = servers.openai.chat.completions.create(**CHAT)
        assert found.choices == expected
        assert text_of(chunks_of(servers)) == expected[0].message.content
    assert [worker.total for worker in servers.router.workers] == [2, 2]
    assert servers.openai.models.list().data[0].id == direct.models.list().data[0].id
    body = {"input_ids": [1, 2, 3], "sampling_params": {"temperature": 0, "max_new_tokens": 3}}
    answers = [servers.client.post("/generate", json=body).json()["output_ids"] for _ in "ab"]
    assert answers[0] == answers[1] and len(answers[0]) == 3
    with pytest.raises(openai.BadRequestError, match="temperature"):
        servers.openai.chat.completions.create(**(CHAT | {"temperature": -1}))
    assert servers.client.post("/generate", content=b"{").status_code == 400
    assert servers.client.get("/nowhere").status_code == 404


def test_a_body_without_end_is_not_read_to_the_end(servers: Servers) -> None:
    taken = 0

    async def receive() -> dict[str, Any]:
        nonlocal taken
        taken += 1 << 20
        assert taken < 4 * MAX_BODY, "far too much is read"
        return {"type": "http.request", "body": bytes(1 << 20), "more_body": True}

    scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b""}
    request = Request({**scope, "headers": [(b"host", b"localhost")]}, receive)
    assert asyncio.run(servers.router.handle(request)).status_code == 413
    assert taken <= MAX_BODY + (1 << 20)
    nested = servers.client.post("/generate", content=b'{"x":' + b"[" * 100_000)
    assert nested.status_code == 400


def test_what_operators_see(servers: Servers) -> None:
    assert servers.client.get("/health").json() == {"status": "ok"}
    workers = servers.client.get("/workers").json()["workers"]
    assert [(one["url"], one["is_healthy"]) for one in workers] == [
        (url, True) for url in servers.urls
    ]
    lines = servers.client.get("/metrics").text
    assert f'moesaic_router_worker_up{{url="{servers.urls[0]}",role="both"}} 1' in lines
    assert 'path="/v1/chat/completions",status="200"' in lines


def test_paths_that_clients_invent_are_counted_as_one(servers: Servers) -> None:
    assert servers.router.proxy is not None
    counted = servers.router.proxy.stats.requests
    servers.client.get("/v1/models/first"), servers.client.get("/invented")
    size, others = len(counted), counted["other", 404]
    for number in range(5):
        assert servers.client.get(f"/invented/{number}").status_code == 404
        assert servers.client.get(f"/v1/models/{number}").status_code == 404
    assert len(counted) == size and counted["other", 404] == others + 5
    assert counted["/v1/models/{model:path}", 404] >= 6


def test_a_client_that_leaves_ends_its_request(servers: Servers) -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
    with servers.client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        next(response.iter_lines())
    for engine in servers.engines:
        wait_until(lambda engine=engine: engine.get_server_info()["running"] == 0)
    wait_until(lambda: all(worker.requests == 0 for worker in servers.router.workers))


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_before_the_first_token(servers: Servers, streams: bool) -> None:
    """While the instances compute nothing: only the client's leaving can end the request."""
    body = {"text": "x", "sampling_params": {"max_new_tokens": 2}, "stream": streams}
    workers = servers.router.workers
    with ExitStack() as stack:
        for engine in servers.engines:
            stack.enter_context(held(engine))
        with pytest.raises(httpx.TimeoutException):
            servers.client.post("/generate", json=body, timeout=0.5)
        wait_until(lambda: all(worker.requests == 0 for worker in workers))
    wait_until(lambda: not any(engine._inflight for engine in servers.engines))
    assert all(worker.is_healthy for worker in workers)


def test_a_server_is_lost_in_the_middle() -> None:
    """Streams go on where they were, whole answers come from the other one; then there is none."""
    with ExitStack() as stack:
        servers = Servers(stack, apart=True)
        call = CHAT | {"max_tokens": 160, "logprobs": True, "top_logprobs": 2}
        expected = servers.openai.chat.completions.create(**call).choices[0]
        found: dict[str, Any] = {}

        def ask(name: str, **more: Any) -> None:
            found[name] = servers.openai.chat.completions.create(**call, **more)
            found[name] = list(found[name]) if more else found[name]

        asked = [
            threading.Thread(target=ask, args=("whole",)),
            threading.Thread(target=ask, args=("stream",), kwargs={"stream": True}),
        ]
        lost = servers.router.workers[1]
        for thread in asked:  # both on the one that is lost, which has every other turn
            before = lost.total
            thread.start()
            wait_until(lambda before=before: lost.total == before + 1)
            if thread is asked[0]:
                servers.openai.chat.completions.create(**(CHAT | {"max_tokens": 1}))
        generated = lambda: servers.engines[1].get_stats().groups[0].generated_tokens  # noqa: E731
        wait_until(lambda: generated() > 30)
        assert lost.requests == 2
        servers.kill(1)
        for thread in asked:
            thread.join(60)
        assert found["whole"].choices[0] == expected
        assert text_of(found["stream"]) == expected.message.content
        told = [one for c in found["stream"] for one in (c.choices[0].logprobs or _NONE).content]
        assert expected.logprobs is not None and told == expected.logprobs.content
        assert len({chunk.id for chunk in found["stream"]}) == 1
        stats = servers.router.proxy.stats  # type: ignore[union-attr]
        assert stats.retries >= 1 and stats.resumed == 1
        wait_until(lambda: not lost.is_healthy)
        servers.kill(0)
        with pytest.raises(openai.InternalServerError):
            servers.openai.chat.completions.create(**CHAT)
        wait_until(lambda: servers.client.get("/health").status_code == 503)


def events_with_ids(response: httpx.Response) -> Iterator[tuple[str, str]]:
    number = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            number = line.removeprefix("id: ")
        elif line.startswith("data: "):
            yield number, line.removeprefix("data: ")


@pytest.mark.parametrize("kind", ["chat", "call", "native"])
def test_another_router_goes_on(servers: Servers, kind: str) -> None:
    """The client has the id of its request and that of the last event; no router knows either."""
    chat = {name: value for name, value in CHAT.items() if name not in ("seed", "extra_body")}
    chat |= {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    path, body = {
        "chat": ("/v1/chat/completions", chat | {"ignore_eos": True}),
        "call": ("/v1/chat/completions", chat | CALL),
        "native": (
            "/generate",
            {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 24}},
        ),
    }[kind]
    call: dict[str, Any] = {"method": "POST", "url": path, "json": body}
    own = {"X-Request-Id": "mine", "Last-Event-ID": ""}
    with servers.client.stream(**call, headers=own) as response:
        assert response.headers["x-request-id"] == "mine"
        expected = [*events_with_ids(response)]
    assert expected[-1][1] == "[DONE]" and len(expected) > 10
    assert any('"arguments"' in data for _, data in expected) == (kind == "call")
    args = RouterArgs(worker_urls=servers.urls[::-1])
    with routed(args) as (_, second):
        for kept in (1, len(expected) // 2, len(expected) - 1):
            headers = own | {"Last-Event-ID": expected[kept - 1][0]}
            with second.stream(**call, headers=headers) as response:
                rest = [*events_with_ids(response)]
            texts = [
                joined([data for _, data in [*expected[:kept], *rest]]),
                joined([data for _, data in expected]),
            ]
            assert texts[0] == texts[1] and rest[-1][1] == "[DONE]"
        wrong = second.post(path, json=body, headers=own | {"Last-Event-ID": "nothing"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "Last-Event-ID"


def joined(events: list[str]) -> Any:
    """The text and the calls of each choice; of /generate the text of its last event, each of which
    has more tokens than the one before it. An id of a call would come twice if a second server's
    were passed on."""
    found: dict[Any, str] = {}
    tokens = 0
    for event in map(json.loads, events[:-1]):
        for choice in event.get("choices", ()):
            delta, index = choice["delta"], choice["index"]
            found[index] = found.get(index, "") + (delta.get("content") or "")
            for called in delta.get("tool_calls", ()):
                key, function = (index, called["index"]), called["function"]
                begins = function["name"] + " " if "id" in called else ""
                found[key] = found.get(key, "") + begins + function["arguments"]
        if "text" in event:
            before, tokens = tokens, event["meta_info"]["completion_tokens"]
            assert tokens > before
            found = {0: event["text"]}
    return found


def test_a_drained_server_is_left_at_once(servers: Servers) -> None:
    """What is open goes on elsewhere, streams where they are, though the server would end it."""
    call = CHAT | {"max_tokens": 150}
    expected = servers.openai.chat.completions.create(**call).choices[0].message.content
    first, second = servers.router.workers
    found: dict[bool, str] = {}

    def ask(streams: bool) -> None:
        answer = servers.openai.chat.completions.create(**call, stream=streams)
        text = text_of(list(answer)) if streams else answer.choices[0].message.content
        found[streams] = text

    stats = servers.router.proxy.stats  # type: ignore[union-attr]
    resumed, retries = stats.resumed, stats.retries
    with ExitStack() as stack:
        direct = stack.enter_context(httpx.Client(base_url=servers.urls[0], timeout=60))
        stack.callback(lambda: direct.post("/drain", json={"drain": False}))
        stack.enter_context(held(servers.engines[0]))
        asked = [threading.Thread(target=ask, args=(streams,)) for streams in (True, False) * 2]
        for thread in asked:
            before = first.total + second.total
            thread.start()
            wait_until(lambda before=before: first.total + second.total == before + 1)
        counted = partial(direct.post, "/drain", json={"drain": False})
        wait_until(lambda: counted().json()["open_requests"] == first.requests > 0)
        direct.post("/drain").raise_for_status()
        assert direct.post("/generate", json={"text": "x"}).status_code == 503
        for thread in asked:
            thread.join(60)
        assert not first.is_healthy and first.state()["is_drained"]
    assert found == {True: expected, False: expected}
    assert stats.resumed + stats.retries > resumed + retries
    wait_until(lambda: first.is_healthy and not first.state()["is_drained"])


class _NONE:
    content: tuple[Any, ...] = ()


def test_a_full_server_is_passed_over() -> None:
    with ExitStack() as stack:
        flags = FLAGS | {"max_running_requests": 1, "max_queued_requests": 1}
        made = [Engine(model_path="tiny:qwen3_moe", **flags) for _ in "ab"]
        for engine in made:
            stack.enter_context(engine)
        urls = tuple(stack.enter_context(served(engine)) for engine in made)
        args = RouterArgs(worker_urls=urls, policy="round_robin")
        _, client = stack.enter_context(routed(args))
        body = {"text": "x", "sampling_params": {"max_new_tokens": 2}}
        with held(made[0]):
            ask = lambda: httpx.post(f"{urls[0]}/generate", json=body, timeout=60)  # noqa: E731
            blocked = [threading.Thread(target=ask) for _ in "ab"]
            for thread in blocked:
                thread.start()
            wait_until(lambda: len(made[0]._inflight) == 2)
            assert [client.post("/generate", json=body).status_code for _ in "ab"] == [200, 200]
        for thread in blocked:
            thread.join(60)


# --- what is passed on ---


def test_routes_of_administrators_are_not_passed_on(servers: Servers) -> None:
    """Not under any other spelling either; the instances have no keys, so they would answer."""
    client, refused = servers.client, {route.path for route in ROUTES if route.access is ADMIN}
    assert {"/server_info", "/flush_cache", "/rebalance", "/start_profile"} <= refused
    for route in ROUTES:
        if route.access is ADMIN:
            answer = client.request(route.method, f"{route.path}/")
            assert answer.status_code == 403, route
            assert f"{route.path} is for administrators" in answer.json()["error"]["message"]
    abort = client.post("/abort_request", json={"abort_all": True})
    assert abort.status_code == 403 and "abort_all" in abort.text
    for path in ("/v1/models/%2E%2E%2F%2E%2E%2Fserver_info", "/v1/models/x%2F..%2F.."):
        assert client.get(path).status_code == 404
    names = client.get("/nowhere").json()["error"]["message"]
    assert "/v1/models" in names and "/flush_cache" not in names
    assert client.get("/generate").status_code == 405


def test_streams_of_other_routes_come_as_they_are_written(servers: Servers) -> None:
    """Of /v1/responses and /v1/messages; and what one server has stored is found there."""
    client = servers.openai
    call: dict[str, Any] = {"model": "default", "input": "Hello", "max_output_tokens": 12}
    with client.responses.create(**call, stream=True) as stream:
        names = [event.type for event in stream]
    assert names[0] == "response.created" and names[-1].startswith("response.")
    assert names.count("response.output_text.delta") > 3
    body = {"max_tokens": 900, "stream": True, "messages": [{"role": "user", "content": "x"}]}
    with servers.client.stream("POST", "/v1/messages", json=body) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: message_start"  # the answer has not ended
        assert any(engine._inflight for engine in servers.engines)
    wait_until(lambda: not any(engine._inflight for engine in servers.engines))
    wait_until(lambda: all(worker.requests == 0 for worker in servers.router.workers))
    first = client.responses.create(**call)
    for _ in "ab":  # whichever server is asked first
        assert client.responses.retrieve(first.id).output_text == first.output_text
        client.responses.create(**call, previous_response_id=first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_0")


def test_an_abort_reaches_the_server_that_has_the_request(servers: Servers) -> None:
    for number in range(4):
        body = {
            "text": "x",
            "rid": f"to end {number}",
            "stream": True,
            "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True},
        }
        with servers.client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            told = servers.client.post("/abort_request", json={"rid": body["rid"]})
            assert told.json() == {"status": "ok", "aborted": 1}
            last = [line for line in lines if line.startswith("data: {")][-1]
        assert json.loads(last[6:])["meta_info"]["finish_reason"]["type"] == "abort"
    none = servers.client.post("/abort_request", json={})
    assert none.status_code == 400 and "give the rid" in none.text


def test_names_and_pages_of_others_are_refused(servers: Servers) -> None:
    """A site could give its name to this machine's address, or call it from a page."""
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        for method, path in (("POST", "/generate"), ("GET", "/v1/models"), ("GET", "/workers")):
            assert servers.client.request(method, path, headers=headers).status_code == 403
        assert servers.client.get("/health", headers=headers).status_code == 200
    assert servers.client.get("/v1/models", headers={"Host": "localhost:1"}).status_code == 200


def test_a_slow_body_does_not_hold_a_connection(servers: Servers) -> None:
    """As in front of a server."""
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    router = Router(servers.router.args)
    with (
        Listening(router.app()).serve(seconds=0.5) as running,
        socket.create_connection(("127.0.0.1", running.port), 20) as connection,
    ):
        connection.sendall(head)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408")


def test_routes_of_users_are_passed_on(servers: Servers) -> None:
    client = servers.client
    for path in ("/", "/version", "/openapi.json", "/model_info", "/v1/loads?include=core"):
        direct = httpx.get(servers.urls[0] + path, timeout=60)
        assert (found := client.get(path)).status_code == direct.status_code == 200, path
        assert found.headers["content-type"] == direct.headers["content-type"]
    assert "a?b/c" in client.get("/v1/models/a%3Fb%2Fc").json()["error"]["message"]
    assert client.post("/abort_request", json={"rid": "none"}).json()["aborted"] == 0


@pytest.mark.parametrize("params", [5, "x", [1], True])
def test_sampling_params_that_are_no_object(servers: Servers, params: Any) -> None:
    answer = servers.client.post("/generate", json={"text": "x", "sampling_params": params})
    assert answer.status_code == 400 and "sampling_params" in answer.text
