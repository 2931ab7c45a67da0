"""Compiles the kernel for few rows of dense products for Hopper, as it is launched.

python -m tests.kernels.aot_linear_hopper          # qkv of Qwen3, in CI
python -m tests.kernels.aot_linear_hopper all
"""

from __future__ import annotations

import sys

from moesaic.kernels.triton import linear_hopper
from moesaic.kernels.triton.linear_hopper import LinearConstants, plan_for
from tests.kernels.aot import Usage, build

ALIGNED = ("num_outputs", "x_stride")
SIZES = dict.fromkeys(("num_rows", "num_outputs", "x_stride"), "i32")
SHAPES = {"qkv": (5120, 2048), "o": (2048, 4096)}


def compiled(plan: LinearConstants, bias: bool = False) -> Usage:
    kind = "*bf16" if plan.SIZE == 2 else "*fp8e4nv"
    types = {"x": kind, "w": kind, "y": "*bf16", **SIZES}
    fixed = {"P": plan}
    scales = ("x_scales", "w_scales") if plan.SIZE == 1 else ()
    given = dict.fromkeys(scales, "*fp32") | ({"bias": "*bf16"} if bias else {})
    missing = {name: None for name in ("x_scales", "w_scales", "bias") if name not in given}
    return build(
        linear_hopper.rows_kernel,
        types | given,
        fixed | missing,
        aligned=ALIGNED,
        num_warps=plan.WARPS,
    )


def check(name: str, plan: LinearConstants | None, bias: bool = False) -> None:
    """Nothing spills; all weights are asked for before the wait, and no copy waits for another; the
    rows come in pieces of 128 bits."""
    assert plan is not None, f"{name} has no plan"
    usage = compiled(plan, bias)
    print(f"{name:36} {usage.registers:4} registers {usage.local:4} local {usage.shared:7} shared")
    assert usage.local == 0, f"{name} spills {usage.local} bytes"
    assert usage.shared == plan.shared <= linear_hopper.SHARED, f"{name}: {usage.shared} bytes"
    assert usage.registers * 32 * plan.WARPS <= 65_536, f"{name}: {usage.registers} registers"
    before, after = usage.ptx.split("griddepcontrol.wait")
    copies = plan.UNITS * 8 * plan.INPUTS * plan.SIZE // (16 * 32 * plan.WARPS)
    assert before.count("cp.async.cg.shared.global") == copies, f"{name}: not all copies are early"
    assert "bar.sync" not in before, f"{name}: copies wait for each other"
    assert "cp.async.cg.shared.global" not in after, name
    loads = plan.ROWS * plan.INPUTS * plan.SIZE // (16 * 32 * plan.WARPS)
    assert after.count("ld.global.v4") == loads, f"{name}: {after.count('ld.global.v4')} loads"
    tiles = plan.ROWS // 16 * plan.UNITS * plan.INPUTS * plan.SIZE // (32 * plan.WARPS)
    assert after.count("mma.sync") == tiles, f"{name}: {after.count('mma.sync')} products"
    # One for each step, one before the warps' sums are read.
    barriers = after.count("bar.sync")
    assert barriers <= plan.steps + 1, f"{name}: {barriers} barriers"


def main(everything: bool) -> None:
    check("qkv, 8 rows", plan_for(8, SHAPES["qkv"], 2, 132))
    if not everything:
        return
    for name, shape in SHAPES.items():
        for size in (2, 1):
            check(f"{name}, 16 rows of {size} bytes", plan_for(16, shape, size, 132))
    check("qkv, by lines, bias", plan_for(8, SHAPES["qkv"], 1, 132, blocked=False), bias=True)


if __name__ == "__main__":
    main("all" in sys.argv[1:])
