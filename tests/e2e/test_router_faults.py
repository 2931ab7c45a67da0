"""Real servers behind the router, killed with kill -9 while they answer: clients notice nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from moesaic import Engine
from moesaic.router.args import RouterArgs
from tests.e2e.grid import model_path
from tests.e2e.test_disaggregation import SAME, client_of_url, free_port
from tests.server.serving import served, wait_until
from tests.server.test_router import routed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MODEL = model_path("qwen3_moe")


class Server:
    """A process of the command line, with what it starts."""

    def __init__(self, mode: str, logs: Path) -> None:
        self.port, self.bootstrap_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._mode, self._log = mode, logs / f"{self.port}.log"
        self.start()

    def start(self) -> None:
        flags = f"--model-path {MODEL} --port {self.port} --disaggregation-mode {self._mode} "
        flags += f"--disaggregation-bootstrap-port {self.bootstrap_port} --num-threads 1 "
        flags += "--enable-deterministic-inference"
        command = [sys.executable, "-m", "moesaic.launch_server", *flags.split()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def stop(self, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)
        self._process.wait(60)


def test_servers_are_killed_while_they_answer(tmp_path: Path) -> None:
    """One of each kind, and one of each is stopped in order, while streams run all the time."""
    with ExitStack() as stack:
        servers = [Server(mode, tmp_path) for mode in ("prefill", "prefill", "decode", "decode")]
        for server in servers:
            stack.callback(server.stop)
        alone = stack.enter_context(Engine(model_path=MODEL, **SAME))
        direct = client_of_url(stack.enter_context(served(alone)))
        args = RouterArgs(
            pd_disaggregation=True,
            prefill=tuple(f"{one.url} {one.bootstrap_port}" for one in servers[:2]),
            decode=tuple(one.url for one in servers[2:]),
            policy="round_robin",
            health_check_interval_secs=0.5,
            retry_max_retries=20,
        )
        router, http = stack.enter_context(routed(args))
        client = client_of_url(str(http.base_url))

        def all_live() -> bool:
            return all(worker.is_healthy for worker in router.workers)

        time.sleep(1)
        wait_until(all_live, 300)
        calls = [call_of(number) for number in range(12)]
        expected = [direct.chat.completions.create(**c).choices[0].message.content for c in calls]
        for victim, number in zip(
            servers[1:], (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM), strict=True
        ):
            begun = list[str]()
            with ThreadPoolExecutor(len(calls)) as pool:
                asked = [pool.submit(text_of, client, call, begun) for call in calls]
                wait_until(lambda begun=begun: len(begun) > 6)
                victim.stop(number)
                assert [one.result(300) for one in asked] == expected
            victim.start()
            wait_until(all_live, 300)
            if victim is servers[2]:  # killed in the middle of its streams, and nobody else was
                assert router.proxy is not None and router.proxy.stats.resumed >= 1
                assert router.workers[2].failures >= 1


def call_of(number: int) -> dict[str, Any]:
    return {
        "model": "default",
        "messages": [{"role": "user", "content": f"Mosaic {number}" * (number + 1)}],
        "temperature": 0.8,
        "seed": number,
        "max_tokens": 60,
        "extra_body": {"ignore_eos": True},
    }


def text_of(client: openai.OpenAI, call: dict[str, Any], begun: list[str]) -> str:
    """`begun` gets the id of each stream with its first chunk."""
    text = ""
    for number, chunk in enumerate(client.chat.completions.create(**call, stream=True)):
        if not number:
            begun.append(chunk.id)
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    return text
