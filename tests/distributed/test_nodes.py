"""Several nodes, each with a supervisor, on addresses of this machine."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from moesaic.comm.launch import Service, ServiceSpec, Timeouts
from moesaic.comm.mesh import Mesh
from moesaic.comm.supervise.seal import Seal
from moesaic.comm.torchrun import Torchrun
from moesaic.core.messages import Fault, Stop, Submit
from tests.distributed.test_supervisor import (
    TARGET,
    collect,
    family,
    fault_of,
    next_message,
    rank_pid,
    request,
    start_stepping,
)

# Replicas on a node each: their ranks meet in memory, the supervisors over TCP.
MESH = Mesh(tp=2, replicas=2, nnodes=2)
# Two ranks of one step on two nodes.
SPLIT = Mesh(tp=2, dp=2, ep=2, nnodes=2)
SECRET = {"MOESAIC_SECRET": "a secret of some length"}


def spec(node: int, port: int, mesh: Mesh = MESH, config: dict | None = None) -> ServiceSpec:
    return ServiceSpec(
        mesh,
        TARGET,
        config or {},
        node_rank=node,
        dist_init_addr=f"127.0.0.1:{port}",
        host=f"127.0.0.{node + 1}",
        timeouts=Timeouts(start=60.0, collective=20.0, guard=0.5, hang=2.0, stop=5.0),
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def two_nodes(
    mesh: Mesh = MESH, config: dict | None = None, environment: dict[str, str] | None = None
) -> Iterator[list[Service]]:
    """Both nodes of a service; at the end nothing is left of them."""
    port = free_port()
    nodes = [Service(spec(node, port, mesh, config), environment) for node in range(2)]
    threads = [threading.Thread(target=node.connect) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    processes = [process for node in nodes for process in family(node.pid)]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.close()
        alive = psutil.wait_procs(processes, timeout=20)[1]
        for process in alive:
            process.kill()
        assert alive == []
        assert not any(node.folder is not None and node.folder.exists() for node in nodes)


def end_of(node: Service) -> Fault | Stop:
    """On a node other than the first, the only thing to be heard."""
    message = next_message(node)
    assert isinstance(message, Fault | Stop), message
    return message


def test_two_nodes_serve_and_stop(capfd: pytest.CaptureFixture[str]):
    with two_nodes() as (first, second):
        rids = {"a", "b", "c", "d"}
        first.send(Submit([request(rid, 4) for rid in sorted(rids)]))
        tokens, _ = collect(first, rids)
        assert tokens == {rid: [0, 1, 2, 0] for rid in rids}
        listening = {
            connection.laddr.ip
            for node in (first, second)
            for process in family(node.pid)
            for connection in process.net_connections("inet")
            if connection.status == "LISTEN"
        }
        assert listening == {"127.0.0.1"}
        first.close()
        assert isinstance(end_of(second), Stop)
        second.close()
        assert (first.exit_code, second.exit_code) == (0, 0)
    assert "can read the secret of this service there" in capfd.readouterr().err


def test_step_across_nodes_and_its_guard(capfd: pytest.CaptureFixture[str]):
    config = {"rank": 1, "step": 40, "what": "sleep"}
    with two_nodes(SPLIT, config, SECRET) as (first, second):
        start_stepping(first)
        fault = fault_of(first, {"a", "b"})
        assert fault.ranks == [1]
        assert "the odd one out is rank 1 (tp 1, dp 1, ep 1): step 40, computing" in fault.message
        assert "Waiting for it: rank 0 in 'count work' of step 40" in fault.message
        assert end_of(second) == fault
        second.close()
        assert second.exit_code == 1
    assert "can read the secret" not in capfd.readouterr().err


def test_killed_rank_of_another_node():
    with two_nodes(environment=SECRET) as (first, second):
        start_stepping(first)
        os.kill(rank_pid(first, 3), signal.SIGKILL)
        fault = fault_of(first, {"a", "b"})
        assert fault.ranks == [3]
        assert fault.message.startswith(
            "node 1: rank 3 (replica 1, tp 1) was killed by signal 9 (SIGKILL); step "
        )
        assert end_of(second) == fault
        second.close()
        assert second.exit_code == 1


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_lost_node(victim: int):
    """Its supervisor and all of its ranks vanish without a word."""
    with two_nodes(environment=SECRET) as nodes:
        start_stepping(nodes[0])
        os.kill(nodes[victim].pid, signal.SIGKILL)
        if victim == 1:
            fault = fault_of(nodes[0], {"a", "b"})
            assert fault.ranks == [2, 3]
            assert fault.message.startswith("node 1 (ranks 2 to 3) is lost: silent for 3.")
        else:
            fault = end_of(nodes[1])
            assert "is lost: silent for 3." in fault.message
            nodes[1].close()
            assert nodes[1].exit_code == 1


def wait_in_vain(node: Service, ends: list[str]) -> None:
    with pytest.raises(RuntimeError) as caught:
        node.connect()
    ends.append(str(caught.value))


def test_wrong_secret(capfd: pytest.CaptureFixture[str]):
    """What it sends is dropped, and not acted on: the first node goes on waiting."""
    port = free_port()
    first = Service(spec(0, port), SECRET)
    ends: list[str] = []
    waiting = threading.Thread(target=wait_in_vain, args=(first, ends))
    waiting.start()
    try:
        other = {"MOESAIC_SECRET": "another secret of some length"}
        with pytest.raises(RuntimeError, match="is MOESAIC_SECRET the same on all nodes"):
            Service.start(spec(1, port), other)
        with pytest.raises(RuntimeError, match="MOESAIC_SECRET is set on node 0 but not here"):
            Service.start(spec(1, port), {"MOESAIC_SECRET": ""})
        assert first.alive
    finally:
        os.kill(first.pid, signal.SIGTERM)
        waiting.join()
    assert ends == ["the service was stopped while it started"]
    assert "dropped: it has a wrong MAC" in capfd.readouterr().err


def test_address_in_use():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(RuntimeError, match=r"node 0 cannot listen at 127\.0\.0\.1:.*in use"),
    ):
        Service.start(spec(0, taken.getsockname()[1]), SECRET)


def test_seal():
    session = bytes(16)
    sender, receiver = Seal(b"s" * 16, session, 1), Seal(b"s" * 16, session, 0)
    frames = sender.close(0, b"hello")
    assert receiver.open(frames) == (1, b"hello")
    assert receiver.open(frames) is None  # played again
    assert receiver.open(sender.close(2, b"x")) is None  # for another
    head, mac, payload = sender.close(0, b"pay 1")
    assert receiver.open([head, mac, b"pay 2"]) is None
    assert receiver.open([bytes(24), mac, payload]) is None
    assert receiver.open([payload]) is None
    assert receiver.open([head, mac, payload]) == (1, b"pay 1")
    assert Seal(b"t" * 16, session, 0).open(sender.close(0, b"x")) is None
    assert Seal(b"s" * 16, bytes([1] * 16), 0).open(sender.close(0, b"x")) is None


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_environment_of_torchrun():
    assert Torchrun.find({}) is None
    found = Torchrun.find(TORCHRUN)
    assert found == Torchrun(8, 1, 2, 1, "10.0.0.1:29501", 0)
    assert not found.is_launcher
    alone = Torchrun.find(TORCHRUN | {"WORLD_SIZE": "4", "GROUP_RANK": "0", "LOCAL_RANK": "0"})
    assert (alone.nnodes, alone.dist_init_addr, alone.is_launcher) == (1, None, True)
    with pytest.raises(ValueError, match="'RANK'"):
        Torchrun.find(TORCHRUN | {"RANK": ""})


WORKER = """
import os, pathlib, signal, sys, time
from moesaic.comm.torchrun import Torchrun
run, folder = Torchrun.find(), pathlib.Path(sys.argv[1])
if run.is_launcher:
    time.sleep(0.3)  # the others come first
    with run.launching():
        (folder / "launched").write_text(f"{run.world} {run.nnodes}")
        time.sleep(0.5)
        (folder / "ended").touch()
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "kill" else None
else:
    run.wait_for_launcher()
    assert (folder / "ended").exists()
    (folder / f"waited{run.local_rank}").touch()
"""


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_processes_of_torchrun_wait_for_the_launcher(tmp_path: Path, end: str):
    """The launcher and two others with one parent, as torchrun starts them."""
    both = {**os.environ, **TORCHRUN, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), end], env=both | {"LOCAL_RANK": str(rank)}
        )
        for rank in (1, 2, 0)
    ]
    codes = [worker.wait(60) for worker in workers]
    assert codes == [0, 0, 0 if end == "exit" else -signal.SIGKILL]
    assert (tmp_path / "launched").read_text() == "3 1"
    assert (tmp_path / "waited1").exists() and (tmp_path / "waited2").exists()
