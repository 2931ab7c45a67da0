"""One batch through the engine: how long prompts take, and a step in which all requests decode.

    python -m bench.one_batch --model-path shape:qwen3-30b-a3b --load-format dummy --dtype bfloat16
    python -m bench.one_batch --model-path shape:qwen3-30b-a3b --load-format dummy \
        --quantization fp8 --batch-size 1 8 32 128 256 --out bench/results/h200_one_batch.json
    python -m bench.one_batch --model-path tiny:qwen3_moe --batch-size 1 4 --input-len 64

Flags of the server are taken, too. Requests go through the engine's own scheduler as anybody's do:
distinct prompts of random tokens, greedy, none ends early. A decode step is the time between two
ends of steps, as the engine recorded them, in which every request of the batch had one token. The
limit is that of bench/step_limits.py at the mean context, from what a copy and a matrix product
reach on this GPU, or from --bandwidth and --rate.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.common import (
    above_zero,
    complaints_in_a_line,
    cpu_name,
    engine_flags,
    positive,
    print_table,
)
from bench.one_batch_peer import LIMIT_SECONDS, PeerPoint, run_apart
from bench.step_limits import Ceilings, Forward, ModelLimit
from bench.step_profile import profile_steps, show_profile
from moesaic import Engine
from moesaic.cli.common import read_args
from moesaic.config.resolve import resolve
from moesaic.core.request import Request
from moesaic.engine.worker.local_core import LocalCore
from moesaic.models.tiny import materialise
from moesaic.observe.spans import Span, SpanKind, unpack

BATCHES = (1, 8, 32, 128, 256)
WARM_TOKENS = 8


@dataclass(frozen=True)
class Timing:
    """Of one run of a batch, in milliseconds; `steps`: of those in which all requests decoded."""

    prefill: float
    steps: list[float]
    plan: list[float]
    take_in: list[float]
    total: float


@dataclass
class Point:
    """A row of the result. `limit_ms`, `of_limit`: of a decode step, where limits are known; so for
    prompts. `plan_ms`, `take_in_ms`: of the host, beside the device where steps overlap."""

    model: str
    dtype: str
    batch: int
    input_len: int
    output_len: int
    prefill_ms: float
    prefill_tok_s: float
    decode_ms: float
    decode_tok_s: float
    decode_steps: int
    plan_ms: float
    take_in_ms: float
    total_s: float
    total_tok_s: float
    limit_ms: float | None = None
    of_limit: float | None = None
    prefill_limit_tok_s: float | None = None
    overlap: bool = False
    device: str = ""
    peers: dict[str, Any] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    options, rest = parser().parse_known_args(argv)
    with complaints_in_a_line():
        args = engine_args(rest, options)
        materialise(args["model_path"])
    on_gpu = args["device"] == "cuda"
    peers = measure_peers(options, args, on_gpu)
    found = ceilings(options, on_gpu)
    say(f"making the engine of {args['model_path']}")
    with complaints_in_a_line():
        made = Engine(**args)
    with made as engine:
        core = engine._core
        assert isinstance(core, LocalCore), "one rank, in this process"
        seconds = engine.startup_seconds["model"]
        say(f"ready after {seconds:.1f} s: {core.facts.cache_tokens:,} tokens of cache")
        run = Run(engine, core, options, model_limit(core, found), peers)
        give_up_at_once(core)
        for batch in options.batch_size:
            run.attempt(batch)
    report(run.points)
    for batch_name, profile in run.profiles.items():
        show_profile(f"batch {batch_name}", profile)
    if run.failed:
        say(f"batches of {', '.join(map(str, run.failed))} failed: see above")
    return 1 if run.failed or not run.points else 0


def give_up_at_once(core: LocalCore) -> None:
    """A step that fails ends all requests: nobody is to blame, and to look for them takes as many
    steps as there are requests."""

    def report_failure(suspects: Sequence[Request], error: str, *, alone: bool) -> None:
        core.fail_all(f"a step failed: {error}")

    core.planner.report_failure = report_failure  # type: ignore[method-assign]


@dataclass
class Run:
    """What one batch finds is written before the next begins, and one that fails ends no other."""

    engine: Engine
    core: LocalCore
    options: argparse.Namespace
    limit: ModelLimit | None
    peers: list[PeerPoint]
    points: list[Point] = field(default_factory=list)
    profiles: dict[str, Any] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)

    def attempt(self, batch: int) -> None:
        room = self.core.facts.cache_tokens
        longest = self.options.input_len + self.options.output_len
        if batch * longest > room:
            say(
                f"batch {batch} does not fit: it needs {batch * longest:,} tokens of cache, and "
                f"{room:,} are there; give a smaller --batch-size, --input-len or --output-len"
            )
            return
        if batch > self.engine.max_running:
            say(f"batch {batch} is more than --max-running-requests {self.engine.max_running}")
            return
        try:
            self._measure(batch)
            if self.options.profile:
                self._profile(batch)
        except SystemExit as error:  # says what to do
            print(f"batch {batch}: {error}", file=sys.stderr, flush=True)
            self.failed.append(batch)
        except Exception as error:
            traceback.print_exception(error)
            self.failed.append(batch)

    def _measure(self, batch: int) -> None:
        point = measure(self.engine, self.core, self.options, batch, self.limit)
        point.peers = {one.name: asdict(one) for one in self.peers if one.batch == batch}
        self.points.append(point)
        report([point])
        if self.options.out is not None:
            merge_rows(self.options.out, self.points)

    def _profile(self, batch: int) -> None:
        facts, out = self.core.facts, self.options.out
        prompts = draw_prompts(batch, self.options.input_len, facts.vocab_size, seed=99)
        output_len = self.options.output_len
        self.profiles[str(batch)] = profile_steps(self.engine, self.core, prompts, output_len)
        if out is not None:
            name = f"{out.stem}_profile_{name_of(self.core)}.json"
            write(out.with_name(name), self.profiles)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m bench.one_batch",
        description=(__doc__ or "").splitlines()[0],
        epilog="Flags of the server are taken, too: --model-path, --device and all others.",
        allow_abbrev=False,
    )
    made.add_argument("--batch-size", type=positive, nargs="+", default=list(BATCHES))
    made.add_argument("--input-len", type=positive, default=1024)
    made.add_argument("--output-len", type=positive, default=128)
    made.add_argument(
        "--repeats", type=positive, default=1, help="runs of each batch; all steps count"
    )
    made.add_argument(
        "--bandwidth", type=above_zero, help="TB/s of a copy, instead of measuring it"
    )
    made.add_argument(
        "--rate", type=above_zero, help="TFLOP/s in bfloat16, instead of measuring it"
    )
    made.add_argument(
        "--fp8-rate", type=above_zero, help="TFLOP/s in fp8; twice --rate unless given"
    )
    made.add_argument("--peer", choices=("transformers",), help="also measure this on the GPU")
    made.add_argument("--peer-batch", type=positive, nargs="+", default=[1, 8, 32])
    made.add_argument("--peer-seconds", type=float, default=LIMIT_SECONDS, help="for all of it")
    made.add_argument("--profile", action="store_true", help="which kernels a step's time goes to")
    made.add_argument("--out", type=Path, help="JSON list; rows of other models and types stay")
    return made


def check_options(options: argparse.Namespace) -> None:
    if (options.bandwidth is None) != (options.rate is None):
        raise ValueError("--bandwidth and --rate go together: give both, or neither")
    if options.fp8_rate is not None and options.rate is None:
        raise ValueError(f"--fp8-rate {options.fp8_rate:g} needs --bandwidth and --rate, too")
    if options.peer is not None and not set(options.peer_batch) & set(options.batch_size):
        raise ValueError(
            f"--peer-batch {' '.join(map(str, options.peer_batch))} has none of --batch-size "
            f"{' '.join(map(str, options.batch_size))}: give some of these"
        )


def engine_args(rest: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """The server's flags, with what a benchmark wants where they say nothing."""
    check_options(options)
    given = engine_flags("one_batch", rest)
    most = str(max(options.batch_size))
    defaults = {"max_running_requests": most, "log_level": "warning", "random_seed": "0"}
    defaults["watchdog_timeout"] = "60"
    read = read_args(defaults | given)
    resolved = resolve(read)
    if resolved.tp_size * resolved.pp_size * resolved.dp_size > 1:
        raise ValueError("this measures one rank: leave out --tp-size, --pp-size and --dp-size")
    made = asdict(read) | {"disable_radix_cache": True, "skip_tokenizer_init": True}
    made["device"] = resolved.device
    made["skip_server_warmup"] = True  # each batch is run once before it counts
    if not (read.disable_cuda_graph or read.cuda_graph_bs or read.cuda_graph_max_bs):
        # Others would be captured for steps that do not count.
        made["cuda_graph_bs"] = tuple(sorted(set(options.batch_size)))
    return made


def measure_peers(
    options: argparse.Namespace, args: dict[str, Any], on_gpu: bool
) -> list[PeerPoint]:
    """Before the engine takes the GPU's memory."""
    if options.peer is None:
        return []
    folder, device = materialise(args["model_path"]), "cuda" if on_gpu else "cpu"
    batches = [batch for batch in options.peer_batch if batch in options.batch_size]
    say(f"measuring {options.peer} with batches of {', '.join(map(str, batches))}")
    return run_apart(folder, batches, options.input_len, device, options.peer_seconds)


def ceilings(options: argparse.Namespace, on_gpu: bool) -> Ceilings | None:
    """None on a CPU, unless they are given."""
    if options.bandwidth is not None and options.rate is not None:
        fp8 = options.fp8_rate or 2 * options.rate
        return Ceilings(options.bandwidth * 1e12, options.rate * 1e12, fp8 * 1e12)
    if not on_gpu:
        return None
    say("measuring what the GPU can do")
    gpu = import_module("bench.gpu")  # gives figures a microsecond
    rates = [gpu.matrix_rate(dtype) * 1e6 for dtype in (torch.bfloat16, torch.float8_e4m3fn)]
    found = Ceilings(gpu.copy_bandwidth() * 1e6, *rates)
    copied = f"copy {found.bandwidth / 1e12:.2f} TB/s"
    say(f"{copied}, bf16 {found.rate / 1e12:.0f}, fp8 {found.fp8_rate / 1e12:.0f} TFLOP/s")
    free_memory()
    return found


def device_of(core: LocalCore) -> torch.device:
    return next(core.runner.model.parameters()).device


def model_limit(core: LocalCore, found: Ceilings | None) -> ModelLimit | None:
    if found is None:
        return None
    config = Path(core.args.model_path, "config.json").read_text(encoding="utf-8")
    return ModelLimit(json.loads(config), found, fp8=name_of(core) == "fp8")


def name_of(core: LocalCore) -> str:
    """How results name the type of the weights."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    return core.args.quantization or names[core.runner.moe.dtype]


def draw_prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    chooser = random.Random(seed)
    return [[chooser.randrange(vocab) for _ in range(length)] for _ in range(count)]


def measure(
    engine: Engine,
    core: LocalCore,
    options: argparse.Namespace,
    batch: int,
    limit: ModelLimit | None,
) -> Point:
    vocab, length = core.facts.vocab_size, options.input_len
    # Kernels are compiled and memory is taken before anything is measured.
    begin = time.perf_counter()
    warm = min(WARM_TOKENS, options.output_len)
    generate(engine, draw_prompts(batch, length, vocab, seed=batch), warm)
    say(f"batch {batch}: warm after {time.perf_counter() - begin:.1f} s")
    timings = []
    for repeat in tqdm(range(options.repeats), desc=f"batch {batch}", unit="run"):
        prompts = draw_prompts(batch, length, vocab, seed=1000 * (repeat + 1) + batch)
        core.runner.spans.start()
        generate(engine, prompts, options.output_len)
        core.runner.spans.stop()
        spans = core.runner.spans
        timings.append(timing(list(unpack(spans.read(0, spans.count))), batch))
        spans.free()
    point = make_point(timings, batch, options, core)
    if limit is not None:
        context = length + options.output_len / 2
        point.limit_ms = 1e3 * limit.seconds(Forward.decode(batch, context))
        point.of_limit = point.limit_ms / point.decode_ms
        prompts_at_once = min(batch, max(1, core.runner.limits.chunk_tokens // length))
        pass_ = Forward.prefill(prompts_at_once, length)
        point.prefill_limit_tok_s = pass_.tokens / limit.seconds(pass_)
    return point


def generate(engine: Engine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    answers = engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    )
    assert isinstance(answers, list)
    for answer in answers:
        reason = answer["meta_info"]["finish_reason"]
        if len(answer["output_ids"]) != tokens:
            raise SystemExit(f"a request ended early: {reason}")
    return [answer["output_ids"] for answer in answers]


def timing(spans: Sequence[Span], batch: int) -> Timing:
    """Prompts are done with the last step of more tokens than requests; the decode steps that count
    are the run after it, until the first request ends."""
    steps = sorted((s for s in spans if s.kind == SpanKind.STEP), key=lambda s: s.step)
    filling = [number for number, step in enumerate(steps) if step.tokens > batch]
    if not filling:
        raise SystemExit(f"no step had more than {batch} tokens: give a longer --input-len")
    last = filling[-1]
    run = []
    for step in steps[last + 1 :]:
        if step.tokens != batch:
            break
        run.append(step)
    if len(run) < 2:
        raise SystemExit(
            f"the requests of a batch of {batch} never decoded together for two steps: give a "
            "longer --output-len or a larger --chunked-prefill-size"
        )
    counted = {step.step for step in run}
    return Timing(
        prefill=_ms(steps[last].end - steps[0].begin),
        steps=[_ms(after.end - before.end) for before, after in pairwise(run)],
        plan=_durations(spans, SpanKind.PLAN, counted),
        take_in=_durations(spans, SpanKind.DETOKENISE, counted),
        total=_ms(steps[-1].end - steps[0].begin),
    )


def _durations(spans: Sequence[Span], kind: SpanKind, steps: set[int]) -> list[float]:
    return [_ms(s.end - s.begin) for s in spans if s.kind == kind and s.step in steps]


def _ms(nanoseconds: int) -> float:
    return nanoseconds / 1e6


def make_point(
    timings: Sequence[Timing],
    batch: int,
    options: argparse.Namespace,
    core: LocalCore,
) -> Point:
    steps = [step for one in timings for step in one.steps]
    decode = statistics.median(steps)
    prefill = statistics.median(one.prefill for one in timings)
    total = statistics.median(one.total for one in timings) / 1e3
    device = device_of(core)
    return Point(
        model=str(core.args.served_model_name).removeprefix("shape:"),
        dtype=name_of(core),
        batch=batch,
        input_len=options.input_len,
        output_len=options.output_len,
        prefill_ms=prefill,
        prefill_tok_s=1e3 * batch * options.input_len / prefill,
        decode_ms=decode,
        decode_tok_s=1e3 * batch / decode,
        decode_steps=len(steps),
        plan_ms=statistics.median(x for one in timings for x in one.plan),
        take_in_ms=statistics.median(x for one in timings for x in one.take_in),
        total_s=total,
        total_tok_s=batch * (options.input_len + options.output_len) / total,
        overlap=core.runner.overlaps,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
    )


def say(text: str) -> None:
    """At once, also where nobody's terminal is."""
    print(text, flush=True)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def report(points: Sequence[Point]) -> None:
    header = ["batch", "prefill ms", "tok/s", "decode ms", "limit ms", "of limit", "tok/s"]
    header += ["plan ms", "take in ms", "total s", "tok/s"]
    rows = []
    for p in points:
        limits = ["", ""]
        if p.limit_ms is not None and p.of_limit is not None:
            limits = [f"{p.limit_ms:.2f}", f"{p.of_limit:.0%}"]
        cells = [str(p.batch), f"{p.prefill_ms:.1f}", f"{p.prefill_tok_s:,.0f}"]
        cells += [f"{p.decode_ms:.3f}", *limits, f"{p.decode_tok_s:,.0f}"]
        cells += [f"{p.plan_ms:.3f}", f"{p.take_in_ms:.3f}"]
        rows.append([*cells, f"{p.total_s:.2f}", f"{p.total_tok_s:,.0f}"])
    if points:
        print(f"{points[0].model}, {points[0].dtype}, {points[0].device}")
    print_table(header, rows)
    peers = [(p, one) for p in points for one in p.peers.values()]
    if peers:
        print_table(
            ["peer", "batch", "decode ms", "times", "prefill tok/s", "how"],
            [
                [one["name"], str(p.batch), _shown(one["decode_ms"]), _times(one, p)]
                + [_shown(one["prefill_tok_s"]), one["problem"] or one["detail"]]
                for p, one in peers
            ],
        )


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _times(peer: dict[str, Any], point: Point) -> str:
    """How much longer its step takes than the engine's."""
    return "" if peer["decode_ms"] is None else f"{peer['decode_ms'] / point.decode_ms:.1f}x"


def merge_rows(path: Path, points: Sequence[Point]) -> None:
    """Rows of the same model, type and batch are replaced."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    new = {(p.model, p.dtype, p.batch): asdict(p) for p in points}
    kept = [row for row in rows if (row["model"], row["dtype"], row["batch"]) not in new]
    merged = [*kept, *new.values()]
    write(path, sorted(merged, key=lambda row: (row["model"], row["dtype"], row["batch"])))


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
