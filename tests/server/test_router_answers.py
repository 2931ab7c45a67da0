"""What a router makes of the answers of instances, of flags and of bodies."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from moesaic.cli.main import main
from moesaic.cli.router import _with_ports
from moesaic.router.app import Router
from moesaic.router.args import RouterArgs
from moesaic.router.halves import Call
from moesaic.router.proxy import MAX_EVENT
from moesaic.router.workers import Worker, workers_of
from moesaic.server.context import DRAINING
from moesaic.server.errors import Refusal
from tests.server.routers import routed
from tests.server.serving import listening, wait_until


@contextmanager
def routed_to_two(*answers: Response) -> Iterator[tuple[list[bytes], Router, httpx.Client]]:
    """A router to two instances, which give these answers in turn, the last one again and again;
    and the bodies that they got."""
    bodies: list[bytes] = []

    async def answer(request: Request) -> Response:
        bodies.append(await request.body())
        return answers[min(len(bodies), len(answers)) - 1]

    async def health(_: Request) -> Response:
        return Response()

    routes = [Route("/health", health), Route("/{path:path}", answer, methods=["POST"])]
    with ExitStack() as stack:
        urls = [stack.enter_context(listening(Starlette(routes=routes))) for _ in "ab"]
        args = RouterArgs(worker_urls=tuple(urls), policy="round_robin")
        yield bodies, *stack.enter_context(routed(args))


def events_of(*texts: str) -> Response:
    return Response("".join(f"data: {text}\n\n" for text in texts), media_type="text/event-stream")


@pytest.mark.parametrize(("size", "passes"), [(5 << 20, True), (MAX_EVENT + (1 << 20), False)])
def test_large_events(size: int, passes: bool) -> None:
    event = json.dumps({"choices": [{"index": 0, "text": "x" * size}]})
    with routed_to_two(events_of(event, "[DONE]")) as (bodies, _, client):
        answer = client.post("/v1/completions", json={"prompt": "x", "stream": True})
    first, done = answer.text.strip().split("\n\n")
    found = json.loads(first.removeprefix("data: "))
    assert done == "data: [DONE]" and len(bodies) == 1
    if passes:
        assert found["choices"][0]["text"] == "x" * size
    else:
        assert f"more than {MAX_EVENT} bytes" in found["error"]["message"]


WHOLE = Response('{"choices": []}', media_type="application/json")


@pytest.mark.parametrize(
    ("status", "sent"), [(400, 1), (500, 1), (429, 2), (502, 2), (503, 2), (504, 2)]
)
def test_what_is_sent_again(status: int, sent: int) -> None:
    """What an instance cannot do now, and nothing that fails by itself."""
    refusal = Refusal(status, "no")
    with routed_to_two(refusal.response(), WHOLE) as (bodies, router, client):
        answer = client.post("/v1/completions", json={"prompt": "x"})
        assert router.proxy is not None and router.proxy.stats.retries == sent - 1
    assert len(bodies) == sent
    assert answer.content == (WHOLE.body if sent == 2 else refusal.response().body)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_redirections_are_not_followed(path: str) -> None:
    """An instance could make the router ask others in its network."""
    with routed_to_two(RedirectResponse("/elsewhere")) as (bodies, _, client):
        answer = client.post(path, json={"prompt": "x"})
    assert (answer.status_code, answer.headers["location"]) == (307, "/elsewhere")
    assert len(bodies) == 1


def test_without_a_prefill_instance() -> None:
    """A decode instance computes the prompt, too."""
    with routed_to_two(WHOLE) as (bodies, router, _):
        args = RouterArgs(
            pd_disaggregation=True,
            prefill=("http://127.0.0.1:9",),
            decode=(router.workers[0].url,),
            health_check_interval_secs=0.1,
        )
        with routed(args) as (second, client):
            wait_until(lambda: not second.workers[0].is_healthy)
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    [body] = map(json.loads, bodies)
    assert "bootstrap_room" not in body and "seed" in body


@pytest.mark.parametrize(("status", "refusals", "sent"), [(429, 9, 2), (503, 3, 4), (503, 9, 6)])
def test_when_all_refuse(status: int, refusals: int, sent: int) -> None:
    """Those that are overloaded are not asked again; those that stop may be replaced."""
    refusal = Refusal(status, "no")
    with routed_to_two(*[refusal.response()] * refusals, WHOLE) as (bodies, _, client):
        answer = client.post("/v1/completions", json={"prompt": "x"})
    assert len(bodies) == sent
    assert answer.status_code == (200 if sent > refusals else status)


@pytest.mark.parametrize(("status", "sent"), [(500, 1), (503, 2)])
def test_what_is_continued(status: int, sent: int) -> None:
    choices = [json.dumps({"choices": [{"index": 0, "text": text}]}) for text in ("one", " two")]
    error = json.dumps(Refusal(status, "no").body())
    answers = events_of(choices[0], error, "[DONE]"), events_of(*choices, "[DONE]")
    with routed_to_two(*answers) as (bodies, router, client):
        answer = client.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert router.proxy is not None and router.proxy.stats.resumed == sent - 1
    events = [line.removeprefix("data: ") for line in answer.text.strip().split("\n\n")]
    assert len(bodies) == sent and len(events) == 3 and events[2] == "[DONE]"
    if sent == 1:
        assert json.loads(events[1]) == Refusal(status, "no").body()
    else:
        assert json.loads(events[1])["choices"][0]["text"] == " two"


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_stream_of_a_drained_server_goes_on(is_silent: bool) -> None:
    """A stream that has begun; also of a server that is stopped, and answers nothing any more."""
    parts = [json.dumps({"choices": [{"index": 0, "text": text}]}) for text in ("one", " two")]
    drained, is_over = threading.Event(), threading.Event()

    async def hang() -> None:
        while not is_over.is_set():
            await asyncio.sleep(0.02)

    async def begin(request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield f"data: {parts[0]}\n\n".encode()
            drained.set()
            await hang()

        return StreamingResponse(events(), media_type="text/event-stream")

    async def finish(request: Request) -> Response:
        return events_of(*parts, "[DONE]")

    async def health(request: Request) -> Response:
        if drained.is_set() and request.url.port == port:
            if is_silent:
                await hang()
            return Refusal(503, "no", code=DRAINING).response()
        return Response()

    with ExitStack() as stack:
        urls = [
            stack.enter_context(
                listening(
                    Starlette(
                        routes=[
                            Route("/health", health),
                            Route("/{path:path}", answer, methods=["POST"]),
                        ]
                    )
                )
            )
            for answer in (begin, finish)
        ]
        port = int(urls[0].rpartition(":")[2])
        args = RouterArgs(
            worker_urls=tuple(urls),
            policy="round_robin",
            health_check_interval_secs=0.1,
            health_check_timeout_secs=1.0,
        )
        router, client = stack.enter_context(routed(args))
        stack.callback(is_over.set)
        answer = client.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert router.proxy is not None and router.proxy.stats.resumed == 1
    events = [line.removeprefix("data: ") for line in answer.text.strip().split("\n\n")]
    assert [json.loads(event)["choices"][0]["text"] for event in events[:-1]] == ["one", " two"]


def test_an_instance_with_another_role_is_not_used() -> None:
    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "disaggregation_mode": "decode"})

    with ExitStack() as stack:
        url = stack.enter_context(listening(Starlette(routes=[Route("/health", health)])))
        pair = RouterArgs(pd_disaggregation=True, prefill=(url,), decode=(url,))
        plain = RouterArgs(worker_urls=(url,))
        routers = [stack.enter_context(routed(args))[0] for args in (pair, plain)]
        prefill, decode, both = (one for router in routers for one in router.workers)
        wait_until(lambda: not (prefill.is_healthy or both.is_healthy))
        assert prefill.why == "it runs --disaggregation-mode decode, not prefill"
        assert both.why == "it runs --disaggregation-mode decode, not null" and decode.is_healthy


# --- flags and bodies ---


def test_flags_of_pairs() -> None:
    words = "--prefill http://p:1 9000 --prefill http://q:2/ none --decode http://d:3".split()
    folded = [*_with_ports(words)]
    assert folded[1] == "http://p:1 9000" and folded[3] == "http://q:2/ none"
    args = RouterArgs(pd_disaggregation=True, prefill=(folded[1], folded[3]), decode=("http://d",))
    found = [(worker.url, worker.role, worker.bootstrap_port) for worker in workers_of(args)]
    assert found == [
        ("http://p:1", "prefill", 9000),
        ("http://q:2", "prefill", 8998),
        ("http://d", "decode", 8998),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "there is nothing to route to"),
        ("--prefill http://a:1", "--prefill and --decode need --pd-disaggregation"),
        ("--pd-disaggregation --prefill http://a:1", "needs --prefill URL [PORT] and --decode"),
        ("--worker-urls ftp://x", "--worker-urls ftp://x: give http://HOST:PORT"),
        (
            "--pd-disaggregation --prefill http://a:1 80000 --decode http://b:1",
            "--prefill http://a:1 80000: the bootstrap port is a number from 1 to 65535",
        ),
        ("--policy fastest --worker-urls http://x", "--policy is 'fastest'"),
    ],
)
def test_wrong_flags(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", *line.split()]) == 2
    assert message in capsys.readouterr().err


def test_bodies_of_both_halves() -> None:
    prefill = Worker("http://p:30000", "prefill", 9000)
    body = {"messages": [], "stream": True, "stream_options": {"include_usage": True}}
    call = Call.of("/v1/chat/completions", body)
    first, second = call.halves(prefill)
    assert (first["stream"], second["stream"]) == (False, True) and "stream_options" not in first
    assert first["bootstrap_room"] == second["bootstrap_room"] and first["seed"] == second["seed"]
    assert (second["bootstrap_host"], second["bootstrap_port"]) == ("p", 9000)
    assert call.halves(prefill)[1]["seed"] == second["seed"]
    where = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 22, "bootstrap_room": 1}
    assert Call.of("/generate", {"text": ["a"], **where}).body == {"text": ["a"]}
    assert Call.of("/v1/completions", where).body.keys() == {"seed"}
    several = Call.of("/generate", {"text": ["a", "b", "c"]})
    assert len(set(several.halves(prefill)[0]["bootstrap_room"])) == 3
    assert "sampling_params" not in several.body
    assert Call.of("/generate", {"input_ids": [1, 2]}).body["sampling_params"]["sampling_seed"] > 0


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "moesaic.launch_router", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "--pd-disaggregation" in told and "--prefill-policy" in told
