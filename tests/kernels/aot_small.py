"""What the small kernels of a step take of a Hopper GPU: norms, routing, quantising, sampling.

A program: `python -m tests.kernels.aot_small [all]` compiles, prints and asserts.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from moesaic.kernels.routing import TopKConfig
from moesaic.kernels.triton import (
    norm,
    penalties,
    quantise,
    routing,
    sampling,
    sampling_narrow,
    sort,
    split,
)
from tests.kernels.aot import Usage, build

TYPES = {
    "x_ptr": "*bf16",
    "residual_ptr": "*bf16",
    "weight_ptr": "*bf16",
    "norm_ptr": "*bf16",
    "normed_ptr": "*bf16",
    "sum_ptr": "*bf16",
    "out_ptr": "*bf16",
    "values_ptr": "*fp8e4nv",
    "scales_ptr": "*fp32",
    "logits_ptr": "*fp32",
    "bias_ptr": "*fp32",
    "router_bias_ptr": "*bf16",
    "partial_ptr": "*fp32",
    "counter_ptr": "*i32",
    "num_tokens_ptr": "*i32",
    "slots_ptr": "*i32",
    "count_ptr": "*i32",
    "ids_ptr": "*i32",
    "weights_ptr": "*fp32",
    "params_ptr": "*i64",
    "counts_ptr": "*i32",
    "amounts_ptr": "*fp32",
    "packed_ptr": "*i64",
    "drafts_ptr": "*i64",
    "thresholds_ptr": "*fp64",
    "peaks_ptr": "*fp32",
    "best_ptr": "*fp32",
    "token_ptr": "*i32",
    "sums_ptr": "*fp64",
    "kept_ptr": "*fp64",
    "above_ptr": "*fp64",
    "ranges_ptr": "*fp32",
    "list_ptr": "*i32",
    "drawn_ptr": "*i64",
    "eps": "fp32",
    "scale": "fp32",
    "reach": "fp32",
}
ALIGNED = ("stride", "residual_stride", "stride_outer", "stride_inner", "stride_residual", "V")
QWEN = TopKConfig(8, renormalize=True)
DEEPSEEK = TopKConfig(8, "sigmoid", True, 2.5, 8, 4, "top2")


def use(kernel: Any, types: dict[str, str], **constants: Any) -> Usage:
    """`types`: where they are not those of TYPES; plain numbers are i32."""
    options = {"num_warps": constants.pop("num_warps", 4)}
    if kernel.__module__ == penalties.__name__:
        options["enable_fp_fusion"] = False
    known = {
        name: types.get(name, TYPES.get(name, "i32"))
        for name in kernel.arg_names
        if name not in constants and name != "PDL"
    }
    usage = build(kernel, known, {**constants, "PDL": True}, aligned=ALIGNED, **options)
    print(
        f"{kernel.__name__:18} {usage.registers:4} registers {usage.local:3} spilled "
        f"{usage.shared:6} shared, {usage.count('redux.sync'):3} redux {usage.count('bar.sync'):3} "
        f"barriers, wide loads {usage.count('ld.global.v4') + usage.count('ld.global.cg.v4')}"
    )
    assert usage.local == 0, f"{kernel.__name__} spills {usage.local} bytes"
    assert usage.count("griddepcontrol.wait") == 1
    assert usage.count("griddepcontrol.launch_dependents") == 1
    return usage


def check_norm(size: int, add: bool, fp8: bool, top_k: int = 0) -> None:
    fixed: dict[str, Any] = {"H": size, "K": top_k, "BY_COLUMN": fp8, **norm.tiling(size)}
    given = {"ids_ptr": top_k, "residual_ptr": add, "sum_ptr": add}
    given |= {"normed_ptr": not fp8, "values_ptr": fp8, "scales_ptr": fp8}
    fixed |= {name: None for name, there in given.items() if not there}
    usage = use(norm._norm_kernel, {}, **fixed)
    assert usage.registers <= 64 + 4 * top_k
    assert usage.count("ld.global.v4") >= 1 + add + max(0, top_k - 1)
    assert fp8 == (usage.count("cvt.rn.satfinite.e4m3x2") > 0)


def check_route() -> None:
    fixed = {"P": routing.constants(128, QWEN, biased=False, replicas=0)}
    logits = {"logits_ptr": "*bf16"}
    usage = use(routing._route_kernel, logits, ROWS=1, num_warps=1, bias_ptr=None, **fixed)
    # A choice takes three maxima over the warp, and nothing but them.
    assert usage.count("redux.sync") == 3 * QWEN.top_k and usage.registers <= 64


def check_deepseek_route() -> None:
    fixed = {"P": routing.constants(256, DEEPSEEK, biased=True, replicas=0)}
    usage = use(routing._route_kernel, {}, ROWS=1, num_warps=1, **fixed)
    assert usage.count("redux.sync") >= 3 * 8 and usage.registers <= 128


def check_fake_route() -> None:
    """Experts of a hash, and a slot table."""
    spec = replace(QWEN, fake=True)
    fixed = {"P": routing.constants(128, spec, biased=False, replicas=4)}
    usage = use(routing._route_kernel, {}, ROWS=1, num_warps=1, bias_ptr=None, **fixed)
    assert usage.count("redux.sync") == 3 * QWEN.top_k and usage.registers <= 64


def check_split() -> None:
    """256 experts in 288 slots of 32 ranks, as large as a target for its time."""
    types = dict.fromkeys(("counts", "slots", "single", "several", "scratch", "ends"), "*i32")
    sizes = {"D": 32, "DP": 32, "E": 256, "EP": 256, "BP": split.COUNTED_SOURCES}
    sizes |= {"BE": split.COUNTED_EXPERTS, "SWEEPS": split.SWEEPS}
    usage = use(split._fill_kernel, types, num_warps=1, **sizes)
    assert usage.registers <= 255 and usage.shared <= 4096
    types = dict.fromkeys(("ids", "hist", "before", "ends", "slots", "single", "out"), "*i32")
    sizes = {"D": 32, "BD": 32, "EP": 256, "CHUNK": sort.CHUNK, "PARTS": sort.chunk_parts(256)}
    sizes |= {"BC": sort.COUNTS // 256, "BJ": 32}
    use(split._take_kernel, types, num_warps=sort.PLACE_WARPS, **sizes)


def check_router(rows: int, norm: bool = False) -> None:
    experts, channels = routing.ROUTER_TILE
    sizes = {"H": 2048, "SPLITS": 2048 // channels}
    blocks = {"BLOCK_H": channels, "BLOCK_X": experts}
    fixed = {"P": routing.constants(128, QWEN, biased=False, replicas=0), **sizes, **blocks}
    flags: dict[str, Any] = {"router_bias_ptr": None, "bias_ptr": None, "ROUNDS": True}
    if not norm:
        flags |= dict.fromkeys(("residual_ptr", "norm_ptr", "normed_ptr", "sum_ptr"))
    usage = use(routing._router_kernel, {}, ROWS=rows, num_warps=rows, **flags, **fixed)
    # Weights are asked for before the rows that they wait for are there.
    before = usage.ptx[: usage.ptx.index("griddepcontrol.wait")]
    assert before.count("ld.global.v4") >= 8 // rows
    assert usage.registers <= (168 if norm else 96)
    assert usage.count("atom.global.gpu.acq_rel.add") == 1


def check_quantise(rows: int, size: int) -> None:
    tile = quantise.fp8_tile(rows, size // 128)
    usage = use(
        quantise._fp8_kernel, {}, SIZE=size, ROWS=tile.rows, GROUPS=tile.groups,
        BY_COLUMN=size == 2048, num_warps=tile.warps,
    )  # fmt: skip
    loads = tile.rows * tile.groups * 128 // (tile.warps * 32 * 8)
    assert usage.count("ld.global.v4") == loads and usage.registers <= 64
    assert usage.count("cvt.rn.satfinite.e4m3x2") == 4 * loads
    # Two divisions a group, the scale and its inverse, and none by element.
    assert usage.count("div.rn.f32") <= 2 * loads


def check_int8() -> None:
    values = {"values_ptr": "*i8"}
    use(quantise._int8_kernel, values, SIZE=2048, BLOCK=2048, num_warps=8)
    use(quantise._silu_mul_kernel, {}, SIZE=768, BLOCK=1024)


def check_greedy() -> None:
    usage = use(sampling._peaks_kernel, {}, peaks_ptr=None)
    assert usage.count("ld.global.v4") == 8 and usage.registers <= 128
    use(sampling._greedy_kernel, {}, BLOCK_C=64, num_warps=1)


def check_draw() -> None:
    use(sampling._peaks_kernel, {})
    usage = use(sampling._sums_kernel, {}, BLOCK_C=64)
    # The exact division, and the exponential that torch has.
    assert usage.count("div.rn.f32") == 32 and usage.count("ex2.approx.ftz.f32") == 32
    warps = sampling_narrow.RANGE_WARPS
    usage = use(sampling_narrow._range_kernel, {}, BLOCK_C=64, BLOCK_N=2048, num_warps=warps)
    assert usage.registers <= 128
    warps = sampling_narrow.LIST_WARPS
    usage = use(sampling_narrow._list_kernel, {}, BLOCK_C=64, num_warps=warps)
    assert usage.registers <= 128 and usage.count("ld.global.v4") >= 4
    warps = sampling.DRAW_WARPS
    sizes = {"BLOCK_C": 64, "BLOCK_N": 2048, "num_warps": warps}
    without = {"drafts_ptr": None, "thresholds_ptr": None, "DRAFTS": 0}
    assert use(sampling._draw_kernel, {}, **sizes, **without).shared <= 32 * 1024
    for drafts in (1, 4):
        assert use(sampling._draw_kernel, {}, **sizes, DRAFTS=drafts).shared <= 32 * 1024


def check_penalties() -> None:
    usage = use(penalties._counts_kernel, {}, BLOCK=penalties.BLOCK)
    # Counters in wide loads; the exact division, and no product that is fused with a sum.
    per_thread = penalties.BLOCK // 128
    assert usage.count("ld.global.v4") == per_thread // 4 and usage.count("fma") == 0
    assert usage.count("div.rn.f32") == per_thread and usage.registers <= 128
    usage = use(penalties._edits_kernel, {}, EDITS=penalties.EDITS)
    assert usage.count("bar.sync") >= 1 and usage.registers <= 64


def main() -> None:
    check_norm(2048, add=True, fp8=False)
    check_norm(2048, add=True, fp8=True, top_k=8)
    check_route()
    check_quantise(1, 2048)
    check_greedy()
    if "all" not in sys.argv:
        return
    check_norm(7168, add=True, fp8=False)
    check_norm(7168, add=True, fp8=False, top_k=8)
    check_norm(2048, add=True, fp8=False, top_k=8)
    check_norm(2048, add=True, fp8=True)
    check_norm(128, add=False, fp8=False)
    check_deepseek_route()
    check_fake_route()
    check_split()
    for rows in (1, 2, 4, 8):
        check_router(rows)
        check_router(rows, norm=True)
    check_quantise(8192, 2048)
    check_quantise(8192, 7168)
    check_int8()
    check_draw()
    check_penalties()


if __name__ == "__main__":
    main()
