"""`moesaic doctor --cluster …`, on all nodes at once: whether they can work together."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from moesaic import __version__
from moesaic.cli.doctor_text import table
from moesaic.cli.machine import package_versions
from moesaic.comm.launch.cluster_check import (
    MEET_SECONDS,
    ClusterReport,
    Installed,
    NodeFacts,
    PairFacts,
    check_cluster,
    model_digest,
)
from moesaic.comm.launch.cluster_nccl import SMALL_BYTES, NcclFacts, NcclPair
from moesaic.comm.launch.node_place import NodePlace, find_place
from moesaic.comm.network.node_secret import NO_SECRET, own_secret
from moesaic.comm.supervise.address import check_init_address
from moesaic.comm.supervise.config_check import shared_flags
from moesaic.config.args import ServerArgs
from moesaic.config.devices import cuda_missing, device_of
from moesaic.config.resolve import master_address

logger = logging.getLogger(__name__)


def run(args: ServerArgs, as_json: bool) -> int:
    place = _place(args)
    assert place.address is not None
    secret = own_secret(file=args.node_secret_file)
    logger.info("%s", place)
    seconds = args.dist_timeout or MEET_SECONDS
    # A launcher's name of node 0 may be known late; one that a user typed may be wrong.
    waits = 0.0 if args.dist_init_addr else seconds
    check_init_address(place.node_rank, place.address, secret, name_timeout=waits)
    versions = {"python": platform.python_version(), "moesaic": __version__}
    versions |= {name: found or "none" for name, found in package_versions()}
    args = replace(args, nnodes=place.nnodes)
    device = device_of(args)
    if device == "cuda" and (missing := cuda_missing()):
        raise ValueError(f"--device cuda cannot work here: {missing}; give --device cpu")
    flags = shared_flags(asdict(replace(args, device=device)))
    installed = Installed(versions, _model(args), flags, args.base_gpu_id)
    report = check_cluster(place, secret or NO_SECRET, installed, seconds)
    if as_json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        print("\n".join(_lines(report)))
    return 1 if report.problems else 0


def _model(args: ServerArgs) -> str:
    """A digest of the model that is here: a name of the Hub stands for a folder in its cache."""
    path = args.model_path
    if path and ":" not in path and not Path(path).exists():
        from moesaic.models.locate import own_folder  # it imports torch

        path = own_folder(args)
        if not Path(path).is_dir():
            raise ValueError(f"--model-path {path} is not a folder on this node")
    return model_digest(path)


def _place(args: ServerArgs) -> NodePlace:
    """By flags, or else by Slurm, Open MPI or a LeaderWorkerSet."""
    if args.use_ray:
        raise ValueError(
            "--cluster --use-ray: Ray does not start this check on other nodes: run it on all of "
            "them without --use-ray, with --nnodes N, --node-rank R and --dist-init-addr HOST:PORT"
        )
    found = None if args.nnodes > 1 or args.node_rank else find_place()
    if found is None:
        found = NodePlace("--nnodes", args.nnodes, args.node_rank, None)
    if found.node_rank >= found.nnodes > 1:
        told = "--node-rank" if found.launcher == "--nnodes" else f"{found.launcher}: node"
        raise ValueError(f"{told} {found.node_rank}: give one of 0..{found.nnodes - 1}")
    address = args.dist_init_addr or found.address or master_address()
    if found.nnodes == 1:
        raise ValueError(
            "--cluster: which nodes? Run it on all of them with --nnodes N, --node-rank R and "
            "--dist-init-addr HOST:PORT, or by srun or mpirun"
        )
    if address is None:
        raise ValueError("--cluster: where do nodes meet? Give --dist-init-addr NODE0:PORT")
    first = address.partition(",")[0]  # behind it are nodes that may lead in its place
    return NodePlace(found.launcher, found.nnodes, found.node_rank, first)


def _lines(report: ClusterReport) -> Iterator[str]:
    yield "Nodes"
    head: Sequence[str] = (
        *("node", "host", "address", "interface", "its Gbit/s", "RDMA", "torch", "device"),
    )
    yield from table(head, (_node(n, node) for n, node in enumerate(report.nodes)))
    yield from ("", "Pairs, the first sends")
    head = ("pair", "there and back us", "Gbit/s", "clock ahead ms")
    yield from table(head, (_pair(name, pair) for name, pair in report.pairs.items()))
    if report.nccl is not None:
        yield from _nccl_lines(report.nccl)
    if report.notes:
        yield from ("", "Worth knowing", *(f"  - {note}" for note in report.notes))
    yield ""
    if report.problems:
        yield from ("This will not work well:", *(f"  - {one}" for one in report.problems))
    else:
        yield f"All {len(report.nodes)} nodes can work together."


def _node(number: int, node: NodeFacts) -> tuple[str, ...]:
    speed = f"{node.link_mbit / 1000:g}" if node.link_mbit else "?"
    rdma = " ".join(node.rdma) or "none"
    torch = node.versions.get("torch", "none")
    interface = node.interface or "?"
    return str(number), node.host, node.address, interface, speed, rdma, torch, node.device


def _pair(name: str, pair: PairFacts) -> tuple[str, ...]:
    if pair.error:
        return name, "-", "-", "-"
    return name, f"{pair.latency_us:.0f}", f"{pair.gbit_s:.1f}", f"{1000 * pair.clock_s:.1f}"


def _nccl_lines(nccl: NcclFacts) -> Iterator[str]:
    yield from ("", "NCCL, both ways at once")
    head = ("pair", f"all-gather of {SMALL_BYTES >> 10} KiB us", "Gbit/s", "by")
    yield from table(head, (_nccl_pair(name, pair, nccl) for name, pair in nccl.pairs.items()))


def _nccl_pair(name: str, pair: NcclPair, nccl: NcclFacts) -> tuple[str, ...]:
    used = {nccl.nodes[int(node)].network or "?": None for node in name.split("-")}
    if pair.error:
        return name, "-", "-", "; ".join(used)
    return name, f"{pair.latency_us:.0f}", f"{pair.gbit_s:.1f}", "; ".join(used)
