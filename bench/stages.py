"""Which stage of a step a kernel belongs to, and how long a rank has none on the GPU.

Kernels of ours are known by name, and a test goes over all of them; those of libraries by a part of
it. With programmatic dependent launch a kernel begins while the one before it runs, and waits: so
the stages of a step may add up to more than the step.

Waiting for other ranks is in several stages: the kernel that sends waits for what others send where
there is one lane, a kernel of its own (`wait`) for their results before these are collected, and
collectives wait, too. So a stage has its mean over ranks, and its least: the rank that comes last
hardly waits.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

# In the order of tables.
KERNELS: Final = {
    "attention": (
        *("decode_kernel", "prefill_kernel", "attention_kernel"),
        *("enter_heads_kernel", "enter_latent_kernel"),
    ),
    "dense": (
        *("_few_rows", "_one_row", "_many_rows", "rows_kernel", "heads_kernel"),
        "_norm_product",  # the norm of one row with its product
    ),
    "norms": ("_norm_kernel",),
    "routing": (
        *("_route_kernel", "_router_kernel"),
        *("_sort_few", "count_chunks", "_place_chunks", "_blocks"),
        *("_fill_kernel", "_take_kernel"),
    ),
    "dispatch": ("_send_kernel",),
    "experts": (
        *("_gate_up_kernel", "_down_kernel", "_gate_up_down_kernel", "_gate_up_remote_kernel"),
        *("_down_row_kernel", "gate_up_kernel", "down_kernel", "experts_kernel"),
        *("_sum_pairs", "weigh_kernel", "_zero_missing_kernel", "_silu_mul_kernel"),
    ),
    "combine": ("collect_kernel",),
    "wait": ("_wait_kernel", "_signal_kernel"),
    "collectives": ("_push_kernel", "_publish_kernel", "_pull_kernel"),
    "quantising": ("_fp8_kernel", "_int8_kernel", "nvfp4_grid_kernel"),
    "KV transfers": ("_copy_kernel",),
    "sampling": (
        *("_peaks_kernel", "_greedy_kernel", "_sums_kernel", "_draw_kernel"),
        *("_counts_kernel", "_edits_kernel"),
        *("_range_kernel", "_list_kernel"),
    ),
}
# The first that fits; also torch's operators on a CPU.
FOREIGN: Final = {
    "experts": "[gG]roup(ed|Problem)",
    "collectives": "nccl",
    "attention": "flash|scaled_dot_product",
    "dense": "gemm|gemv|nvjet|cutlass|splitK|linear|mm$",
    "sampling": "argmax|softmax",
}
OTHER: Final = "other"
STAGE_OF: Final = {name: stage for stage, names in KERNELS.items() for name in names}
LAST: Final = "_greedy_kernel"
"""Ends the kernels of a decode step: each has one."""


def stage_of(kernel: str) -> str:
    found = (stage for stage, part in FOREIGN.items() if re.search(part, kernel))
    return STAGE_OF.get(kernel) or next(found, OTHER)


@dataclass(frozen=True, slots=True)
class Ran:
    """A kernel, from when to when, in microseconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class StepKernels:
    """Of a rank in a step, in microseconds: what each kernel took, and how long none ran of the
    `step_us` from the end of the step before to its own. On a CPU the last two are not known."""

    us: dict[str, float]
    idle_us: float = 0.0
    step_us: float = 0.0


def step_kernels(ran: Iterable[Ran], steps: int, on_gpu: bool = True) -> StepKernels:
    """The whole step of median length: who was recorded first waits in a step of its for those
    whose recording begins then. Where no steps are told apart, as by operators on a CPU, the mean
    of `steps`."""
    ran = sorted(ran, key=lambda one: one.end)
    ends = _step_ends(ran, steps) if on_gpu else []
    if len(ends) < 2:
        return StepKernels({name: us / steps for name, us in _sums(ran).items()})
    begin, end = _middle(list(pairwise(ends)))
    inside = [one for one in ran if begin < one.end <= end]
    idle = end - begin - covered_us(inside, begin)
    return StepKernels(_sums(inside), idle, end - begin)


def _step_ends(ran: Sequence[Ran], steps: int) -> list[float]:
    """By the kernel that ends a step, or, in a pipeline stage that does not sample, by the last of
    those that each step has once."""
    count = Counter(one.name for one in ran)
    once = (one.name for one in reversed(ran) if count[one.name] == steps)
    last = LAST if LAST in count else next(once, None)
    return [one.end for one in ran if one.name == last]


def _middle(spans: list[tuple[float, float]]) -> tuple[float, float]:
    length = statistics.median_low(end - begin for begin, end in spans)
    return next(span for span in spans if span[1] - span[0] == length)


def _sums(ran: Iterable[Ran]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for one in ran:
        found[one.name] += one.end - one.begin
    return dict(found)


def covered_us(ran: Iterable[Ran], since: float = float("-inf")) -> float:
    """How long any of them ran from then on; what overlaps counts once."""
    covered = 0.0
    for one in sorted(ran, key=lambda one: one.begin):
        covered += max(0.0, one.end - max(one.begin, since))
        since = max(since, one.end)
    return covered


@dataclass(frozen=True, slots=True)
class Stages:
    """Microseconds of each stage in a step, over ranks; `idle` and `step` likewise."""

    mean: dict[str, float]
    least: dict[str, float]


def stages_of(ranks: Sequence[StepKernels]) -> Stages:
    """A rank without a kernel of a stage takes none of its time."""
    found = [_stages(rank) for rank in ranks]
    names = [name for name in ORDER if any(name in one for one in found)]
    us = {name: [one.get(name, 0.0) for one in found] for name in names}
    return Stages(
        {name: statistics.fmean(ranks) for name, ranks in us.items()},
        {name: min(ranks) for name, ranks in us.items()},
    )


def _stages(rank: StepKernels) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for name, us in rank.us.items():
        found[stage_of(name)] += us
    if rank.step_us:
        found |= {"idle": rank.idle_us, "step": rank.step_us}
    return found


ORDER: Final = (*KERNELS, OTHER, "idle", "step")
