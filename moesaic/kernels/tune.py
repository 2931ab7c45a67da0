"""Finds the fastest configuration of the experts' kernels on the GPU that is there.

The two products are independent but for the block of places that both share: for every block the
best configuration of each is found by itself, then whole layers compete, with the products apart
and, where that exists, in one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    sort_pairs,
    sum_pairs,
)
from moesaic.kernels.quantise import FP8_GROUP
from moesaic.kernels.timing import measure
from moesaic.kernels.triton.experts import function_of
from moesaic.kernels.tuning import FP8_FORMATS, Plan, Shape

FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = ("bf16", "fp16", *FP8_FORMATS)
SMALL_BLOCKS = (16, 32, 64)
LARGE_BLOCKS = (64, 128)
# What Triton raises for a configuration that the device has no room for, or cannot compile.
UNFIT = (TritonError, RuntimeError, ValueError, AssertionError)

Clock = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Case:
    """One entry of a file: a shape of experts at a number of tokens."""

    shape: Shape
    top_k: int
    tokens: int

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k

    def blocks(self, implementation: str) -> list[int]:
        """Those that neither cut a typical expert into many tiles nor leave most of one empty."""
        mean = self.pairs / self.shape.experts
        if implementation == "large":
            return [block for block in LARGE_BLOCKS if mean >= block / 8]
        return [block for block in SMALL_BLOCKS if block / 4 <= max(4.0, mean) <= 4 * block]


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
        """As `quantises_inner` has it: narrow tiles cannot quantise h."""
        narrow = implementation == "small" and gate_up.block_n != FP8_GROUP
        if self.quantised is None or narrow:
            return self.x, self.h
        return self.quantised


def candidates(case: Case, device: tuning.Device) -> Iterator[Candidate]:
    for block in case.blocks("small"):
        gates, downs = tuning.candidates(device, case.shape, block)
        yield from (Candidate("small", "gate_up", config) for config in gates)
        yield from (Candidate("small", "down", config) for config in downs)
    for block in case.blocks("large"):
        for which, config in product(("gate_up", "down"), _large(case.shape, block)):
            yield Candidate("large", which, config)


def _large(shape: Shape, block: int) -> Iterator[Any]:
    kind = tuning.config_class("large")
    step = tuning.LINE // tuning.ITEM_BYTES[shape.format]
    base = kind(block_m=block, block_k=step)
    for group, ring in product((4, 16), (3, 4, 5)):
        yield replace(base, specialised=True, group=group, ring=ring)
    for group, stages, direct in product((4, 16), (3, 4), (True, False)):
        yield replace(base, specialised=False, group=group, stages=stages, tensor_memory=direct)


def make_tensors(case: Case, device: torch.device, seed: int = 0) -> Tensors:
    shape, pairs, tokens = case.shape, case.pairs, case.tokens
    generator = torch.Generator(device=device).manual_seed(seed)
    noise = torch.rand(tokens, shape.experts, generator=generator, device=device)
    dtype = FLOATS.get(shape.format, torch.bfloat16)
    x_TH = torch.randn(tokens, shape.hidden, generator=generator, device=device).to(dtype)
    h_PI = torch.randn(pairs, shape.inner, generator=generator, device=device).to(dtype)
    w13 = _matrices(shape, 2, shape.inner, shape.hidden, generator)
    w2 = _matrices(shape, 1, shape.hidden, shape.inner, generator)
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
    shape: Shape, parts: int, rows: int, columns: int, generator: torch.Generator
) -> Matrices:
    """Random values and, where the format has them, equal scales."""
    device, sizes = generator.device, (shape.experts, parts, rows, columns)
    planes = {}
    if shape.format in FP8_FORMATS:
        byte = torch.randint(0, 120, sizes, generator=generator, device=device, dtype=torch.uint8)
        planes["values"] = byte.view(torch.float8_e4m3fn)
        block = FP8_GROUP if shape.format == "fp8_block" else 1
        across = -(-columns // FP8_GROUP) if shape.format == "fp8_block" else 1
        blocks = (shape.experts, parts, -(-rows // block), across)
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


def compile_all(case: Case, device: torch.device, share: tuple[int, int]) -> int:
    """Runs every `share[1]`-th candidate once, so that it lies compiled in Triton's cache; how many
    can run."""
    tensors = make_tensors(case, device)
    wanted = list(candidates(case, tuning.device_facts(device)))[share[0] :: share[1]]
    able = 0
    for candidate in wanted:
        groups = sort_pairs(tensors.ids, case.shape.experts, candidate.config.block_m)
        if device.type == "cuda":
            # Right behind the sorting, `down` would read its tiles before they are there.
            torch.cuda.synchronize(device)
        with suppress(*UNFIT):
            runs(tensors, candidate, groups)()
            able += 1
    return able


def search(
    case: Case, device: torch.device, tick: Callable, clock: Clock = measure
) -> tuple[Plan, float]:
    """The fastest plan and its microseconds by the `clock`; `tick` is called after each
    candidate."""
    tensors = make_tensors(case, device)
    best: dict[tuple[str, int, str], tuple[float, Any]] = {}
    for candidate in candidates(case, tuning.device_facts(device)):
        block = candidate.config.block_m
        groups = sort_pairs(tensors.ids, case.shape.experts, block)
        us = _time(runs(tensors, candidate, groups), clock)
        key = (candidate.implementation, block, candidate.product)
        if us is not None and us < best.get(key, (us + 1, None))[0]:
            best[key] = us, candidate.config
        tick()
    guessed = tuning.guess(tuning.device_facts(device), case.shape, case.pairs)
    plans = [*_plans(best), *([guessed] if guessed.gate_up is not None else [])]
    layers = ((layer_time(tensors, case, plan, clock), plan) for plan in plans)
    timed = [(us, plan) for us, plan in layers if us is not None]
    if not timed:
        raise RuntimeError(f"no configuration runs for {case.shape} with {case.tokens} tokens")
    us, plan = min(timed, key=lambda pair: pair[0])
    return plan, us


def _plans(best: dict[tuple[str, int, str], tuple[float, Any]]) -> Iterator[Plan]:
    for implementation, block, which in list(best):
        if which != "gate_up" or (implementation, block, "down") not in best:
            continue
        gate_up = best[implementation, block, "gate_up"][1]
        down = best[implementation, block, "down"][1]
        yield Plan(implementation, block, gate_up, down)
        if implementation == "small":
            yield Plan(implementation, block, gate_up, down, fused=True)


def layer_time(tensors: Tensors, case: Case, plan: Plan, clock: Clock) -> float | None:
    """Microseconds of everything after routing, as the engine would do it by that plan."""
    experts, y = tensors.experts, tensors.y
    x, h = tensors.rows(plan.implementation, plan.gate_up)

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
