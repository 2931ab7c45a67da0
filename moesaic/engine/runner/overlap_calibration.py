"""Measures steps of all schedules at start, for --overlap auto.

Steps go through the runner as in service: all ranks begin the same ones, with as many tokens on
each, which share one page of the empty KV cache. Schedules take turns, so that a machine that
becomes slower slows all of them down, and the slowest rank counts. The compute of a step is that
of one batch whose kernels do not wait for other ranks; on a CPU, the step without its dispatches
and combines.
"""

from __future__ import annotations

import logging
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from moesaic.config import ServerArgs
from moesaic.core.overlap import Overlap
from moesaic.core.step import Step
from moesaic.engine.runner.trial_graphs import TrialGraphs
from moesaic.engine.schedule.plan import PlanItem, StepAgreement, StepPlan
from moesaic.models.blocks import SparseBlock
from moesaic.overlap.cost import OverlapChoice, StepCosts, between
from moesaic.overlap.split import cut_decodes, cut_prompts

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Requests of the steps; real ones are numbered from 0 or 1 on.
FIRST_REQUEST: Final = 1 << 50
PAGE: Final = 1
CONTEXT: Final = 256
"""Tokens that a decoding sequence has before the step, if the model has as many positions."""
PROMPT: Final = 1024
"""Tokens of a prompt; steps with more have several."""
LEAST_PREFILL: Final = 16
ROUNDS: Final = 5
# Steps in a row, so that the host is ahead of the device.
DECODES, PREFILLS, HOST_STEPS = 6, 2, 2
SECONDS: Final = 30.0
"""When so many have passed in steps that count, no larger step is measured."""
COMPILE_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class StepKind:
    """As many tokens on every rank. `first_half`: those of the first micro-batch."""

    prefill: bool
    tokens: int
    first_half: int

    @property
    def can_split(self) -> bool:
        return 0 < self.first_half < self.tokens


def sizes_of(
    decode_tokens: int, chunk_tokens: int, verify_tokens: int = 0
) -> list[tuple[bool, int]]:
    """Whether a step prefills, and its tokens: powers of two and the most, small ones first.
    `verify_tokens`: the most of a step with drafts.

    >>> sizes_of(3, 32, 6)
    [(False, 1), (False, 2), (False, 3), (False, 4), (False, 6), (True, 16), (True, 32)]
    """

    def powers(least: int, most: int) -> list[int]:
        found = [1 << n for n in range(most.bit_length()) if least <= 1 << n <= most]
        return found if most in found or most < least else [*found, most]

    decodes, prefills = powers(1, decode_tokens), powers(LEAST_PREFILL, chunk_tokens)
    decodes += [size for size in powers(1, verify_tokens) if size > decode_tokens]
    sizes = [*((False, size) for size in decodes), *((True, size) for size in prefills)]
    return sorted(sizes, key=lambda one: one[1])


def calibrate(runner: ModelRunner, args: ServerArgs) -> list[OverlapChoice]:
    """The choices for the steps that could be measured in time; all ranks of a stage make the same
    ones."""
    began = time.monotonic()
    prompts = min(runner.limits.chunk_tokens, runner.max_running * runner.context_length)
    # Drafts are verified in one batch, which may compute its shared experts meanwhile.
    verified = runner.limits.decode_tokens if Overlap.SBO in runner.schedules else 0
    calibration = Calibration(runner, args, sizes_of(runner.max_running, prompts, verified))
    runner.ranks.stage_peers.all_gather_bytes(b"", "measure overlap")
    if runner.ranks.stage_peers.repeats:
        logger.info("overlap: as it was measured when the service started")
        calibration.is_known = True
        return calibration.run()
    sizes = len(calibration.kinds)
    logger.info("overlap: measuring steps of %d sizes, up to %.0f s of them", sizes, SECONDS)
    with calibration.measuring():
        choices = calibration.run()
    logger.info(
        "overlap: measured %d sizes of steps in %.1f s", len(choices), time.monotonic() - began
    )
    for choice in choices:
        kind = "prefill" if choice.prefill else "decode"
        logger.info("overlap: %s of %d tokens a rank: %s", kind, choice.tokens, choice.why)
    return choices


class Calibration:
    is_known = False
    """A predecessor of this rank has measured: no steps run, and exchanges tell what came of it."""

    def __init__(
        self,
        runner: ModelRunner,
        args: ServerArgs,
        sizes: Sequence[tuple[bool, int]],
        all_schedules: Sequence[tuple[bool, int]] | None = None,
    ) -> None:
        """`sizes`: of the steps, as `sizes_of` gives them. `all_schedules`: those of them that are
        measured with every schedule, None for all; others are only known as one batch."""
        self._runner, self._page_size = runner, args.page_size
        self._threshold = args.tbo_token_distribution_threshold
        self._number, self._spent = FIRST_REQUEST, 0.0
        self._shared = [
            module
            for module in runner.model.modules()
            if isinstance(module, SparseBlock) and module.shared_experts is not None
        ]
        self.kinds = [self._kind(prefill, tokens) for prefill, tokens in sizes]
        asked = sizes if all_schedules is None else all_schedules
        self._trial = TrialGraphs(runner, self._steps(asked))

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Steps are measured inside, as graphs where they would be graphs in service."""
        runner = self._runner
        for part in (runner.cache.keys, runner.cache.values):
            part[:, PAGE].view(torch.uint8).zero_()
        with (
            torch.inference_mode(),
            runner.watchdog.waiting_longer(COMPILE_SECONDS),
            self._trial.captured(),
        ):
            yield
        runner.reset_statistics()
        for recorder in (runner.recorder, runner.draft_recorder, runner.balance_recorder):
            if recorder is not None:
                recorder.restart()

    def run(self) -> list[OverlapChoice]:
        """Of all sizes that can be measured in time, inside of `measuring`."""
        costs: dict[bool, list[StepCosts]] = {False: [], True: []}
        found = list[OverlapChoice]()
        for kind in self.kinds:
            if self._slowest([self._spent])[0] > SECONDS:
                logger.warning(
                    "overlap: after %.0f s steps of %d and more tokens are not measured: they "
                    "have the schedule of the largest that was",
                    SECONDS,
                    kind.tokens,
                )
                break
            known = costs[kind.prefill]
            half = between(known, -(-kind.tokens // 2)) if kind.can_split else None
            found.append(self.measure(kind, half))
            known.append(found[-1].costs)
        return found

    def _kind(self, prefill: bool, tokens: int) -> StepKind:
        lengths = np.array(self._lengths(prefill, tokens))
        cut = cut_prompts(lengths, self._threshold) if prefill else cut_decodes(lengths)
        has_drafts = not prefill and len(lengths) < tokens
        return StepKind(prefill, tokens, 0 if has_drafts else cut.tokens)

    def _lengths(self, prefill: bool, tokens: int) -> list[int]:
        """Of no more sequences than may run; what is more decodes as drafts."""
        runner = self._runner
        most = -(-tokens // runner.max_running)
        if prefill:
            most = min(max(PROMPT, most), runner.context_length)
        rest = [tokens % most] if tokens % most else []
        return [most] * (tokens // most) + rest

    def _steps(
        self, all_schedules: Sequence[tuple[bool, int]]
    ) -> Iterator[tuple[StepPlan, StepAgreement]]:
        for kind in self.kinds:
            has_all = (kind.prefill, kind.tokens) in all_schedules
            for schedule in self._schedules(kind) if has_all else [Overlap.OFF]:
                yield self._plan(kind), self._agreement(kind, schedule)

    def _schedules(self, kind: StepKind) -> list[Overlap]:
        return [one for one in self._runner.schedules if kind.can_split or one != Overlap.TBO]

    def measure(
        self, kind: StepKind, half: StepCosts | None, schedules: Sequence[Overlap] | None = None
    ) -> OverlapChoice:
        """`half`: of half as many tokens, None if they are not known. `schedules`: those that are
        measured, one batch among them; all unless given, but two halves of unknown costs."""
        if schedules is None:
            schedules = self._schedules(kind)
            schedules = [one for one in schedules if half is not None or one != Overlap.TBO]
        for schedule in schedules:
            self._timed(kind, schedule)  # compiles
        begin = time.monotonic()
        rounds = [self._round(kind, schedules, number) for number in range(ROUNDS)]
        self._spent += time.monotonic() - begin
        shared_experts = self._shared_seconds(kind)
        mine = [seconds for times in rounds for seconds in (*times, shared_experts)]
        width = len(schedules) + 2
        slowest = self._slowest(mine)
        by_round = [slowest[at : at + width] for at in range(0, len(slowest), width)]
        *columns, alone, shared = zip(*by_round, strict=True)
        times = dict(zip(schedules, columns, strict=True))
        off = statistics.median(times[Overlap.OFF])
        compute = min(statistics.median(alone), off)
        costs = StepCosts(kind.tokens, compute, off - compute, min(max(shared), compute))
        return OverlapChoice(kind.prefill, costs, half, times)

    def _round(self, kind: StepKind, schedules: Sequence[Overlap], number: int) -> list[float]:
        """Seconds of each schedule, and of the compute of one batch. Every other round has the
        reverse order."""
        order = schedules if number % 2 else reversed(schedules)
        found = {schedule: self._timed(kind, schedule) for schedule in order}
        seconds, inside = found[Overlap.OFF]
        compute, watchdog = seconds - inside, self._runner.watchdog
        if watchdog.windows or watchdog.has_nccl:  # kernels of a device
            compute = self._timed_alone(kind)
        return [*(found[schedule][0] for schedule in schedules), compute]

    def _timed_alone(self, kind: StepKind) -> float:
        """Of kernels that find the rows of the last step where those of others would arrive: no
        rank may send new ones meanwhile, so all begin and end together."""
        self._meet()
        with self._trial.alone():
            seconds, _ = self._timed(kind, Overlap.OFF)
        self._meet()
        return seconds

    def _meet(self) -> None:
        self._slowest([0.0])

    def _timed(self, kind: StepKind, schedule: Overlap) -> tuple[float, float]:
        """Seconds of a step, and those of them in dispatches and combines of ranks on CPU: of
        several steps in a row behind one that all ranks end together."""
        if self.is_known:
            return 0.0, 0.0
        count = HOST_STEPS
        if self._on_device:
            count = PREFILLS if kind.prefill else DECODES
        plans = [self._plan(kind) for _ in range(1 + count)]
        agreement = self._agreement(kind, schedule)
        if self._on_device:
            return self._timed_on_device(plans, agreement), 0.0
        first, *others = plans
        self._runner.begin(first, agreement).wait()
        begin, before = time.perf_counter(), self._transfer_seconds()
        for plan in others:
            self._runner.begin(plan, agreement).wait()
        inside = self._transfer_seconds() - before
        return (time.perf_counter() - begin) / count, inside / count

    def _timed_on_device(self, plans: Sequence[StepPlan], agreement: StepAgreement) -> float:
        """From the end of the first step to the end of the last, while the host launches ahead."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        handles = [self._runner.begin(plans[0], agreement)]
        begin.record()
        handles += [self._runner.begin(plan, agreement) for plan in plans[1:]]
        end.record()
        for handle in handles:
            handle.wait()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / (len(plans) - 1)

    def _agreement(self, kind: StepKind, schedule: Overlap) -> StepAgreement:
        groups = self._runner.ranks.mesh.dp
        split = (kind.first_half,) * groups if schedule == Overlap.TBO else ()
        counts, nothing = (kind.tokens,) * groups, (0,) * groups
        return StepAgreement(0, counts, nothing, kind.prefill, overlap=schedule, first_half=split)

    @property
    def _on_device(self) -> bool:
        return self._runner.device.type == "cuda"

    def _plan(self, kind: StepKind) -> StepPlan:
        """Sequences that nobody samples; their tokens choose experts as text of any kind does."""
        runner, page_size = self._runner, self._page_size
        items = []
        for row, length in enumerate(self._lengths(kind.prefill, kind.tokens)):
            self._number += 1
            first = 0 if kind.prefill else min(CONTEXT, runner.context_length - length)
            ids = [(31 * (self._number + n)) % runner.vocab_size for n in range(length)]
            pages = [PAGE] * -(-(first + length) // page_size)
            drafts = 0 if kind.prefill else length - 1
            items.append(PlanItem(self._number, ids, first, row, pages, num_drafts=drafts))
        return StepPlan(items, prefill=kind.prefill)

    def _transfer_seconds(self) -> float:
        """That ranks on CPU have spent in dispatches and combines."""
        stats = self._runner.moe.comm.traffic.values()
        return sum(one.dispatch_seconds + one.combine_seconds for one in stats)

    def _shared_seconds(self, kind: StepKind) -> float:
        """All shared experts of a step, one behind the other."""
        if not self._shared or self.is_known:
            return 0.0
        x_TH = self._runner.hidden_buffer(kind.tokens).normal_()
        counts = self._runner.group_counts((kind.tokens,) * self._runner.ranks.mesh.dp)
        step = Step(kind.prefill, counts=counts, rows=kind.tokens)

        def run() -> None:
            for block in self._shared:
                assert block.shared_experts is not None
                block.shared_experts(x_TH, step)

        run()
        if self._on_device:
            return _replayed_seconds(run)
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def _slowest(self, seconds: Sequence[float]) -> list[float]:
        """Of all ranks of the stage."""
        packed = struct.pack(f"{len(seconds)}d", *seconds)
        gathered = self._runner.ranks.stage_peers.all_gather_bytes(packed, "calibrate overlap")
        by_rank = (struct.unpack(f"{len(seconds)}d", part) for part in gathered)
        return [max(times) for times in zip(*by_rank, strict=True)]


def _replayed_seconds(run: Callable[[], None]) -> float:
    """In a graph, as launches take longer than kernels of a few rows."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3
