"""Nodes that look whether they can work together: processes of this machine play them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from bench.http_server import free_port
from moesaic.cli import doctor_cluster
from moesaic.comm.launch.cluster_check import (
    PAIR_SECONDS,
    Installed,
    NodeFacts,
    PairFacts,
    _bad_pairs,
    _differences,
    _listen,
    _measure_all,
    check_cluster,
    model_digest,
)
from moesaic.comm.launch.node_place import NodePlace
from moesaic.comm.network.handshake import Role
from moesaic.comm.network.store import StoreClient, StoreRequest, StoreTable
from moesaic.config import ServerArgs
from moesaic.config.devices import cuda_missing

SECRET = {"MOESAIC_SECRET": "a secret of some length"}

NODE = NodeFacts(
    "a", "10.0.0.1", 1, "eth0", 1000, [], {"torch": "2.13.0"}, "m", {"tp_size": 2}, True
)
OTHER = NodeFacts(
    "b", "10.0.0.2", 1, "eth1", 1000, [], {"torch": "2.11.0"}, "n", {"tp_size": 4}, True
)


def doctor(node: int, nodes: int, port: int, *more: str, **env: str) -> subprocess.Popen[str]:
    more = (*more, *([] if "--dist-timeout" in more else ["--dist-timeout", "60"]))
    words = f"--cluster --nnodes {nodes} --node-rank {node} --dist-init-addr 127.0.0.1:{port}"
    return subprocess.Popen(
        [sys.executable, "-m", "moesaic.cli.main", "doctor", *words.split(), *more],
        env=os.environ | SECRET | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_three_nodes():
    port = free_port()
    nodes = [doctor(node, 3, port, "--json") for node in (2, 1, 0)]
    said = [node.communicate(timeout=120) for node in nodes]
    reports = [json.loads(out) for out, _ in said]
    assert reports[0] == reports[1] == reports[2]
    # A busy machine may be slow, by which nothing is judged here.
    slow = reports[0]["problems"]
    assert all("Gbit/s" in problem for problem in slow)
    assert [node.returncode for node in nodes] == [1 if slow else 0] * 3, said
    assert list(reports[0]["pairs"]) == ["0-1", "0-2", "1-2"]
    for pair in reports[0]["pairs"].values():
        assert pair["error"] == "" and pair["gbit_s"] > 0 and 0 < pair["latency_us"] < 1e6
        assert abs(pair["clock_s"]) < 1.0
    assert [node["address"] for node in reports[0]["nodes"]] == ["127.0.0.1"] * 3
    assert {node["interface"] for node in reports[0]["nodes"]} == {"lo"}


def test_missing_and_different_nodes():
    """Node 1 has another model; of four nodes two are missing; one has another secret. All
    start at once, with time for it on a busy machine."""
    port, missing, refused = free_port(), free_port(), free_port()
    late = [doctor(node, 4, missing, "--dist-timeout", "12") for node in (0, 2)]
    wrong = doctor(1, 2, refused, MOESAIC_SECRET="another secret, as long")
    first = doctor(0, 2, refused, "--dist-timeout", "12")
    differ = [
        doctor(node, 2, port, f"tiny:{name}") for node, name in enumerate(("dbrx", "mixtral"))
    ]
    for node in differ:
        out, error = node.communicate(timeout=120)
        assert node.returncode == 1, error
        assert "node 1 (" in out and "has another model than node 0" in out
    for node in late:
        _, error = node.communicate(timeout=120)
        assert node.returncode == 2 and "node 1, node 3 of 4 did not come to" in error
    _, error = wrong.communicate(timeout=120)
    assert wrong.returncode == 2 and "does not know this node's secret" in error
    _, error = first.communicate(timeout=120)
    assert first.returncode == 2 and "node 1 of 2 did not come to" in error


def test_the_same_node_twice_and_other_flags():
    """Node 2 comes once one of the two has been refused, so that node 0 is there for both."""
    port = free_port()
    twice = [doctor(1, 3, port, "--tp", "4") for _ in range(2)]
    first = doctor(0, 3, port, "--tp", "2")
    deadline = time.monotonic() + 120
    while all(node.poll() is None for node in twice) and time.monotonic() < deadline:
        time.sleep(0.1)
    last = doctor(2, 3, port, "--tp", "2")
    said = [node.communicate(timeout=120) for node in (first, *twice)]
    assert last.wait(timeout=120) == 1
    assert sorted(node.returncode for node in twice) == [1, 2], said
    for node, (out, error) in zip((first, *twice), said, strict=True):
        if node.returncode == 2:
            assert "another node came with --node-rank 1 before: give each node its own" in error
        else:
            assert "different settings: --tp-size is 2 on node 0 and 4 on node 1" in out


def test_other_numbers_of_nodes():
    port = free_port()
    nodes = [doctor(0, 2, port), doctor(1, 3, port)]
    for node, (_, error) in zip(
        nodes, [one.communicate(timeout=120) for one in nodes], strict=True
    ):
        assert node.returncode == 2
        assert error == "error: --nnodes is 2 on node 0 and 3 on node 1: give all the same\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "which nodes"),
        ("--nnodes 2", "where do nodes meet"),
        ("--nnodes 2 --node-rank 5 --dist-init-addr h:1", "give one of 0..1"),
        ("--nnodes 2 --dist-init-addr 0.0.0.0:80", "other nodes cannot connect to it"),
        ("--nnodes 2 --dist-init-addr 0.0.0.0:80,h:1", "0.0.0.0:80: other nodes cannot"),
    ],
)
def test_wrong_flags(flags: str, words: str):
    command = [sys.executable, "-m", "moesaic.cli.main", "doctor", "--cluster", *flags.split()]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2 and words in found.stderr


def test_a_launcher_with_a_wrong_number(monkeypatch: pytest.MonkeyPatch):
    place = NodePlace("a group of a LeaderWorkerSet", 2, 7, "127.0.0.1:1")
    monkeypatch.setattr(doctor_cluster, "find_place", lambda: place)
    with pytest.raises(ValueError, match=r"LeaderWorkerSet: node 7: give one of 0\.\.1"):
        doctor_cluster._place(ServerArgs())


@pytest.mark.skipif(not cuda_missing(), reason="there is a GPU")
def test_no_gpu():
    said = doctor(0, 2, free_port(), "--device", "cuda").communicate(timeout=60)[1]
    assert f"error: --device cuda cannot work here: {cuda_missing()}; give --device cpu" in said


def test_what_is_told():
    assert list(_differences([NODE, NODE])) == []
    assert list(_differences([NODE, OTHER])) == [
        "node 0 has torch 2.13.0, node 1 2.11.0: install the same",
        "node 1 (b) has another model than node 0: its JSON files or the sizes of its files "
        "differ, or it is not there",
        "nodes 0 and 1 have different settings: --tp-size is 2 on node 0 and 4 on node 1",
    ]
    nodes = [NODE, OTHER, NODE]
    good = PairFacts(100.0, 9.0, 0.001)
    assert list(_bad_pairs(nodes, {"0-1": good, "0-2": good})) == []
    bad = {
        "0-1": PairFacts(100.0, 0.9, 0.0),
        "0-2": PairFacts(100.0, 9.0, -3.0),
        "1-2": PairFacts(error="no connection to 10.0.0.1: refused"),
    }
    slow, clock, gone = _bad_pairs(nodes, bad)
    assert slow.startswith("node 0 reaches node 1 over eth1 at 0.9 Gbit/s: if there is a faster")
    assert clock == "the clocks of node 0 and node 2 differ by -3.0 s"
    assert gone == "node 1 and node 2 (a): no connection to 10.0.0.1: refused"
    # Slow by comparison, too.
    uneven = {"0-1": PairFacts(100.0, 2.9, 0.0), "0-2": PairFacts(100.0, 10.0, 0.0)}
    assert len(list(_bad_pairs(nodes, uneven))) == 1


def test_model_digest(tmp_path: Path):
    assert [model_digest(name) for name in ("tiny:dbrx", "")] == ["tiny:dbrx", ""]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    first = model_digest(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"xyz")
    assert model_digest(str(tmp_path)) == first, "weights are not read"
    (tmp_path / "config.json").write_text("[]")
    second = model_digest(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"abcd")
    assert len({first, second, model_digest(str(tmp_path))}) == 3


def test_models_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two nodes may know other versions by the same name, or none."""
    args, found = ServerArgs(model_path="some-org/some-model"), []
    for text in ("{}", "[]"):
        model = tmp_path / text / "models--some-org--some-model"
        (model / "snapshots/abc").mkdir(parents=True)
        (model / "snapshots/abc/config.json").write_text(text)
        (model / "refs").mkdir()
        (model / "refs/main").write_text("abc")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / text))
        found.append(doctor_cluster._model(args))
    assert len({*found, args.model_path}) == 3
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"is neither a folder nor in .*empty"):
        doctor_cluster._model(args)
    with pytest.raises(ValueError, match="no/such/folder is not a folder on this node"):
        doctor_cluster._model(ServerArgs(model_path="no/such/folder"))
    for name in ("", "tiny:dbrx", "shape:qwen3-30b-a3b"):
        assert doctor_cluster._model(ServerArgs(model_path=name)) == name


def test_node_0_is_lost_after_others_came():
    port, secret, told = free_port(), b"a secret of some length", []
    table = StoreTable()
    installed = Installed({}, "m", {})

    def check() -> None:
        with pytest.raises(ValueError) as error:
            check_cluster(NodePlace("", 2, 1, f"127.0.0.1:{port}"), secret, installed, 60.0)
        told.append(str(error.value))

    with closing(_listen(("127.0.0.1", port), 0, secret, {Role.STORE: table.serve})[0]):
        node = threading.Thread(target=check)
        node.start()
        while not table.has(StoreRequest("has", ["node/1"])):
            time.sleep(0.01)
    node.join(60)
    assert told == [f"node 0 at 127.0.0.1:{port} is lost: the connection was closed"]


def test_a_lost_node_is_waited_for_once():
    """In all pairs that it was to measure."""
    waits: list[float] = []

    class Store:
        def wait(self, keys: list[str], seconds: float) -> list[str]:
            waits.append(seconds)
            return keys

    found = _measure_all(cast(StoreClient, Store()), [NODE] * 4, 3, b"")
    assert waits == [PAIR_SECONDS, 0.0, 0.0, PAIR_SECONDS, 0.0, PAIR_SECONDS]
    assert found["1-3"].error == "node 1 has not measured it" and len(found) == 6
