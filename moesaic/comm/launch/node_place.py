"""Which node this process is on, as the launcher that started it says in the environment.

Slurm, a LeaderWorkerSet of Kubernetes and Open MPI start the same command on every node. torchrun,
which starts one process a rank, is in torchrun.py. No torch here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from moesaic.core.addresses import host_and_port

Environment = Mapping[str, str]
# Where nodes meet if MASTER_PORT is not set. Jobs of Slurm may share a node, so each has its own.
PORT: Final = 29500
JOB_PORTS: Final = 1000
# What launchers of one process a rank set for torch.distributed: how many ranks a node has, and so
# which node this is, they do not say.
RANK_NAMES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# How an actor of Ray tells its command: node, nodes and address.
RAY_PLACE: Final = "MOESAIC_RAY_PLACE"


@dataclass(frozen=True, slots=True)
class NodePlace:
    launcher: str
    """In words."""
    nnodes: int
    node_rank: int
    address: str | None
    """Where nodes meet; None if the launcher does not tell."""

    def __str__(self) -> str:
        place = f"{self.launcher}: this is node {self.node_rank} of {self.nnodes}"
        return place if self.address is None else f"{place}, which meet at {self.address}"


def find_place(environment: Environment = os.environ) -> NodePlace | None:
    """None on one node, and where no launcher is known."""
    # mpirun starts processes on other nodes by srun, where both have left variables.
    for find in (_open_mpi, _slurm, _leader_worker_set):
        place = find(environment)
        if place is not None and place.nnodes > 1:
            return place
    return None


def unused_ranks(environment: Environment = os.environ) -> str:
    """A warning where RANK and WORLD_SIZE say that this is one of several processes, as in a
    PyTorchJob of Kubeflow; else empty."""
    world = environment.get("WORLD_SIZE", "")
    if "RANK" not in environment or not world.isdecimal() or int(world) < 2:
        return ""
    found = ", ".join(f"{n}={environment[n]}" for n in RANK_NAMES if n in environment)
    return (
        f"{found} are in the environment and are not used, as they do not say which node this is: "
        "this is a server of its own. For one of several nodes give --nnodes, --node-rank and "
        "--dist-init-addr; --nnodes 1 if it is none"
    )


def ray_place(environment: Environment = os.environ) -> NodePlace | None:
    """What the actor of this node says; None if no actor started this process."""
    if RAY_PLACE not in environment:
        return None
    node, nodes, address = environment[RAY_PLACE].split()
    return NodePlace("Ray", int(nodes), int(node), address)


def _slurm(environment: Environment) -> NodePlace | None:
    """A step of srun: a batch script or a shell of salloc is no node of its own."""
    if "SLURM_STEP_ID" not in environment:
        return None
    job = environment.get("SLURM_JOB_ID", "0")
    launcher = f"step {environment['SLURM_STEP_ID']} of Slurm's job {job}"
    nodes = _number(environment, "SLURM_STEP_NUM_NODES", launcher)
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", launcher)
    if nodes > 1 and tasks != nodes:
        raise ValueError(
            f"srun started {tasks} tasks on {nodes} nodes, and one process starts all ranks of a "
            "node: give srun --ntasks-per-node 1"
        )
    port = PORT + int(job) % JOB_PORTS if job.isdecimal() else PORT
    host = first_host(environment.get("SLURM_STEP_NODELIST", ""))
    address = _meeting_point(environment, host, port)
    return NodePlace(launcher, nodes, _number(environment, "SLURM_NODEID", launcher), address)


def _leader_worker_set(environment: Environment) -> NodePlace | None:
    leader = environment.get("LWS_LEADER_ADDRESS")
    if leader is None:
        return None
    launcher = "a group of a LeaderWorkerSet"
    nodes = _number(environment, "LWS_GROUP_SIZE", launcher)
    number = _number(environment, "LWS_WORKER_INDEX", launcher)
    return NodePlace(launcher, nodes, number, _meeting_point(environment, leader, PORT))


def _open_mpi(environment: Environment) -> NodePlace | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    launcher = "Open MPI"
    processes = _number(environment, "OMPI_COMM_WORLD_SIZE", launcher)
    here = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", launcher)
    if here > 1:
        raise ValueError(
            f"mpirun started {here} processes on this node, and one process starts all of its "
            "ranks: give mpirun --map-by ppr:1:node"
        )
    number = _number(environment, "OMPI_COMM_WORLD_RANK", launcher)
    return NodePlace(launcher, processes, number, _meeting_point(environment, "", PORT))


def _number(environment: Environment, name: str, launcher: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        found = f"{name}={text!r}, which is no number" if text else f"{name}, which is not set"
        raise ValueError(
            f"{launcher} tells the node by {found}: give --nnodes, --node-rank and --dist-init-addr"
        )
    return int(text)


def _meeting_point(environment: Environment, host: str, port: int) -> str | None:
    """MASTER_ADDR and MASTER_PORT prevail."""
    host = environment.get("MASTER_ADDR") or host
    text = environment.get("MASTER_PORT") or str(port)
    return host_and_port(host, text) if host else None


def first_host(hosts: str) -> str:
    """The first of Slurm's list: gpu003 of `gpu[003-007,9],login1`, r1n02 of `r[1-2]n[02,04]`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    assert first is not None  # it may be empty
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])
