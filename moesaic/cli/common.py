"""What the commands that start an engine share: the model argument, flags, logging."""

import logging
from collections.abc import Mapping
from typing import Any

from moesaic.config.args import ServerArgs
from moesaic.config.parser import FlagParser, merge, read_config
from moesaic.config.resolve import SHAPE_PREFIX


def add_model(parser: FlagParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="the same as --model-path; put it first"
    )


def read_args(given: Mapping[str, Any]) -> ServerArgs:
    """The engine's arguments from a parsed command line and the file it names."""
    named, flagged = given["model"], given.get("model_path")
    if named is not None and flagged is not None and named != flagged:
        raise ValueError(f"two models, {named} and --model-path {flagged}: keep one")
    path = given["config"]
    file = read_config(ServerArgs, path) if path is not None else {}
    return merge(ServerArgs, {**given, "model_path": named} if named else given, file)


def require_tokenizer(args: ServerArgs, what: str) -> None:
    """Of resolved arguments: ValueError, before weights are loaded, where there is none."""
    if args.skip_tokenizer_init:
        shape = args.model_path.startswith(SHAPE_PREFIX)
        how = "give --tokenizer-path DIR" if shape else "leave out --skip-tokenizer-init"
        whose = f", and {args.model_path} has none" if shape else ""
        raise ValueError(f"{what} a tokenizer{whose}: {how}")


def set_up_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="[%(asctime)s] %(message)s")


def check_nodes(args: ServerArgs) -> None:
    """Of resolved arguments: ValueError if several nodes could not meet as they are told to."""
    if args.nnodes > 1:
        from moesaic.comm.supervise.address import check_meeting

        check_meeting(args.node_rank, args.dist_init_addr or "")


def join_node(args: ServerArgs) -> int:
    """The ranks of another node than the first, which gives the answers; until that ends."""
    check_nodes(args)
    from moesaic.engine.frontend.core_client import serve_node

    return serve_node(args)
