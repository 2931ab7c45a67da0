"""Compiles attention's kernels for Hopper as the served models use them, and looks at the result.

python -m tests.kernels.aot_attention          # the main ones
python -m tests.kernels.aot_attention all
python -m tests.kernels.aot_attention specialised
python -m tests.kernels.aot_attention entering
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from moesaic.kernels.attention import Splits
from moesaic.kernels.triton import attention_decode, attention_hopper, attention_prefill, rotary
from tests.kernels.aot import Usage, build
from tests.kernels.aot_experts_large import warnings

SHARED_LIMIT = 227 * 1024
STRIDES = tuple(f"{x}_{y}" for x in ("q1", "q2", "out") for y in ("row", "head"))
STRIDES += tuple(f"{x}_{y}" for x in ("k", "v") for y in ("slot", "head")) + ("cos_row",)
INDICES = ("counters", "rows_p", "kv_lens", "first_p", "pages_p", "tiles", "starts", "lengths")
INDICES += ("slots_p", *attention_decode.EXTRA)
ENTERING = ("slots_p", "cos", "sin", "q_norm", "k_norm")


@dataclass(frozen=True)
class Shape:
    """`rest`: channels of queries and keys in a second part; `shared`: values are keys."""

    group: int
    dim: int
    value_dim: int
    rest: int = 0
    shared: bool = False
    window: int = 0
    sinks: bool = False
    cache: str = "*bf16"

    @property
    def key_bytes(self) -> int:
        return (self.dim + self.rest) * (2 if self.cache == "*bf16" else 1)

    def constants(self, page: int) -> dict[str, Any]:
        made = {
            "GROUP": self.group,
            "D1": self.dim,
            "D2": self.rest,
            "V": self.value_dim,
            "PAGE": page,
            "SHARED": self.shared,
            "WINDOW": self.window,
            "PDL": True,
        }
        return made if self.sinks else made | {"sinks": None}

    def types(self, kernel: Any) -> dict[str, str]:
        every = dict.fromkeys(("q1_p", "q2_p", "out", "sinks"), "*bf16")
        every |= dict.fromkeys(("keys", "values"), self.cache)
        every |= dict.fromkeys(("partial", "sums"), "*fp32") | dict.fromkeys(INDICES, "*i32")
        every |= dict.fromkeys((*STRIDES, "num_splits", "least_chunk", "parts"), "i32")
        every |= dict.fromkeys(("scale", "v_scale", "eps", "k_factor", "v_factor"), "fp32")
        every |= {"cos": "*fp32", "sin": "*fp32", "q_norm": "*bf16", "k_norm": "*bf16"}
        left = {"sinks"} if not self.sinks else set()
        return {name: every[name] for name in kernel.arg_names if name in every.keys() - left}


QWEN3 = Shape(8, 128, 128)
GPT_OSS = Shape(8, 64, 64, window=128, sinks=True)
LATENT_16 = Shape(16, 512, 512, rest=64, shared=True)
LATENT_128 = Shape(128, 512, 512, rest=64, shared=True)
EXPANDED = Shape(1, 128, 128, rest=64)
SPECIALISED = {
    "qwen3": QWEN3,
    "gpt-oss": replace(GPT_OSS, window=0),
    "gpt-oss, window": GPT_OSS,
    "latents, expanded": EXPANDED,
}
QWEN3_FP8 = Shape(8, 128, 128, cache="*fp8e4nv")
ENTERED = (
    (2, False, QWEN3),
    (1, True, QWEN3),
    (66, False, QWEN3_FP8),
    (66, False, replace(QWEN3, group=16)),
    (66, False, GPT_OSS),
)


def decode(
    shape: Shape,
    page: int,
    count: int = 2,
    lone: bool = False,
    quantised: bool = False,
    entering: bool = False,
    room: int = 0,
    trees: bool = False,
) -> Usage:
    config = attention_decode.choose_config(shape.group, shape.key_bytes, Splits(count, 64, lone))
    entry_rows = attention_decode.entry_rows(shape.group, shape.dim, config) if entering else 0
    if entering:
        shape = replace(shape, dim=shape.dim // 2, rest=shape.dim // 2)
    constants = shape.constants(page) | {
        "ROWS": config.rows,
        "BLOCK_N": config.block,
        "SPLIT": count > 1 or room > 0,
        "ENTRY_ROWS": entry_rows,
        "ROOM": room,
    }
    if not room:
        constants |= dict.fromkeys(attention_decode.EXTRA)
    if not trees:
        constants |= {"masks_p": None}
    if not entering:
        constants |= dict.fromkeys(ENTERING)
    constants |= attention_decode.merging(shape.group, shape.value_dim, config)
    kernel = attention_decode.decode_kernel
    types = shape.types(kernel) | {"scale_row": "i32", "scale_group": "i32", "masks_p": "*i64"}
    if quantised:
        types |= {"out": "*fp8e4nv", "scales": "*fp32"}
    else:
        constants |= {"scales": None}
    types = {name: kind for name, kind in types.items() if name not in constants}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return build(kernel, types, constants, aligned=STRIDES, **options)


def prefill(shape: Shape, page: int, invariant: bool = False) -> Usage:
    key_bytes = (shape.dim + shape.rest) * 2
    config = attention_prefill.choose_config(key_bytes, shape.window, invariant)
    constants = shape.constants(page) | {
        "ROWS": config.rows,
        "PER_TILE": min(shape.group, config.rows),
        "BLOCK_N": config.block,
        "PLAIN": not invariant,
    }
    kernel = attention_prefill.prefill_kernel
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return build(kernel, shape.types(kernel), constants, aligned=STRIDES, **options)


def specialised(shape: Shape, page: int) -> Usage:
    config = attention_hopper.choose_config((shape.dim + shape.rest) * 2)
    plan = attention_hopper.AttentionConstants(
        shape.group, min(shape.group, attention_hopper.ROWS), shape.dim, shape.rest,
        shape.value_dim, page, shape.window, config,
    )  # fmt: skip
    kernel = attention_hopper.attention_kernel
    types = shape.types(kernel) | {"q1": "*bf16", "q2": "*bf16", "items": "i32"}
    constants: dict[str, Any] = {"P": plan} if shape.sinks else {"P": plan, "sinks": None}
    options = {"num_warps": 4, "maxnreg": attention_hopper.REGISTERS}
    usage = build(kernel, types, constants, aligned=STRIDES, **options)
    assert not warnings(usage), warnings(usage)
    # Two groups, each with a loop over masked blocks and, without a window, one over the others.
    overlapping = usage.count("wgmma.wait_group.sync.aligned 1")
    assert overlapping == (2 if shape.window else 4), overlapping
    return usage


def enter(cache: str = "*bf16") -> Usage:
    kernel = rotary.enter_heads_kernel
    types = dict.fromkeys(("qkv", "out", "q_norm", "k_norm"), "*bf16")
    types |= {"keys": cache, "values": cache, "slots": "*i32", "cos": "*fp32", "sin": "*fp32"}
    strides = ("qkv_row", "cos_row", "k_slot", "k_head", "v_slot", "v_head")
    types |= dict.fromkeys((*strides, "num_rows"), "i32")
    types |= dict.fromkeys(("eps", "k_factor", "v_factor"), "fp32")
    constants = {
        "HEADS": 32,
        "KV_HEADS": 4,
        "D": 128,
        "ROWS": rotary.TILE // 128,
        "INTERLEAVED": False,
        "PDL": True,
    }
    return build(kernel, types, constants, aligned=strides, num_warps=rotary.WARPS)


def check(name: str, usage: Usage, *wanted: str) -> None:
    counts = ", ".join(f"{usage.count(text)} {text}" for text in wanted)
    print(
        f"{name}: {usage.registers} registers, {usage.local} bytes spilled, {usage.shared} bytes "
        f"of shared memory, {counts}"
    )
    assert usage.local == 0, f"{name} spills {usage.local} bytes"
    assert usage.shared <= SHARED_LIMIT, f"{name} needs {usage.shared} bytes of shared memory"
    for text in wanted:
        assert usage.count(text), f"{name} has no {text}"


def check_order(usage: Usage) -> None:
    """No key is loaded before the newest is stored and the threads have met."""
    stored = usage.ptx.rindex("st.global", 0, usage.ptx.index("cp.async.cg.shared.global"))
    assert usage.ptx.index("griddepcontrol.wait") < usage.ptx.index("st.global") <= stored
    met = usage.ptx.index("bar.sync", stored)
    assert met < usage.ptx.index("cp.async.cg.shared.global")


def main(every: bool) -> None:
    early = ("prefetch.global.L2", "ld.global.cg.v4")
    loads, few, many = "cp.async.cg.shared.global", "mma.sync", "wgmma.mma_async"
    check("enter", enter(), "ld.global.v4", "st.global.v4", "griddepcontrol.wait")
    entered = decode(QWEN3, 16, 66, entering=True)
    check("enter and decode qwen3, many splits", entered, loads, few, early[-1])
    check_order(entered)
    check("invariant qwen3", prefill(QWEN3, 16, invariant=True), loads, many)
    if not every:
        return
    check("invariant qwen3, float8", prefill(QWEN3_FP8, 16, invariant=True), many)
    check("invariant gpt-oss", prefill(GPT_OSS, 16, invariant=True), loads, many)
    check("invariant latents, 16 heads", prefill(LATENT_16, 16, invariant=True), loads, few)
    check("invariant latents, 128 heads", prefill(LATENT_128, 16, invariant=True), loads, few)
    check("decode qwen3, many splits", decode(QWEN3, 16, 66), loads, few, *early)
    check("decode qwen3, alone", decode(QWEN3, 16, 1, lone=True), loads, few)
    check("decode qwen3, float8, alone", decode(QWEN3_FP8, 16, 1, lone=True), loads, few)
    check("decode qwen3, two splits", decode(QWEN3, 16), loads, few, *early)
    check("decode qwen3, extra splits", decode(QWEN3, 16, 1, room=32), loads, few, *early)
    converted = "cvt.rn.satfinite.e4m3x2.f32"
    for name, count, lone in (
        ("many splits", 66, False),
        ("no splits", 1, False),
        ("alone", 1, True),
    ):
        usage = decode(QWEN3, 16, count, lone, quantised=True)
        check(f"decode qwen3, quantised, {name}", usage, loads, few, converted)
    check("decode qwen3, pages of 64", decode(QWEN3, 64), loads, few)
    check("decode qwen3, no splits", decode(QWEN3, 16, 1), loads, few)
    check("decode qwen3, float8", decode(QWEN3_FP8, 16), loads, few)
    check("decode gpt-oss", decode(GPT_OSS, 16), loads, few)
    for count in (1, 66):
        check("decode qwen3, trees", decode(QWEN3, 16, count, trees=True), loads, few)
    check("decode qwen3, float8, trees", decode(QWEN3_FP8, 16, trees=True), loads, few)
    check("decode gpt-oss, trees", decode(GPT_OSS, 16, trees=True), loads, few)
    check("decode latents, 16 heads, trees", decode(LATENT_16, 16, trees=True), loads, few)
    usage = decode(LATENT_128, 16, trees=True)
    assert usage.local <= 16, f"decode latents, 128 heads, trees: spills {usage.local} bytes"
    check("decode latents, 16 heads", decode(LATENT_16, 16), loads, few)
    check("decode latents, 128 heads", decode(LATENT_128, 16), loads, many)
    check("prefill qwen3, pages of 16", prefill(QWEN3, 16), loads, many)
    check("prefill qwen3, pages of 64", prefill(QWEN3, 64), loads, many)
    check("prefill gpt-oss", prefill(GPT_OSS, 16), loads, many)
    check("prefill latents, expanded", prefill(EXPANDED, 16), loads, many)
    check("prefill latents, absorbed", prefill(LATENT_16, 16), loads, few)
    check("prefill qwen3, float8", prefill(QWEN3_FP8, 16), many)
    check("enter, float8", enter("*fp8e4nv"), "ld.global.v4")


def check_entering() -> None:
    for count, lone, shape in ENTERED:
        usage = decode(shape, 16, count, lone, entering=True)
        name = f"enter and decode, {shape}, {count} splits"
        check(name, usage, "cp.async.cg.shared.global", "mma.sync")
        check_order(usage)
    usage = decode(QWEN3, 16, 66, quantised=True, entering=True)
    check("enter and decode qwen3, quantised", usage, "cvt.rn.satfinite.e4m3x2.f32")


def check_specialised() -> None:
    for name, shape in SPECIALISED.items():
        usage = specialised(shape, page=1)
        check(name, usage, "cp.async.cg.shared.global", "wgmma.mma_async", "setmaxnreg.inc")


if __name__ == "__main__":
    if sys.argv[1:] == ["specialised"]:
        check_specialised()
    elif sys.argv[1:] == ["entering"]:
        check_entering()
    else:
        main(sys.argv[1:] == ["all"])
