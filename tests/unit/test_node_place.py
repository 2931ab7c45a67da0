"""What launchers say in the environment about the nodes of a service."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

from moesaic.cli.main import main
from moesaic.comm.launch import ray_nodes
from moesaic.comm.launch.node_place import NodePlace, find_place, first_host, unused_ranks
from moesaic.comm.supervise import address
from moesaic.config.devices import VISIBLE
from moesaic.core.addresses import host_and_port

SLURM = {
    "SLURM_JOB_ID": "71042",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[003-005],gpu9",
    "SLURM_NODEID": "2",
}
LWS = {
    "LWS_LEADER_ADDRESS": "moesaic-0.moesaic.default",
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
MASTER = {"MASTER_ADDR": "fd00::7", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SLURM, (4, 2, "gpu003:29542")),
        (SLURM | {"MASTER_ADDR": "10.0.0.1"}, (4, 2, "10.0.0.1:29542")),
        (SLURM | MASTER, (4, 2, "[fd00::7]:1234")),
        (LWS, (2, 1, "moesaic-0.moesaic.default:29500")),
        (MPI, (3, 1, None)),
        (MPI | MASTER, (3, 1, "[fd00::7]:1234")),
        (SLURM | MPI, (3, 1, None)),  # mpirun starts its processes by srun
    ],
)
def test_places(environment: dict[str, str], expected: tuple[int, int, str | None]):
    place = find_place(environment)
    assert place is not None
    assert (place.nnodes, place.node_rank, place.address) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        MASTER,
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"},
        SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8"},
        LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"},
        MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    ],
    ids=["nothing", "only an address", "a batch script", "one node", "one pod", "one process"],
)
def test_one_node(environment: dict[str, str]):
    assert find_place(environment) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (SLURM | {"SLURM_STEP_NUM_TASKS": "32"}, "32 tasks on 4 nodes.*--ntasks-per-node 1"),
        (
            SLURM | {"SLURM_NODEID": ""},
            "SLURM_NODEID, which is not set: give --nnodes, --node-rank",
        ),
        (LWS | {"LWS_GROUP_SIZE": "two"}, "LWS_GROUP_SIZE='two', which is no number"),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "8 processes.*--map-by ppr:1:node"),
    ],
)
def test_wrong_environments(environment: dict[str, str], words: str):
    with pytest.raises(ValueError, match=words):
        find_place(environment)


JOB = {"RANK": "1", "WORLD_SIZE": "2"} | MASTER


def test_ranks_of_no_known_launcher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert find_place(JOB) is None
    assert unused_ranks({}) == unused_ranks(MASTER) == unused_ranks(JOB | {"WORLD_SIZE": "1"}) == ""
    said = unused_ranks(JOB)
    assert said.startswith("RANK=1, WORLD_SIZE=2, MASTER_ADDR=fd00::7, MASTER_PORT=1234 are in the")
    assert "give --nnodes, --node-rank and --dist-init-addr" in said
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "no/such/model"]) == 2
    assert said in caplog.messages
    caplog.clear()
    assert main(["serve", "no/such/model", "--nnodes", "1"]) == 2
    assert said not in caplog.messages


def test_words():
    place = NodePlace("Open MPI", 3, 1, None)
    assert str(place) == "Open MPI: this is node 1 of 3"
    assert str(find_place(SLURM)) == (
        "step 0 of Slurm's job 71042: this is node 2 of 4, which meet at gpu003:29542"
    )


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("gpu[003-007,9],login1", "gpu003"),
        ("gpu[1,3-4]x,b[1-2]", "gpu1x"),
        ("r[1-2]n[02,04]", "r1n02"),
        ("a-b[7].c.org,d", "a-b7.c.org"),
        ("", ""),
    ],
)
def test_first_host(hosts: str, first: str):
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--tp 3", "cannot be divided evenly by --nnodes 2"),
        ("--tp 2 --dist-timeout 1", "the name 'moesaic-0.moesaic.invalid' has no address"),
        ("--tp 2 --dist-init-addr 0.0.0.0:80", "0.0.0.0:80: other nodes cannot connect to it"),
        ("--tp 3 --nnodes 1", "no/such/model"),
        ("--tp 3 --nnodes 3 --node-rank 1 --dist-init-addr 0.0.0.0:80", "0.0.0.0:80: other nodes"),
    ],
    ids=["nodes", "address", "address given", "one node given", "nodes given"],
)
def test_serve_reads_the_environment_unless_flags_say_something_else(
    flags: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, value in (LWS | {"LWS_LEADER_ADDRESS": "moesaic-0.moesaic.invalid"}).items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "no/such/model", *flags.split()]) == 2
    assert words in capsys.readouterr().err


def test_an_actor_of_ray_prevails_over_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("MOESAIC_RAY_PLACE", "1 2 node-0.invalid:29500")
    flags = "--tp 2 --use-ray --nnodes 9"
    assert main(["serve", "no/such/model", *flags.split()]) == 2
    assert "the name 'node-0.invalid' has no address" in capsys.readouterr().err


def test_paths_of_an_actor_of_ray_count_from_node_0s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Where that folder is on its node."""
    script = "import os, sys; open('told', 'w').write(f'{sys.argv[1:]} {os.environ[\"A\"]}')"
    monkeypatch.setattr(ray_nodes, "PROGRAM", (sys.executable, "-c", script))
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "there"
    there.mkdir()
    assert ray_nodes.RayNode().serve(["--tp", "2"], {"A": "b"}, str(there)) == 0
    assert (there / "told").read_text() == "['--tp', '2'] b"
    assert ray_nodes.RayNode().serve([], {"A": "c"}, str(tmp_path / "not here")) == 0
    assert (tmp_path / "told").read_text() == "[] c"


HIDDEN = """
import os, sys
from moesaic.comm.launch import ray_nodes
os.environ["CUDA_VISIBLE_DEVICES"] = ""
script = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))"
ray_nodes.PROGRAM = (sys.executable, "-c", script)
ray_nodes.RayNode().serve([], {}, "")
"""


@pytest.mark.parametrize(
    ("given", "there"), [({"CUDA_VISIBLE_DEVICES": "2,3"}, "2,3"), ({}, "all")]
)
def test_gpus_that_ray_hides_from_an_actor(given: dict[str, str], there: str):
    """The shell is in the place of Ray's own process, which starts the actor's."""
    environment = {name: value for name, value in os.environ.items() if name != VISIBLE} | given
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(HIDDEN)}; true"
    found = subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, check=False
    )
    assert found.stdout.split() == [there], found.stderr


def test_actors_of_ray_get_no_keys(monkeypatch: pytest.MonkeyPatch):
    """Others see the flags of a process."""
    told: list[list[str]] = []

    def nodes(argv: list[str], *_: object) -> NoReturn:
        told.append(argv)
        raise ValueError("enough")

    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setattr(ray_nodes, "ray_nodes", nodes)
    keys = "--api-key A --admin-api-key=B --ssl-keyfile-p C --tp 2 --ssl-keyfile key.pem"
    assert main(["serve", "tiny:qwen3_moe", "--use-ray", *keys.split()]) == 2
    kept = "--tp 2 --ssl-keyfile key.pem"
    assert told == [["tiny:qwen3_moe", "--use-ray", *kept.split()]]


def test_without_ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "tiny:qwen3_moe", "--use-ray", "--tp", "2"]) == 2
    assert "pip install 'moesaic[ray]'" in capsys.readouterr().err


def test_a_launchers_name_that_becomes_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tries: list[str] = []

    def numeric(host: str) -> str:
        tries.append(host)
        if len(tries) < 3:
            raise ValueError("no address")
        return "127.0.0.1"

    monkeypatch.setattr(address, "numeric", numeric)
    monkeypatch.setattr(address, "NAME_SECONDS", 0.0)
    with caplog.at_level("INFO"):
        address.wait_for_name("moesaic-0", 60)
    assert len(tries) == 3
    (said,) = caplog.messages
    assert said == "the name 'moesaic-0' has no address yet: waiting up to 60 s"
    tries.clear()
    address.wait_for_name("typed-by-a-user", 0)
    assert not tries


def test_the_check_of_a_cluster_waits_for_a_launchers_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for name, value in (LWS | {"LWS_LEADER_ADDRESS": "moesaic-0.moesaic.invalid"}).items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("INFO"):
        assert main(["doctor", "--cluster", "--dist-timeout", "0.1"]) == 2
        given = ["--dist-init-addr", "typed-by-a-user.invalid:29500"]
        assert main(["doctor", "--cluster", "--dist-timeout", "0.1", *given]) == 2
    (waits,) = [one for one in caplog.messages if "no address yet" in one]
    assert waits.startswith("the name 'moesaic-0.moesaic.invalid' has no address yet: waiting")


def test_ray_and_the_check_of_a_cluster(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "tiny:qwen3_moe", "--cluster", "--use-ray", "--nnodes", "2"]) == 2
    assert "run it on all of them without --use-ray" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("node0", "node0:29500"),
        ("10.0.0.1", "10.0.0.1:29500"),
        ("fd00::1", "[fd00::1]:29500"),
        ("[fd00::1]", "[fd00::1]:29500"),
    ],
)
def test_host_and_port(host: str, text: str):
    assert host_and_port(host, 29500) == text
