"""What a client must not be able to do to others, to the log, or to who runs the server."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from starlette.requests import Request

from moesaic.core.sampling import Grammar
from moesaic.engine.engine import Engine
from moesaic.engine.errors import QueueFull
from moesaic.engine.frontend.profiler import FOLDER_VARIABLE
from moesaic.engine.text.grammar_check import MAX_OPEN, GrammarChecker
from moesaic.engine.text.grammar_child import GrammarSetup
from moesaic.server import generation
from moesaic.server.admission import AdmissionQueue
from moesaic.server.app import ROUTES
from moesaic.server.auth import Keys
from moesaic.server.bodies import MAX_DEPTH
from moesaic.server.run import Server
from tests.server.serving import Running, post_head, status_of, talk, wait_until
from tests.server.test_limits import keys

GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(
        model_path="tiny:qwen3_moe",
        num_threads=1,
        log_level="info",
        log_requests=True,
        log_requests_level=1,
        max_running_requests=4,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def running(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch, Running(engine).serve() as running:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("profile")))
        yield running


@pytest.fixture
def client(running: Running) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client


def asker(host: str, key: bytes = b"") -> Hashable:
    scope = {"type": "http", "headers": [], "client": (host, 1), generation.CLIENT: key}
    return generation.client_of(Request(scope))


def test_lines_are_by_key_and_address() -> None:
    found = [asker(host, key) for key in (b"", b"k", b"l") for host in ("1.2.3.4", "::5")]
    assert len(set(found)) == 6 and found[0] == asker("1.2.3.4")


NETWORK = [asker(f"2001:db8::{number:x}") for number in range(1, MAX_OPEN + 1)]
STRANGER = asker("2001:db8:0:1::1")


def test_addresses_of_one_network_do_not_fill_the_queue_of_requests() -> None:
    async def main() -> None:
        admission = AdmissionQueue(max_running=1, max_queued=4)
        calls = [admission.new_call(client) for client in NETWORK[: admission.most_open]]
        many = [asyncio.create_task(call.enter(1, lambda number: number)) for call in calls]
        await asyncio.sleep(0)
        assert admission.running + admission.waiting == admission.most_open
        one = admission.new_call(STRANGER)
        began = asyncio.create_task(one.enter(1, lambda number: number))
        for _ in range(3):
            await asyncio.sleep(0)
        assert many[-1].done() and isinstance(many[-1].exception(), QueueFull)
        while not began.done():  # each turn of the loop ends what has begun
            for call in calls:
                call.finished(call.held)
            await asyncio.sleep(0)
        await began
        for call in (*calls, one):
            call.leave()

    asyncio.run(main())


def test_addresses_of_one_network_do_not_fill_the_queue_of_grammars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checker, release = GrammarChecker(GrammarSetup("unused", 1, [0]), None), threading.Event()
    monkeypatch.setattr(checker._child, "ask", lambda question: b"" if release.wait(60) else b"no")

    async def main() -> list[BaseException | None]:
        many = [
            asyncio.create_task(checker.check_in_turn(Grammar("regex", f"a{number}"), client))
            for number, client in enumerate(NETWORK)
        ]
        await asyncio.sleep(0)
        one = asyncio.create_task(checker.check_in_turn(Grammar("regex", "b"), STRANGER))
        await asyncio.sleep(0)
        release.set()
        return await asyncio.gather(*many, one, return_exceptions=True)

    try:
        *many, newest, one = asyncio.run(main())
        assert isinstance(newest, QueueFull)
        assert one is None and many == [None] * (MAX_OPEN - 1)
    finally:
        checker.close()


def test_deep_arguments_of_a_call_are_refused(client: httpx.Client) -> None:
    def ask(depth: int) -> httpx.Response:
        arguments = '{"a":' * depth + "1" + "}" * depth
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
        body = {"messages": turns, "max_tokens": 1}
        return client.post("/v1/chat/completions", json=body)

    assert ask(MAX_DEPTH).status_code == 200
    for depth in (MAX_DEPTH + 1, 990, 5000):
        error = ask(depth).json()["error"]
        assert error["param"] == "messages" and "nested more than 64 levels" in error["message"]


def test_probes_join(running: Running) -> None:
    go_on, watch = threading.Event(), running.engine.request_stats
    wait_until(running.idle)
    before, admission = watch().prompt_tokens, running.context.admission
    running.engine._thread.submit(lambda core: go_on.wait(60))
    with running.client() as client, ThreadPoolExecutor(20) as pool:
        found = [pool.submit(client.get, "/health_generate") for _ in range(20)]
        wait_until(lambda: len(running.engine._inflight) == 1)
        wait_until(lambda: len(running.server.server_state.tasks) == 20)
        assert len(running.engine._inflight) == 1 and admission.waiting == 0
        go_on.set()
        assert {one.result().status_code for one in found} == {200}
    assert watch().prompt_tokens == before + 1


@pytest.mark.parametrize("sign", ["\n", "\r", "\x1b[2J", "\u2028", "\u0085", "\u202e", "\x7f"])
def test_names_cannot_write_lines_of_the_log(client: httpx.Client, sign: str) -> None:
    body = {"text": "x", "sampling_params": GREEDY, "rid": f"a{sign}request b: all is well"}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 400 and "rid must have printable" in answer.text
    assert client.post("/generate", json=body | {"rid": "a é 中 b"}).status_code == 200


def test_parameters_are_logged_on_one_line(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    stop = "a\u0085b\u2028c\x9b2J\nd\U000e0001"
    with caplog.at_level(logging.INFO, "moesaic.server.request_log"):
        body = {"text": "x", "sampling_params": GREEDY | {"stop": stop}, "rid": "line"}
        assert client.post("/generate", json=body).status_code == 200
    (line,) = [r.getMessage() for r in caplog.records if "request line:" in r.getMessage()]
    assert line.isprintable() and json.dumps(stop)[1:-1] in line


@pytest.mark.parametrize("path", ["/openapi.json", "/generate"])
def test_unread_answers_are_cut_off(engine: Engine, path: str) -> None:
    """The end of an answer that is complete, and a stream that cannot go on."""
    body = {"text": ["x"] * 4, "sampling_params": GREEDY | {"max_new_tokens": 500}, "stream": True}
    data = json.dumps(body | {"return_logprob": True, "top_logprobs_num": 100}).encode()
    get = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with Running(engine).serve(write_seconds=0.8) as hasty:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(60)
            connection.connect(("127.0.0.1", hasty.port))
            connection.sendall(get if path == "/openapi.json" else post_head(data) + data)
            state = hasty.server.server_state
            wait_until(lambda: bool(state.connections))
            wait_until(lambda: not state.connections and not state.tasks)
        wait_until(hasty.idle)
        assert len(engine._inflight) == 0
        with hasty.client() as client:
            assert client.get("/openapi.json").status_code == 200


def test_slow_readers_are_not_cut_off(engine: Engine) -> None:
    with Running(engine).serve(write_seconds=2.0) as hasty, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", hasty.port))
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        said = connection.recv(1000)
        for _ in range(12):  # longer than the limit in all
            threading.Event().wait(0.25)
            said += connection.recv(1000)
        head, _, body = (said + hear_all(connection, said)).partition(b"\r\n\r\n")
        assert json.loads(body)["openapi"] == "3.1.0" and head.startswith(b"HTTP/1.1 200")


def hear_all(connection: socket.socket, said: bytes) -> bytes:
    head, _, body = said.partition(b"\r\n\r\n")
    missing = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]) - len(body)
    found = b""
    while len(found) < missing and (piece := connection.recv(1 << 16)):
        found += piece
    return found


def test_grammars_that_wait_keep_nobody_else_waiting(running: Running) -> None:
    """40 of one client are more than may wait: another client's is still taken in, grammars that
    are known do not wait, and prompts of others are tokenised."""
    turns, long = running.engine.limits.grammars.turns, ["a" * 600] * 4
    params = {"temperature": 0, "max_new_tokens": 4}
    known = {"text": "x", "sampling_params": params | {"regex": "[ab]+"}}
    release = threading.Event()
    elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
    other = httpx.Client(
        base_url=f"http://127.0.0.1:{running.port}", transport=elsewhere, timeout=60
    )
    with running.client() as client, other, ThreadPoolExecutor(50) as pool:
        assert client.post("/generate", json=known).status_code == 200
        turns.submit("operator", release.wait)
        try:
            bodies = [
                {"text": "x", "sampling_params": params | {"regex": f"a{{{n},}}"}}
                for n in range(1, 41)
            ]
            asked = [pool.submit(client.post, "/generate", json=body) for body in bodies]
            wait_until(lambda: sum(one.done() for one in asked) == 9 and turns.open == 32)
            refused = [one.result() for one in asked if one.done()]
            assert {one.status_code for one in refused} == {429}
            assert "32 new grammars already wait" in refused[0].text
            assert running.context.admission.arriving == 31
            new = {"model": "default", "prompt": "x", "max_tokens": 4, "regex": "[cd]+"}
            theirs = pool.submit(other.post, "/v1/completions", json=new)
            wait_until(lambda: sum(one.done() for one in asked) == 10)
            assert not theirs.done() and turns.open == 32
            assert client.post("/generate", json=known).status_code == 200
            body = {"text": long, "sampling_params": GREEDY}
            assert client.post("/generate", json=body).status_code == 200
        finally:
            release.set()
        assert theirs.result().status_code == 200
        assert [one.result().status_code for one in asked].count(200) == 30
    assert running.context.admission.arriving == 0


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("evil.example:30000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("127.0.0.1", 200),
        ("127.0.0.1:1", 200),
        ("10.1.2.3:30000", 200),
        ("[::1]:30000", 200),
        ("LocalHost:30000", 200),
    ],
)
def test_names_of_other_machines_are_refused_without_a_key(
    running: Running, host: str, status: int
) -> None:
    """Such a name may have been made to point here by whoever owns it."""
    request = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\n\r\n".encode()
    assert running.context.keys == Keys(local=True)
    said = talk(running.port, request)
    assert status_of(said) == status
    assert (b"use localhost or an IP address" in said) == (status == 403)
    with keys(running, "k"):
        given = request.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer k\r\n\r\n")
        assert status_of(talk(running.port, given)) == 200


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_what_is_local(engine: Engine, host: str, local: bool) -> None:
    args = type(engine.args)(model_path="tiny:qwen3_moe", host=host)
    assert Keys.of(args, {}).local is local


def test_a_server_is_busy_with_calls_that_are_still_being_checked(engine: Engine) -> None:
    with socket.socket() as listener:
        server = Server(engine, listener, Keys.of(engine.args))
    assert not server._is_busy
    call = server._admission.new_call("somebody")
    assert server._is_busy
    call.leave()
    assert not server._is_busy


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b'{"text": "\\ud800"}', "a lone surrogate"),
        (b'{"text": "\\udc00 and more"}', "a lone surrogate"),
        (b'{"text": "\\ud800 and more text"}', "a lone surrogate"),
        (b'{"text": "\\ud83d\\ude00', "truncated"),
        (b'{"surrogate": 1}', "unknown field `surrogate`"),
    ],
)
def test_what_is_wrong_with_a_body(client: httpx.Client, body: bytes, words: str) -> None:
    answer = client.post("/generate", content=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_errors_of_the_engine_stay_in_the_log(
    running: Running, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("private")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running.engine, "flush_cache", fail)
        answer = client.post("/flush_cache")
    assert answer.status_code == 500 and "private" not in answer.text
    assert answer.json()["error"]["message"] == "internal server error: see the server's log"
    assert sum("private" in (line.exc_text or "") for line in caplog.records) == 1


def test_a_profile_of_nothing_says_so(running: Running, client: httpx.Client) -> None:
    wait_until(running.idle)
    assert client.post("/start_profile").status_code == 200
    told = client.post("/stop_profile").json()
    assert told["steps"] == 0 and "no step ran" in told["warning"]
    assert client.post("/start_profile").status_code == 200
    body = {"text": "x", "sampling_params": GREEDY}
    assert client.post("/generate", json=body).status_code == 200
    told = client.post("/stop_profile").json()
    assert told["steps"] == 4 and "warning" not in told


def test_keys_are_not_taken_from_trailers(running: Running) -> None:
    """All of it is read before the handler is asked."""
    body = json.dumps({"text": "x", "sampling_params": GREEDY}).encode()
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n%s\r\n"
    data = b"%x\r\n%s\r\n0\r\n%s\r\n"
    key = b"Authorization: Bearer k\r\n"
    with keys(running, "k"):
        late = head % b"Trailer: Authorization\r\n" + data % (len(body), body, key)
        assert status_of(talk(running.port, late)) == 401
        early = head % key + data % (len(body), body, key)
        assert status_of(talk(running.port, early)) == 200


def test_the_document_needs_no_key(running: Running, client: httpx.Client) -> None:
    """It is the same for every server of this version."""
    with keys(running, "k", "a"):
        answer = client.get("/openapi.json")
        assert answer.status_code == 200 and answer.json()["openapi"] == "3.1.0"
        assert "security" not in answer.json()["paths"]["/openapi.json"]["get"]
        assert client.get("/v1/models").status_code == 401


# What Chrome, Firefox and Safari send for <img>, a link and fetch(mode="no-cors"); to a plain http
# address other than localhost, no Sec-Fetch headers.
MOZILLA = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"
BROWSERS = (
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
    {"User-Agent": MOZILLA},
    {"Accept-Language": "en"},
    {"Accept": "image/avif,image/webp,*/*"},
    {"Accept": "text/html,application/xhtml+xml,*/*"},
    {"Referer": "http://evil.example/"},
    {"Cookie": "a=b"},
    {"Upgrade-Insecure-Requests": "1"},
)
CHANGING = [route.path for route in ROUTES if route.changes]


@pytest.mark.parametrize("path", CHANGING)
def test_browsers_change_nothing_by_get_without_a_key(
    running: Running, client: httpx.Client, path: str
) -> None:
    done = (200, 400, 409)  # a profile may run already, or none
    for headers in BROWSERS:
        for method in ("GET", "HEAD"):
            assert client.request(method, path, headers=headers).status_code == 403, headers
        assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.post(path, headers=headers).status_code in done
    for agent in ("curl/8.5.0", "python-requests/2.32.3", "Python/3.11 aiohttp/3.11"):
        answer = client.get(path, headers={"User-Agent": agent, "Accept": "*/*"})
        assert answer.status_code in done
    with keys(running, "k"):
        for headers in BROWSERS:
            given = headers | {"Authorization": "Bearer k"}
            assert client.get(path, headers=given).status_code in done
            assert client.get(path, headers=headers).status_code == 401


def test_which_routes_change_something_by_get() -> None:
    """Those that do the same as a POST; but vLLM asks by POST whether ranks come or go."""
    asks = "/is_scaling_elastic_ep"
    posts = {route.handler for route in ROUTES if route.method == "POST" and route.path != asks}
    shared = [route.path for route in ROUTES if route.method == "GET" and route.handler in posts]
    records = [f"/{word}_expert_distribution_record" for word in ("start", "stop", "dump")]
    assert shared == CHANGING == ["/flush_cache", "/start_profile", "/stop_profile", *records]
