"""A server under traffic: requests and tokens a second, and how long clients wait for tokens.

    python -m bench.serving --model-path shape:qwen3-30b-a3b --load-format dummy
    python -m bench.serving --model-path shape:qwen3-30b-a3b --load-format dummy \
        --ranks 1 4 --dtype bf16 fp8 --loads closed
    python -m bench.serving --attach http://127.0.0.1:30000 --server-name sglang --vocab-size 151936
    python -m bench.serving --model-path tiny:qwen3_moe --dtype fp32 --concurrency 4 \
        --input-len 64 --output-len 16 --long-len 512 --seconds 4
    python -m bench.serving --markdown             # no run: tables of what was measured

For each number of ranks and type of weights a server is started, driven by the client of
`moesaic bench serve` in this process, and ended. Flags that are not named here go to the server.
Several ranks: --tp N --ep N --dp N --enable-dp-attention --moe-a2a-backend deepep, unless flags say
something else, and --device cuda where they have to share GPUs.

Loads, in this order:
closed: --concurrency requests open at once, --rounds times as many in all, --input-len/2 to
--input-len tokens in and --output-len/2 to --output-len out, drawn uniformly, as SGLang's
bench_serving draws its random prompts with a range ratio of 0.5; as many short ones before it.
alone: 20 prompts of --input-len tokens one after the other, each for one token.
poisson: the same lengths at 60% and 90% of the most requests a second that closed loops had.
mixed: chats of up to --chat-len tokens, --chats of them open at once, without and with a prompt of
--long-len tokens every second beside them.

What latencies mean: bench/serving_load.py. Rows go to --out, on an H200 to
bench/results/h200_serving.json and elsewhere to serving.json beside it, which git ignores.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Final

import torch

from bench.common import (
    RESULTS,
    Distinct,
    above_zero,
    check_out,
    complaints_in_a_line,
    device_name,
    positive,
    read_rows,
)
from bench.http_server import START_SECONDS, Server, started
from bench.serving_load import LONG_OUTPUT, LoadDriver, Sizes
from bench.serving_tables import (
    ALONE,
    CHATS,
    CLOSED,
    LONG,
    MIXED,
    OURS,
    ServerFacts,
    ServingRow,
    make_row,
    merge,
    report,
)
from moesaic.loadgen.client import Client, session
from moesaic.loadgen.endpoints import ENDPOINTS, RequestOptions
from moesaic.loadgen.metrics import CLIENT_BOUND, RunMetrics
from moesaic.loadgen.serve_bench import raise_file_limit, run_loop

BACKEND: Final = "--moe-a2a-backend"
# What --ranks decides.
LAID_OUT: Final = ("--tp", "--tp-size", "--ep", "--ep-size", "--dp", "--dp-size", "--pp-size")
At = tuple[int | None, float | None]
Rows = list[ServingRow]
LOADS: Final = ("closed", "alone", "poisson", "mixed")
POISSON_SHARES: Final = (0.6, 0.9)
DTYPES: Final = {
    "bf16": ("--dtype", "bfloat16"),
    "fp16": ("--dtype", "float16"),
    "fp32": ("--dtype", "float32"),
    "fp8": ("--dtype", "bfloat16", "--quantization", "fp8"),
}
SIZE_HELP: Final = {
    "input_len": "most tokens of a prompt",
    "output_len": "most tokens of an answer",
    "rounds": "requests of a closed loop for each that is open",
    "seconds": "for which an open load sends; a closed loop ends after three times that",
    "chats": "chats that are open at once",
    "chat_len": "most tokens of a chat's prompt",
    "long_len": "tokens of a long prompt",
    "alone": "prompts that are sent alone",
}


@dataclass(frozen=True)
class ServerSetup:
    """How a server was started; `start_s` is None for one that ran already."""

    ranks: int
    dtype: str
    flags: str
    start_s: float | None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m bench.serving",
        description=(__doc__ or "").splitlines()[0],
        epilog="All other flags go to the server.",
        allow_abbrev=False,
    )
    made.add_argument("--model-path", "--model", help="as moesaic serve takes it")
    made.add_argument("--attach", metavar="URL", help="drive this server, and start none")
    made.add_argument("--server-name", default=OURS, help="of the one that is attached to")
    made.add_argument("--vocab-size", type=positive, help="unset: by the config of the model")
    made.add_argument("--ranks", type=positive, nargs="+", action=Distinct, default=[1])
    made.add_argument("--dtype", choices=DTYPES, nargs="+", action=Distinct, default=["bf16"])
    made.add_argument("--loads", choices=LOADS, nargs="+", action=Distinct, default=list(LOADS))
    made.add_argument(
        "--concurrency", type=positive, nargs="+", action=Distinct, default=[16, 64, 256]
    )
    for field in fields(Sizes):
        kind = above_zero if field.name == "seconds" else positive
        flag, default = "--" + field.name.replace("_", "-"), field.default
        told = f"{SIZE_HELP[field.name]} (default {default})"
        made.add_argument(flag, type=kind, default=default, help=told)
    made.add_argument("--start-seconds", type=above_zero, default=START_SECONDS)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--log", type=Path, help="of the server; unset: kept until it has ended")
    made.add_argument("--out", type=Path, help="JSON list; rows of other servers stay")
    made.add_argument("--markdown", action="store_true", help="no run: what --out has, as tables")
    return made


def check(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """ValueError for flags that cannot be measured with."""
    if (options.model_path is None) == (options.attach is None):
        raise ValueError("give either --model-path MODEL, or --attach URL of a server that runs")
    if options.attach is not None:
        if rest:
            raise ValueError(f"--attach starts no server: leave out {' '.join(rest)}")
        if len(options.ranks) + len(options.dtype) > 2:
            raise ValueError("--attach: give the one number of --ranks and the one --dtype it has")
    if laid_out := [word for word in rest if word.partition("=")[0] in LAID_OUT]:
        raise ValueError(f"{laid_out[0]}: ranks are laid out by --ranks here, so leave it out")
    if "poisson" in options.loads and "closed" not in options.loads:
        raise ValueError("--loads poisson is a share of what closed loops reach: add closed")


def server_flags(rest: Sequence[str], ranks: int, dtype: str) -> list[str]:
    flags = [*rest, *DTYPES[dtype]]
    if ranks > 1:
        flags += f"--tp {ranks} --ep {ranks} --dp {ranks} --enable-dp-attention".split()
        if BACKEND not in rest:
            flags += [BACKEND, "deepep"]
        if "--device" not in rest and ranks > torch.cuda.device_count() > 0:
            flags += ["--device", "cuda"]
    return flags


@contextmanager
def server_of(
    options: argparse.Namespace, rest: Sequence[str], ranks: int, dtype: str
) -> Iterator[tuple[Server, ServerFacts]]:
    """Starts a server, or takes the one to attach to."""
    if options.attach is not None:
        server = Server(options.attach.rstrip("/"), None)
        yield server, facts_of(server, options, ServerSetup(ranks, dtype, "", None))
        return
    flags = server_flags(rest, ranks, dtype)
    begin = time.perf_counter()
    say(f"starting {options.model_path} {' '.join(flags)}")
    with started(options.model_path, flags, options.log, options.start_seconds) as server:
        seconds = time.perf_counter() - begin
        say(f"ready after {seconds:.1f} s")
        yield server, facts_of(server, options, ServerSetup(ranks, dtype, " ".join(flags), seconds))


def facts_of(server: Server, options: argparse.Namespace, setup: ServerSetup) -> ServerFacts:
    info = server.get("/server_info")
    context, longest = info.get("context_length"), options.long_len + LONG_OUTPUT
    if "mixed" in options.loads and context is not None and longest > context:
        raise ValueError(f"--long-len {options.long_len} is too long for a context of {context}")
    name = str(info.get("served_model_name") or info["model_path"])
    model = name.removeprefix("shape:").rpartition("/")[2]
    device = device_name(info.get("device") or "cpu")
    return ServerFacts(model=model, server=options.server_name, device=device, **asdict(setup))


def vocab_size(server: Server, options: argparse.Namespace) -> int:
    if options.vocab_size is not None:
        return int(options.vocab_size)
    config = Path(server.get("/server_info")["model_path"], "config.json")
    if not config.is_file():
        raise ValueError(f"{config} is not on this machine: give --vocab-size")
    return int(json.loads(config.read_text(encoding="utf-8"))["vocab_size"])


async def figures_of(
    driver: LoadDriver, options: argparse.Namespace
) -> AsyncIterator[tuple[str, At, RunMetrics]]:
    """Measures the loads that are asked for: what each is called, its size and its figures."""
    best = 0.0
    if "closed" in options.loads:
        for concurrency in options.concurrency:
            figures = await driver.closed(concurrency)
            best = max(best, figures.request_throughput)
            yield CLOSED, (concurrency, None), figures
    if "alone" in options.loads:
        yield ALONE, (1, None), await driver.alone()
    if "poisson" in options.loads and best:
        for share in POISSON_SHARES:
            yield f"poisson {share:.0%}", (None, share * best), await driver.poisson(share * best)
    if "mixed" in options.loads:
        yield CHATS, (options.chats, None), await driver.chats()
        mixed = await driver.chats_beside_long()
        yield MIXED, (options.chats, None), mixed.chats
        yield LONG, (None, 1.0), mixed.long


async def measure(server: Server, facts: ServerFacts, options: argparse.Namespace) -> Rows:
    """Rows are written as they are measured."""
    sizes = Sizes(**{field.name: getattr(options, field.name) for field in fields(Sizes)})
    rows: Rows = []
    # As in SGLang's bench_serving, whose figures have the time to connect in them.
    async with session({}, keep_alive=False) as connections:
        request_options = RequestOptions("default", True, True, {})
        client = Client(connections, server.url, ENDPOINTS["sglang"], request_options)
        driver = LoadDriver(client, sizes, vocab_size(server, options), options.seed)
        async for load, at, figures in figures_of(driver, options):
            row = with_ratio(make_row(facts, load, at, figures), rows)
            rows.append(row)
            merge(out_of(options, facts.device), [row])
            say_row(row, figures)
    return rows


def with_ratio(row: ServingRow, before: Sequence[ServingRow]) -> ServingRow:
    """The chats beside long prompts are compared with those without."""
    plain = next((one.itl_p99_ms for one in before if one.load == CHATS), None)
    if row.load != MIXED or not plain or row.itl_p99_ms is None:
        return row
    return replace(row, itl_p99_ratio=row.itl_p99_ms / plain)


def out_of(options: argparse.Namespace, device: str) -> Path:
    name = "h200_serving" if "H200" in device else "serving"
    return options.out or RESULTS / f"{name}.json"


def say_row(row: ServingRow, figures: RunMetrics) -> None:
    size = f"{row.rate:.1f}/s" if row.concurrency is None else f"{row.concurrency} at once"
    say(f"{row.load}, {size}: {row.requests} requests in {row.seconds:.1f} s")
    if row.itl_p99_ratio is not None:
        say(f"  ITL p99 is {row.itl_p99_ratio:.2f} times that without long prompts")
    for message, number in figures.errors.items():
        say(f"  {number} failed: {message}")
    if figures.client_bound:
        say(f"  the client took {row.client_cpu:.0%} of its core, more than {CLIENT_BOUND:.0%}")


def say(text: str) -> None:
    print(text, flush=True)


def measure_all(options: argparse.Namespace, rest: Sequence[str]) -> tuple[Rows, bool]:
    """The rows, and whether all servers and requests were fine."""
    rows: Rows = []
    fine = True
    for dtype in options.dtype:
        for ranks in options.ranks:
            try:
                with server_of(options, rest, ranks, dtype) as (server, facts):
                    rows += run_loop(measure(server, facts, options))
            except (RuntimeError, ValueError, OSError) as error:
                say(f"error: {ranks} ranks, {dtype}: {error}")
                fine = False
    return rows, fine and not any(row.failed for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    options, rest = parser().parse_known_args(argv)
    if options.markdown:
        report(read_rows(options.out or RESULTS / "h200_serving.json", ServingRow), markdown=True)
        return 0
    with complaints_in_a_line():
        check(options, rest)
    check_out(options.out or RESULTS / "serving.json")
    # A benchmark that is told to end must not leave its server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise_file_limit()
    rows, fine = measure_all(options, rest)
    if rows:
        report(rows)
        print(f"rows are in {out_of(options, rows[0].device)}")
    return 0 if rows and fine else 1


if __name__ == "__main__":
    sys.exit(main())
