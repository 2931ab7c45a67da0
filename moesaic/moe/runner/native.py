"""Registers a runner whose native provider on CPU is GroupedCore in the layouts it declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from moesaic.moe.permute import register_post_permute, register_pre_permute
from moesaic.moe.registry import RunnerBackend, register_runner
from moesaic.moe.runner.layouts import (
    ContiguousInput,
    GroupedCore,
    GroupedInput,
    MaskedInput,
    Placer,
    StandardInput,
    contiguous_places,
    masked_places,
    post_permute_blocks,
    post_permute_masked,
    post_permute_rows,
    pre_permute_blocks,
    pre_permute_masked,
    pre_permute_rows,
    standard_places,
)

LAYOUTS: dict[str, tuple[type[GroupedInput], Placer]] = {
    "standard": (StandardInput, standard_places),
    "contiguous": (ContiguousInput, contiguous_places),
    "masked": (MaskedInput, masked_places),
}


def register_native_runner(declared: RunnerBackend) -> RunnerBackend:
    backend = register_runner(replace(declared, providers={"cpu": GroupedCore}))
    for format, layout in backend.layouts.items():
        if format == "fused":  # its function takes the place of both permutes
            continue
        pre, post = _permutes(format, layout)
        register_pre_permute(format, backend.name)(pre)
        register_post_permute(backend.name, format)(post)
    return backend


def _permutes(format: str, layout: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if format == "deepep_ll" and layout == "masked":
        return pre_permute_masked, post_permute_masked
    if format == "deepep_ll":
        return partial(pre_permute_blocks, *LAYOUTS[layout]), post_permute_blocks
    return partial(pre_permute_rows, *LAYOUTS[layout]), post_permute_rows
