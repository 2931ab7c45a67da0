"""Finds the fastest configuration of the experts' kernels on this GPU.

The two products are independent except for their common block of places. For every block the best
configurations of each product are found separately, by a quick measurement of all and a precise one
of the best. Then whole layers compete: with and without prefetching and, if it may matter, with
both products in one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from moesaic.kernels import tuning
from moesaic.kernels.cpu.experts import SwigluSpec
from moesaic.kernels.experts import (
    FeedForward,
    Groups,
    Matrices,
    Rows,
    gate_up_down,
    group_pairs,
    sum_pairs,
)
from moesaic.kernels.quantise import FP8_GROUP
from moesaic.kernels.timing import measure
from moesaic.kernels.triton.experts import function_of
from moesaic.kernels.tuning import FP8_FORMATS, ExpertsPlan, ExpertsShape

FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = ("bf16", "fp16", *FP8_FORMATS)
SMALL_BLOCKS = (16, 32, 64)
LARGE_BLOCKS = (64, 128)
# Configurations of a product and block that are measured again; and how much slower than the best a
# block may be in the quick measurement.
FINALISTS = 3
MARGIN = 1.1
# In longer layers one launch does not matter.
FUSED_MICROSECONDS = 100.0
# Raised for configurations that do not fit the device or do not compile.
UNFIT = (TritonError, RuntimeError, ValueError, AssertionError)

Clock = Callable[[Callable[[], object]], float]
QUICK_CLOCK: Clock = partial(measure, quick=True)


@dataclass(frozen=True)
class TuneCase:
    """One entry of a file: a shape of experts and a number of tokens."""

    shape: ExpertsShape
    top_k: int
    tokens: int

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k

    def blocks(self, implementation: str) -> list[int]:
        """Blocks of which a typical expert neither needs many nor leaves one nearly empty."""
        mean = self.pairs / self.shape.experts
        if implementation == "large":
            most = (2 * LARGE_BLOCKS[0], math.inf)
            sizes = zip(LARGE_BLOCKS, most, strict=True)
            return [block for block, limit in sizes if block / 8 <= mean <= limit]
        return [block for block in SMALL_BLOCKS if block / 4 <= max(4.0, mean) <= 2 * block]


@dataclass(frozen=True)
class Candidate:
    """A configuration of one product ("gate_up" or "down")."""

    implementation: str
    product: str
    config: Any


@dataclass(frozen=True)
class Tensors:
    """Random tensors of one case; `quantised`: `x` and `h` for fp8 weights."""

    x: Rows
    h: Rows
    quantised: tuple[Rows, Rows] | None
    experts: FeedForward
    ids: Tensor
    weights: Tensor
    y: Tensor
    out: Tensor

    def rows(self, implementation: str, gate_up: Any) -> tuple[Rows, Rows]:
        """The rows that this gate_up reads and writes; h as `quantises_inner` decides."""
        if self.quantised is None:
            return self.x, self.h
        x, h = self.quantised
        return x, h if _quantises(implementation, gate_up) else self.h


def _quantises(implementation: str, gate_up: Any) -> bool:
    """Narrow tiles cannot quantise h."""
    return implementation != "small" or gate_up.block_n == FP8_GROUP


def candidates(case: TuneCase, device: tuning.DeviceTuning) -> Iterator[Candidate]:
    for block in case.blocks("small"):
        gates, downs = tuning.candidates(device, case.shape, block)
        yield from (Candidate("small", "gate_up", config) for config in gates)
        yield from (Candidate("small", "down", config) for config in downs)
    for block in case.blocks("large"):
        for which, config in product(("gate_up", "down"), _large(case.shape, block)):
            yield Candidate("large", which, config)


def _large(shape: ExpertsShape, block: int) -> Iterator[Any]:
    """Only whole tiles on Hopper can use the specialised kernel; all others use the plain one."""
    kind = tuning.config_class("large")
    base = kind(block_m=block, block_k=tuning.LINE // tuning.ITEM_BYTES[shape.format])
    if block == tuning.LARGE_BLOCK:
        for group, ring in product((4, 8, 16), (3, 4)):
            yield replace(base, specialised=True, group=group, ring=ring)
    for group, stages in product((4, 16), (3,) if block == tuning.LARGE_BLOCK else (3, 4)):
        yield replace(base, specialised=False, group=group, stages=stages)


def make_tensors(case: TuneCase, device: torch.device, few: bool = False) -> Tensors:
    """`few`: only as many experts as a row needs have weights, and only those are chosen."""
    shape, pairs, tokens = case.shape, case.pairs, case.tokens
    held = case.top_k if few else shape.experts
    generator = torch.Generator(device=device).manual_seed(0)
    noise = torch.rand(tokens, held, generator=generator, device=device)
    dtype = FLOATS.get(shape.format, torch.bfloat16)
    x_TH = torch.randn(tokens, shape.hidden, generator=generator, device=device).to(dtype)
    h_PI = torch.randn(pairs, shape.inner, generator=generator, device=device).to(dtype)
    w13 = _matrices(shape, held, (2, shape.inner, shape.hidden), generator)
    w2 = _matrices(shape, held, (1, shape.hidden, shape.inner), generator)
    fp8 = shape.format in FP8_FORMATS and shape.inner % FP8_GROUP == 0
    return Tensors(
        x=Rows(x_TH),
        h=Rows(h_PI),
        quantised=(_quantised(x_TH), _quantised(h_PI)) if fp8 else None,
        experts=FeedForward(w13, w2, SwigluSpec()),
        ids=noise.topk(case.top_k).indices.int(),
        weights=torch.rand(tokens, case.top_k, generator=generator, device=device),
        y=torch.empty(pairs, shape.hidden, dtype=dtype, device=device),
        out=torch.empty(tokens, shape.hidden, dtype=dtype, device=device),
    )


def _quantised(x_TH: Tensor) -> Rows:
    scales = torch.full((len(x_TH), -(-x_TH.shape[1] // FP8_GROUP)), 0.01, device=x_TH.device)
    return Rows((x_TH.float() * 100).clamp(-448, 448).to(torch.float8_e4m3fn), scales)


def _matrices(
    shape: ExpertsShape, held: int, size: tuple[int, int, int], generator: torch.Generator
) -> Matrices:
    """Random values, and equal scales if the format has any."""
    parts, rows, columns = size
    device, sizes = generator.device, (held, *size)
    planes = {}
    if shape.format in FP8_FORMATS:
        byte = torch.randint(0, 120, sizes, generator=generator, device=device, dtype=torch.uint8)
        planes["values"] = byte.view(torch.float8_e4m3fn)
        block = FP8_GROUP if shape.format == "fp8_block" else 1
        across = -(-columns // FP8_GROUP) if shape.format == "fp8_block" else 1
        blocks = (held, parts, -(-rows // block), across)
        planes["scales"] = torch.full(blocks, 1e-3, device=device)
    else:
        values = torch.empty(sizes, dtype=FLOATS[shape.format], device=device)
        planes["values"] = values.normal_(0, columns**-0.5, generator=generator)
    return Matrices(shape.format, planes, (shape.experts, parts * rows, columns), parts)


def runs(tensors: Tensors, candidate: Candidate, groups: Groups) -> Callable[[], object]:
    function, config = function_of(candidate.implementation, candidate.product), candidate.config
    experts = tensors.experts
    if candidate.product == "gate_up":
        x, h = tensors.rows(candidate.implementation, config)
        return partial(function, x, experts.w13, groups, experts.activation, h, config)
    # `down` always gets h as a wide gate_up writes it.
    h = tensors.h if tensors.quantised is None else tensors.quantised[1]
    return partial(function, h, experts.w2, groups, tensors.weights, tensors.y, config)


def grouped(tensors: Tensors, case: TuneCase, candidate: Candidate) -> Groups:
    """The groups that the engine would use for such a product."""
    config = candidate.config
    plan = ExpertsPlan(candidate.implementation, config.block_m, config, config)
    with tuning.override_plan(case.shape, plan):
        return group_pairs(tensors.ids, tensors.experts.w2)


def kernels(
    cases: Sequence[TuneCase], device: tuning.DeviceTuning
) -> list[tuple[TuneCase, Candidate]]:
    """The kernels to compile, each once, with a case that uses it. Triton compiles another one if
    the number of pairs is no multiple of 16, and a single row has its own."""
    found: dict[tuple[object, ...], tuple[TuneCase, Candidate]] = {}
    for case in cases:
        sizes = case.shape, case.top_k, case.pairs % 16 == 0, case.tokens == 1
        for candidate in candidates(case, device):
            for variant in (candidate, *_without_prefetch(candidate)):
                found.setdefault((*sizes, variant), (case, variant))
    # The slowest to compile come first.
    return sorted(found.values(), key=lambda kernel: kernel[1].implementation)


def _without_prefetch(candidate: Candidate) -> Iterator[Candidate]:
    if getattr(candidate.config, "prefetch", 0):
        yield replace(candidate, config=replace(candidate.config, prefetch=0))


def compile_all(cases: Sequence[TuneCase], device: torch.device, share: tuple[int, int]) -> int:
    """Runs every `share[1]`-th kernel once, to fill Triton's cache; returns how many can run."""
    wanted = kernels(cases, tuning.device_facts(device))[share[0] :: share[1]]
    made, able = None, 0
    for case, candidate in wanted:
        if made != case:  # many processes share one GPU's memory
            made, tensors = case, make_tensors(case, device, few=True)
        groups = grouped(tensors, case, candidate)
        if device.type == "cuda":
            # Directly after the sorting, `down` would read the tiles too early.
            torch.cuda.synchronize(device)
        with suppress(*UNFIT):
            runs(tensors, candidate, groups)()
            able += 1
    return able


Key = tuple[str, int]
"""Implementation and block."""
Times = dict[Key, dict[str, list[tuple[float, Any]]]]
"""Microseconds and configurations by product, ascending."""


def search(
    case: TuneCase,
    device: torch.device,
    tick: Callable,
    clock: Clock = measure,
    quick_clock: Clock = QUICK_CLOCK,
) -> tuple[ExpertsPlan, float]:
    """The fastest plan and its microseconds by `clock`; `quick_clock` is a quicker clock for all
    candidates. Calls `tick` after each candidate."""
    tensors, facts = make_tensors(case, device), tuning.device_facts(device)

    def timed(candidate: Candidate, by: Clock) -> float | None:
        return _time(runs(tensors, candidate, grouped(tensors, case, candidate)), by)

    first: list[tuple[float, Candidate]] = []
    for candidate in candidates(case, facts):
        us = timed(candidate, quick_clock)
        first += [] if us is None else [(us, candidate)]
        tick()
    chosen = [(timed(candidate, clock), candidate) for candidate in _finalists(first)]
    best = _sorted([(us, candidate) for us, candidate in chosen if us is not None])
    guessed = tuning.guess(facts, case.shape, case.pairs)
    plans = [*_plans(case.shape, best), *([guessed] if guessed.gate_up is not None else [])]
    layers = ((layer_time(tensors, case, plan, clock), plan) for plan in plans)
    found = [(us, plan) for us, plan in layers if us is not None]
    if not found:
        raise RuntimeError(f"no configuration runs for {case.shape} with {case.tokens} tokens")
    us, plan = min(found, key=lambda pair: pair[0])
    return plan, us


def _sorted(times: list[tuple[float, Candidate]]) -> Times:
    """Groups the times by block, for blocks in which both products run."""
    found: Times = {}
    for us, candidate in sorted(times, key=lambda pair: pair[0]):
        products = found.setdefault((candidate.implementation, candidate.config.block_m), {})
        products.setdefault(candidate.product, []).append((us, candidate.config))
    return {key: products for key, products in found.items() if len(products) == 2}


def _both(products: dict[str, list[tuple[float, Any]]]) -> float:
    """Microseconds of the best configuration of each product."""
    return sum(times[0][0] for times in products.values())


def _finalists(first: list[tuple[float, Candidate]]) -> list[Candidate]:
    found = _sorted(first)
    limit = MARGIN * min(map(_both, found.values()), default=0.0)
    return [
        Candidate(implementation, which, config)
        for (implementation, _), products in found.items()
        if _both(products) <= limit
        for which, times in products.items()
        for _, config in times[:FINALISTS]
    ]


def _plans(shape: ExpertsShape, best: Times) -> Iterator[ExpertsPlan]:
    for (implementation, block), products in best.items():
        plan = ExpertsPlan(implementation, block, products["gate_up"][0][1], products["down"][0][1])
        yield plan
        if implementation != "small":
            continue
        yield replace(plan, down=replace(plan.down, prefetch=0))
        finished = shape.format not in FP8_FORMATS or _quantises(implementation, plan.gate_up)
        if finished and _both(products) <= FUSED_MICROSECONDS:
            yield replace(plan, fused=True)


def layer_time(tensors: Tensors, case: TuneCase, plan: ExpertsPlan, clock: Clock) -> float | None:
    """Microseconds of everything after routing, as the engine computes it by that plan."""
    experts, x, y = tensors.experts, tensors.x, tensors.y
    _, h = tensors.rows(plan.implementation, plan.gate_up)

    def run() -> Tensor:
        groups = group_pairs(tensors.ids, experts.w2)
        gate_up_down(x, experts, groups, tensors.weights, h, y)
        return sum_pairs(y, tensors.ids, y if case.top_k == 1 else tensors.out)

    with tuning.override_plan(case.shape, plan):
        return _time(run, clock)


def _time(work: Callable[[], object], clock: Clock) -> float | None:
    """None if the configuration cannot run."""
    try:
        return clock(work)
    except UNFIT:
        return None
