"""Chooses the kernels and configurations of the experts' two products on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels import tuning
from moesaic.kernels.cpu.experts import SwigluSpec
from moesaic.kernels.experts import FeedForward, Groups, Matrices, Rows
from moesaic.kernels.tuning import ExpertsPlan, ExpertsShape

MODULES = {
    "small": "moesaic.kernels.triton.experts_small",
    "large": "moesaic.kernels.triton.experts_large",
    "formats": "moesaic.kernels.triton.experts_formats",
    "remote": "moesaic.kernels.triton.experts_remote_rows",
}
FIXED_EXPERTS = 64
"""Number of experts that fixed plans assume."""
DEFAULTS = {"large": "large_config"}
"""Functions of rows, matrices and block that return a configuration if the plan has none."""


def gate_up(x: Rows, w13: Matrices, groups: Groups, activation: SwigluSpec, h: Rows) -> Rows:
    plan = plan_of(w13, groups, x.values.device, hidden=w13.shape[2], inner=w13.shape[1] // 2)
    return _gate_up(plan, x, w13, groups, activation, h)


def _gate_up(
    plan: ExpertsPlan, x: Rows, w13: Matrices, groups: Groups, activation: SwigluSpec, h: Rows
) -> Rows:
    if x.remote is not None:
        assert plan.implementation == "small", f"no {plan.implementation} kernel takes remote rows"
        return function_of("remote", "gate_up")(x, w13, groups, activation, h, plan.gate_up)
    config = _config(plan, plan.gate_up, x, w13)
    return function_of(plan.implementation, "gate_up")(x, w13, groups, activation, h, *config)


def down(h: Rows, w2: Matrices, groups: Groups, weights_RK: Tensor | None, y: Tensor) -> Tensor:
    plan = plan_of(w2, groups, h.values.device, hidden=w2.shape[1], inner=w2.shape[2])
    return _down(plan, h, w2, groups, weights_RK, y)


def _down(
    plan: ExpertsPlan, h: Rows, w2: Matrices, groups: Groups, weights_RK: Tensor | None, y: Tensor
) -> Tensor:
    config = _config(plan, plan.down, h, w2)
    return function_of(plan.implementation, "down")(h, w2, groups, weights_RK, y, *config)


def gate_up_down(
    x: Rows, experts: FeedForward, groups: Groups, weights_RK: Tensor | None, h: Rows, y: Tensor
) -> Tensor:
    w13, w2 = experts.w13, experts.w2
    _, hidden, inner = w2.shape
    plan = plan_of(w2, groups, x.values.device, hidden=hidden, inner=inner)
    if w13.format != w2.format:
        gate_up(x, w13, groups, experts.activation, h)
        return down(h, w2, groups, weights_RK, y)
    finished = h.scales is not None or w2.format not in tuning.FP8_FORMATS
    if plan.fused and finished and x.remote is None:
        fused = function_of(plan.implementation, "gate_up_down")
        return fused(x, experts, groups, weights_RK, h, y, plan)
    _gate_up(plan, x, w13, groups, experts.activation, h)
    return _down(plan, h, w2, groups, weights_RK, y)


def plan_of(
    matrices: Matrices, groups: Groups, device: torch.device, hidden: int, inner: int
) -> ExpertsPlan:
    """The plan that `block_for` used. For another block, and for fixed groups, a plan that depends
    on the block alone."""
    shape = ExpertsShape(matrices.format, matrices.shape[0], hidden, inner)
    if groups.fixed:
        shape = replace(shape, experts=FIXED_EXPERTS)
        return tuning.plan_of_block(device, shape, groups.block)
    plan = tuning.plan_for_block(device, shape, groups.planned_places, groups.block)
    assert groups.ids_K is None or plan.implementation == "small", "groups belong to other experts"
    return plan


def _config(plan: ExpertsPlan, planned: Any, rows: Rows, matrices: Matrices) -> tuple[Any, ...]:
    """Empty for implementations without configurations."""
    if planned is None and plan.implementation in DEFAULTS:
        planned = _default_of(plan.implementation)(rows, matrices, plan.block)
    return () if planned is None else (planned,)


@cache
def _default_of(implementation: str) -> Callable[..., Any]:
    return getattr(import_module(MODULES[implementation]), DEFAULTS[implementation])


@cache
def function_of(implementation: str, product: str) -> Callable[..., Any]:
    return getattr(import_module(MODULES[implementation]), f"{product}_{implementation}")
