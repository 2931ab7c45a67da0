"""What overlap of communication and computation gains: off, single-batch, two micro-batches, auto.

    python -m bench.overlap                        # links: the shared GPU as it is, 50 and 450 GB/s
    python -m bench.overlap --quick                # 4 layers, fewer sizes: about 3 minutes
    python -m bench.overlap --device cpu --model-path tiny:deepseek_v2 --ranks 2 --decode 8 \
        --prefill 64 --links gbps=0.05,us=2000
    python -m bench.overlap --markdown             # no run: tables of what was measured

Each engine has --tp P --ep P --dp P --enable-dp-attention --moe-a2a-backend deepep --overlap auto,
with ranks that share a GPU. At its start auto measures steps of 1, 2, 4 … tokens a rank with all
schedules (moesaic/engine/runner/overlap_calibration.py) and chooses. Then all of it is measured
once more, and only that counts: `auto` is the second measurement of what the first one chose, so
that luck of the first shows. `predicted`: by the cost model, from one batch and its half.
`hidden`: of the communication. Ranks that share a GPU share its time: compute is that of all ranks,
so communication has a smaller part of a step than on as many GPUs.

Rows go to --out, on an H200 to bench/results/h200_overlap.json and elsewhere to overlap.json beside
it, which git ignores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.common import RESULTS, check_out, merge, positive, read_rows, show_table
from bench.gpu import named
from bench.overlap_rank import FOLDER, FOUND, TARGET
from moesaic import Engine
from moesaic.comm.launch.service import Timeouts
from moesaic.core.link import EmulatedLink
from moesaic.engine.frontend import core_client as remote

MODELS = ("shape:deepseek-v2-lite", "shape:qwen3-30b-a3b")
LINKS = ("none", "gbps=50,us=5", "gbps=450,us=1")
ENGINE_SECONDS = 300.0
SILENT_SECONDS = 60.0


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
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--model-path", nargs="+", default=list(MODELS))
    made.add_argument("--layers", type=positive, help="of shape: and tiny: models")
    made.add_argument("--ranks", type=positive, default=4)
    made.add_argument(
        "--links", nargs="+", default=list(LINKS), help="none, or what --emulate-link takes"
    )
    made.add_argument("--decode", type=positive, default=256, help="most tokens of a rank")
    made.add_argument("--prefill", type=positive, default=8192, help="most tokens of a rank")
    made.add_argument("--quick", action="store_true", help="4 layers, steps of up to 4096 tokens")
    made.add_argument("--out", type=Path, help="JSON list; rows of other points stay")
    made.add_argument("--markdown", action="store_true", help="no run: tables of what --out has")
    made.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args(words)
    for link in args.links:
        if link != "none":
            EmulatedLink.parse(link)
    if args.quick:
        args.layers, args.prefill = args.layers or 4, min(args.prefill, 4096)
    return args


def powers(least: int, most: int) -> tuple[int, ...]:
    found = [1 << n for n in range(most.bit_length()) if least <= 1 << n <= most]
    return tuple(sorted({*found, most}))


def engine_args(args: argparse.Namespace, model: str, link: str) -> dict[str, Any]:
    """Graphs have the sizes that are measured."""
    ranks, path = args.ranks, model
    if args.layers is not None:
        path += f",num_hidden_layers={args.layers}"
    made: dict[str, Any] = {
        "model_path": path,
        "load_format": "dummy",
        "dtype": "auto" if args.device == "cpu" else "bfloat16",
        "device": args.device,
        "tp_size": ranks,
        "ep_size": ranks,
        "dp_size": ranks,
        "enable_dp_attention": True,
        "moe_a2a_backend": "deepep",
        "overlap": "auto",
        "emulate_link": None if link == "none" else link,
        "max_running_requests": ranks * args.decode,
        "chunked_prefill_size": ranks * args.prefill,
        "max_total_tokens": 4 * max(args.decode, args.prefill),
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "random_seed": 0,
        "watchdog_timeout": 300.0,
        "log_level": "info",
    }
    if args.device == "cuda":
        made |= {"cuda_graph_bs": powers(1, args.decode)}
        made |= {"cuda_graph_bs_prefill": powers(16, args.prefill)}
    return made


def measure(args: argparse.Namespace) -> int:
    """In the process of one engine."""
    folder = args.part.parent
    os.environ[FOLDER] = str(folder)
    remote.Timeouts = partial(Timeouts, beat=SILENT_SECONDS)  # type: ignore[misc, assignment]
    remote.TARGET = TARGET
    (model,), (link,) = args.model_path, args.links
    begin = time.monotonic()
    with Engine(**engine_args(args, model, link)) as engine:
        seconds = time.monotonic() - begin
        while not (folder / FOUND).exists():
            if time.monotonic() - begin > ENGINE_SECONDS:
                raise SystemExit("error: the second measurement did not end")
            time.sleep(0.05)
        first, second = json.loads((folder / FOUND).read_text())
        config = json.loads(Path(engine.args.model_path, "config.json").read_text())
        device = next(
            (f["device"].get("name") for f in engine._core.rank_facts if f.get("device")), "cpu"
        )
    shown = "none" if link == "none" else str(EmulatedLink.parse(link))
    place = (device, model.partition(":")[2], config["num_hidden_layers"], args.ranks, shown)
    rows = rows_of(place, first, second, seconds)
    args.part.write_text(json.dumps([asdict(row) for row in rows]))
    return 0


def rows_of(
    place: tuple[Any, ...],
    first: Sequence[Mapping[str, Any]],
    second: Sequence[Mapping[str, Any]],
    seconds: float,
) -> list[Row]:
    """`first`: what auto chose by; `second`: what counts."""
    chosen = {(one["kind"], one["tokens"]): one["chosen"] for one in first}
    made = []
    for one in second:
        measured, picked = one["measured_ms"], chosen.get((one["kind"], one["tokens"]), "off")
        made.append(
            Row(
                *place, one["kind"], one["tokens"], measured, one["predicted_ms"],
                one["hidden_ratio"], one["communication_ms"] / measured["off"], picked,
                measured[picked], seconds,
            )
        )  # fmt: skip
    return made


def show(rows: Sequence[Row], markdown: bool = False) -> None:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key[:5], []).append(row)
    header = ["step", "tokens", "comm.", "off ms", "sbo", "tbo", "auto", "chosen", "hides"]
    header += ["sbo predicted", "tbo predicted"]
    for (device, model, layers, ranks, link), found in groups.items():
        print(f"\n{model}, {layers} layers, {ranks} ranks, link {link}, {device}\n")
        show_table(header, [_cells(row) for row in found], markdown)
    sys.stdout.flush()


def _cells(row: Row) -> list[str]:
    off = row.measured_ms["off"]

    def against(times: Mapping[str, float], name: str) -> str:
        return f"{times[name] / off - 1:+.1%}" if name in times else ""

    return [
        *(row.kind, str(row.tokens), f"{row.communication:.0%}", f"{off:.3f}"),
        *(against(row.measured_ms, name) for name in ("sbo", "tbo")),
        *(f"{row.auto_ms / off - 1:+.1%}", row.chosen, f"{row.hidden.get(row.chosen, 0):.0%}"),
        *(against(row.predicted_ms, name) for name in ("sbo", "tbo")),
    ]


def run_apart(args: argparse.Namespace, model: str, link: str) -> list[Row]:
    """An engine in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "rows.json"
        words = [
            sys.executable,
            "-m",
            "bench.overlap",
            "--device",
            args.device,
            "--model-path",
            model,
        ]
        words += ["--links", link, "--ranks", str(args.ranks), "--decode", str(args.decode)]
        words += ["--prefill", str(args.prefill), "--part", str(part)]
        words += [] if args.layers is None else ["--layers", str(args.layers)]
        try:
            code = subprocess.run(words, timeout=ENGINE_SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"{model}, {link}: not done after {ENGINE_SECONDS:g} s", file=sys.stderr)
            return []
        if code or not part.exists():
            print(f"{model}, {link}: ended with {code}", file=sys.stderr)
            return []
        return [Row(**row) for row in json.loads(part.read_text())]


def main(words: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if words is None else words)
    if args.markdown:
        show(read_rows(args.out or RESULTS / "h200_overlap.json", Row), markdown=True)
        return 0
    if args.part is not None:
        return measure(args)
    check_out(args.out or RESULTS / "overlap.json")
    failed = 0
    for model in args.model_path:
        for link in args.links:
            rows = run_apart(args, model, link)
            failed += not rows
            if rows:
                show(rows)
                merge(args.out or RESULTS / f"{named('overlap', rows[0].device)}.json", rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
