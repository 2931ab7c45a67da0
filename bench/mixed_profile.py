"""Where a step that decodes and fills a prompt at once loses its time: on the host or the device.

    python -m bench.mixed_profile --model-path shape:qwen3-30b-a3b --load-format dummy \
        --dtype bfloat16 --decoding 16 64 256 --context 1024 --prompt 768 2048
    python -m bench.mixed_profile --model-path tiny:qwen3_moe --decoding 3 --context 24 --prompt 40

For each size as many requests as --decoding decode with --context tokens or a few more; then, again
and again, one prompt of --prompt tokens comes for one token. The scheduler, the runner and their
overlap are those of a server with one rank, without HTTP. The scheduler decides how many tokens of
the prompt share a step: the table has the steps that it made, and one line for those without any.

plan, launch: of the host, median; host: their sum. device: between two CUDA events around the
launch. step: from the end of the step before to its own end. busy: when the device ran any kernel,
in the least busy of a few steps under torch's profiler, whose kernels are listed below. gap: step
less busy, so what there is to win without faster kernels. A CPU computes while it launches: there
device is the time of the launch, host is the plan alone, and busy is torch's operators.

Flags of the engine are taken, too. Rows go to --out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import profile

from bench.common import (
    Distinct,
    check_out,
    complaints_in_a_line,
    engine_flags,
    positive,
    print_table,
)
from bench.step_profile import Table, activities, kernel_table, show_kernels
from moesaic.cli.common import read_args
from moesaic.config.args import ServerArgs
from moesaic.config.resolve import resolve
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import StepAgreement, StepHandle, StepPlan
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.worker.local_core import LocalCore
from moesaic.models.tiny import materialise
from moesaic.observe.spans import SpanKind, unpack

# Steps without a prompt after each one that has some.
BETWEEN: Final = 3
PROFILES: Final = 3
MOST_STEPS: Final = 100_000


@dataclass(frozen=True)
class MixedShape:
    decoding: int  # requests
    context: int  # tokens of each
    prompt: int  # tokens


@dataclass(frozen=True)
class MixedRow:
    """Milliseconds of a step, each a median. `tokens`: of prompts, in such a step."""

    decoding: int
    context: int
    prompt: int
    tokens: float
    steps: int
    plan_ms: float
    launch_ms: float
    host_ms: float
    device_ms: float
    step_ms: float
    busy_ms: float
    gap_ms: float
    kernels: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class TimedStep:
    """A step that was launched, in milliseconds."""

    number: int
    decoding: int
    tokens: int  # of prompts
    plan_ms: float
    launch_ms: float
    device_ms: Callable[[], float]


class StepTimer:
    """Times the plans and launches of a core while it is entered."""

    def __init__(self, core: LocalCore) -> None:
        self.core, self.steps = core, list[TimedStep]()
        self._plan, self._begin = core.planner.plan, core.runner.begin
        self._cuda = core.runner.device.type == "cuda"
        self._planned, self._plan_ms = InflightStep(), 0.0

    def __enter__(self) -> StepTimer:
        self.core.planner.plan = self.plan  # type: ignore[method-assign]
        self.core.runner.begin = self.begin  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        del self.core.planner.plan, self.core.runner.begin  # type: ignore[method-assign]

    def plan(self, parts: int = 1) -> InflightStep:
        begin = time.perf_counter()
        self._planned = self._plan(parts)
        self._plan_ms = 1e3 * (time.perf_counter() - begin)
        return self._planned

    def begin(
        self, plan: StepPlan, agreement: StepAgreement | None = None, *rest: Any
    ) -> StepHandle:
        assert agreement is not None
        before = self._mark()
        begin = time.perf_counter()
        handle = self._begin(plan, agreement, *rest)
        launch_ms = 1e3 * (time.perf_counter() - begin)
        after, decoding = self._mark(), self._planned.work.decode_tokens
        self.steps.append(
            TimedStep(
                number=agreement.number,
                decoding=decoding,
                tokens=self._planned.prompt_tokens,
                plan_ms=self._plan_ms,
                launch_ms=launch_ms if self._cuda else 0.0,
                device_ms=(lambda: before.elapsed_time(after)) if self._cuda else lambda: launch_ms,
            )
        )
        return handle

    def _mark(self) -> Any:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class MixedLoad:
    """Requests that decode, and prompts that come among them."""

    def __init__(self, core: LocalCore, shape: MixedShape, repeats: int) -> None:
        self.core, self.shape, self.repeats = core, shape, repeats
        self._rng, self._number = random.Random(0), 0
        self._cuda = core.runner.device.type == "cuda"

    def measure(self) -> list[MixedRow]:
        """A row of steps without a prompt, and one of steps with some."""
        spans = self.core.runner.spans
        try:
            self._fill()
            with StepTimer(self.core) as timer:
                spans.start()
                for _ in range(self.repeats):
                    self._run_prompt()
                self.settle()
                spans.stop()
                found = list(unpack(spans.read(0, spans.count)))
            ends = {s.step: (s.end - s.begin) / 1e6 for s in found if s.kind == SpanKind.STEP}
            tables = [self._least_busy(0), self._least_busy(self.shape.prompt)]
            whole = [step for step in timer.steps if step.decoding == self.shape.decoding]
            parts = [[s for s in whole if not s.tokens], [s for s in whole if s.tokens]]
            return [
                self._row(steps, table, ends)
                for steps, table in zip(parts, tables, strict=True)
                if steps
            ]
        finally:
            spans.free()
            self._clear()

    def _fill(self) -> None:
        shape = self.shape
        # More than all steps to come; a prompt may need as many as it has tokens.
        room = self.core.runner.context_length - shape.context
        for _ in range(shape.decoding):
            self._add(shape.context, min(room, MOST_STEPS))
        scheduler = self.core.planner.scheduler
        while scheduler.waiting or not all(r.is_decoding for r in scheduler.running):
            self._step()
        for _ in range(BETWEEN):
            self._run_prompt()  # kernels are compiled before anything counts

    def _run_prompt(self) -> None:
        request = self._add(self.shape.prompt, 1)
        while request.finish_reason is None:
            self._step()
        for _ in range(BETWEEN):
            self._step()

    def _step(self) -> None:
        if len(self.core.states) < self.shape.decoding:
            raise ValueError(
                f"requests ended before all was measured: {self.shape.context} tokens of --context "
                f"leave too few of the model's {self.core.runner.context_length}; give fewer"
            )
        self.core.step()

    def _add(self, tokens: int, output: int) -> Request:
        ids = self._rng.choices(range(self.core.facts.vocab_size), k=tokens)
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        self._number += 1
        request = Request(
            rid=str(self._number),
            prompt_ids=ids,
            params=params,
            seed=0,
            max_new_tokens=output,
            request_no=self._number,
        )
        self.core.add(RequestState(request, None, lambda progress: None))
        return request

    def settle(self) -> None:
        """Completes what is in flight."""
        while self.core.loop.inflight:
            self.core.loop.complete_oldest()
        if self._cuda:
            torch.cuda.synchronize()

    def _least_busy(self, tokens: int) -> Table:
        """Of a few profiles the one that was disturbed the least."""
        return min((self._profile(tokens) for _ in range(PROFILES)), key=lambda t: t["busy_us"])

    def _profile(self, tokens: int) -> Table:
        """Kernels of one step, whose prompt has so many tokens; 0: without any."""
        self.settle()
        with StepTimer(self.core) as timer:
            begin = time.perf_counter()
            with profile(activities=activities()) as recorded:
                if tokens:
                    self._add(tokens, 1)
                self._step()
                self.settle()
            seconds = time.perf_counter() - begin
        made = len(timer.steps)
        while len(self.core.states) > self.shape.decoding:
            self._step()
        return kernel_table(recorded, made, seconds)

    def _row(self, steps: Sequence[TimedStep], table: Table, ends: dict[int, float]) -> MixedRow:
        plan, launch, device, step = (
            statistics.median(values)
            for values in (
                [one.plan_ms for one in steps],
                [one.launch_ms for one in steps],
                [one.device_ms() for one in steps],
                [ends[one.number] for one in steps],
            )
        )
        busy = (table["step_us"] - table["idle_us"]) / 1e3
        return MixedRow(
            **asdict(self.shape),
            tokens=statistics.median(one.tokens for one in steps),
            steps=len(steps),
            plan_ms=plan,
            launch_ms=launch,
            host_ms=plan + launch,
            device_ms=device,
            step_ms=step,
            busy_ms=busy,
            gap_ms=step - busy,
            kernels=table["kernels"],
        )

    def _clear(self) -> None:
        for number in list(self.core.states):
            self.core.abort(number)
        while self.core.has_work:
            self.core.step()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m bench.mixed_profile",
        description=(__doc__ or "").splitlines()[0],
        epilog="Flags of the engine are taken, too: --model-path, --device and all others.",
        allow_abbrev=False,
    )
    sizes: dict[str, Any] = {"type": positive, "nargs": "+", "action": Distinct}
    made.add_argument("--decoding", default=[16, 64, 256], **sizes, help="requests that decode")
    made.add_argument("--context", default=[1024], **sizes, help="tokens that each of them has")
    made.add_argument("--prompt", default=[768], **sizes, help="tokens of the prompt beside them")
    made.add_argument("--repeats", type=positive, default=10, help="prompts of each size")
    made.add_argument("--out", type=Path, help="JSON list of rows, with their kernels")
    return made


def read_flags(rest: Sequence[str], options: argparse.Namespace) -> ServerArgs:
    given = engine_flags("mixed_profile", rest)
    # A request that decodes beside the prompt's.
    most = str(max(options.decoding) + 1)
    defaults = {"max_running_requests": most, "log_level": "warning", "random_seed": "0"}
    read = resolve(read_args(defaults | given))
    if read.tp_size * read.pp_size * read.dp_size > 1:
        raise ValueError("this measures one rank: leave out --tp-size, --pp-size and --dp-size")
    folder = materialise(read.model_path)
    return replace(read, model_path=folder, disable_radix_cache=True, skip_tokenizer_init=True)


def report(rows: Sequence[MixedRow]) -> None:
    names = ("plan", "launch", "host", "device", "step", "busy", "gap")
    print_table(
        ["decoding", "context", "prompt", "tokens", "steps", *(f"{name} ms" for name in names)],
        [
            [*map(str, (row.decoding, row.context, row.prompt)), f"{row.tokens:g}", str(row.steps)]
            + [f"{getattr(row, f'{name}_ms'):.3f}" for name in names]
            for row in rows
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    options, rest = parser().parse_known_args(argv)
    with complaints_in_a_line():
        args = read_flags(rest, options)
    if options.out is not None:
        check_out(options.out)
    rows: list[MixedRow] = []
    with complaints_in_a_line():
        core = LocalCore(args)
        for sizes in product(options.decoding, options.context, options.prompt):
            rows += MixedLoad(core, MixedShape(*sizes), options.repeats).measure()
            if options.out is not None:
                options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    for row in rows:
        show_kernels(f"{row.decoding} decode, {row.tokens:g} tokens of prompts", row.kernels)
    report(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
