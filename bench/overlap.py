"""What overlap of communication and computation gains: off, single-batch, two micro-batches, auto.

    python -m bench.overlap                        # all links and sizes of two models
    python -m bench.overlap --quick                # 4 layers and four sizes of them
    python -m bench.overlap --quick --model-path shape:qwen3-30b-a3b --links gbps=50,us=5 none
    python -m bench.overlap --device cpu --model-path tiny:deepseek_v2 --ranks 2 --decode 4 8 \
        --prefill 64 --links none gbps=0.05,us=2000
    python -m bench.overlap --markdown             # no run: tables of what was measured

Links: `none` is the shared GPU as it is, `gbps=50,us=5` what --emulate-link takes, and `nodes` two
nodes with half of the ranks each, between which rows cross by NCCL over loopback. Ranks that share
a GPU also share its time: each of 4 computes at about a quarter of its speed, so a link has a
smaller part of a step than with a GPU for each rank, where one of 4 times its speed has the same.

Each engine has --tp P --ep P --dp P --enable-dp-attention --moe-a2a-backend deepep --overlap auto.
One engine measures all emulated links. As at a start with auto, ranks measure steps with all
schedules (moesaic/engine/runner/overlap_calibration.py) and choose. Then all of it is measured once
more, and only that counts: `auto` is the second measurement of what the first one chose, so that
luck of the first shows. `predicted`: by the cost model, from one batch and its half. Gains are of
tokens a second, against one batch. `hides`: of the communication.

Rows are written one by one to --out, on an H200 to bench/results/h200_overlap.json and elsewhere to
overlap.json beside it, which git ignores.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.common import RESULTS, Distinct, check_out, merge, positive, read_rows, show_table
from bench.gpu import named
from bench.nodes_engine import other_nodes, shared_gpu
from bench.overlap_rank import FOLDER, FOUND, JOB, half_of, prepare_ranks
from moesaic import Engine
from moesaic.config.args import ServerArgs
from moesaic.core.link import EmulatedLink
from moesaic.core.process import NODE_SECRET

MODELS = ("shape:qwen3-30b-a3b", "shape:deepseek-v2-lite")
NONE, NODES = "none", "nodes"
LINKS = ("gbps=50,us=5", "gbps=25,us=5", "gbps=450,us=1", NONE, NODES)
DECODE, PREFILL = [1 << n for n in range(9)], [1 << n for n in range(4, 14)]
QUICK_DECODE, QUICK_PREFILL = [32, 128], [1024, 4096]
QUICK_LAYERS = 4
ENGINE_SECONDS, SILENT_SECONDS = 600.0, 240.0
HEADER = ("step", "tokens", "comm.", "off ms", "sbo", "tbo", "auto", "took", "hides")
PREDICTED = ("sbo predicted", "tbo predicted")


@dataclass
class Row:
    """Milliseconds of a step, by schedule; `auto_ms`: of the schedule that auto had chosen."""

    device: str
    model: str
    layers: int
    ranks: int
    link: str
    kind: str
    tokens: int
    measured_ms: dict[str, float]
    predicted_ms: dict[str, float]
    hidden: dict[str, float]
    communication: float
    """Part of a step of one batch."""
    chosen: str
    auto_ms: float
    start_s: float

    @property
    def key(self) -> tuple[Any, ...]:
        return (
            *(self.device, self.model, self.layers, self.ranks, self.link),
            *(self.kind, self.tokens),
        )


def parse(words: Sequence[str]) -> argparse.Namespace:
    made = argparse.ArgumentParser(
        "python -m bench.overlap", description=(__doc__ or "").split("\n")[0]
    )
    several: dict[str, Any] = {"nargs": "+", "action": Distinct}
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--model-path", default=list(MODELS), **several)
    made.add_argument("--layers", type=positive, help="of shape: and tiny: models")
    made.add_argument("--ranks", type=positive, default=4)
    made.add_argument(
        "--links", default=list(LINKS), help="none, nodes, or what --emulate-link takes", **several
    )
    tokens = "tokens of a rank"
    made.add_argument("--decode", type=positive, help=f"{tokens} that decode", **several)
    made.add_argument("--prefill", type=positive, help=f"{tokens} of prompts", **several)
    made.add_argument("--quick", action="store_true", help="few layers and sizes unless given")
    made.add_argument("--out", type=Path, help="JSON list; rows of other points stay")
    made.add_argument("--markdown", action="store_true", help="no run: tables of what --out has")
    made.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    args = made.parse_args(words)
    for link in args.links:
        if link not in (NONE, NODES):
            EmulatedLink.parse(link)
    if args.ranks < 2 or (NODES in args.links and args.ranks % 2):
        made.error(f"--ranks {args.ranks}: give 2 or more, and two nodes have half of them each")
    args.decode = args.decode or (QUICK_DECODE if args.quick else DECODE)
    args.prefill = args.prefill or (QUICK_PREFILL if args.quick else PREFILL)
    if args.quick:
        args.layers = args.layers or QUICK_LAYERS
    return args


def engines(links: Sequence[str]) -> list[list[str]]:
    """The links of each engine: all emulated ones have the same."""
    emulated = [link for link in links if link not in (NONE, NODES)]
    found = list[list[str]]()
    for link in links:
        group = emulated if link in emulated else [link]
        if group not in found:
            found.append(group)
    return found


def engine_args(args: argparse.Namespace, model: str, links: Sequence[str]) -> dict[str, Any]:
    """Graphs have the sizes that are measured."""
    ranks, path, link = args.ranks, model, links[0]
    if args.layers is not None:
        path += f",num_hidden_layers={args.layers}"
    decode, prefill = max(args.decode), max(args.prefill)
    made: dict[str, Any] = {
        "model_path": path,
        "load_format": "dummy",
        "dtype": "auto" if args.device == "cpu" else "bfloat16",
        "device": args.device,
        "tp_size": ranks,
        "ep_size": ranks,
        "dp_size": ranks,
        "nnodes": 2 if link == NODES else 1,
        "enable_dp_attention": True,
        "moe_a2a_backend": "deepep",
        "overlap": "auto",
        "emulate_link": None if link in (NONE, NODES) else link,
        "max_running_requests": ranks * decode,
        "chunked_prefill_size": ranks * prefill,
        "max_total_tokens": 4 * max(decode, prefill),
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "random_seed": 0,
        "watchdog_timeout": 300.0,
        "log_level": "info",
    }
    if link == NODES:
        made["dist_init_addr"] = "127.0.0.1:1"  # until a port is chosen
    if args.device == "cuda":
        made |= {"cuda_graph_bs": with_halves(args.decode)}
        made |= {"cuda_graph_bs_prefill": with_halves(args.prefill)}
    return made


def with_halves(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({*sizes, *filter(None, map(half_of, sizes))}))


def measure(args: argparse.Namespace) -> int:
    """In the process of one engine, which has one model and links that it can emulate."""
    (model,), begin = args.model_path, time.monotonic()
    made = engine_args(args, model, args.links)
    is_apart = made["nnodes"] > 1
    if is_apart:
        made = complete(made)
    prepare_ranks()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        job = {"links": args.links, "decode": args.decode, "prefill": args.prefill}
        Path(folder, JOB).write_text(json.dumps(job))
        gpu = shared_gpu(args.device, args.ranks) if is_apart else nullcontext()
        with gpu, other_nodes(made, "bench.overlap_rank") as placed, Engine(**placed) as engine:
            seconds = time.monotonic() - begin
            print(f"{model}, {', '.join(args.links)}: ready after {seconds:.1f} s", flush=True)
            place = place_of(engine, model, args)
            for line in lines(Path(folder, FOUND), lambda: engine._core.fault):
                keep(args.out, row_of(place, line, seconds))
    return 0


def complete(made: dict[str, Any]) -> dict[str, Any]:
    """With the defaults of all other arguments, for the command line of the other node."""
    os.environ.setdefault(NODE_SECRET, secrets.token_hex(16))
    return asdict(ServerArgs(**made))


def place_of(engine: Engine, model: str, args: argparse.Namespace) -> tuple[Any, ...]:
    """The first fields of all rows of an engine."""
    config = json.loads(Path(engine.args.model_path, "config.json").read_text())
    devices = (facts["device"] for facts in engine._core.rank_facts if facts.get("device"))
    device = next((found.get("name") for found in devices), "cpu")
    return device, model.partition(":")[2], config["num_hidden_layers"], args.ranks


def lines(path: Path, fault: Callable[[], str]) -> Iterator[dict[str, Any]]:
    """What rank 0 adds to a file, until its end. `fault`: why the ranks have ended, if so."""
    done, last = 0, time.monotonic()
    while True:
        written = path.read_text().split("\n")[:-1] if path.exists() else []
        for line in map(json.loads, written[done:]):
            if "end" in line:
                return
            yield line
            last = time.monotonic()
        done = len(written)
        if why := fault():
            raise SystemExit(f"error: {why}")
        if time.monotonic() - last > SILENT_SECONDS:
            raise SystemExit(f"error: the ranks have told nothing for {SILENT_SECONDS:g} s")
        time.sleep(0.05)


def row_of(place: tuple[Any, ...], line: Mapping[str, Any], seconds: float) -> Row:
    """`first`: what auto chose by; `second`: what counts."""
    link, one, picked = line["link"], line["second"], line["first"]["chosen"]
    measured = one["measured_ms"]
    return Row(
        *place,
        link if link in (NONE, NODES) else str(EmulatedLink.parse(link)),
        one["kind"],
        one["tokens"],
        measured,
        one["predicted_ms"],
        one["hidden_ratio"],
        one["communication_ms"] / measured["off"],
        picked,
        measured[picked],
        seconds,
    )


def keep(out: Path | None, row: Row) -> None:
    """At once, as a run may be cut off."""
    told = zip([*HEADER, *PREDICTED], _cells(row), strict=True)
    print(f"{row.link}: " + ", ".join(f"{name} {cell}" for name, cell in told if cell), flush=True)
    merge(out or RESULTS / f"{named('overlap', row.device)}.json", [row], tell=False)


def show(rows: Sequence[Row], markdown: bool = False) -> None:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key[:5], []).append(row)
    for (device, model, layers, ranks, link), found in groups.items():
        print(f"\n{model}, {layers} layers, {ranks} ranks, link {link}, {device}\n")
        show_table([*HEADER, *PREDICTED], [_cells(row) for row in found], markdown)
    sys.stdout.flush()


def _cells(row: Row) -> list[str]:
    off = row.measured_ms["off"]

    def gain(times: Mapping[str, float], name: str) -> str:
        return f"{off / times[name] - 1:+.1%}" if name in times else ""

    return [
        *(row.kind, str(row.tokens), f"{row.communication:.0%}", f"{off:.3f}"),
        *(gain(row.measured_ms, name) for name in ("sbo", "tbo")),
        *(f"{off / row.auto_ms - 1:+.1%}", row.chosen, f"{row.hidden.get(row.chosen, 0):.0%}"),
        *(gain(row.predicted_ms, name) for name in ("sbo", "tbo")),
    ]


def run_apart(args: argparse.Namespace, model: str, links: Sequence[str]) -> bool:
    """An engine in a process of its own, which writes its rows. Whether it came to its end."""
    words = ["--device", args.device, "--model-path", model, "--links", *links]
    words += ["--ranks", str(args.ranks), "--apart"]
    words += ["--decode", *map(str, args.decode), "--prefill", *map(str, args.prefill)]
    words += [] if args.layers is None else ["--layers", str(args.layers)]
    words += [] if args.out is None else ["--out", str(args.out)]
    command = [sys.executable, "-m", "bench.overlap", *words]
    try:
        code = subprocess.run(command, timeout=ENGINE_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        code = f"nothing after {ENGINE_SECONDS:g} s"
    if code:
        print(f"{model}, {', '.join(links)}: ended with {code}", file=sys.stderr, flush=True)
    return not code


def main(words: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if words is None else words)
    if args.markdown:
        show(read_rows(args.out or RESULTS / "h200_overlap.json", Row), markdown=True)
        return 0
    if args.apart:
        return measure(args)
    check_out(args.out or RESULTS / "overlap.json")
    ended = [
        run_apart(args, model, links) for links in engines(args.links) for model in args.model_path
    ]
    return 0 if all(ended) else 1


if __name__ == "__main__":
    sys.exit(main())
