"""The server's processes: where they listen, what a signal does, what is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from moesaic.server.listen import bind

KEY = "correct-horse-battery"
SECRET = "of-the-nodes-and-nobody-else"


@pytest.fixture(scope="module")
def later() -> list[str]:
    """What the server logs once it is ready."""
    return []


@pytest.fixture(scope="module")
def server(later: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """On 2 expert-parallel ranks, with a key; its end is the last test."""
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "moesaic.launch_server", "--model-path", "tiny:qwen3_moe"]
    flags = ["--tp", "2", "--ep", "2", "--num-threads", "1"]
    process = subprocess.Popen(
        [*command, *flags, "--port", str(port)],
        env={**os.environ, "MOESAIC_API_KEY": KEY, "MOESAIC_SECRET": SECRET},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        log = iter(process.stdout.readline, "")
        assert KEY not in "".join(_until_ready(log))
        threading.Thread(target=lambda: later.extend(log), daemon=True).start()
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _until_ready(log: Iterator[str]) -> Iterator[str]:
    for line in log:
        yield line
        if line.startswith("ready: "):
            return
    raise AssertionError("it did not start")


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_every_listener_is_on_loopback(server: tuple[subprocess.Popen[str], str]) -> None:
    process, url = server
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    listening = [
        link.laddr
        for member in family
        for link in member.net_connections(kind="inet")
        if link.status == psutil.CONN_LISTEN or not link.raddr
    ]
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}
    assert int(url.rpartition(":")[2]) in {address.port for address in listening}


def test_the_key_stays_inside(server: tuple[subprocess.Popen[str], str]) -> None:
    process, url = server
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/server_info").status_code == 401
        answer = client.get("/server_info", headers={"Authorization": f"Bearer {KEY}"})
        assert answer.json()["tp_size"] == 2 and KEY not in answer.text
        body = {"messages": [{"role": "user", "content": "x"}], "regex": "a+", "max_tokens": 1}
        headers = {"Authorization": f"Bearer {KEY}"}
        assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    family = psutil.Process(process.pid).children(recursive=True)
    told = {child: Path(f"/proc/{child.pid}/environ").read_text() for child in family}
    assert len(told) >= 6  # supervisor, fork server, ranks, and who runs grammars and templates
    for child, environment in told.items():
        assert KEY not in " ".join(child.cmdline()) + environment
    # Supervisors of other nodes are met with the secret; ranks and others need none.
    assert [child.name() for child in family if SECRET in told[child]] == ["moesaic-super"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
)
def test_schemathesis(
    server: tuple[subprocess.Popen[str], str], mode: schemathesis.GenerationMode
) -> None:
    """Requests made from the OpenAPI document, by somebody else."""
    _, url = server
    headers = {"Authorization": f"Bearer {KEY}"}
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    schema.config.generation.update(modes=[mode])
    sent = 0

    for result in schema.get_all_operations():
        operation = result.ok()
        if mode.is_negative and not operation.body:
            continue  # there is nothing in it that could be wrong
        strategy = operation.as_strategy(generation_mode=mode)

        @settings(
            max_examples=150,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def check(case: schemathesis.Case) -> None:
            nonlocal sent
            sent += 1
            answer = case.call(headers=headers, timeout=180)  # many fill the whole context
            assert answer.status_code < 500, answer.text

        check()
    assert sent > 200


def test_a_signal_drains_and_leaves_nothing(
    server: tuple[subprocess.Popen[str], str], later: list[str]
) -> None:
    process, url = server
    children = psutil.Process(process.pid).children(recursive=True)
    headers = {"Authorization": f"Bearer {KEY}"}
    long = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
    with (
        httpx.Client(base_url=url, timeout=120, headers=headers) as client,
        ThreadPoolExecutor() as pool,
        client.stream(
            "POST", "/generate", json={"text": "x", "sampling_params": long, "stream": True}
        ) as running,
    ):
        lines = running.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        refused = pool.submit(_until_refused, client).result()
        assert refused.headers["retry-after"] == "1" and refused.headers["connection"] == "close"
        assert refused.json()["error"]["message"] == "the server is stopping"
        process.send_signal(signal.SIGTERM)  # a second one does not wait for the request
        list(lines)
    assert process.wait(timeout=60) == 0
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert not [name for name in shared_memory() if "moesaic" in name]
    log = _whole(later)
    assert "SIGTERM again" in log and "Traceback" not in log and "CancelledError" not in log


def _whole(later: list[str]) -> str:
    """The last line comes from a thread."""
    for _ in range(600):
        if any("has stopped" in line for line in later):
            break
        time.sleep(0.1)
    return "".join(later)


def _until_refused(client: httpx.Client) -> httpx.Response:
    """The signal takes a moment to arrive."""
    while (answer := client.get("/health")).status_code == 200:
        pass
    assert answer.status_code == 503
    return answer
