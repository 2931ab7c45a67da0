"""A server from start to end: full queues, draining, signals, dead ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import psutil
import pytest

from bench.http_server import free_port
from moesaic.config import ServerArgs, resolve
from moesaic.engine.engine import Engine
from moesaic.server import run
from moesaic.server.auth import Keys
from moesaic.server.listen import bind
from tests.server.serving import held, pieces_of, served, wait_until

Answer = dict[str, Any]
GREEDY = {"temperature": 0, "max_new_tokens": 8}
LONG = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}


def test_queue_full() -> None:
    limits = {"max_running_requests": 1, "max_queued_requests": 1}
    with (
        Engine(model_path="tiny:qwen3_moe", num_threads=1, log_level="warning", **limits) as engine,
        served(engine) as url,
        httpx.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor() as pool,
    ):
        with held(engine):
            body = {"text": ["Hello", "you"], "sampling_params": GREEDY}
            first = pool.submit(client.post, "/generate", json=body)
            wait_until(lambda: len(engine._inflight) == 2)
            for stream in (False, True):
                third = client.post("/generate", json=body | {"text": "third", "stream": stream})
                assert (third.status_code, third.headers["retry-after"]) == (429, "1")
                assert "try again later" in third.json()["error"]["message"]
            assert client.get("/health").status_code == 200
            more = client.post("/generate", json=body | {"text": ["x"] * 3})
            assert more.status_code == 400 and "send several requests" in more.text
        assert first.result().status_code == 200
        assert client.post("/generate", json={"text": "x"}).status_code == 200


def test_a_stopping_server_drains_and_then_ends_what_runs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def main() -> tuple[httpx.Response, httpx.Response]:
        with Engine(
            model_path="tiny:qwen3_moe", num_threads=1, log_level="warning", drain_timeout=1.0
        ) as mortal:
            listener = bind("127.0.0.1", 0)
            server = run.Server(mortal, listener, Keys())
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            serving = asyncio.create_task(server.serve_until_stopped())
            while not server.started:
                await asyncio.sleep(0.01)
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                # Sixteen at once outlast the second that they get.
                long = {"text": ["Hello"] * 16, "sampling_params": LONG}
                short = {"text": "Hello", "sampling_params": GREEDY}
                posts = [client.post("/generate", json=body) for body in (long, short)]
                tasks = [asyncio.create_task(post) for post in posts]
                while (await asyncio.to_thread(mortal.get_server_info))["running"] < 10:
                    await asyncio.sleep(0.01)
                os.kill(os.getpid(), signal.SIGTERM)
                answers = await asyncio.gather(*tasks)
                await serving
        return answers[0], answers[1]

    ended, finished = asyncio.run(main())
    assert (ended.status_code, finished.status_code) == (503, 200)
    assert ended.json()["error"]["message"] == "the server is stopping"
    assert len(finished.json()["output_ids"]) == 8
    assert "ready: http://127.0.0.1:" in capfd.readouterr().out


def test_a_stopping_server_waits_for_a_chat_in_its_template() -> None:
    """The chat came before the signal; its prompt is rendered only after it."""

    async def main() -> tuple[int, int]:
        with Engine(model_path="tiny:qwen3_moe", num_threads=1, drain_timeout=60.0) as mortal:
            listener = bind("127.0.0.1", 0)
            server = run.Server(mortal, listener, Keys())
            assert mortal.tokenizer is not None
            submit, rendering = mortal.tokenizer.chat.submit, threading.Event()

            def after_the_signal(*given: Any) -> str:
                rendering.set()
                while not server.stopping:
                    time.sleep(0.01)
                return submit(*given).result()

            serving = asyncio.create_task(server.serve_until_stopped())
            while not server.started:
                await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with ThreadPoolExecutor() as pool, pytest.MonkeyPatch.context() as patch:
                late = partial(pool.submit, after_the_signal)
                patch.setattr(mortal.tokenizer.chat, "submit", late)
                async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
                    chat = asyncio.create_task(client.post("/v1/chat/completions", json=body))
                    await asyncio.to_thread(rendering.wait, 60)
                    os.kill(os.getpid(), signal.SIGTERM)
                    answer = await chat
                await serving
        return answer.status_code, answer.json()["usage"]["completion_tokens"]

    assert asyncio.run(main()) == (200, 4)


def test_a_port_in_use_is_refused_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "moesaic.launch_server", "--model-path", "no/such/model"]
        done = subprocess.run([*command, "--port", str(port)], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"--host 127.0.0.1 --port {port}: Address already in use" in done.stderr


@contextmanager
def process(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of its own on the tiny model, ready."""
    port = free_port()
    command = [sys.executable, "-m", "moesaic.launch_server", "--model-path", "tiny:qwen3_moe"]
    server = subprocess.Popen(
        [*command, "--port", str(port), *flags], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == f"ready: http://127.0.0.1:{port}\n"
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow  # test_process.py always ends one with SIGTERM, while a stream is open
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_in_order(number: signal.Signals) -> None:
    with process() as (server, url), httpx.Client(base_url=url, timeout=60) as client:
        body = {"text": "Hello", "sampling_params": LONG | {"max_new_tokens": 80}, "stream": True}
        with client.stream("POST", "/generate", json=body) as response:
            pieces = pieces_of(response)
            next(pieces)
            server.send_signal(number)
            assert len(list(pieces)[-1]["output_ids"]) == 80
        assert server.wait(timeout=60) == 0
        with pytest.raises(httpx.ConnectError):
            client.get("/health")


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_signal_while_loading_ends_the_server(number: signal.Signals, status: int) -> None:
    command = [sys.executable, "-m", "moesaic.launch_server", "--model-path", "tiny:qwen3_moe"]
    port = free_port()
    server = subprocess.Popen(
        [*command, "--tp", "2", "--port", str(port)], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    assert any("loading tiny:qwen3_moe" in line for line in iter(server.stderr.readline, ""))
    children = psutil.Process(server.pid).children(recursive=True)
    server.send_signal(number)
    server.communicate(timeout=60)
    assert server.returncode == status
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_a_signal_whose_exception_is_dropped_ends_the_server_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a finalizer, where Python ignores exceptions."""

    def load(**args: Any) -> Engine:
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        return Engine(**args)

    monkeypatch.setattr(run, "Engine", load)
    args = ServerArgs.from_kwargs(model_path="tiny:qwen3_moe", num_threads=1)
    with pytest.raises(SystemExit) as ended:
        run.serve(resolve(args), bind("127.0.0.1", 0))
    assert ended.value.code == 143


def test_a_dead_rank_ends_the_server_with_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with process("--tp", "2") as (server, url), httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/server_info").json()["tp_size"] == 2
        children = psutil.Process(server.pid).children(recursive=True)
        body = {"text": "Hello", "sampling_params": LONG, "stream": True}
        with client.stream("POST", "/generate", json=body) as response:
            pieces = pieces_of(response)
            next(pieces)
            os.kill(rank_of(children), signal.SIGKILL)
            error = list(pieces)[-1]["error"]["message"]
        assert "was killed by signal 9" in error
        assert server.wait(timeout=60) == 1
        log = capfd.readouterr().err
        assert log.count("was killed by signal 9") == 1 and "the engine has failed" in log
        assert psutil.wait_procs(children, timeout=30)[1] == []


def test_after_a_fault_every_answer_names_it() -> None:
    with (
        Engine(model_path="tiny:qwen3_moe", tp_size=2, log_level="warning") as engine,
        served(engine) as url,
        httpx.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor() as pool,
    ):
        pending = [
            pool.submit(client.post, "/generate", json={"text": text, "sampling_params": LONG})
            for text in ("one", ["a", "list"])
        ]
        wait_until(lambda: engine.get_server_info()["running"] == 3)
        os.kill(engine.get_server_info()["ranks"][1]["pid"], signal.SIGKILL)
        answers = [future.result() for future in pending]
        answers += [client.get(path) for path in ("/health", "/health_generate", "/server_info")]
        answers += [client.post("/generate", json={"text": "x"}), client.post("/flush_cache")]
        assert [answer.status_code for answer in answers] == [503] * 7
        assert {answer.json()["error"]["message"] for answer in answers} == {engine.fault}
        assert "was killed by signal 9" in engine.fault


def rank_of(processes: list[psutil.Process]) -> int:
    """The largest that has no children: neither the supervisor nor its fork server."""
    leaves = [process for process in processes if not process.children()]
    return int(max(leaves, key=lambda process: process.memory_info().rss).pid)
