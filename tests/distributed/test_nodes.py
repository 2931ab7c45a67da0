"""Several nodes, each with a supervisor, on addresses of this machine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from bench.fuzz_ports import attack, listening
from bench.http_server import free_port
from moesaic.cli.main import main
from moesaic.comm.launch.service import Service, ServiceSpec, Timeouts
from moesaic.comm.mesh import Mesh
from moesaic.comm.supervise.address import check_init_address
from moesaic.comm.supervise.config_check import differences, facts_of
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
from tests.e2e.namespaces import Node, NotAllowed, nodes

# Replicas on a node each: their ranks meet in memory, the supervisors over TCP.
MESH = Mesh(tp=2, replicas=2, nnodes=2)
# Two ranks of one step on two nodes.
SPLIT = Mesh(tp=2, dp=2, ep=2, nnodes=2)
KEY = b"a secret of some length"
SECRET = {"MOESAIC_SECRET": KEY.decode()}


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


@contextmanager
def two_nodes(
    mesh: Mesh = MESH,
    config: dict | None = None,
    environment: dict[str, str] | None = None,
    secret_file: str | None = None,
) -> Iterator[list[Service]]:
    """Both nodes of a service; at the end nothing is left of them."""
    port = free_port()
    specs = [spec(node, port, mesh, config) for node in range(2)]
    nodes = [Service(replace(one, secret_file=secret_file), environment) for one in specs]
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
        numbers = {0, 1, 2, 3}
        first.send(Submit([request(number, 4) for number in sorted(numbers)]))
        tokens, _ = collect(first, numbers)
        assert tokens == {number: [0, 1, 2, 0] for number in numbers}
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
    assert "can join this service" in capfd.readouterr().err


def test_step_across_nodes_and_its_guard(capfd: pytest.CaptureFixture[str]):
    config = {"rank": 1, "step": 40, "what": "sleep"}
    with two_nodes(SPLIT, config, SECRET) as (first, second):
        start_stepping(first)
        fault = fault_of(first)
        assert fault.ranks == [1]
        assert "the odd one out is rank 1 (tp 1, dp 1, ep 1): step 40, computing" in fault.message
        assert "Waiting for it: rank 0 in 'count work' of step 40" in fault.message
        assert end_of(second) == fault
        second.close()
        assert second.exit_code == 1
    assert "can join this service" not in capfd.readouterr().err


def test_killed_rank_of_another_node():
    with two_nodes(environment=SECRET) as (first, second):
        start_stepping(first)
        os.kill(rank_pid(first, 3), signal.SIGKILL)
        fault = fault_of(first)
        assert fault.ranks == [3]
        assert fault.message.startswith(
            "node 1 (127.0.0.2): rank 3 (replica 1, tp 1) was killed by signal 9 (SIGKILL); step "
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
            fault = fault_of(nodes[0])
            assert fault.ranks == [2, 3]
            assert fault.message == (
                "node 1 (127.0.0.1, ranks 2 to 3) is lost: the connection was closed"
            )
        else:
            fault = end_of(nodes[1])
            assert (
                f"node 0 ({nodes[0].spec.dist_init_addr}) is lost: the connection was closed"
                in fault.message
            )
            nodes[1].close()
            assert nodes[1].exit_code == 1


def wait_in_vain(node: Service, ends: list[str]) -> None:
    with pytest.raises(RuntimeError) as caught:
        node.connect()
    ends.append(str(caught.value))


@contextmanager
def waiting(first: ServiceSpec) -> Iterator[tuple[Service, list[str]]]:
    """A node that starts in vain, and what it says when it gives up; by itself, or stopped."""
    node, ends = Service(first, SECRET), []
    thread = threading.Thread(target=wait_in_vain, args=(node, ends))
    thread.start()
    try:
        yield node, ends
    finally:
        if node.exit_code is None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(node.pid, signal.SIGTERM)
        thread.join(60)
    assert not thread.is_alive()


def hurried(wanted: ServiceSpec, seconds: float) -> ServiceSpec:
    return replace(wanted, timeouts=replace(wanted.timeouts, join=seconds))


def test_wrong_secret(capfd: pytest.CaptureFixture[str]):
    """Who has not the secret is told so and not let in; the first node goes on waiting."""
    port = free_port()
    with waiting(spec(0, port)) as (first, ends):
        for secret, told in (
            (
                "another secret of some length",
                "MOESAIC_SECRET here is not that of node 0, or is not set there: give",
            ),
            ("", "MOESAIC_SECRET is set on node 0 but not here: give all nodes the same"),
        ):
            with pytest.raises(RuntimeError, match=told) as caught:
                Service.start(spec(1, port), {"MOESAIC_SECRET": secret})
            assert f"node 1 (127.0.0.2): node 0 (127.0.0.1:{port}) refuses: " in str(caught.value)
        assert first.exit_code is None
    assert ends == ["the service was stopped while it started"]
    log = capfd.readouterr().err
    assert "it does not accept this node's certificate, or has not the same: it has no or" in log
    assert "Traceback" not in log


def test_the_same_node_twice():
    with two_nodes(environment=SECRET) as (first, second):
        again = spec(1, int((first.spec.dist_init_addr or "").rpartition(":")[2]))
        with pytest.raises(RuntimeError, match="another node came with --node-rank 1 before"):
            Service.start(again, SECRET)
        assert first.exit_code is None and second.exit_code is None


def test_node_that_never_comes(capfd: pytest.CaptureFixture[str]):
    """Nobody else is to blame, and the ranks that wait for its ranks say nothing."""
    port = free_port()
    with pytest.raises(RuntimeError) as caught:
        Service.start(hurried(spec(0, port, SPLIT), 4.0), SECRET)
    address = f"127.0.0.1:{port}"
    assert str(caught.value) == (
        f"node 1 did not connect to {address} within 4 s: start --nnodes 2 --node-rank 1 "
        f"--dist-init-addr {address}"
    )
    log = capfd.readouterr().err
    assert "waiting for node 1 (1 of 2 nodes are here)" in log
    assert "Traceback" not in log and "failed" not in log


def test_first_node_that_never_comes(capfd: pytest.CaptureFixture[str]):
    port = free_port()
    why = rf"did not answer at 127\.0\.0\.1:{port} within 1 s: start it"
    with pytest.raises(RuntimeError, match=why):
        Service.start(hurried(spec(1, port), 1.0), SECRET)
    assert f"waiting for node 0 at 127.0.0.1:{port}" in capfd.readouterr().err


def test_ranks_may_come_late():
    """The start has its own limit, not that of operations between ranks."""
    port = free_port()
    brief = Timeouts(start=60.0, collective=1.0, stop=5.0)
    nodes = [Service(replace(spec(n, port, SPLIT), timeouts=brief), SECRET) for n in range(2)]
    first = threading.Thread(target=nodes[0].connect)
    first.start()
    first.join(5.0)
    try:
        nodes[1].connect()
        first.join(60)
        assert [len(node.facts["ranks"]) for node in nodes] == [2, 2]
    finally:
        for node in nodes:
            node.close()


def test_nodes_with_different_flags():
    port = free_port()
    flags = {"page_size": 16, "model_path": "a", "node_rank": 0, "api_key": "x"}
    other = {"page_size": 1, "model_path": "b", "node_rank": 1, "api_key": "y"}
    with (
        waiting(spec(0, port, config=flags)) as (_, ends),
        pytest.raises(RuntimeError) as caught,
    ):
        Service.start(spec(1, port, config=other), SECRET)
    told = "nodes 0 and 1 have different settings: --page-size is 16 on node 0 and 1 on node 1"
    assert [str(caught.value), *ends] == [told, told]


def test_what_differs():
    mine = facts_of(spec(0, 1, config={"page_size": 1}))
    assert mine["flags"] == {"page_size": 1}
    assert differences(mine, facts_of(spec(1, 2, config={"page_size": 1, "port": 7})), 1) == ""
    assert differences(mine, facts_of(spec(1, 1, SPLIT, {"page_size": 1})), 1) == (
        "dp is 1 on node 0 and 2 on node 1; ep is 1 on node 0 and 2 on node 1; "
        "replicas is 2 on node 0 and 1 on node 1"
    )
    assert differences(mine, facts_of(spec(1, 1)), 1) == (
        "--page-size is 1 on node 0 and unknown on node 1"
    )
    old = {**mine, "version": "0.0.1", "flags": {}}
    assert differences(mine, old, 3).endswith("on node 0 and 0.0.1 on node 3")


def test_nodes_with_other_models(tmp_path: Path):
    """Paths may differ and config.json may have been written by another tool; the model may not."""

    def facts(name: str, config: dict[str, object]) -> dict[str, object]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return facts_of(spec(0, 1, config={"model_path": str(folder)}))

    mine = facts("a", {"model_type": "mixtral", "num_hidden_layers": 2})
    copy = {"transformers_version": "5", "num_hidden_layers": 2, "model_type": "mixtral"}
    assert differences(mine, facts("b", copy), 1) == ""
    deeper = facts("c", {"model_type": "mixtral", "num_hidden_layers": 3})
    told = "the model's config.json is mixtral {} on node 0 and mixtral {} on node 1"
    digests = [str(one["model"]).removeprefix("mixtral ") for one in (mine, deeper)]
    assert differences(mine, deeper, 1) == told.format(*digests)
    assert digests[0] != digests[1] and [len(one) for one in digests] == [8, 8]
    assert facts_of(spec(0, 1, config={"model_path": str(tmp_path / "none")}))["model"] == "unknown"


NODE = """
import logging, sys
import msgspec
from moesaic.comm.launch.service import Service, ServiceSpec, host_ranks
logging.basicConfig(level="INFO", format="%(message)s")
spec = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=ServiceSpec)
sys.exit(host_ranks(Service(spec), float(sys.argv[2])))
"""


@contextmanager
def node_process(
    wanted: ServiceSpec, patience: float = 0.0, place: Node | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A node as the command line runs it; in a network of its own at a `place`."""
    words = [sys.executable, "-c", NODE, msgspec.msgpack.encode(wanted).hex(), str(patience)]
    process = subprocess.Popen(
        words if place is None else place.command(words),
        env={**os.environ, **SECRET},
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(node: subprocess.Popen[str], words: str) -> str:
    """The node's log up to the line with these words."""
    assert node.stderr is not None
    log = ""
    while words not in log:
        line = node.stderr.readline()
        assert line, log
        log += line
    return log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_node_that_is_ended(number: signal.Signals):
    port = free_port()
    with node_process(spec(1, port)) as second:
        first = Service.start(spec(0, port), SECRET)
        try:
            start_stepping(first)
            log = until(second, "node 1 is ready")
            second.send_signal(number)
            log += second.communicate(timeout=60)[1]
            fault = fault_of(first)
        finally:
            first.close()
        if number == signal.SIGKILL:
            reason = "the process that started node 1's ranks ended"
            assert second.returncode == -signal.SIGKILL
        else:
            reason = "it was stopped by SIGTERM"
            assert second.returncode == 0
            assert "SIGTERM: node 1 leaves" in log and "Traceback" not in log
        assert fault.message == f"node 1 (127.0.0.2) has left: {reason}"
        assert f"joined node 0 at 127.0.0.1:{port}; ranks 2 to 3 are here" in log
        assert log.index("joined node 0") < log.index("node 1 is ready")


def test_a_node_whose_network_is_cut():
    """No connection ends: its silence is noticed on both sides, in the middle of a step."""
    try:
        with nodes(1) as (far,):
            address = f"{far.bridge}:{free_port()}"
            first, second = (
                replace(
                    spec(node, 1, SPLIT),
                    dist_init_addr=address,
                    host=(far.bridge, far.address)[node],
                    timeouts=Timeouts(start=60.0, stop=5.0, node=1.0),
                )
                for node in range(2)
            )
            check_silence(far, first, second)
    except NotAllowed as reason:
        pytest.skip(f"no network namespaces here: {reason}")


def check_silence(far: Node, first: ServiceSpec, second: ServiceSpec) -> None:
    with node_process(second, place=far) as node:
        service = Service.start(first, SECRET)
        try:
            start_stepping(service)
            left = family(node.pid)
            far.cut()
            fault = fault_of(service)
            log = node.communicate(timeout=60)[1]
        finally:
            service.close()
        told = rf"node 1 \({re.escape(far.address)}, rank 1\) is lost: silent for \d\.\d s"
        assert fault.ranks == [1] and re.fullmatch(told, fault.message), fault
        assert (
            f"node 1 ({far.address}): node 0 ({first.dist_init_addr}) is lost: silent for " in log
        )
        assert node.returncode == 1 and psutil.wait_procs(left, timeout=20)[1] == []


@pytest.mark.parametrize("how", ["node 0 ends", "told again", "too late"])
def test_a_node_that_is_told_to_stop_waits_for_node_0(how: str):
    """Node 0 may have been told, too, and lets open requests finish."""
    port, patience = free_port(), 1.0 if how == "too late" else 60.0
    with node_process(spec(1, port), patience) as second:
        first = Service.start(spec(0, port), SECRET)
        try:
            start_stepping(first)
            log = until(second, "node 1 is ready")
            second.send_signal(signal.SIGTERM)
            log += until(second, f"SIGTERM: node 1 waits for node 0 for up to {patience:g} s")
            if how == "told again":
                second.send_signal(signal.SIGINT)
            if how != "node 0 ends":
                assert (
                    "node 1 (127.0.0.2) has left: it was stopped by SIG" in fault_of(first).message
                )
        finally:
            first.close()
        log += second.communicate(timeout=60)[1]
    assert second.returncode == 0
    end = {"told again": "SIGINT: node 1 leaves", "too late": "SIGTERM: node 1 leaves"}
    assert end.get(how, "node 0 has ended the service: node 1 ends") in log


def test_a_node_that_is_ended_while_it_waits():
    with node_process(spec(1, free_port())) as node:
        until(node, "waiting for node 0")
        node.send_signal(signal.SIGINT)
        assert "SIGINT: node 1 leaves" in node.communicate(timeout=60)[1]
        assert node.returncode == 130


@pytest.mark.parametrize("node", [0, 1])
def test_unusable_meeting_places(node: int):
    """Refused before anything is started, with what to do."""
    for address, told in (
        ("no.such.host.invalid:5000", "the name 'no.such.host.invalid' has no address"),
        (
            "0.0.0.0:5000",
            "0.0.0.0:5000: other nodes cannot connect to it; give an address of node 0",
        ),
        ("nowhere", "give HOST:PORT of node 0"),
    ):
        with pytest.raises(ValueError, match=told):
            check_init_address(node, address, KEY)
    with pytest.raises(ValueError, match="MOESAIC_SECRET has 5 bytes: give 16 or more"):
        Service(spec(node, free_port()), {"MOESAIC_SECRET": "short"})


def test_address_of_another_machine_or_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"127\.0\.0\.1:{port}: .*in use.*another port"):
            Service(spec(0, port), SECRET)
        check_init_address(1, f"127.0.0.1:{port}", KEY)  # there it must be in use
    other = (
        r"203\.0\.113\.7:5000: node 0 cannot listen there .*this machine has .*127\.0\.0\.1:5000"
    )
    with pytest.raises(ValueError, match=other):
        check_init_address(0, "203.0.113.7:5000", KEY)


@pytest.mark.parametrize("node", [0, 1])
def test_short_secret_on_the_command_line(
    node: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("MOESAIC_SECRET", "short")
    address = f"127.0.0.1:{free_port()}"
    flags = f"--tp 2 --nnodes 2 --node-rank {node} --dist-init-addr {address}".split()
    assert main(["serve", "no/such/model", *flags, "--port", str(free_port())]) == 2
    assert "error: MOESAIC_SECRET has 5 bytes" in capsys.readouterr().err


def test_strangers_at_every_listener():
    """What bench.fuzz_ports does to a server, in small: ranks step on, and nothing stays open."""
    with two_nodes(SPLIT, environment=SECRET) as nodes:
        pids = [process.pid for node in nodes for process in family(node.pid)]
        listeners = listening(pids)
        kinds = {one[0] if isinstance(one, tuple) else Path(one).name for one in listeners}
        assert kinds == {"127.0.0.1", "127.0.0.2", "client", "ranks"}
        nodes[0].send(Submit([request(5, 3000)]))
        outcome = attack(listeners, range(200), seed=1)
        assert outcome.problems == []
        tokens, _ = collect(nodes[0], {5})
        assert tokens[5] == [0, 1, 2] * 1000
