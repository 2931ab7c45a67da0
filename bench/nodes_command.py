"""The `moesaic` command of a node of bench/nodes_engine.py, with the ranks of that benchmark."""

from __future__ import annotations

import os
import sys
from functools import partial

from bench.ep import SILENT_SECONDS
from bench.ep_rank import FOLDER
from bench.nodes_rank import TARGET
from moesaic.cli.main import main as command
from moesaic.comm.launch.service import Timeouts
from moesaic.engine.frontend import core_client


def prepare_ranks() -> None:
    """Ranks of this node record kernels where the environment names a folder for them. What they
    compile in their first steps, and a profiler that starts, may hold the interpreter for seconds,
    and with it the rank's heartbeat: the supervisor is not to take that for a hang."""
    core_client.Timeouts = partial(Timeouts, beat=SILENT_SECONDS)  # type: ignore[misc, assignment]
    if os.environ.get(FOLDER):
        core_client.TARGET = TARGET


def main() -> int:
    prepare_ranks()
    return command()


if __name__ == "__main__":
    sys.exit(main())
