"""Finds the fastest configuration of the experts' kernels on the GPU that is there.

The two products are independent but for the block of places that both share: for every block the
best configurations of each are found by themselves, by a glance at all and a closer look at the
best. Then whole layers compete: with and without fetching ahead and, where that may matter, with
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
# Of a product in a block, that are looked at again; and by how much a block may be slower than the
# best one at first sight.
FINALISTS = 3
MARGIN = 1.1
# Longer layers do not notice a launch more or less.
FUSED_MICROSECONDS = 100.0
# What Triton raises for a configuration that the device has no room for, or cannot compile.
UNFIT = (TritonError, RuntimeError, ValueError, AssertionError)

Clock = Callable[[Callable[[], object]], float]
GLANCE: Clock = partial(measure, quick=True)


@dataclass(frozen=True)
class TuneCase:
    """One entry of a file: a shape of experts at a number of tokens."""

    shape: ExpertsShape
    top_k: int
    tokens: int

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k

    def blocks(self, implementation: str) -> list[int]:
        """Those that neither cut a typical expert into many tiles nor leave most of one empty."""
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
    """Of one case, with random contents. `x` and `h` are in a float type; where the weights are fp8
    the same are there `quantised`."""

    x: Rows
    h: Rows
    quantised: tuple[Rows, Rows] | None
    experts: FeedForward
    ids: Tensor
    weights: Tensor
    y: Tensor
    out: Tensor

    def rows(self, implementation: str, gate_up: Any) -> tuple[Rows, Rows]:
        """What that gate_up reads and writes; h as `quantises_inner` has it."""
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
    """Only whole tiles have a kernel with warps that load; others, and other GPUs, have a plain
    one."""
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
    """Random values and, where the format has them, equal scales."""
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
    # Whatever its own width, it is given h as a wide gate_up leaves it.
    h = tensors.h if tensors.quantised is None else tensors.quantised[1]
    return partial(function, h, experts.w2, groups, tensors.weights, tensors.y, config)


def grouped(tensors: Tensors, case: TuneCase, candidate: Candidate) -> Groups:
    """As the engine has them before such a product."""
    config = candidate.config
    plan = ExpertsPlan(candidate.implementation, config.block_m, config, config)
    with tuning.trying(case.shape, plan):
        return group_pairs(tensors.ids, tensors.experts.w2)


def kernels(
    cases: Sequence[TuneCase], device: tuning.DeviceTuning
) -> list[tuple[TuneCase, Candidate]]:
    """What is to be compiled for all cases: each kernel once, with a case that uses it. Triton
    makes another one where the pairs are not a multiple of 16, and a single row has its own."""
    found: dict[tuple[object, ...], tuple[TuneCase, Candidate]] = {}
    for case in cases:
        sizes = case.shape, case.top_k, case.pairs % 16 == 0, case.tokens == 1
        for candidate in candidates(case, device):
            for variant in (candidate, *_without_prefetch(candidate)):
                found.setdefault((*sizes, variant), (case, variant))
    # Those that take longest are dealt out first.
    return sorted(found.values(), key=lambda kernel: kernel[1].implementation)


def _without_prefetch(candidate: Candidate) -> Iterator[Candidate]:
    if getattr(candidate.config, "prefetch", 0):
        yield replace(candidate, config=replace(candidate.config, prefetch=0))


def compile_all(cases: Sequence[TuneCase], device: torch.device, share: tuple[int, int]) -> int:
    """Runs every `share[1]`-th kernel once, so that it lies compiled in Triton's cache; how many
    can run."""
    wanted = kernels(cases, tuning.device_facts(device))[share[0] :: share[1]]
    made, able = None, 0
    for case, candidate in wanted:
        if made != case:  # many processes do this at once, in one GPU's memory
            made, tensors = case, make_tensors(case, device, few=True)
        groups = grouped(tensors, case, candidate)
        if device.type == "cuda":
            # Right behind the sorting, `down` would read its tiles before they are there.
            torch.cuda.synchronize(device)
        with suppress(*UNFIT):
            runs(tensors, candidate, groups)()
            able += 1
    return able


Key = tuple[str, int]
"""Implementation and block."""
Times = dict[Key, dict[str, list[tuple[float, Any]]]]
"""By product: microseconds and configurations, ascending."""


def search(
    case: TuneCase,
    device: torch.device,
    tick: Callable,
    clock: Clock = measure,
    glance: Clock = GLANCE,
) -> tuple[ExpertsPlan, float]:
    """The fastest plan and its microseconds by the `clock`; `glance`: a quicker one for all
    candidates, `tick` is called after each of them."""
    tensors, facts = make_tensors(case, device), tuning.device_facts(device)

    def timed(candidate: Candidate, by: Clock) -> float | None:
        return _time(runs(tensors, candidate, grouped(tensors, case, candidate)), by)

    first: list[tuple[float, Candidate]] = []
    for candidate in candidates(case, facts):
        us = timed(candidate, glance)
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
    """Of blocks in which both products can run."""
    found: Times = {}
    for us, candidate in sorted(times, key=lambda pair: pair[0]):
        products = found.setdefault((candidate.implementation, candidate.config.block_m), {})
        products.setdefault(candidate.product, []).append((us, candidate.config))
    return {key: products for key, products in found.items() if len(products) == 2}


def _both(products: dict[str, list[tuple[float, Any]]]) -> float:
    """Microseconds of the best of each."""
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
    """Microseconds of everything after routing, as the engine would do it by that plan: rows come
    in a float type."""
    experts, x, y = tensors.experts, tensors.x, tensors.y
    _, h = tensors.rows(plan.implementation, plan.gate_up)

    def run() -> Tensor:
        groups = group_pairs(tensors.ids, experts.w2)
        gate_up_down(x, experts, groups, tensors.weights, h, y)
        return sum_pairs(y, tensors.ids, y if case.top_k == 1 else tensors.out)

    with tuning.trying(case.shape, plan):
        return _time(run, clock)


def _time(work: Callable[[], object], clock: Clock) -> float | None:
    """None for what cannot run."""
    try:
        return clock(work)
    except UNFIT:
        return None
