"""`moesaic bench serve | throughput | latency`: measures a server, or the engine alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from moesaic.cli.common import (
    add_model,
    join_node,
    prepare,
    read_args,
    requires_extra,
    start_engine,
)
from moesaic.config.args import ServerArgs
from moesaic.config.args_engine import ServeArgs
from moesaic.config.flags import nearest, refuse_unbuilt
from moesaic.config.parser import FlagParser, merge, read_config
from moesaic.loadgen.args import LatencyArgs, ServeBenchArgs, ThroughputArgs

USAGE = """\
usage: moesaic bench serve [flags]             a server, over HTTP
       moesaic bench throughput MODEL [flags]  the engine in this process, all requests at once
       moesaic bench latency MODEL [flags]     the same, one batch at a time

moesaic bench KIND --help shows the flags of each.

A server on this machine with 64 requests at once, then under growing load with a plot:
  moesaic bench serve --num-prompts 500 --random-input-len 512 --random-output-len 128 \\
    --max-concurrency 64
  moesaic bench serve --num-prompts 200 --request-rate 1,2,4,8 --plot load.png
"""
SERVE = "Measure a server over HTTP: throughput, TTFT, TPOT, ITL and end-to-end latency."
THROUGHPUT = "Measure the throughput of the engine for many requests, without HTTP."
LATENCY = "Measure prefill and decode of one batch at a time, without HTTP."
OFFLINE: dict[str, tuple[str, type[ThroughputArgs | LatencyArgs]]] = {
    "throughput": (THROUGHPUT, ThroughputArgs),
    "latency": (LATENCY, LatencyArgs),
}


def run(argv: Sequence[str]) -> int:
    kinds = ("serve", *OFFLINE)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] not in kinds:
        hint = nearest(argv[0], kinds)
        raise ValueError(f"unknown benchmark {argv[0]}: choose one of {', '.join(kinds)}{hint}")
    return _serve(argv[1:]) if argv[0] == "serve" else _offline(argv[0], argv[1:])


def _serve(argv: Sequence[str]) -> int:
    parser = FlagParser("moesaic bench serve", "moesaic bench serve [flags]", SERVE)
    parser.add_flags(ServeBenchArgs)
    given = parser.parse(argv)
    args = merge(ServeBenchArgs, given, read_config(ServeBenchArgs, given["config"]))
    refuse_unbuilt(args)
    with requires_extra("bench serve", "bench", "aiohttp"):
        from moesaic.loadgen.serve_bench import serve_bench
    return serve_bench(args)


def _offline(name: str, argv: Sequence[str]) -> int:
    description, kind = OFFLINE[name]
    command = f"moesaic bench {name}"
    parser = FlagParser(command, f"{command} MODEL [flags]", description)
    add_model(parser)
    parser.add_flags(kind)
    parser.add_flags(ServerArgs, leave_out=(ServeArgs.GROUP,))
    given = parser.parse(argv)
    options, args = merge(kind, given, {}), read_args(given)
    resolved = prepare(args)
    if resolved.node_rank > 0:
        return join_node(resolved)
    from moesaic.loadgen import offline_bench  # only here: --help must be quick

    measure = getattr(offline_bench, f"{name}_bench")
    with start_engine(args) as engine:
        return int(measure(engine, options))
