"""The engine on nodes that share a GPU, against one node of as many ranks: what crossing costs.

    python -m bench.nodes_engine --model-path shape:qwen3-30b-a3b --load-format dummy \
        --dtype bfloat16 --profile
    python -m bench.nodes_engine --model-path shape:qwen3-30b-a3b --load-format dummy \
        --layouts 1x4 2x2 --attention tp --batch 32
    python -m bench.nodes_engine --model-path tiny:qwen3_moe --device cpu --layouts 1x2 2x1 \
        --batch 4 --input-len 24 --output-len 16
    python -m bench.nodes_engine --markdown           # no run: tables of what was measured

2x2 are two nodes of two ranks, 1x4pp2 is one node of four ranks in two pipeline stages, and of
2x2pp2 each node has a stage. The ranks of a stage are --tp P --ep P --moe-a2a-backend deepep,
unless another backend is given, and --dp P --enable-dp-attention, or with --attention tp they share
each request's attention. Node 0 runs in this process, the others are processes beside it, over
loopback: to NCCL each is a host of its own, so that rows cross by sockets. On a GPU all nodes use
one MPS daemon and the first GPU, unless CUDA_VISIBLE_DEVICES names another, each rank on as many of
its processors whatever the layout; and each rank has a KV cache of as many tokens as the largest
batch needs, unless --max-total-tokens is given: no node knows what the others take.

Requests are those of bench/one_batch.py. A step is what gives every request one token: with S
stages S steps of the engine, which are in flight at once. `of first`: of the tokens a second of the
first layout in the same run; `same`: of the requests, those with all tokens of the first layout.
`total`: prompts and answers, from the first step to the last.

Breakdown: from the host's record of all ranks, and with --profile by kernels, a few steps of one
more run (bench/ep.py): the mean of the ranks and the least. `nccl` are NCCL's kernels, in which
rows cross between nodes, with the waiting for the other node; they are part of `collectives`.

Rows go to --out, on an H200 to bench/results/h200_nodes_engine.json and on a CPU to
cpu_nodes_engine.json, which git ignores. Flags of the engine are taken, too, but for those that lay
out ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bench.common import (
    RESULTS,
    Distinct,
    check_out,
    complaints_in_a_line,
    device_name,
    merge,
    positive,
    read_rows,
)
from bench.ep import WARM_RUNS, WARM_TOKENS, check_args, facts, prompts_of, read_flags
from bench.ep import engine_args as stage_args
from bench.ep_rank import FOLDER, WANTED
from bench.ep_trace import read_trace
from bench.gpu import named
from bench.http_server import free_port
from bench.nodes_command import prepare_ranks
from bench.nodes_tables import Row, Timing, compare, kernel_stages, mean_of, report, timing
from bench.one_batch import generate, say
from bench.stages import StepKernels
from moesaic import Engine
from moesaic.comm.launch.mps import start_mps
from moesaic.config.args import ServerArgs
from moesaic.config.devices import VISIBLE, device_of
from moesaic.config.flags import specs
from moesaic.config.gpus import PERCENT, processor_percent
from moesaic.core.process import NODE_SECRET, child_environment

LAYOUTS = ("1x4", "2x2", "1x4pp2", "2x2pp2")
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Layout:
    """`ranks`: on each node."""

    nodes: int
    ranks: int
    pp: int = 1

    @property
    def name(self) -> str:
        return f"{self.nodes}x{self.ranks}" + (f"pp{self.pp}" if self.pp > 1 else "")

    @property
    def world(self) -> int:
        return self.nodes * self.ranks

    @property
    def tp(self) -> int:
        return self.world // self.pp

    @classmethod
    def parse(cls, word: str) -> Layout:
        """Type of an argument."""
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:pp([1-9]\d*))?", word)
        if found is None:
            example = "give NODESxRANKS or NODESxRANKSppSTAGES, as 2x2 or 2x2pp2"
            raise argparse.ArgumentTypeError(f"{word!r} is no layout: {example}")
        made = cls(*(int(number or 1) for number in found.groups()))
        if made.world % made.pp or made.world == 1:
            wrong = "one rank has no peers" if made.world == 1 else "stages have as many ranks each"
            raise argparse.ArgumentTypeError(f"{word!r}: {wrong}")
        return made


def engine_args(read: ServerArgs, options: argparse.Namespace, layout: Layout) -> dict[str, Any]:
    """Of all nodes, but for where they meet."""
    made = stage_args(read, options, layout.tp)
    if options.attention == "tp":
        made |= {"dp_size": 1, "enable_dp_attention": False}
    made |= {"pp_size": layout.pp, "nnodes": layout.nodes}
    if layout.nodes > 1:
        made["dist_init_addr"] = "127.0.0.1:1"  # until a port is chosen
    most, groups, page = max(options.batch), made["dp_size"], read.page_size
    if read.max_total_tokens is None:
        pages = -(-(options.input_len + options.output_len) // page) + 1
        made["max_total_tokens"] = -(-most // groups) * pages * page
    if made["device"] == "cuda" and not (read.disable_cuda_graph or read.cuda_graph_bs):
        sizes = {-(-batch // (groups * layout.pp)) for batch in options.batch}
        made["cuda_graph_bs"] = tuple(sorted(sizes))
    return made


def check(read: ServerArgs, options: argparse.Namespace, layout: Layout) -> None:
    """ValueError for what would go wrong once the nodes are started."""
    args = check_args(engine_args(read, options, layout), options)
    parts = args.dp_size * layout.pp
    for batch in options.batch:
        if batch % parts:
            groups = f"{args.dp_size} groups and {layout.pp} stages"
            raise ValueError(
                f"--batch {batch} cannot be laid evenly over {groups} of {layout.name}"
            )
        if batch > (args.max_running_requests or batch):
            raise ValueError(f"--batch {batch}: --max-running-requests is less")


@contextmanager
def shared_gpu(device: str, ranks: int) -> Iterator[None]:
    """All nodes are on one GPU and under one MPS daemon, and limit their ranks alike."""
    if device != "cuda":
        yield
        return
    os.environ.setdefault(VISIBLE, "0")
    os.environ.setdefault(PERCENT, str(processor_percent(ranks, crowded=True)))
    with start_mps() as mps:
        os.environ.update(mps.environment)
        yield


def flag_words(args: dict[str, Any]) -> Iterator[str]:
    """Arguments as a command line has them; those with their default value are left out."""
    for spec in specs(ServerArgs).values():
        value = args[spec.field]
        if value is None or value == spec.default:
            continue
        if spec.kind is bool:
            yield spec.name if value else f"--no-{spec.field.replace('_', '-')}"
        elif spec.many:
            yield from (spec.name, *map(str, value))
        else:
            yield f"{spec.name}={value}"


@contextmanager
def other_nodes(
    args: dict[str, Any], module: str = "bench.nodes_command"
) -> Iterator[dict[str, Any]]:
    """Runs all nodes but node 0, whose arguments it gives; they end when that does. `module`: the
    command of a node."""
    if args["nnodes"] == 1:
        yield args
        return
    args = {**args, "dist_init_addr": f"127.0.0.1:{free_port()}"}
    command = [sys.executable, "-m", module, "serve", *flag_words(args)]
    nodes = [
        subprocess.Popen([*command, f"--node-rank={node}"], env=child_environment(NODE_SECRET))
        for node in range(1, args["nnodes"])
    ]
    try:
        yield args
        for number, node in enumerate(nodes, 1):
            if status := node.wait(STOP_SECONDS):
                raise RuntimeError(f"node {number} ended with status {status}: see above")
    finally:
        for node in nodes:
            node.terminate()
            with suppress(subprocess.TimeoutExpired):
                node.wait(STOP_SECONDS)
            node.kill()
            node.wait()


@dataclass
class Run:
    """A layout that fails ends no other. `answers`: of the first layout, by batch."""

    read: ServerArgs
    options: argparse.Namespace
    folder: Path
    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    answers: dict[int, list[list[int]]] = field(default_factory=dict)

    def attempt(self, layout: Layout) -> None:
        try:
            self._measure_layout(layout)
        except SystemExit as error:  # says what to do
            print(f"{layout.name}: {error}", file=sys.stderr, flush=True)
            self.failed.append(layout.name)
        except Exception as error:
            traceback.print_exception(error)
            self.failed.append(layout.name)

    def _measure_layout(self, layout: Layout) -> None:
        begin, rows = time.perf_counter(), list[Row]()
        args = engine_args(self.read, self.options, layout)
        with other_nodes(args) as placed, Engine(**placed) as engine:
            start_s = time.perf_counter() - begin
            say(f"{layout.name}: ready after {start_s:.1f} s")
            for batch in self.options.batch:
                rows.append(self._measure(engine, layout, batch))
                rows[-1].start_s = start_s
                self.rows.append(rows[-1])
            # Behind all that is timed: what has been profiled once may be slower from then on.
            for row in rows if self.options.profile else ():
                found = self._kernels(engine, row.batch)
                row.stages_us, row.least_stages_us = kernel_stages(found, layout.pp)

    def _measure(self, engine: Engine, layout: Layout, batch: int) -> Row:
        options = self.options
        warm = min(WARM_TOKENS, options.output_len)
        for seed in range(WARM_RUNS):  # which prompts share a step differs from run to run
            generate(engine, prompts_of(engine, options, batch, seed), warm)
        found, answers = list[Timing](), list[list[int]]()
        leaders = {engine.mesh.leader(group) for group in range(engine.mesh.num_groups)}
        for repeat in range(options.repeats):
            prompts = prompts_of(engine, options, batch, 1000 * (repeat + 1))
            engine.start_profile(self.folder)
            answers += generate(engine, prompts, options.output_len)
            ranks = read_trace(Path(engine.stop_profile()))
            found.append(timing(ranks, leaders, batch, layout.pp))
        row = self._row(engine, layout, batch, found)
        row.tokens = sum(map(len, answers))
        if layout == options.layouts[0]:
            self.answers[batch] = answers
        if expected := self.answers.get(batch):
            row.same = statistics.fmean(a == b for a, b in zip(answers, expected, strict=True))
        return row

    def _row(self, engine: Engine, layout: Layout, batch: int, found: Sequence[Timing]) -> Row:
        options, (model, layers, dtype, device) = self.options, facts(engine)
        steps = [ms for one in found for ms in one.steps_ms]
        step_ms = statistics.median(steps)
        total_s = statistics.median(one.total_s for one in found)
        return Row(
            *(device, model, layers, dtype, self.read.moe_a2a_backend, options.attention),
            *(layout.name, layout.nodes, layout.world, layout.pp),
            *(batch, options.input_len, options.output_len),
            tokens=0,
            start_s=0.0,
            prefill_s=statistics.median(one.prefill_s for one in found),
            step_ms=step_ms,
            steps=len(steps),
            decode_tok_s=1e3 * batch / step_ms,
            total_s=total_s,
            total_tok_s=batch * (options.input_len + options.output_len) / total_s,
            host_ms=mean_of([one.host_ms for one in found]),
        )

    def _kernels(self, engine: Engine, batch: int) -> list[StepKernels]:
        """Of all ranks that recorded a step; none where the batch did not decode together."""
        folder = self.folder
        for path in folder.glob(f"{batch}-rank*.json"):  # of another layout
            path.unlink()
        (folder / WANTED).write_text(str(batch))
        try:
            generate(engine, prompts_of(engine, self.options, batch, 2000), self.options.output_len)
        finally:
            (folder / WANTED).unlink()
        found = sorted(folder.glob(f"{batch}-rank*.json"))
        return [msgspec.json.decode(path.read_bytes(), type=StepKernels) for path in found]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m bench.nodes_engine",
        description=(__doc__ or "").splitlines()[0],
        epilog="Flags of the engine are taken, too: --model-path, --device, --moe-a2a-backend and "
        "all others but those that lay out ranks, which --layouts does.",
        allow_abbrev=False,
    )
    several: dict[str, Any] = {"nargs": "+", "action": Distinct}
    layouts = [Layout.parse(word) for word in LAYOUTS]
    made.add_argument("--layouts", type=Layout.parse, default=layouts, metavar="LAYOUT", **several)
    made.add_argument("--attention", choices=("dp", "tp"), default="dp", help="of a stage's ranks")
    made.add_argument("--batch", type=positive, default=[32, 128], **several)
    made.add_argument("--input-len", type=positive, default=1024)
    made.add_argument("--output-len", type=positive, default=64)
    made.add_argument("--repeats", type=positive, default=3, help="runs of each batch")
    made.add_argument("--layers", type=positive, help="of the model; unset: as many as it has")
    made.add_argument("--profile", action="store_true", help="stages by kernels, in one more run")
    made.add_argument(
        "--no-warm-up", action="store_true", help="where Triton has all kernels in its cache"
    )
    made.add_argument("--out", type=Path, help="JSON list; rows of other models and layouts stay")
    made.add_argument("--markdown", action="store_true", help="no run: tables for the docs")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options, rest = parser().parse_known_args(argv)
    if options.markdown:
        report(read_rows(options.out or RESULTS / "h200_nodes_engine.json", Row), markdown=True)
        return 0
    with complaints_in_a_line():
        read = read_flags(rest, options, "nodes_engine", "--layouts")
        device = device_of(read)
        for layout in options.layouts:
            check(read, options, layout)
    name = "cpu_nodes_engine" if device == "cpu" else named("nodes_engine", device_name(device))
    out = options.out or RESULTS / f"{name}.json"
    check_out(out)
    os.environ.setdefault(NODE_SECRET, secrets.token_hex(16))
    most = max(layout.world for layout in options.layouts)
    with tempfile.TemporaryDirectory() as folder, shared_gpu(device, most):
        if options.profile:
            os.environ[FOLDER] = folder
        prepare_ranks()
        run = Run(read, options, Path(folder))
        for layout in options.layouts:
            run.attempt(layout)
            compare(run.rows, options.layouts[0].name)
            if run.rows:
                merge(out, run.rows)
    report(run.rows)
    if run.failed:
        say(f"{', '.join(run.failed)} failed: see above")
    return 1 if run.failed or not run.rows else 0


if __name__ == "__main__":
    sys.exit(main())
