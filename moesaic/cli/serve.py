"""`moesaic serve MODEL …`: the HTTP server."""

import sys
from collections.abc import Sequence

from moesaic.cli.common import add_model, read_args, set_up_logging
from moesaic.config.args import ServerArgs
from moesaic.config.parser import FlagParser
from moesaic.config.resolve import resolve

DESCRIPTION = """\
Serve a Mixture-of-Experts model over HTTP.
The HTTP server is not built yet: this command checks the flags and says what to use instead."""


def run(argv: Sequence[str]) -> int:
    parser = FlagParser("moesaic serve", "moesaic serve MODEL [flags]", DESCRIPTION)
    add_model(parser)
    parser.add_flags(ServerArgs)
    args = read_args(parser.parse(argv))
    set_up_logging(args.log_level)
    args = resolve(args)
    print(
        "error: no flag is wrong in itself, but the HTTP server is not built yet; what works now: "
        f"moesaic generate --model-path {args.model_path}",
        file=sys.stderr,
    )
    return 1
