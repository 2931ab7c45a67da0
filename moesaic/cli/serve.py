"""`moesaic serve MODEL …`: the HTTP server."""

import importlib
import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from moesaic.cli.common import (
    add_model,
    check_nodes,
    join_node,
    read_args_and_notes,
    requires_extra,
    set_up_logging,
)
from moesaic.comm.launch.node_place import NodePlace, find_place, ray_place, unused_ranks
from moesaic.comm.launch.torchrun import Torchrun
from moesaic.comm.network.node_secret import own_secret
from moesaic.comm.supervise.child_process import die_with_parent
from moesaic.config.args import ServerArgs
from moesaic.config.parser import FlagParser
from moesaic.config.resolve import resolve
from moesaic.server.keeper import keep
from moesaic.server.listen import bind

logger = logging.getLogger(__name__)

DESCRIPTION = """\
Serve a Mixture-of-Experts model over HTTP.
With --nnodes run the same command on every node, with its --node-rank; node 0 is the server.
Slurm's srun, a LeaderWorkerSet, mpirun and torchrun tell which node it is; with --use-ray it starts
the other nodes itself."""


def run(argv: Sequence[str]) -> int:
    parser = FlagParser("moesaic serve", "moesaic serve MODEL [flags]", DESCRIPTION)
    add_model(parser)
    parser.add_flags(ServerArgs)
    given = parser.parse(argv)
    args, notes = read_args_and_notes(given)
    set_up_logging(args.log_level)
    for note in notes:
        logger.info("%s", note)
    torchrun = Torchrun.find()
    if torchrun is not None:
        return _start_under(torchrun, args)
    names_nodes = given.get("nnodes") is not None or args.nnodes > 1 or args.node_rank > 0
    if args.use_ray:
        # Other nodes need no keys, and ps shows flags to every user there.
        return _start_with_ray(parser.without_secrets(argv), args, names_nodes)
    if names_nodes:
        return _start(args)
    place = find_place()
    if place is None and (warning := unused_ranks()):
        logger.warning("%s", warning)
    return _start(_placed(args, place), waits_for_name=args.dist_init_addr is None)


def _placed(args: ServerArgs, place: NodePlace | None) -> ServerArgs:
    """The arguments with what the launcher says of this node, if one does."""
    if place is None:
        return args
    address = args.dist_init_addr or place.address
    logger.info("%s", replace(place, address=address))
    return replace(args, nnodes=place.nnodes, node_rank=place.node_rank, dist_init_addr=address)


def _start_with_ray(argv: Sequence[str], args: ServerArgs, names_nodes: bool) -> int:
    if args.dist_init_addr is not None:
        raise ValueError("--use-ray: Ray knows where nodes meet: leave out --dist-init-addr")
    if (place := ray_place()) is not None:
        die_with_parent()  # the actor
        # The actor has the secret from node 0, where the file is.
        return _start(_placed(replace(args, node_secret_file=None), place))
    with requires_extra("--use-ray", "ray", "ray"):
        importlib.import_module("ray")
    from moesaic.comm.launch.ray_nodes import ray_nodes

    def check(place: NodePlace | None) -> None:
        resolve(_placed(replace(args, nnodes=1), place))

    stop = partial(os.kill, os.getpid(), signal.SIGTERM)
    nnodes, secret = args.nnodes if names_nodes else 0, own_secret(file=args.node_secret_file)
    with ray_nodes(argv, nnodes, secret, check, stop) as place:
        return _start(_placed(replace(args, nnodes=1), place))


def _start_under(torchrun: Torchrun, args: ServerArgs) -> int:
    """The first process of a node starts its ranks; torchrun's other processes only wait."""
    if not torchrun.is_launcher:
        torchrun.wait_for_launcher()
        return 0
    with torchrun.launching():
        _check_count(torchrun, args)
        return _start(_placed(replace(args, dist_init_addr=None), torchrun.place))


def _check_count(torchrun: Torchrun, args: ServerArgs) -> None:
    rest = args.pp_size * (1 if args.enable_dp_attention else args.dp_size)
    world = args.tp_size * rest
    if torchrun.world == world:
        return
    advice = []
    if world % torchrun.nnodes == 0:
        advice.append(f"--nproc-per-node {world // torchrun.nnodes}")
    tp = torchrun.world // rest
    if tp * rest == torchrun.world and tp % args.ep_size == 0:
        advice.append(f"--tp-size {tp}")
    started = f"{torchrun.world} process{'es' * (torchrun.world > 1)}"
    wanted = f"{world} rank{'s' * (world > 1)}"
    raise ValueError(
        f"torchrun started {started} and the flags ask for {wanted}: give "
        + (", or ".join(advice) or "as many processes as ranks")
    )


def _start(args: ServerArgs, waits_for_name: bool = False) -> int:
    """Waits for a name that a launcher gave; one that a user typed may be wrong."""
    args = resolve(args)  # before anything slow, so a wrong flag is reported at once
    check_nodes(args, (args.dist_timeout or 0.0) if waits_for_name else 0.0)
    return join_node(args) if args.node_rank > 0 and not _has_heads(args) else _serve(args)


def _has_heads(args: ServerArgs) -> bool:
    """Whether this node and others may lead the service."""
    return 1 < (args.dist_init_addr or "").count(",") + 1 > args.node_rank


def _serve(args: ServerArgs) -> int:
    listener = bind(args.host, args.port)
    with requires_extra("the HTTP server", "server", "fastapi", "starlette", "uvicorn"):
        from moesaic.server.run import serve
    if args.elastic_ep_backend is None:
        return serve(args, listener)
    if not _has_heads(args):
        return keep(partial(serve, args, listener), args)
    from moesaic.server.stand_by import bind_meeting, serve_or_stand_by

    return keep(partial(serve_or_stand_by, args, listener), args, bind_meeting(args))
