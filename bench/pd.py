"""Prefill and decode apart: how fast KV caches travel, and what a decode instance gains.

    python -m bench.pd --parts transfer --device cpu
    python -m bench.pd --device cuda                   # an H200: both parts
    python -m bench.pd --parts serving --device cuda --shares 60,60 70,50 --quantization fp8
    python -m bench.pd --parts serving --device cpu --model-path tiny:qwen3_moe --dtype float32 \
        --chats 4 --chat-len 32 --output-len 16 --long-len 512 --seconds 6
    python -m bench.pd --markdown                      # no run: tables of what was measured

transfer: two processes, see bench/pd_transfer.py.
serving: chats, without and with a long prompt every second beside them (bench/serving_load.py), on
one instance that does both, and on a prefill and a decode instance with a router in front, which
share the machine or the GPU. There they are clients of one MPS daemon, with the --shares of its
processors in percent, prefill's first. All other flags go to the servers.

Figures go to --out, on an H200 to bench/results/h200_pd.json and elsewhere to pd.json beside it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from bench.common import (
    RESULTS,
    Distinct,
    above_zero,
    check_out,
    complaints_in_a_line,
    device_name,
    positive,
    show_table,
)
from bench.http_server import START_SECONDS, Server, free_port, started
from bench.pd_transfer import FROM_BYTES, LEAST_SHARE, TransferRow, measure
from bench.serving_load import LoadDriver, Sizes
from moesaic.comm.launch.mps import start_mps
from moesaic.config.gpus import PERCENT
from moesaic.loadgen.client import Client, session
from moesaic.loadgen.endpoints import ENDPOINTS, RequestOptions
from moesaic.loadgen.metrics import RunMetrics
from moesaic.loadgen.serve_bench import raise_file_limit, run_loop

PARTS: Final = ("transfer", "serving")
DEFAULT_TRANSPORTS: Final = {"cpu": ["shm", "tcp"], "cuda": ["cuda_ipc", "tcp"]}
MIB: Final = 1 << 20
SIZES_MIB: Final = {"cpu": [0.1, 1, 8], "cuda": [0.1, 1, 8, 64, 256]}
ROUTER_SECONDS: Final = 60.0
CHATS, MIXED, LONG = "chats", "chats beside long", "long"
MODEL_FLAGS: Final = ("--load-format", "dummy", "--dtype", "bfloat16")


@dataclass
class ServingRow:
    """`system`: one instance, or a pair with its shares of the processors."""

    device: str
    model: str
    system: str
    load: str
    flags: str
    requests: int
    failed: int
    requests_s: float
    output_tok_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    itl_max_ms: float | None

    @property
    def key(self) -> tuple[object, ...]:
        return self.device, self.model, self.system, self.load


KINDS: Final[dict[str, Any]] = {"transfer": TransferRow, "serving": ServingRow}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m bench.pd",
        description=(__doc__ or "").splitlines()[0],
        epilog="All other flags go to the servers.",
        allow_abbrev=False,
    )
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    made.add_argument("--parts", choices=PARTS, nargs="+", action=Distinct, default=list(PARTS))
    made.add_argument("--transports", nargs="+", action=Distinct, help="tcp shm cuda_ipc nixl")
    made.add_argument("--mib", type=above_zero, nargs="+", action=Distinct, help="sizes of chunks")
    made.add_argument("--repeats", type=positive, default=5, help="of a transfer: the best counts")
    made.add_argument("--model-path", "--model", default="shape:qwen3-30b-a3b")
    made.add_argument("--shares", nargs="+", action=Distinct, default=["60,60"])
    made.add_argument("--mem", type=above_zero, default=0.47, help="--mem-fraction-static of each")
    made.add_argument("--start-seconds", type=above_zero, default=START_SECONDS)
    made.add_argument("--seed", type=int, default=1)
    for field in fields(Sizes):
        kind = above_zero if field.name == "seconds" else positive
        flag = "--" + field.name.replace("_", "-")
        made.add_argument(flag, type=kind, default=field.default, help="as in bench.serving")
    made.add_argument("--out", type=Path, help="JSON; rows of other points stay")
    made.add_argument("--markdown", action="store_true", help="no run: what --out has, as tables")
    return made


def transfers(options: argparse.Namespace, out: Path, name: str) -> bool:
    """In other processes: one that has used a GPU stays a client of its MPS daemon."""
    fine = True
    sizes = [round(size * MIB) for size in options.mib or SIZES_MIB[options.device]]
    for transport in options.transports or DEFAULT_TRANSPORTS[options.device]:
        given = transport, options.device, sizes, name, options.repeats
        with (
            daemon(options.device),
            ProcessPoolExecutor(
                1,
                get_context("spawn"),
                # Threads of the sender may be freeing tensors when the interpreter ends.
                partial(atexit.register, os._exit, 0),
            ) as pool,
        ):
            try:
                rows = pool.submit(measure, *given).result()
            except (OSError, RuntimeError, ValueError) as error:
                say(f"error: {transport}: {error}")
                fine = False
                continue
        store(out, "transfer", rows)
    return fine


@contextmanager
def daemon(device: str) -> Iterator[dict[str, str]]:
    """The variables by which processes share a GPU, also set for those that are started now."""
    if device == "cpu":
        yield {}
        return
    with start_mps() as mps, environment(mps.environment):
        yield mps.environment


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables for the servers that are started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def pair(
    options: argparse.Namespace, flags: Sequence[str], shares: tuple[str, str]
) -> Iterator[tuple[str, Server]]:
    """The address of a router in front of two instances, and one of them."""
    port = str(free_port())
    roles = ("prefill", "--disaggregation-bootstrap-port", port), ("decode",)
    with ExitStack() as stack:
        shared = stack.enter_context(daemon(options.device))
        memory = ["--mem-fraction-static", str(options.mem)] if shared else []
        servers = []
        for role, share in zip(roles, shares, strict=True):
            words = [*flags, *memory, "--disaggregation-mode", *role]
            with environment({PERCENT: share} if shared else {}):
                servers.append(stack.enter_context(start(options, words)))
        first, second = servers
        ends = ["--prefill", first.url, port, "--decode", second.url]
        yield stack.enter_context(router(ends)), second


@contextmanager
def start(options: argparse.Namespace, flags: Sequence[str]) -> Iterator[Server]:
    say(f"starting {options.model_path} {' '.join(flags)}")
    given = options.model_path, flags, None, options.start_seconds
    with started(*given) as server:
        yield server


@contextmanager
def router(ends: Sequence[str]) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "moesaic.launch_router", "--pd-disaggregation"]
    process = subprocess.Popen([*command, "--port", str(port), "--log-level", "warning", *ends])
    try:
        _wait_for_router(process, url)
        yield url
    finally:
        process.terminate()
        process.wait(ROUTER_SECONDS)


def _wait_for_router(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + ROUTER_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health") as found:
            if found.status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the router is not ready (its status: {process.poll()})")


@contextmanager
def mixed(options: argparse.Namespace, flags: Sequence[str]) -> Iterator[tuple[str, Server]]:
    with start(options, flags) as server:
        yield server.url, server


async def loads(url: str, server: Server, options: argparse.Namespace) -> dict[str, RunMetrics]:
    sizes = Sizes(**{field.name: getattr(options, field.name) for field in fields(Sizes)})
    config = Path(server.get("/server_info")["model_path"], "config.json")
    vocabulary = int(json.loads(config.read_text(encoding="utf-8"))["vocab_size"])
    async with session({}, keep_alive=False) as connections:
        asked = RequestOptions("default", True, True, {})
        client = Client(connections, url, ENDPOINTS["sglang"], asked)
        driver = LoadDriver(client, sizes, vocabulary, options.seed)
        chats = await driver.chats()
        beside = await driver.chats_beside_long()
    return {CHATS: chats, MIXED: beside.chats, LONG: beside.long}


def servings(options: argparse.Namespace, rest: Sequence[str], out: Path, name: str) -> bool:
    flags = [*rest, "--device", options.device]
    if options.model_path.startswith("shape:"):
        flags = [*MODEL_FLAGS, *flags]
    systems = {"one instance": mixed(options, flags)}
    for shares in options.shares:
        prefill, _, decode = shares.partition(",")
        systems[f"pair {shares}" if options.device == "cuda" else "pair"] = pair(
            options, flags, (prefill, decode)
        )
    fine = True
    for system, made in systems.items():
        try:
            with made as (url, server):
                found = run_loop(loads(url, server, options))
        except (OSError, RuntimeError, ValueError) as error:
            say(f"error: {system}: {error}")
            fine = False
            continue
        for load, figures in found.items():
            row = row_of(name, options.model_path, system, load, " ".join(flags), figures)
            store(out, "serving", [row])
            say(f"{system}, {load}: ITL p99 {row.itl_p99_ms} ms, TTFT p50 {row.ttft_p50_ms} ms")
            for message, number in figures.errors.items():
                say(f"  {number} failed: {message}")
            fine &= not figures.failed
    return fine


def row_of(
    device: str, model: str, system: str, load: str, flags: str, found: RunMetrics
) -> ServingRow:
    return ServingRow(
        device, model, system, load, flags, found.completed, found.failed,
        found.request_throughput, found.output_throughput,
        found.ttft.median, found.ttft.p99, found.itl.median, found.itl.p99, found.itl.max,
    )  # fmt: skip


def read(path: Path) -> dict[str, list[Any]]:
    """The rows of each part."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return {part: [KINDS[part](**row) for row in found.get(part, ())] for part in PARTS}


def store(path: Path, part: str, rows: Sequence[Any]) -> None:
    """Rows with the key of new ones are replaced; others stay."""
    found, new = read(path), {row.key for row in rows}
    found[part] = sorted(
        [*(row for row in found[part] if row.key not in new), *rows], key=lambda row: row.key
    )
    made = {part: [asdict(row) for row in rows] for part, rows in found.items()}
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def report(found: dict[str, list[Any]], markdown: bool) -> None:
    transfer: list[TransferRow] = found["transfer"]
    serving: list[ServingRow] = found["serving"]
    if transfer:
        header = ["transport", "chunk MB", "stream GB/s", "one us", "read GB/s", "copy GB/s"]
        show_table([*header, "read/copy", "stream/copy"], [*map(_cells, transfer)], markdown)
    if serving:
        header = ["system", "load", "requests", "output tok/s", "TTFT p50 ms", "p99"]
        rows = [
            [row.system, row.load, str(row.requests), f"{row.output_tok_s:.0f}"]
            + [_ms(row.ttft_p50_ms), _ms(row.ttft_p99_ms)]
            + [_ms(row.itl_p50_ms), _ms(row.itl_p99_ms), _ms(row.itl_max_ms)]
            for row in serving
        ]
        show_table([*header, "ITL p50 ms", "p99", "most"], rows, markdown)


def _cells(row: TransferRow) -> list[str]:
    share, read = row.share, row.read_gbs
    met = "" if share is None or row.chunk_bytes < FROM_BYTES or share >= LEAST_SHARE else " MISSED"
    return [
        row.transport,
        f"{row.chunk_bytes / 1e6:.2f}",
        f"{row.stream_gbs:.2f}",
        f"{row.one_us:.0f}",
        "" if read is None else f"{read:.2f}",
        f"{row.copy_gbs:.2f}",
        "" if share is None else f"{share:.0%}{met}",
        f"{row.stream_gbs / row.copy_gbs:.0%}",
    ]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    options, rest = parser().parse_known_args(argv)
    if options.markdown:
        report(read(options.out or RESULTS / "h200_pd.json"), markdown=True)
        return 0
    name = device_name(options.device)
    out = options.out or RESULTS / f"{'h200_pd' if 'H200' in name else 'pd'}.json"
    check_out(out)
    if any("," not in shares for shares in options.shares):
        raise SystemExit("error: --shares: give PREFILL,DECODE in percent, such as 60,60")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise_file_limit()
    fine = True
    with complaints_in_a_line():
        if "transfer" in options.parts:
            fine &= transfers(options, out, name)
        if "serving" in options.parts:
            fine &= servings(options, rest, out, name)
    report(read(out), markdown=False)
    say(f"figures are in {out}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
