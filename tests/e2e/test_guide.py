"""The guide's command lines, each started as real processes: they answer as one rank does, and stop
in order. Equality holds because the tiny model is in float32; what other formats give on ranks is
compared elsewhere."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bench.http_server import free_port
from moesaic.comm.launch.mps import start_mps
from moesaic.engine.engine import Engine
from tests.e2e.guide_lines import ALWAYS, MASTER, ON_ONE_GPU, SLOW, Deployment
from tests.e2e.namespaces import Node, NotAllowed, nodes

# Sixteen ranks share its heads and experts, four stages its layers.
MODEL = "tiny:deepseek_v3,num_hidden_layers=4,num_attention_heads=16,n_routed_experts=16"
PROMPTS = ["Expert parallelism", "a mosaic of tiles, each of them on a rank of its own"]
SAMPLING = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
LOCAL = "127.0.0.1"
# Two cores may be shared with other work: these only end a run that hangs.
START_SECONDS, STOP_SECONDS = 600, 60


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The answers of one rank."""
    with Engine(model_path=MODEL, num_threads=1, log_level="warning") as engine:
        answers = engine.generate(PROMPTS, SAMPLING)
        assert isinstance(answers, list)
        return [answer["output_ids"] for answer in answers]


@dataclass
class Running:
    """The processes of a deployment. All that they start inherit a mark by which they are found,
    also when their parent is gone."""

    url: str
    logs: Path
    mark: str = field(default_factory=lambda: f"MOESAIC_TEST_MARK={uuid.uuid4().hex}")
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        name, value = self.mark.split("=")
        variables = os.environ | environment | {name: value}
        with (self.logs / f"node{len(self.servers)}.log").open("wb") as log:
            self.servers.append(
                subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
            )

    def await_health(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            for server in self.servers:
                assert server.poll() is None, self.log()
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            time.sleep(0.2)
        raise AssertionError(f"it did not start: {self.log()}")

    def post(self, body: dict[str, Any]) -> Any:
        response = httpx.post(f"{self.url}/generate", json=body, timeout=120)
        assert response.status_code == 200, response.text + self.log()
        return response.json()

    def await_exit(self) -> list[int]:
        return [server.wait(timeout=STOP_SECONDS) for server in self.servers]

    def processes(self) -> list[int]:
        """Those that carry the mark and are not on their way out."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if self.mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def kill(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for server in self.servers:
            server.wait()

    def log(self) -> str:
        texts = [path.read_text(errors="replace")[-3000:] for path in sorted(self.logs.iterdir())]
        return "\n\n" + "\n----\n".join(texts)


@contextmanager
def deployed(
    deployment: Deployment, logs: Path, flags: tuple[str, ...] = (), apart: bool = True
) -> Iterator[Running]:
    """As the guide says, with more flags; several nodes each in a network namespace, if `apart`."""
    with ExitStack() as stack:
        places: list[Node | None] = [None] * deployment.nodes
        if deployment.nodes > 1 and apart:
            places = [*stack.enter_context(nodes(deployment.nodes))]
        master = places[0].address if places[0] is not None else LOCAL
        port = free_port()
        running = Running(f"http://{master}:{port}", logs)
        stack.callback(running.kill)
        variables = {
            name: text.replace(MASTER, master) for name, text in deployment.environment.items()
        }
        if deployment.nodes > 1:
            variables["MOESAIC_SECRET"] = secrets.token_hex(32)
        for place, words in zip(places, deployment.commands(MODEL, master), strict=True):
            assert words[:3] == ["python", "-m", "moesaic.launch_server"]
            command = [sys.executable, *words[1:], "--port", str(port), *flags]
            if place is not None:
                command = place.command([*command, "--host", master])
            running.start(command, variables)
        yield running


@pytest.mark.timeout(START_SECONDS + 200)
@pytest.mark.parametrize(
    "deployment",
    [*ALWAYS, *(pytest.param(deployment, marks=pytest.mark.slow) for deployment in SLOW)],
    ids=lambda deployment: deployment.name,
)
def test_command_line(deployment: Deployment, expected: list[list[int]], tmp_path: Path) -> None:
    try:
        with deployed(deployment, tmp_path) as running:
            running.await_health()
            assert len(running.processes()) >= deployment.ranks + deployment.nodes
            answers = running.post({"text": PROMPTS, "sampling_params": SAMPLING})
            assert [answer["output_ids"] for answer in answers] == expected
            running.servers[0].send_signal(signal.SIGTERM)
            assert running.await_exit() == [0] * deployment.nodes, running.log()
            assert running.processes() == [], running.log()
    except NotAllowed as reason:
        pytest.skip(f"no network namespaces here: {reason}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.timeout(START_SECONDS + 200)
@pytest.mark.parametrize("deployment", ON_ONE_GPU, ids=lambda deployment: deployment.name)
def test_command_line_on_one_gpu(
    deployment: Deployment,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All nodes share it, and an MPS daemon."""
    flags = ("--dtype", "float32", "--max-total-tokens", "2048", "--max-running-requests", "8")
    monkeypatch.setenv("MOESAIC_DEVICE", "cuda")
    with start_mps() as mps:
        for name, value in mps.environment.items():
            monkeypatch.setenv(name, value)
        with deployed(deployment, tmp_path, flags, apart=False) as running:
            running.await_health()
            answers = running.post({"text": PROMPTS, "sampling_params": SAMPLING})
            assert [answer["output_ids"] for answer in answers] == expected
            info = httpx.get(f"{running.url}/get_server_info").json()
            assert (info["providers"]["device"], len(info["ranks"])) == ("cuda", deployment.ranks)
            running.servers[0].send_signal(signal.SIGTERM)
            assert running.await_exit() == [0] * deployment.nodes, running.log()
            assert running.processes() == [], running.log()


@pytest.mark.slow  # test_torchrun.py always has processes of torchrun
@pytest.mark.timeout(START_SECONDS + 200)
def test_torchrun(expected: list[list[int]], tmp_path: Path) -> None:
    """What ends with torchrun's own status ends nevertheless."""
    port = free_port()
    running = Running(f"http://{LOCAL}:{port}", tmp_path)
    launcher = [sys.executable, *"-m torch.distributed.run --nproc-per-node 2".split()]
    server = f"-m moesaic.launch_server --model-path {MODEL} --tp 2 --ep 2 --port {port}".split()
    try:
        running.start([*launcher, *server], {})
        running.await_health()
        answers = running.post({"text": PROMPTS, "sampling_params": SAMPLING})
        assert [answer["output_ids"] for answer in answers] == expected
        running.servers[0].send_signal(signal.SIGTERM)
        running.await_exit()
        assert running.processes() == [], running.log()
    finally:
        running.kill()


def test_the_table_is_the_guide() -> None:
    """Nodes that the guide does not show differ in their number alone."""
    for deployment in (*ALWAYS, *SLOW):
        commands = deployment.commands(MODEL, LOCAL)
        numbers = [c[c.index("--node-rank") + 1] for c in commands if "--node-rank" in c]
        assert numbers == [str(node) for node in range(deployment.nodes)] or not numbers
        assert len(commands) == deployment.nodes
        for command in commands:
            assert MODEL in command and "\\" not in command and "#" not in command
