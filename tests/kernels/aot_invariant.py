"""Compiles deterministic mode's kernels for Hopper as meshes of other sizes launch them, and
compares what they compute: the same instructions on numbers, in the same order.

python -m tests.kernels.aot_invariant
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moesaic.kernels.routing import TopKConfig
from moesaic.kernels.triton import pairs, rotary, routing
from tests.kernels.aot import Usage, build
from tests.kernels.aot_attention import LATENT_16, QWEN3, prefill

KINDS = "add|sub|mul|fma|mad|div|max|min|ex2|rsqrt|sqrt|rcp|neg"
NUMBERS = re.compile(
    rf"\b((?:{KINDS})\.[a-z0-9.]*f(?:32|16x2)|shfl[a-z0-9.]*|wgmma\.mma_async[a-z0-9.]*"
    r"|mma\.sync[a-z0-9.]*|cvt[a-z0-9.]*bf16[a-z0-9.]*)\b"
)


def numbers(usage: Usage) -> list[str]:
    return NUMBERS.findall(usage.ptx)


def attend(group: int) -> Usage:
    return prefill(replace(QWEN3, group=group), 16, invariant=True)


def attend_latents(group: int) -> Usage:
    return prefill(replace(LATENT_16, group=group), 16, invariant=True)


def enter(heads: int, kv_heads: int) -> Usage:
    types = dict.fromkeys(("qkv", "out", "q_norm", "k_norm", "keys", "values"), "*bf16")
    types |= {"slots": "*i32", "cos": "*fp32", "sin": "*fp32", "num_rows": "i32"}
    strides = ("qkv_row", "cos_row", "k_slot", "k_head", "v_slot", "v_head")
    types |= dict.fromkeys(strides, "i32")
    types |= dict.fromkeys(("eps", "k_factor", "v_factor"), "fp32")
    constants = {"HEADS": heads, "KV_HEADS": kv_heads, "D": 128}
    constants |= {"ROWS": rotary.TILE // 128, "INTERLEAVED": False, "PDL": True}
    kernel = rotary.enter_heads_kernel
    return build(kernel, types, constants, aligned=strides, num_warps=rotary.WARPS)


def route(padded: bool, mapped: bool) -> Usage:
    """A graph's rows may be padding; slots of one rank's experts are the experts."""
    types = {"logits_ptr": "*bf16", "ids_ptr": "*i32", "weights_ptr": "*fp32"}
    types |= {"num_rows": "i32", "stride": "i32", "scale": "fp32"}
    lists = {"num_tokens_ptr": padded, "slots_ptr": mapped, "count_ptr": mapped}
    types |= {name: "*i32" for name, there in lists.items() if there}
    constants: dict[str, Any] = {name: None for name, there in lists.items() if not there}
    spec = TopKConfig(8, renormalize=True)
    constants |= {"P": routing.constants(128, spec, biased=False, replicas=int(mapped))}
    constants |= {"bias_ptr": None, "ROWS": 1, "PDL": True}
    return build(routing._route_kernel, types, constants, aligned=("stride",), num_warps=1)


SAME: dict[str, list[Callable[[], Usage]]] = {
    "attention": [lambda: attend(8), lambda: attend(4), lambda: attend(3)],
    "latents": [lambda: attend_latents(16), lambda: attend_latents(4), lambda: attend_latents(128)],
    "entering": [lambda: enter(32, 4), lambda: enter(8, 1), lambda: enter(6, 2)],
    "routing": [lambda: route(True, True), lambda: route(False, True), lambda: route(True, False)],
}


def check_rounded() -> None:
    """No product of a weight is fused with a sum."""
    types = {"y": "*bf16", "ids": "*i32", "weights": "*fp32", "out": "*bf16"}
    constants = {"H": 2048, "K": 8, "BLOCK": pairs.CHANNELS, "PDL": True}
    usage = build(pairs.weigh_kernel, types, constants, num_warps=2, enable_fp_fusion=False)
    found = [name.split(".")[0] for name in numbers(usage)]
    assert "fma" not in found and found.count("mul") == found.count("add") > 0, found


def main() -> None:
    for name, builds in SAME.items():
        first, *others = (numbers(make()) for make in builds)
        assert len(first) > 50, f"{name}: {first}"
        assert all(other == first for other in others), f"{name} computes otherwise"
        print(f"{name}: {len(first)} instructions on numbers, {len(builds)} times the same")
    check_rounded()


if __name__ == "__main__":
    main()
