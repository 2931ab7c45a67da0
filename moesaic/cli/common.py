"""The model argument, flags, logging and engine that commands share."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moesaic.config.args import ServerArgs
from moesaic.config.parser import FlagParser, merge, read_config, sglang_values
from moesaic.config.resolve import SHAPE_PREFIX, resolve
from moesaic.config.sglang import notes

if TYPE_CHECKING:
    from moesaic.engine.engine import Engine


def add_model(parser: FlagParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="the same as --model-path; put it first"
    )


def read_args(given: Mapping[str, Any]) -> ServerArgs:
    """The engine's arguments from a parsed command line and its --config file."""
    return read_args_and_notes(given)[0]


def read_args_and_notes(given: Mapping[str, Any]) -> tuple[ServerArgs, list[str]]:
    """The arguments, and what to log about flags of SGLang's that need nothing."""
    named, flagged = given["model"], given.get("model_path")
    if named is not None and flagged is not None and named != flagged:
        raise ValueError(f"two models, {named} and --model-path {flagged}: keep one")
    given = {**given, "model_path": named} if named else given
    file = read_config(ServerArgs, given["config"])
    args = merge(ServerArgs, given, file)
    return args, list(notes(sglang_values(ServerArgs, given, file)))


@contextmanager
def requires_extra(what: str, extra: str, *modules: str) -> Iterator[None]:
    """Explain a missing module of an extra, which is imported in this context."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in modules:
            raise
        raise ValueError(
            f"{what} needs {error.name}, which is not installed: pip install 'moesaic[{extra}]'"
        ) from None


def require_tokenizer(args: ServerArgs, what: str) -> None:
    """Raise ValueError, before weights are loaded, if resolved arguments have no tokenizer."""
    if args.skip_tokenizer_init:
        shape = args.model_path.startswith(SHAPE_PREFIX)
        how = "give --tokenizer-path DIR" if shape else "leave out --skip-tokenizer-init"
        whose = f", and {args.model_path} has none" if shape else ""
        raise ValueError(f"{what} a tokenizer{whose}: {how}")


def set_up_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="[%(asctime)s] %(message)s")
    # At exit torch logs statistics of its compiler.
    logging.getLogger("torch").setLevel(max(logging.WARNING, logging.getLogger().level))


def check_nodes(args: ServerArgs, name_timeout: float = 0.0) -> None:
    """Raise ValueError if the nodes of resolved arguments cannot reach each other. The name of
    node 0 has `name_timeout` seconds to become known."""
    if args.nnodes > 1:
        from moesaic.comm.network.node_secret import own_secret
        from moesaic.comm.supervise.address import check_init_address

        secret = own_secret(file=args.node_secret_file)
        for node, address in enumerate((args.dist_init_addr or "").split(",")):
            own = 0 if node == args.node_rank else 1
            check_init_address(own, address, secret, name_timeout=name_timeout)


def prepare(args: ServerArgs, needs_tokenizer: str = "") -> ServerArgs:
    """Resolve and check arguments before anything slow, so a wrong flag is reported at once."""
    resolved = resolve(args)
    check_nodes(resolved)
    if needs_tokenizer:
        require_tokenizer(resolved, needs_tokenizer)
    set_up_logging(args.log_level)
    return resolved


def start_engine(args: ServerArgs) -> Engine:
    from moesaic.engine.engine import Engine

    return Engine(**asdict(args))


def join_node(args: ServerArgs) -> int:
    """Run the ranks of a node other than the first until the first one ends."""
    from moesaic.engine.frontend.core_client import serve_node

    found = serve_node(args)
    assert isinstance(found, int), "a node of one that leads has no keeper"
    return found
