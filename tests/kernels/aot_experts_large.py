"""What the kernels for many rows take of a Hopper GPU. A program: see test_triton_experts_large.py.

python -m tests.kernels.aot_experts_large [quick | all]
"""

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from triton.experimental.gluon import language as gl

from moesaic.kernels.triton import experts_hopper, experts_large
from moesaic.kernels.triton.experts_product import (
    BLOCK,
    CHANNEL,
    PLAIN,
    LargeConfig,
    Product,
    ProductConstants,
    constants,
)
from tests.kernels.aot import TOOLS, Usage, build

SHARED = 227 * 1024
TYPES = {PLAIN: "bf16", CHANNEL: "fp8e4nv", BLOCK: "fp8e4nv"}
MASKED = "masked"
QWEN3 = {
    "gate and up": Product(2048, 768, 2, PLAIN, False, True),
    "down": Product(768, 2048, 1, PLAIN, False, SCATTER=True),
}
PRODUCTS = {
    **QWEN3,
    **{
        f"{name}, {MASKED}": replace(product, GATHER=False, SCATTER=False)
        for name, product in QWEN3.items()
    },
    **{
        f"{name}, {kind}": replace(product, SCALING=scaling, PROMOTE=True)
        for kind, scaling in (("blocks", BLOCK), ("channels", CHANNEL))
        for name, product in QWEN3.items()
    },
}
# Once an item or once in all, by one of two compilers: never in a loop.
SPILLS = {PLAIN: 0, CHANNEL: 8, BLOCK: 8}
QUICK = ("gate and up",)
INTEGERS = ("first_place", "count", "tile_expert", "tile_place", "num_tiles")
COUNTER = {"counter": "*i32"}


def arguments(product: Product, sorted_rows: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """Types of what is passed and None for all else."""
    quantised, back = product.PROMOTE, product.PARTS == 1
    types = {
        "x": f"*{TYPES[product.SCALING]}",
        "x_scales": "*fp32" if quantised else "",
        "w_scales": "*fp32" if quantised else "",
        "bias": "*bf16" if product.SCALING == CHANNEL else "",
        "order": "*i32" if sorted_rows else "",
        **dict.fromkeys(INTEGERS, "*i32"),
        "out": "*fp8e4nv" if quantised and not back else "*bf16",
        "out_scales": "*fp32" if quantised and not back else "",
        "weights": "*fp32" if back and sorted_rows else "",
        **dict.fromkeys(("scale", "alpha", "limit"), "fp32"),
    }
    given = {name: kind for name, kind in types.items() if kind}
    return given, {name: None for name, kind in types.items() if not kind}


def config_of(product: Product) -> LargeConfig:
    return LargeConfig(block_k=128 if product.PROMOTE else 64)


def portable(product: Product, sorted_rows: bool) -> Usage:
    config = config_of(product)
    descriptor = f"tensordesc<{TYPES[product.SCALING]}[{config.block_n},{config.block_k}]>"
    types, none = arguments(product, sorted_rows)
    plan = ProductConstants(**constants(product, 8, config, pdl=True))
    fixed = {**none, "P": plan, "COPIES": True, "IEEE": False}
    return build(
        experts_large.experts_kernel,
        {**types, "w": descriptor},
        fixed,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def specialised(
    product: Product, sorted_rows: bool, limited: bool = False, tall: bool = True
) -> Usage:
    config = replace(config_of(product), tall=tall)
    kind = TYPES[product.SCALING]
    layout = gl.NVMMASharedLayout(128, 8 if product.PROMOTE else 16, 2)
    descriptor = f"tensordesc<{kind}[128, {config.block_k}],{layout!r}>"
    types, none = arguments(product, sorted_rows)
    plan = experts_hopper.plan_of(replace(product, LIMITED=limited), 8, config)
    narrow = descriptor.replace("[128", "[64")
    for name, there in (("x_desc", not product.GATHER), ("half_desc", plan.halves)):
        (types if there else none)[name] = narrow if there else None
    return build(
        experts_hopper.experts_kernel,
        {**types, **COUNTER, "w_desc": descriptor},
        {**none, "P": plan},
        num_warps=4,
        maxnreg=experts_hopper.REGISTERS,
    )


def warnings(usage: Usage) -> list[str]:
    """Of the assembler, which gives up on asynchronous products without an error."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(usage.ptx)
        command = [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", source, "-o", source.with_suffix("")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in done.stderr.splitlines() if "Potential Performance Loss" in line]


def check(name: str, usage: Usage, spills: int) -> None:
    print(f"{name}: {usage.registers} registers, {usage.local} local, {usage.shared} shared")
    assert usage.local <= spills, f"{name} spills {usage.local} bytes"
    assert usage.shared <= SHARED, f"{name} needs {usage.shared} bytes of shared memory"
    assert usage.count("wgmma.mma_async") and usage.count("cp.async.bulk.tensor"), name
    assert not warnings(usage), warnings(usage)


def main(names: tuple[str, ...]) -> None:
    for name in names:
        product = PRODUCTS[name]
        sorted_rows = MASKED not in name
        usage = portable(product, sorted_rows)
        check(f"{name}, portable", usage, spills=128 if product.PROMOTE else 0)
        usage = specialised(product, sorted_rows)
        check(f"{name}, specialised", usage, SPILLS[product.SCALING])
        assert usage.count("setmaxnreg.inc"), name
        # In each group's loops, for wide items and tall ones, products overlap; after them the last
        # one is awaited.
        overlapping = usage.count("wgmma.wait_group.sync.aligned 1")
        assert overlapping == (0 if product.PROMOTE else 4), name
        if product.PROMOTE:
            check_scaling(name, usage)
        # One claim an item, and none of the loads before it has to wait for it.
        assert usage.count("atom.") == 1, name
        gathers = usage.count("cp.async.mbarrier.arrive.noinc")
        assert gathers == (0 if not product.GATHER else 1 if product.PROMOTE else 2), name


def check_scaling(name: str, usage: Usage) -> None:
    """Each product is scaled before the next one, which takes its registers: 64 a thread."""
    waits = usage.ptx.split("wgmma.wait_group.sync.aligned 0")[1:]
    assert len(waits) == 4, name
    for after in waits:
        assert after.split("wgmma.mma_async")[0].count("fma.rn.f32") >= 64, name


def check_wide() -> None:
    """No tall items."""
    for name, product in QWEN3.items():
        usage = specialised(product, True, tall=False)
        check(f"{name}, no tall items", usage, 0)
        assert usage.count("wgmma.wait_group.sync.aligned 1") == 2, name


def check_limit() -> None:
    """What is no number stays so: a plain minimum would give the limit."""
    usage = specialised(PRODUCTS["gate and up"], True, limited=True)
    check("gate and up, limited", usage, 0)
    assert usage.count("min.NaN.f32") and not usage.count("min.f32")
    assert usage.count("max.NaN.f32") and not usage.count("max.f32")


if __name__ == "__main__":
    if sys.argv[1:] == ["all"]:
        main(tuple(PRODUCTS))
        check_limit()
        check_wide()
    else:
        main(QUICK)
