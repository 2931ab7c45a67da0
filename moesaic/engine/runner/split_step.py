"""A step in two micro-batches: which rows each has, and what its layers know.

T rows of the step · P rows of both halves, with padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moesaic.core.overlap import Overlap
from moesaic.core.step import Step
from moesaic.engine.runner.warm_up import split_steps
from moesaic.engine.schedule.plan import StepAgreement
from moesaic.layers.context import AttentionStep
from moesaic.layers.paged_cache import Sequences, pinned
from moesaic.models.halves import Half, Halves

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner


def dummy_agreement(
    tokens: int, groups: int, prefill: bool, overlap: Overlap = Overlap.OFF
) -> StepAgreement:
    """Of a step in which all groups have as many tokens."""
    first = (tokens // 2,) * groups if overlap == Overlap.TBO else ()
    counts = (tokens,) * groups
    return StepAgreement(0, counts, prefill=prefill, overlap=overlap, first_half=first)


def idle_agreements(
    runner: ModelRunner, steps: Sequence[tuple[int, bool]]
) -> Iterator[StepAgreement]:
    """Of steps in which a rank may be idle. `steps`: tokens of the other ranks, and whether any of
    them prefills."""
    groups = runner.ranks.mesh.dp
    if groups == 1:
        return
    for tokens, prefill in steps:
        yield dummy_agreement(tokens, groups, prefill)
    for tokens, prefill in split_steps(steps) if Overlap.TBO in runner.schedules else ():
        yield dummy_agreement(tokens, groups, prefill, Overlap.TBO)


def half_rows(rows: int) -> int:
    """Of a step with so many rows."""
    return -(-rows // 2)


def half_step(step: Step, lane: int) -> Step:
    return replace(step, lane=lane, rows=half_rows(step.rows), overlap=Overlap.TBO)


@dataclass(frozen=True, slots=True)
class SplitStep:
    """`tokens`: of this rank's group in each half."""

    tokens: tuple[int, int]
    steps: tuple[Step, Step]

    @classmethod
    def of(cls, runner: ModelRunner, agreement: StepAgreement, step: Step) -> SplitStep | None:
        """None for one batch. `step`: what is known of the whole one."""
        if agreement.overlap != Overlap.TBO:
            return None
        group, halves = runner.ranks.place.dp_rank, agreement.halves
        first, second = (
            replace(half_step(step, lane), counts=runner.group_counts(counts))
            for lane, counts in enumerate(halves)
        )
        return cls((halves[0][group], halves[1][group]), (first, second))

    def launched(
        self, runner: ModelRunner, sequences: Sequences, idle: AttentionStep | None
    ) -> Halves:
        """Halves of as many rows as they have tokens, but for one without any: kernels need a row,
        so it has one of padding, with the attention of `idle`."""
        starts, device = (0, self.tokens[0]), runner.device
        parts, halves = sequences.cut(self.tokens[0]), list[Half]()
        for start, count, part, step in zip(starts, self.tokens, parts, self.steps, strict=True):
            rows: slice | Tensor = slice(start, start + count)
            if count or not step.rows:
                halves.append(Half(rows, runner.attention.attend(part), step))
                continue
            assert idle is not None, "a rank that exchanges rows has attention without tokens"
            none_1 = torch.zeros(1, dtype=torch.int32, device=device)
            step = replace(step, num_tokens_1=none_1, own_tokens_1=none_1)
            halves.append(Half(none_1.long(), idle, step))
        return Halves(halves[0], halves[1], self._order(halves, device))

    def _order(self, halves: list[Half], device: torch.device) -> Tensor | None:
        """Where the tokens are among the rows of both halves."""
        if all(isinstance(half.rows, slice) for half in halves):
            return None
        first = 0 if self.tokens[0] else 1
        return torch.arange(first, first + sum(self.tokens), device=device)


# Rows of the packed indices: of each half's rows among those of the step, and of the step's rows
# among those of both halves; then tokens of each half, and those that this rank takes to the
# experts.
ENTER, ORDER, COUNTS, PACKED = range(4)
COUNTS_WIDTH = 4


class SplitRows:
    """Which rows the halves of captured steps have, in static buffers. The halves of a rank have
    as many tokens as they can, each padded behind them."""

    def __init__(self, runner: ModelRunner, most: int) -> None:
        """`most`: rows of the largest step."""
        self._runner = runner
        width = max(2 * half_rows(most), COUNTS_WIDTH)
        self._packed = torch.zeros(PACKED, width, dtype=torch.int64, device=runner.device)
        # The lower halves of the numbers, which hold all of them.
        self._counts = self._packed[COUNTS].view(torch.int32)[: 2 * COUNTS_WIDTH : 2]

    def fill(self, tokens: tuple[int, int], rows: int) -> None:
        """`tokens` of both halves of a step with `rows` rows. Does not block the host."""
        size, total = half_rows(rows), sum(tokens)
        packed = np.zeros(self._packed.shape, np.int64)
        packed[ENTER, : tokens[0]] = np.arange(tokens[0])
        packed[ENTER, size : size + tokens[1]] = np.arange(tokens[0], total)
        packed[ORDER, : tokens[0]] = np.arange(tokens[0])
        packed[ORDER, tokens[0] : total] = np.arange(size, size + tokens[1])
        own = [self._runner.parallel.own_tokens(count, size) for count in tokens]
        packed[COUNTS, :COUNTS_WIDTH] = *tokens, *own
        self._packed.copy_(pinned(packed, self._packed.device), non_blocking=True)

    def halves(self, attention: Sequence[AttentionStep], step: Step, rows: int) -> Halves:
        """Those of a step with `rows` rows. `step`: what is known of the whole one."""
        size, counts = half_rows(rows), self._counts
        first, second = (
            Half(
                self._packed[ENTER, lane * size : (lane + 1) * size],
                attention[lane],
                replace(
                    half_step(step, lane),
                    num_tokens_1=counts[lane : lane + 1],
                    own_tokens_1=counts[2 + lane : 3 + lane],
                ),
            )
            for lane in (0, 1)
        )
        return Halves(first, second, self._packed[ORDER, :rows])
