"""`moesaic serve MODEL …`: the HTTP server."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from moesaic.cli.common import (
    add_model,
    check_nodes,
    join_node,
    read_args_and_notes,
    requires_extra,
    set_up_logging,
)
from moesaic.comm.launch.torchrun import Torchrun
from moesaic.config.args import ServerArgs
from moesaic.config.parser import FlagParser
from moesaic.config.resolve import resolve
from moesaic.server.listen import bind

logger = logging.getLogger(__name__)

DESCRIPTION = """\
Serve a Mixture-of-Experts model over HTTP.
With --nnodes run the same command on every node, with its --node-rank; node 0 is the server."""


def run(argv: Sequence[str]) -> int:
    parser = FlagParser("moesaic serve", "moesaic serve MODEL [flags]", DESCRIPTION)
    add_model(parser)
    parser.add_flags(ServerArgs)
    args, notes = read_args_and_notes(parser.parse(argv))
    set_up_logging(args.log_level)
    for note in notes:
        logger.info("%s", note)
    torchrun = Torchrun.find()
    return _start(args) if torchrun is None else _start_under(torchrun, args)


def _start_under(torchrun: Torchrun, args: ServerArgs) -> int:
    """The first process of a node starts its ranks; torchrun's other processes only wait."""
    if not torchrun.is_launcher:
        torchrun.wait_for_launcher()
        return 0
    with torchrun.launching():
        _check_count(torchrun, args)
        return _start(
            replace(
                args,
                nnodes=torchrun.nnodes,
                node_rank=torchrun.node_rank,
                dist_init_addr=torchrun.dist_init_addr,
            )
        )


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
    raise ValueError(
        f"torchrun started {torchrun.world} processes and the flags ask for {world} ranks: give "
        + (", or ".join(advice) or "as many processes as ranks")
    )


def _start(args: ServerArgs) -> int:
    args = resolve(args)  # before anything slow, so a wrong flag is reported at once
    check_nodes(args)
    return join_node(args) if args.node_rank > 0 else _serve(args)


def _serve(args: ServerArgs) -> int:
    listener = bind(args.host, args.port)
    with requires_extra("the HTTP server", "server", "fastapi", "starlette", "uvicorn"):
        from moesaic.server.run import serve
    return serve(args, listener)
