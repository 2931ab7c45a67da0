"""Limits and safety of the HTTP server: keys, heads, bodies, pace, connections, disconnects."""

from __future__ import annotations

import itertools
import json
import random
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from moesaic.engine.engine import Engine
from moesaic.engine.frontend.profiler import FOLDER_VARIABLE
from moesaic.server import app as server_app
from moesaic.server import run
from moesaic.server.app import ROUTES
from moesaic.server.auth import Keys
from moesaic.server.bodies import MAX_BODY, MAX_DEPTH, json_extent
from moesaic.server.context import Context
from moesaic.server.http_protocol import MAX_HEAD
from moesaic.server.listen import bind
from moesaic.server.routes import Route, RouteAccess
from tests.server.serving import Running, hear, post_head, status_of, talk, wait_until

GREEDY = {"temperature": 0, "max_new_tokens": 4}
LONG = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
SLOW_SECONDS = 1.0


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(
        model_path="tiny:qwen3_moe", num_threads=1, log_level="warning", max_running_requests=8
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def running(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch, Running(engine).serve() as running:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("profile")))
        yield running


@pytest.fixture(scope="module")
def hasty(engine: Engine) -> Iterator[Running]:
    """Has little patience and few connections."""
    with Running(engine).serve(SLOW_SECONDS, connections=10) as running:
        yield running


# --- keys ---


@contextmanager
def keys(running: Running, api: str = "", admin: str = "") -> Iterator[None]:
    before = running.context.keys
    running.context.keys = Keys(
        *(sha256(key.encode()).digest() if key else b"" for key in (api, admin))
    )
    try:
        yield
    finally:
        running.context.keys = before


PATHS = {"open": "/health", "user": "/v1/models", "admin": "/server_info"}


@pytest.mark.parametrize(
    ("api", "admin", "given", "statuses"),
    [
        ("", "", "", (200, 200, 200)),
        ("k", "", "", (200, 401, 401)),
        ("k", "", "k", (200, 200, 200)),
        ("k", "", "wrong", (200, 401, 401)),
        ("k", "a", "k", (200, 200, 403)),
        ("k", "a", "a", (200, 200, 200)),
        ("k", "a", "", (200, 401, 401)),
        ("", "a", "", (200, 200, 401)),
        ("", "a", "a", (200, 200, 200)),
        ("", "a", "k", (200, 200, 401)),
    ],
)
def test_keys(
    running: Running, api: str, admin: str, given: str, statuses: tuple[int, int, int]
) -> None:
    headers = {"Authorization": f"Bearer {given}"} if given else {}
    with keys(running, api, admin), running.client(**headers) as client:
        answers = [client.get(path) for path in PATHS.values()]
        assert tuple(answer.status_code for answer in answers) == statuses
        for answer in answers:
            if answer.status_code == 401:
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "header",
    [
        b"Authorization: Bearer \xff\xfe\x80",
        b"Authorization: Bearer",
        b"Authorization: Bearer  ",
        b"Authorization: Basic azpr",
        b"Authorization: \xe4\xb8\xad",
        b"Authorization: Bearer k\r\nAuthorization: Bearer k",
        b"Authorization: k",
        b"X-Api-Key: k\r\nX-Api-Key: k",
        b"X-Api-Key: Bearer k",
        b"Authorization: Basic azpr\r\nX-Api-Key: k",
    ],
)
def test_a_malformed_key_is_no_key(running: Running, header: bytes) -> None:
    with keys(running, "k"):
        said = talk(
            running.port,
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n\r\n",
        )
        assert status_of(said) == 401
        fine = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nauthorization: bearer k\r\n\r\n"
        assert status_of(talk(running.port, fine)) == 200


def test_keys_are_shown_nowhere(engine: Engine) -> None:
    secret = "correct-horse-battery"
    args = replace(engine.args, api_key=secret)
    assert secret not in repr(Keys.of(args, {})) and Keys.of(args, {}).api
    assert Keys.of(engine.args, {"MOESAIC_API_KEY": secret}) == Keys.of(args, {})
    for wrong in ("", "a b", "é", "a\n"):
        with pytest.raises(ValueError, match="--api-key cannot be sent"):
            Keys.of(replace(args, api_key=wrong), {})
    with Engine(model_path="tiny:qwen3_moe", num_threads=1, api_key=secret) as other:
        assert secret not in json.dumps(other.get_server_info())
        assert other.args.api_key == secret


def test_keys_leave_the_environment_before_there_is_an_engine(
    monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    """An engine of one rank is in this process, and what its libraries start inherits from it."""
    names = ("MOESAIC_API_KEY", "MOESAIC_ADMIN_API_KEY")
    for name in names:
        monkeypatch.setenv(name, f"key-of-{name}")
    inherited: list[bytes] = []
    given: list[Keys] = []

    def make_engine(**_: object) -> SimpleNamespace:
        inherited.append(subprocess.run(["env"], capture_output=True, check=True).stdout)
        return SimpleNamespace(shutdown=lambda: None)

    def make_server(_engine: object, _listener: object, keys: Keys, _start: object) -> None:
        given.append(keys)
        raise InterruptedError

    monkeypatch.setattr(run, "Engine", make_engine)
    monkeypatch.setattr(run, "Server", make_server)
    args = replace(engine.args, skip_server_warmup=True)
    with pytest.raises(InterruptedError):
        run.serve(args, bind("127.0.0.1", 0))
    assert b"PATH=" in inherited[0] and b"key-of-" not in inherited[0]
    digests = [sha256(f"key-of-{name}".encode()).digest() for name in names]
    assert [given[0].api, given[0].admin] == digests


def test_pages_of_other_sites_may_not_call(running: Running) -> None:
    own = f"http://127.0.0.1:{running.port}"
    with running.client() as client:
        for origin, status in (("http://evil.example", 403), ("null", 403), (own, 200)):
            answer = client.post("/flush_cache", headers={"Origin": origin})
            assert answer.status_code == status
            assert "access-control-allow-origin" not in answer.headers
        assert client.get("/health", headers={"Origin": "http://evil.example"}).status_code == 200


# --- heads, bodies and pace ---


def test_a_head_has_a_limit(running: Running) -> None:
    line = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    fits = line + b"X: " + b"a" * (MAX_HEAD - 200) + b"\r\n\r\n"
    assert status_of(talk(running.port, fits)) == 200
    for data in (
        line + b"X: " + b"a" * MAX_HEAD + b"\r\n\r\n",
        line + b"X: y\r\n" * MAX_HEAD + b"\r\n",
        b"GET /" + b"a" * MAX_HEAD + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        assert status_of(talk(running.port, data)) == 431


def test_a_header_without_an_end_is_cut_off(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        sent = 0
        try:
            while sent < 100 * MAX_HEAD:
                sent += connection.send(b"a" * 1024)
                time.sleep(0.001)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert sent < 100 * MAX_HEAD


def test_a_long_body_before_another_request_is_no_long_head(running: Running) -> None:
    body = json.dumps({"text": "x", "sampling_params": GREEDY}).encode() + b" " * 50_000
    head = post_head(body)
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection:
        connection.sendall(head + body + b"GET /health HTTP/1.1\r\nHost: ")
        assert status_of(hear(connection)) == 200
        connection.sendall(b"localhost\r\n\r\n")
        assert status_of(hear(connection)) == 200


def test_a_body_that_is_too_large_is_refused_before_it_comes(running: Running) -> None:
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MAX_BODY + 1}\r\n\r\n"
    assert status_of(talk(running.port, head.encode())) == 413
    expects = head.replace("Host", "Expect: 100-continue\r\nHost")
    assert status_of(talk(running.port, expects.encode())) == 413


@pytest.mark.parametrize(
    "data",
    [
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nHost: ",
        b"POST /generate HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n5\r\na",
    ],
)
def test_what_does_not_come_in_time_is_cut_off(hasty: Running, data: bytes) -> None:
    assert status_of(talk(hasty.port, data)) == 408
    wait_until(lambda: not hasty.server.server_state.tasks)


def test_a_request_sent_ahead_in_part_is_cut_off(hasty: Running) -> None:
    half = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + half)
        heard = b""
        while piece := connection.recv(1 << 16):
            heard += piece
    assert [part[:3] for part in heard.split(b"HTTP/1.1 ")] == [b"", b"200", b"408"]


def test_a_trickle_does_not_buy_time(hasty: Running) -> None:
    """A head that comes byte by byte has no longer than one that comes at once."""
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=60) as connection:
        connection.settimeout(0.05)
        head, said = itertools.cycle(b"x"), b""
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        while not said:
            try:
                connection.sendall(bytes([next(head)]))
                said = connection.recv(1000)
            except TimeoutError:
                continue
    assert status_of(said) == 408


def test_a_connection_without_a_request_is_closed(hasty: Running) -> None:
    assert talk(hasty.port, b"") == b""


def test_a_long_answer_outlasts_the_time_for_its_request(hasty: Running) -> None:
    """The limit is on what clients send, not on what they wait for; a request that was sent ahead
    in part does not end the one before it."""
    go_on = threading.Event()
    body = json.dumps({"text": "x", "sampling_params": GREEDY}).encode()
    request = post_head(body) + body
    hasty.engine._thread.submit(lambda core: go_on.wait(60))
    address = "127.0.0.1", hasty.port
    with ThreadPoolExecutor() as pool, socket.create_connection(address, timeout=60) as ahead:
        said = pool.submit(talk, hasty.port, request + b"\r\n")
        ahead.sendall(request)
        wait_until(lambda: len(hasty.server.server_state.tasks) == 2)
        ahead.sendall(request[:9])
        time.sleep(SLOW_SECONDS + 1)
        go_on.set()
        assert status_of(said.result()) == 200
        assert status_of(hear(ahead)) == 200
        ahead.sendall(request[9:])
        assert status_of(hear(ahead)) == 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", 1),
        ("[" * 64 + "]" * 64, 64),
        ("[" * 65 + "]" * 65, 65),
        ('{"a": ' * 80 + "1" + "}" * 80, 80),
        ("[" + "[]," * 500 + "[]]", 2),
        ('["' + "[" * 500 + '"]', 1),
        ('["' + '\\"[' * 500 + '"]', 1),
        ('["' + "\\\\" * 3 + '",' + "[" * 70 + "]" * 70 + "]", 71),
        ('["' + "[" * 500, 1),
        ('["' + "[" * 100 + "\\", 1),
    ],
)
def test_depth(text: str, expected: int) -> None:
    found = json_extent(text.encode()).depth
    assert found == expected or (found <= MAX_DEPTH and expected <= MAX_DEPTH)


def test_depth_is_found_in_one_pass() -> None:
    """A quadratic scan of this would take minutes."""
    begun = time.process_time()
    assert json_extent(b'"\\"' * (MAX_BODY // 3) + b"[" * 100).depth <= 100
    assert json_extent(b'{"' + b'\\"' * (MAX_BODY // 2)).depth <= 1
    assert json_extent(b"[]" * (MAX_BODY // 2)).depth == 1
    assert time.process_time() - begun < 30


# --- errors and isolation ---


def test_an_error_in_a_handler_is_that_requests_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(context: Context, request: Any) -> Any:
        raise KeyError("private")

    route = Route("GET", "/broken", broken, RouteAccess.USER, "Fails")
    monkeypatch.setattr(server_app, "ROUTES", (*ROUTES, route))
    with Running(engine).serve() as running, running.client() as client:
        answer = client.get("/broken")
        assert answer.status_code == 500 and "private" not in answer.text
        assert answer.json()["error"]["type"] == "server_error"
        assert client.get("/health").status_code == 200
    assert sum("'/broken' failed" in line.message for line in caplog.records) == 1


def test_methods_and_paths(running: Running) -> None:
    with running.client() as client:
        assert client.head("/health").status_code == 200
        assert client.options("/generate").status_code == 405
        assert client.get("/generate/").status_code == 405
        assert client.get("/health?x=%00&y").status_code == 200
        assert (
            status_of(talk(running.port, b"GET /%00%ff HTTP/1.1\r\nHost: localhost\r\n\r\n")) == 404
        )
        assert status_of(talk(running.port, b"nonsense\r\n\r\n")) == 400
        upgrade = {"Connection": "Upgrade", "Upgrade": "h2c", "HTTP2-Settings": "AAA"}
        body = {"text": "x", "sampling_params": GREEDY}
        assert client.post("/generate", json=body, headers=upgrade).status_code == 200
        for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
            sent = client.post(
                "/generate", content=json.dumps(body), headers={"Content-Type": kind}
            )
            assert sent.status_code == 200


def test_disconnects_at_any_byte_leave_nothing(running: Running) -> None:
    """300 clients that leave after a random number of bytes sent or received."""
    rng = random.Random(5)
    wait_until(running.idle)
    tasks = running.tasks()
    for number in range(300):
        stream = rng.random() < 0.5
        text = [f"{number} {k}" for k in range(rng.choice((1, 1, 3, 30)))]
        body = json.dumps({"text": text, "sampling_params": LONG, "stream": stream}).encode()
        head = post_head(body)
        data = (head + body) * rng.choice((1, 1, 1, 2))
        with socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection:
            connection.sendall(data[: rng.choice((rng.randrange(len(data)), len(data)))])
            if stream and rng.random() < 0.3:
                connection.settimeout(rng.random() * 0.05 + 0.001)
                with suppress(TimeoutError, ConnectionResetError):
                    connection.recv(rng.randint(1, 4000))
    wait_until(running.idle)
    wait_until(lambda: not running.server.server_state.connections)
    wait_until(lambda: running.tasks() <= tasks)
    running.engine.flush_cache()
    info = running.engine.get_server_info()
    assert (info["pages_used"], info["pages_cached"]) == (0, 0)
    assert len(running.engine._inflight) == 0 and not running.engine._inflight._waiting
    with running.client() as client:
        assert client.post("/generate", json={"text": "x", "sampling_params": GREEDY}).is_success


def test_a_client_that_does_not_read_holds_no_place(running: Running) -> None:
    """Its answers are ready and lie there; others are served meanwhile."""
    wait_until(running.idle)
    body = {"text": ["x"] * 9, "sampling_params": LONG | {"max_new_tokens": 400}, "stream": True}
    data = json.dumps(body | {"return_logprob": True}).encode()
    head = post_head(data)
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(head + data)
        admission = running.context.admission
        wait_until(lambda: admission.admitted_total > 0 and admission.running == 0)
    wait_until(running.idle)


def test_who_waits_can_be_aborted_by_name(running: Running) -> None:
    wait_until(running.idle)
    go_on = threading.Event()
    running.engine._thread.submit(lambda core: go_on.wait(60))
    with running.client() as client, ThreadPoolExecutor() as pool:
        long = {"text": ["x"] * 9, "sampling_params": GREEDY}
        first = pool.submit(client.post, "/generate", json=long)
        wait_until(lambda: running.context.admission.running == 9)
        late = {"text": "y", "sampling_params": GREEDY, "rid": "late"}
        second = pool.submit(client.post, "/generate", json=late)
        wait_until(lambda: running.context.admission.waiting == 1)
        assert client.post("/generate", json=late).status_code == 400
        assert client.post("/abort_request", json={"rid": "late"}).status_code == 200
        answer = second.result().json()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["output_ids"] == []
        go_on.set()
        assert first.result().status_code == 200
    wait_until(running.idle)


@pytest.mark.parametrize(
    ("api", "admin", "asks", "expected"),
    [
        ("", "", "", [1, 0, 0]),
        ("k", "", "k", [1, 0, 0]),  # this key is the administrator's, too
        ("k", "a", "k", [0, 1, 0]),
        ("k", "a", "a", [0, 0, 1]),
        ("", "a", "", [0, 1, 0]),
    ],
)
def test_which_client_may_abort(
    running: Running, api: str, admin: str, asks: str, expected: list[int]
) -> None:
    """By its id: another client with the users' key, the same client with it, an administrator. A
    client is a key and an address."""
    wait_until(running.idle)
    other = httpx.HTTPTransport(local_address="127.0.0.2")
    url = f"http://127.0.0.1:{running.port}"
    go_on = threading.Event()
    headers = [{"Authorization": f"Bearer {key}"} if key else {} for key in (asks, api, admin)]
    with (
        keys(running, api, admin),
        running.client() as client,
        httpx.Client(base_url=url, transport=other, timeout=60) as stranger,
        ThreadPoolExecutor() as pool,
    ):
        running.engine._thread.submit(lambda core: go_on.wait(60))
        long = {"text": "x", "sampling_params": {"max_new_tokens": 500}, "rid": "mine-0"}
        answer = pool.submit(client.post, "/generate", json=long, headers=headers[0])
        wait_until(lambda: len(running.engine._inflight) == 1)
        ended = []
        for sender, header in zip(
            (stranger, client, client), headers[1:2] + headers[1:], strict=True
        ):
            told = sender.post("/abort_request", json={"rid": "mine-0"}, headers=header)
            ended.append(told.json()["aborted"])
            if ended[-1]:
                break
        go_on.set()
        assert ended == expected[: len(ended)] and sum(ended) == 1
        assert answer.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    wait_until(running.idle)


# --- the document ---


def test_the_document_is_openapi(running: Running) -> None:
    with running.client() as client:
        found = client.get("/openapi.json").json()
    assert found["openapi"] == "3.1.0"
    assert {route.path for route in ROUTES if "{" not in route.path} <= found["paths"].keys()
    assert "/openapi.json" in found["paths"]
    generate = found["paths"]["/generate"]["post"]
    schema = generate["requestBody"]["content"]["application/json"]["schema"]
    body = found["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    assert body["additionalProperties"] is False and "sampling_params" in body["properties"]
    assert {"400", "401", "413", "429", "503"} <= generate["responses"].keys()
