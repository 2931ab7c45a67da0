"""Services of two nodes as launchers start them, on one machine: Slurm by its batch script with an
srun of our own, a LeaderWorkerSet by its variables, Ray by a cluster of two nodes where it is
installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from bench.http_server import free_port
from moesaic import Engine
from tests.e2e.grid import model_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).parents[2] / "deploy/slurm/serve.sbatch"
FLAGS = "--tp 2 --ep 2 --moe-a2a-backend deepep --skip-tokenizer-init".split()
PROMPT = {
    "input_ids": [5, 6, 7, 8, 9],
    "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
}
# Starts the command twice with the variables of two tasks. It reads options as srun does: the value
# of the second is optional, so that it takes no next word.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
assert sys.argv[1:4] == ["--ntasks-per-node", "1", "--kill-on-bad-exit=1"], sys.argv
at = 4
step = {{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}}
step |= {{"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "7"}}
tasks = [
    subprocess.Popen(sys.argv[at:], env=os.environ | step | {{"SLURM_NODEID": str(n)}})
    for n in range(2)
]
sys.exit(max(abs(task.wait()) for task in tasks))
"""


@contextmanager
def ended(*processes: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends them with SIGTERM, which they follow with status 0."""
    try:
        yield
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def answer(port: int) -> list[int]:
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                break
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline, "the server has not come up"
            time.sleep(0.2)
    data, kind = json.dumps(PROMPT).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/generate", data, kind)) as reply:
        found: list[int] = json.load(reply)["output_ids"]
    return found


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with Engine(model_path=model_path("qwen3_moe"), skip_tokenizer_init=True) as engine:
        found: list[int] = engine.generate(**PROMPT)["output_ids"]  # type: ignore[call-overload]
    return found


def environment(**more: str) -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    shared = {"PATH": f"{here}:{os.environ['PATH']}", "MASTER_PORT": str(free_port())}
    return os.environ | shared | more


def test_slurm(tmp_path: Path, expected: list[int]) -> None:
    srun = tmp_path / "srun"
    srun.write_text(SRUN, encoding="utf-8")
    srun.chmod(0o700)
    given, port = environment(), free_port()
    given["PATH"] = f"{tmp_path}:{given['PATH']}"
    words = [str(SCRIPT), model_path("qwen3_moe"), *FLAGS, "--port", str(port)]
    job = subprocess.Popen(words, env=given)
    try:
        assert answer(port) == expected
        for task in psutil.Process(job.pid).children():  # as `scancel --signal TERM` does
            task.terminate()
        assert job.wait(60) == 0
    finally:
        for task in psutil.Process(job.pid).children() if job.poll() is None else ():
            task.kill()
        job.kill()
        job.wait()


def test_leader_worker_set(expected: list[int]) -> None:
    port, group = free_port(), environment(LWS_LEADER_ADDRESS="localhost", LWS_GROUP_SIZE="2")
    words = ["moesaic", "serve", model_path("qwen3_moe"), *FLAGS, "--port", str(port)]
    pods = [
        subprocess.Popen(words, env=group | {"LWS_WORKER_INDEX": str(index)}) for index in (1, 0)
    ]
    try:
        with ended(pods[1]):  # the first pod's server ends the service
            assert answer(port) == expected
        assert pods[0].wait(60) == 0
    finally:
        pods[0].kill()
        pods[0].wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of two nodes, which this machine plays."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made.address
    made.shutdown()


def ray_server(cluster: str, port: int, *more: str) -> subprocess.Popen[bytes]:
    words = ["moesaic", "serve", model_path("qwen3_moe"), *FLAGS, "--port", str(port), *more]
    given = environment(RAY_ADDRESS=cluster)
    return subprocess.Popen([*words, "--use-ray"], env=given, stderr=subprocess.PIPE)


def test_ray(cluster: str, expected: list[int]) -> None:
    server = ray_server(cluster, port := free_port())
    with ended(server):
        assert answer(port) == expected


def test_an_actor_of_ray_that_is_killed(cluster: str) -> None:
    server = ray_server(cluster, port := free_port())
    try:
        answer(port)
        (actor,) = [
            process
            for process in psutil.process_iter(["cmdline"])
            if (process.info["cmdline"] or [""])[0].startswith("ray::RayNode")
        ]
        actor.kill()
        _, said = server.communicate(timeout=60)
    finally:
        server.kill()
    assert server.returncode == 1
    assert b"Ray's actor of node 1 has ended: " in said
    assert b") has left: " in said or b", rank 1) is lost: " in said


def test_too_few_nodes_of_ray(cluster: str) -> None:
    server = ray_server(cluster, free_port(), "--nnodes", "3", "--tp", "3", "--ep", "1")
    _, said = server.communicate(timeout=60)
    assert server.returncode == 2 and b"Ray's cluster has 2 nodes: start more" in said
