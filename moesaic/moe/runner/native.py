"""Registers a runner with native providers: GroupedCore on CPU in the declared layouts, and on a
GPU SortedPairsCore, which takes all formats in one layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from moesaic.moe.formats import DISPATCH_FORMATS
from moesaic.moe.permute import register_post_permute, register_pre_permute
from moesaic.moe.registry import RunnerBackend, register_runner
from moesaic.moe.runner.device import sorted_pairs as gpu
from moesaic.moe.runner.device.sorted_pairs import SortedPairsCore
from moesaic.moe.runner.host.layouts import (
    GroupedCore,
    LayoutPlanner,
    plan_contiguous,
    plan_masked,
    plan_standard,
    post_permute_blocks,
    post_permute_masked,
    post_permute_rows,
    pre_permute_blocks,
    pre_permute_masked,
    pre_permute_rows,
)

# By whether rows come in blocks.
GPU_PERMUTES = (
    (gpu.pre_permute_pairs, gpu.post_permute_pairs),
    (gpu.pre_permute_masked, gpu.post_permute_masked),
)
# The layout of each dispatch format, where a runner has no other.
STANDARD = dict.fromkeys(DISPATCH_FORMATS, "standard")
LAYOUTS: dict[str, LayoutPlanner] = {
    "standard": plan_standard,
    "contiguous": plan_contiguous,
    "masked": plan_masked,
}


def register_native_runner(declared: RunnerBackend) -> RunnerBackend:
    providers = {"cpu": GroupedCore, "cuda": SortedPairsCore, **declared.providers}
    backend = register_runner(replace(declared, providers=providers))
    for format, layout in backend.layouts.items():
        if DISPATCH_FORMATS[format].is_fused:
            continue
        for device, (pre, post) in {
            "cpu": _permutes(format, layout),
            "cuda": GPU_PERMUTES[DISPATCH_FORMATS[format].in_blocks],
        }.items():
            register_pre_permute(format, backend.name, device)(pre)
            register_post_permute(backend.name, format, device)(post)
    return backend


def _permutes(format: str, layout: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    in_blocks = DISPATCH_FORMATS[format].in_blocks
    if in_blocks and layout == "masked":
        return pre_permute_masked, post_permute_masked
    if in_blocks:
        return partial(pre_permute_blocks, LAYOUTS[layout]), post_permute_blocks
    return partial(pre_permute_rows, LAYOUTS[layout]), post_permute_rows
