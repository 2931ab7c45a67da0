"""Decoding on ranks that share a GPU, against one rank on it: what expert parallelism costs.

    python -m bench.ep --model-path shape:qwen3-30b-a3b --load-format dummy --dtype bfloat16
    python -m bench.ep --model-path shape:qwen3-30b-a3b --load-format dummy --ep 1 4 \
        --batch 256 --layers 24 --profile
    python -m bench.ep --model-path tiny:qwen3_moe --device cpu --ep 1 2 --batch 4 --input-len 24
    python -m bench.ep --markdown             # no run: tables of what was measured

With P ranks: --tp P --ep P --dp P --enable-dp-attention --moe-a2a-backend deepep, whose low latency
serves decoding, unless another backend is given; one rank sends nothing. So each rank holds its
part of the experts and all of the rest, and has its part of the batch. Engines come one after the
other, each in a process of its own. They warm up as a server does, unless --no-warm-up says that
Triton has all kernels in its cache, and each batch is run twice before it counts, one request alone
twice on each rank: a rank that compiled a kernel would hold up all.
A batch of 1 is taken, too: one rank has it, and the others no more than experts for it.
Requests, and which steps count, are those of bench/one_batch.py; a step of several ranks lasts
until all have ended it, and has the tokens of all. `of single`: of the tokens a second of one rank
in the same run.

Stages: from the host's record of all ranks, and with --profile by kernels, a few steps of one more
run: the mean of the ranks and the least, which is nearly without waiting, as kernels that send may
wait for other ranks themselves. `idle`: of the step, when no kernel of the rank was on
the GPU; stages may overlap, and add up to more than that leaves (bench/stages.py).

Rows go to --out, on an H200 to bench/results/h200_ep.json and elsewhere to ep.json beside it, which
git ignores, unless told.

Flags of the engine are taken, too, but for those that lay out ranks; those of the HTTP server, such
as --skip-server-warmup, are not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.common import (
    RESULTS,
    Distinct,
    check_out,
    complaints_in_a_line,
    device_name,
    engine_flags,
    merge,
    positive,
    read_rows,
    show_table,
)
from bench.ep_rank import FOLDER, TARGET, WANTED
from bench.ep_trace import host_ms, joined, read_trace
from bench.one_batch import Timing, draw_prompts, generate, say, timing
from bench.stages import ORDER, StepKernels, stages_of
from bench.step_profile import DECODE_STEPS, profile_steps
from moesaic import Engine
from moesaic.cli.common import read_args
from moesaic.comm.launch.service import Timeouts
from moesaic.config.args import ServerArgs
from moesaic.config.devices import device_of, device_reason
from moesaic.config.flags import specs
from moesaic.config.parser import read_config
from moesaic.config.resolve import SHAPE_PREFIX, resolve
from moesaic.engine.frontend import core_client as remote
from moesaic.engine.setup.memory_plan import check_plan, context_length
from moesaic.engine.worker.local_core import LocalCore
from moesaic.models.config import RawConfig
from moesaic.models.tiny import PREFIX, materialise

WARM_TOKENS = 8
WARM_RUNS = 2
ENGINE_SECONDS = 420.0
SILENT_SECONDS = 60.0
ALONE_BATCH = 1
# Prompts give the first token, and between two more there is a step; what is profiled must be over
# before the requests are.
LEAST_OUTPUT, LEAST_PROFILED = 3, DECODE_STEPS + 2
# What --ep decides, and what has nothing to say to one rank.
LAID_OUT = ("tp_size", "dp_size", "pp_size", "ep_size", "enable_dp_attention")
LAID_OUT += ("nnodes", "node_rank", "dist_init_addr")
ALONE = {"moe_a2a_backend": "none", "deepep_mode": "auto", "deepep_config": None}


@dataclass
class Row:
    """`host_ms`: of a rank's host in a decode step, by what it did, on average; `stages_us`: of its
    kernels, likewise; `least_stages_us`: of the rank that has the least of a stage."""

    model: str
    layers: int
    dtype: str
    ep: int
    batch: int
    input_len: int
    output_len: int
    decode_ms: float
    decode_tok_s: float
    decode_steps: int
    prefill_tok_s: float
    start_s: float
    device: str
    host_ms: dict[str, float] = field(default_factory=dict)
    stages_us: dict[str, float] = field(default_factory=dict)
    least_stages_us: dict[str, float] = field(default_factory=dict)
    of_single: float | None = None
    backend: str = "deepep"

    @property
    def group(self) -> tuple[Any, ...]:
        made = (self.device, self.layers, self.model, self.dtype, self.backend)
        return *made, self.input_len, self.output_len

    @property
    def key(self) -> tuple[Any, ...]:
        return *self.group, self.ep, self.batch


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m bench.ep",
        description=(__doc__ or "").splitlines()[0],
        epilog="Flags of the engine are taken, too: --model-path, --device, --moe-a2a-backend and "
        "all others but those that lay out ranks, which --ep does.",
        allow_abbrev=False,
    )
    made.add_argument("--ep", type=positive, nargs="+", action=Distinct, default=[1, 2, 4, 8])
    made.add_argument("--batch", type=positive, nargs="+", action=Distinct, default=[32, 128, 256])
    made.add_argument("--input-len", type=positive, default=1024)
    made.add_argument("--output-len", type=positive, default=128)
    made.add_argument("--layers", type=positive, help="of the model; unset: as many as it has")
    made.add_argument("--profile", action="store_true", help="stages by kernels, in one more run")
    made.add_argument(
        "--no-warm-up", action="store_true", help="where Triton has all kernels in its cache"
    )
    made.add_argument("--out", type=Path, help="JSON list; rows of other models and sizes stay")
    made.add_argument(
        "--markdown", action="store_true", help="no run: what --out has, as tables for the docs"
    )
    made.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    return made


def read_flags(
    rest: Sequence[str], options: argparse.Namespace, module: str = "ep", by: str = "--ep"
) -> ServerArgs:
    """The engine's, with what this benchmark wants where they say nothing. `by`: the flag of the
    benchmark that lays out ranks."""
    given = engine_flags(module, rest)
    path = given["config"]
    file = {} if path is None else read_config(ServerArgs, path)
    most = str(max(options.batch))
    defaults = {"max_running_requests": most, "log_level": "warning", "random_seed": "0"}
    # The first steps of several ranks compile kernels.
    defaults |= {"watchdog_timeout": "300", "moe_a2a_backend": "deepep"}
    for name in LAID_OUT:
        if name in given or name in file:
            flag = specs(ServerArgs)[name].name
            raise ValueError(f"{flag}: ranks are laid out by {by} here, so leave it out")
    return read_args({k: v for k, v in defaults.items() if k not in file} | given)


def engine_args(read: ServerArgs, options: argparse.Namespace, ep: int) -> dict[str, Any]:
    made = asdict(read) | {"disable_radix_cache": True, "skip_tokenizer_init": True}
    made |= {"device": device_of(read), "skip_server_warmup": options.no_warm_up}
    if options.layers is not None:
        if not read.model_path.startswith((PREFIX, SHAPE_PREFIX)):
            raise ValueError(
                f"--layers {options.layers} is for {PREFIX} and {SHAPE_PREFIX} models; a folder "
                f"has its own layers: leave it out with {read.model_path}"
            )
        made["model_path"] = f"{read.model_path},num_hidden_layers={options.layers}"
    if ep > 1:
        made |= {"tp_size": ep, "ep_size": ep, "dp_size": ep, "enable_dp_attention": True}
    else:
        made |= ALONE
    if made["device"] == "cuda" and not (read.disable_cuda_graph or read.cuda_graph_bs):
        # Others would be captured for steps that do not count.
        made["cuda_graph_bs"] = tuple(sorted({-(-batch // ep) for batch in options.batch}))
    return made


def check(read: ServerArgs, options: argparse.Namespace, ep: int) -> None:
    """ValueError for what would go wrong once the engine is started."""
    args = check_args(engine_args(read, options, ep), options)
    running = args.max_running_requests or 0
    reasons = [unfit(batch, ep, running) for batch in options.batch]
    if all(reasons):
        raise ValueError(f"nothing to measure: {'; '.join(reasons)}")


def check_args(made: dict[str, Any], options: argparse.Namespace) -> ServerArgs:
    """The resolved arguments of an engine; ValueError where they or the lengths do not work."""
    args = resolve(ServerArgs(**made))
    args = replace(args, model_path=materialise(args.model_path))
    check_plan(args)
    most = context_length(args, RawConfig.read(Path(args.model_path)))
    if options.input_len + options.output_len > most:
        raise ValueError(
            f"--input-len {options.input_len} and --output-len {options.output_len} are more than "
            f"the {most} tokens of the context: give less"
        )
    least = LEAST_PROFILED if options.profile else LEAST_OUTPUT
    if options.output_len < least:
        profiled = " with --profile" if options.profile else ""
        raise ValueError(f"--output-len {options.output_len}{profiled}: give at least {least}")
    return args


def unfit(batch: int, ep: int, running: int) -> str:
    """Why so many requests are not measured with so many ranks; empty: they are."""
    if batch % ep and batch != ALONE_BATCH:
        return f"batch {batch} cannot be laid evenly over {ep} ranks"
    if batch > running:
        return f"batch {batch} is more than the {running} of --max-running-requests"
    return ""


def measure_engine(read: ServerArgs, options: argparse.Namespace, ep: int) -> list[Row]:
    """In the process of this engine; what is found is written batch by batch."""
    args = engine_args(read, options, ep)
    folder = options.part.parent
    begin = time.perf_counter()
    prepare_ranks(folder if options.profile else None)
    rows: list[Row] = []
    with Engine(**args) as engine:
        seconds = time.perf_counter() - begin
        say(f"{ep} ranks: ready after {seconds:.1f} s")
        for batch in options.batch:
            if why := unfit(batch, ep, engine.max_running):
                say(f"{why}: left out")
                continue
            rows.append(measure(engine, options, ep, batch, folder))
            rows[-1].start_s, rows[-1].backend = seconds, read.moe_a2a_backend
            write_part(options.part, rows)
        # Behind all that is timed: what has been profiled once may be slower from then on.
        for row in rows if options.profile else ():
            if row.batch < ep:
                continue  # ranks that only serve others have no step that decodes
            prompts = prompts_of(engine, options, row.batch, 2000)
            found = stages_of(kernels(engine, prompts, options, ep, folder))
            row.stages_us, row.least_stages_us = found.mean, found.least
            write_part(options.part, rows)
    return rows


def part_of(read: ServerArgs, options: argparse.Namespace) -> int:
    """Its exit status. What ranks say when they fail names the rank and the reason."""
    (ep,) = options.ep
    try:
        return 0 if measure_engine(read, options, ep) else 1
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"error: {ep} rank{'s' * (ep > 1)}: {error}") from error


def prepare_ranks(folder: Path | None) -> None:
    """`folder`: where they record kernels. What they compile in their first steps, and a profiler
    that starts, may hold the interpreter for seconds, and with it the rank's heartbeat: the
    supervisor is not to take that for a hang."""
    remote.Timeouts = partial(Timeouts, beat=SILENT_SECONDS)  # type: ignore[misc, assignment]
    if folder is not None:
        os.environ[FOLDER] = str(folder)
        remote.TARGET = TARGET


def write_part(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows]))


def prompts_of(
    engine: Engine, options: argparse.Namespace, batch: int, seed: int
) -> list[list[int]]:
    return draw_prompts(batch, options.input_len, engine.limits.vocab_size, seed + batch)


def measure(engine: Engine, options: argparse.Namespace, ep: int, batch: int, folder: Path) -> Row:
    warm = min(WARM_TOKENS, options.output_len)
    # Which prompts share a step differs from run to run, and ranks get prompts in turn.
    for seed in range(WARM_RUNS * (ep if batch == ALONE_BATCH else 1)):
        generate(engine, prompts_of(engine, options, batch, seed), warm)
    engine.start_profile(folder)
    generate(engine, prompts_of(engine, options, batch, 1000), options.output_len)
    ranks = read_trace(Path(engine.stop_profile()))
    row = row_of(timing(joined(ranks), batch), options, ep, batch)
    row.host_ms = host_ms(ranks, batch)
    row.model, row.layers, row.dtype, row.device = facts(engine)
    return row


def kernels(
    engine: Engine, prompts: list[list[int]], options: argparse.Namespace, ep: int, folder: Path
) -> list[StepKernels]:
    """Of a decode step, by rank."""
    if ep == 1:
        assert isinstance(engine._core, LocalCore)
        table = profile_steps(engine, engine._core, prompts, options.output_len)["decode"]
        us = {row["kernel"]: row["us"] for row in table["kernels"]}
        on_gpu = engine.args.device == "cuda"
        return [StepKernels(us, *((table["idle_us"], table["step_us"]) if on_gpu else ()))]
    wanted, each = folder / WANTED, len(prompts) // ep
    wanted.write_text(str(each))
    generate(engine, prompts, options.output_len)
    wanted.unlink()
    found = [json.loads(path.read_text()) for path in folder.glob(f"{each}-rank*.json")]
    return [StepKernels(**one) for one in found]


def row_of(found: Timing, options: argparse.Namespace, ep: int, batch: int) -> Row:
    decode = statistics.median(found.steps)
    return Row(
        model="",
        layers=0,
        dtype="",
        ep=ep,
        batch=batch,
        input_len=options.input_len,
        output_len=options.output_len,
        decode_ms=decode,
        decode_tok_s=1e3 * batch / decode,
        decode_steps=len(found.steps),
        prefill_tok_s=1e3 * batch * options.input_len / found.prefill,
        start_s=0.0,
        device="",
    )


def facts(engine: Engine) -> tuple[str, int, str, str]:
    """Of the model: its name, layers and type; and of the machine."""
    args = engine.args
    config = json.loads(Path(args.model_path, "config.json").read_text(encoding="utf-8"))
    name = str(args.served_model_name).removeprefix("shape:").partition(",")[0]
    dtype = config.get("torch_dtype", "") if args.dtype == "auto" else args.dtype
    told = args.quantization or str(dtype)
    return name, config["num_hidden_layers"], told, device_name(args.device)


def compare(rows: Iterable[Row]) -> list[Row]:
    """Fills in how each compares with one rank."""
    rows = list(rows)
    single = {row.batch: row.decode_tok_s for row in rows if row.ep == 1}
    for row in rows:
        if row.batch in single:
            row.of_single = row.decode_tok_s / single[row.batch]
    return rows


def report(rows: Sequence[Row], markdown: bool = False) -> None:
    """A model after the other."""
    for group, same in groupby(rows, lambda row: row.group):
        device, layers, model, dtype, backend, *lengths = group
        told = "--input-len {} --output-len {}".format(*lengths)
        print(f"\n{model}, {layers} layers, {dtype}, {backend}, {device}, {told}")
        for title, header, cells in tables(list(same)):
            print(f"\n{title}\n")
            show_table(header, cells, markdown)


def tables(rows: Sequence[Row]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, header and cells of each."""
    header = ["ranks", "batch", "decode ms", "tok/s", "of single", "prefill tok/s", "start s"]
    cells = [
        [str(row.ep), str(row.batch), f"{row.decode_ms:.2f}", f"{row.decode_tok_s:,.0f}"]
        + ["" if row.of_single is None else f"{row.of_single:.2f}"]
        + [f"{row.prefill_tok_s:,.0f}", f"{row.start_s:.1f}"]
        for row in rows
    ]
    yield "a step in which all requests decode", header, cells
    hosts = [{name: f"{ms:.2f}" for name, ms in row.host_ms.items()} for row in rows]
    yield from stage_table("host, ms a step", rows, hosts)
    kernels = [kernel_cells(row) for row in rows]
    yield from stage_table("kernels of a rank, us a step: mean (least) of ranks", rows, kernels)


def kernel_cells(row: Row) -> dict[str, str]:
    least = {name: f" ({us:,.0f})" for name, us in row.least_stages_us.items() if row.ep > 1}
    return {name: f"{us:,.0f}{least.get(name, '')}" for name, us in row.stages_us.items()}


def stage_table(
    title: str, rows: Sequence[Row], found: Sequence[dict[str, str]]
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """None where nothing was recorded. Stages that are not a step's are in the order of names."""
    names = sorted({name for stages in found for name in stages}, key=_place)
    if names:
        cells = [
            [str(row.ep), str(row.batch), *(stages.get(name, "") for name in names)]
            for row, stages in zip(rows, found, strict=True)
            if stages
        ]
        yield title, ["ranks", "batch", *names], cells


def _place(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else -1), name


def run_apart(words: Sequence[str], ep: int, folder: Path) -> tuple[list[Row], bool]:
    """An engine in a process of its own; what it has measured, and whether it ended well."""
    part = folder / f"{ep}" / "rows.json"
    part.parent.mkdir()
    command = [sys.executable, "-m", "bench.ep", *words, "--ep", str(ep), "--part", str(part)]
    try:
        fine = subprocess.run(command, timeout=ENGINE_SECONDS, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        say(f"{ep} ranks: not done after {ENGINE_SECONDS:g} s, given up")
        fine = False
    rows = json.loads(part.read_text()) if part.exists() else []
    return [Row(**row) for row in rows], fine


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    options, rest = parser().parse_known_args(words)
    if options.markdown:
        if rest:
            parser().error(f"--markdown measures nothing: leave out {' '.join(rest)}")
        report(read_rows(options.out or RESULTS / "h200_ep.json", Row), markdown=True)
        return 0
    with complaints_in_a_line():
        read = read_flags(rest, options)
        if options.part is not None:
            return part_of(read, options)
        if read.device == "auto" and device_of(read) == "cpu":
            say(f"on the CPU: {device_reason(read)}")
        for ep in options.ep:
            check(read, options, ep)
    check_out(options.out or RESULTS / "ep.json")
    if options.out is not None and options.out.exists():
        read_rows(options.out, Row)  # before anything is measured that could not be written there
    rows: list[Row] = []
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for ep in options.ep:
            found, fine = run_apart(words, ep, Path(folder))
            rows = compare([*rows, *found])
            failed += [] if fine else [ep]
            if rows:
                name = "h200_ep" if "H200" in rows[0].device else "ep"
                merge(options.out or RESULTS / f"{name}.json", rows)
    if rows:
        report(rows)
    if failed:
        say(f"engines of {', '.join(map(str, failed))} ranks failed: see above")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
