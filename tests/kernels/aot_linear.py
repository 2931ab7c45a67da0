"""Compiles the dense projections' kernels for Hopper, as they are launched.

python -m tests.kernels.aot_linear          # the main ones, in CI
python -m tests.kernels.aot_linear all      # every tile, with a table
"""

from __future__ import annotations

import sys
from typing import Any

from moesaic.kernels.triton import linear, linear_fp8, linear_heads
from moesaic.kernels.triton.linear import LinearTile
from tests.kernels import aot_norm_linear
from tests.kernels.aot import Usage, build

SHARED = 227 * 1024
ALIGNED = ("num_outputs", "num_inputs", "x_stride")
SIZES = dict.fromkeys(("num_outputs", "num_inputs", "x_stride"), "i32")
SPLIT = {"partial": "*fp32", "arrived": "*i32", "num_rows": "i32", "num_tiles": "i32"}
FLAGS = {"bias": None, "EVEN": True, "PREFETCH": True, "PDL": True}


def bf16(tile: LinearTile, gated: bool = False, splits: int = 4) -> Usage:
    types = {"x": "*bf16", "w": "*bf16", "y": "*bf16", **SIZES}
    constants = {**FLAGS, "BLOCK_O": tile.outputs, "BLOCK_I": tile.inputs, "GATED": gated}
    options: dict[str, Any] = {"aligned": ALIGNED, "num_warps": tile.warps}
    if tile.rows == 1:
        del types["x_stride"]
        constants["WHOLE"] = tile not in dict(linear.ONE_ROW).values()
        return build(linear._one_row, types, constants, **options)
    del constants["PREFETCH"]
    constants |= {"BLOCK_T": tile.rows, "SPLITS": splits, "TURNED": tile.turned}
    options["num_stages"] = tile.stages
    return build(linear._few_rows, types | SPLIT, constants, **options)


def fp8(tile: LinearTile, gated: bool = False, blocked: bool = True) -> Usage:
    types = {"x": "*fp8e4nv", "x_scales": "*fp32", "w": "*fp8e4nv", "w_scales": "*fp32"}
    types |= {"y": "*bf16", **SIZES}
    constants = {**FLAGS, "BLOCK_O": tile.outputs, "BLOCKED": blocked, "GATED": gated}
    options: dict[str, Any] = {"aligned": ALIGNED, "num_warps": tile.warps}
    if tile.rows == 1:
        del types["x_stride"]
        constants["BLOCK_I"] = tile.inputs
        return build(linear_fp8._one_row, types, constants, **options)
    constants |= {"BLOCK_T": tile.rows, "SPLITS": 4}
    options["num_stages"] = tile.stages
    return build(linear_fp8._few_rows, types | SPLIT, constants, **options)


def fp8_many(gated: bool = False, blocked: bool = True) -> Usage:
    tile = linear_fp8.MANY
    types = {"x": "*fp8e4nv", "x_scales": "*fp32", "w": "*fp8e4nv", "w_scales": "*fp32"}
    types |= {"y": "*bf16", "num_rows": "i32", "num_outputs": "i32", "num_inputs": "i32"}
    types |= {"row_tiles": "i32", "output_tiles": "i32"}
    constants = {"bias": None, "EVEN": True, "PDL": True, "BLOCKED": blocked, "GATED": gated}
    constants |= {"BLOCK_T": tile.rows, "BLOCK_O": tile.outputs, "BAND": linear_fp8.BAND}
    options: dict[str, Any] = {"aligned": ALIGNED, "num_warps": tile.warps}
    return build(linear_fp8._many_rows, types, constants, num_stages=tile.stages, **options)


def heads(turned: bool) -> Usage:
    """Of deterministic mode; `turned`: the inputs of a matrix do not lie side by side."""
    tile = linear.INVARIANT[2]
    strides = ("x_head", "x_row", "w_head", "w_row" if not turned else "w_column")
    sizes = ("num_rows", "num_outputs", "num_inputs", *strides)
    types = {"x": "*bf16", "w": "*bf16", "y": "*bf16", **dict.fromkeys(sizes, "i32")}
    constants = {"w_row" if turned else "w_column": 1, "PDL": True}
    constants |= {"BLOCK_T": tile.rows, "BLOCK_O": tile.outputs, "BLOCK_I": tile.inputs}
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
    aligned = (*ALIGNED, *strides)
    return build(linear_heads.heads_kernel, types, constants, aligned=aligned, **options)


def check(name: str, usage: Usage, programs: int = 1, matrix: str = "") -> None:
    """No spills; so many programs fit on a processor at once."""
    print(f"{name:40} {usage.registers:4} registers {usage.local:4} local {usage.shared:7} shared")
    assert usage.local == 0, f"{name} spills {usage.local} bytes"
    assert usage.shared * programs <= SHARED, f"{name}: {usage.shared} bytes of shared memory"
    assert not matrix or usage.count(matrix), f"{name} has no {matrix}"
    assert usage.count("griddepcontrol.wait"), f"{name} does not wait for its predecessor"


def check_one_row(name: str, usage: Usage) -> None:
    check(name, usage)
    assert usage.count("ld.global.v4"), f"{name} has no loads of 128 bits"
    first_load, wait = usage.ptx.index("ld.global.v4"), usage.ptx.index("griddepcontrol.wait")
    assert first_load < wait, f"{name} does not fetch weights before it waits"


def check_whole_rows(name: str, tile: LinearTile, outputs: int, gated: bool = False) -> None:
    """All of a matrix is on its way before x is there: its programs fit on an H200 at once."""
    usage = bf16(tile, gated)
    check_one_row(name, usage)
    before = usage.ptx[: usage.ptx.index("griddepcontrol.wait")].count("ld.global.v4")
    assert before == tile.outputs * tile.inputs // (tile.warps * 32 * 8), f"{name}: {before} loads"
    fitting = 65536 // (-(-usage.registers // 8) * 8 * 32 * tile.warps)
    programs = -(-outputs // tile.outputs)
    assert fitting * 132 >= programs, f"{name}: {fitting} of {programs} programs on a processor"


def main(everything: bool) -> None:
    tiles = {tile.rows: tile for tile in linear.TILES}
    tiles_fp8 = {tile.rows: tile for tile in linear_fp8.TILES}
    check_whole_rows("one row of 2048", linear.WHOLE_ROWS[2048][1][1], 5120)
    check_whole_rows("one row of 4096", linear.WHOLE_ROWS[4096][1][1], 2048)
    check("8 rows", bf16(tiles[8]), 2, "mma.sync")
    check("32 rows", bf16(tiles[32]), 2, "wgmma.mma_async")
    check("16 rows fp8", fp8(tiles_fp8[16]), 4, "mma.sync")
    check("heads, deterministic", heads(turned=True), 2, "wgmma.mma_async")
    aot_norm_linear.main(everything)
    if not everything:
        return
    check("heads, deterministic, as they lie", heads(turned=False), 2, "wgmma.mma_async")
    check("deterministic", bf16(linear.INVARIANT[2], splits=1), 2, "wgmma.mma_async")
    check("16 rows", bf16(tiles[16]), 2, "wgmma.mma_async")
    check("64 rows", bf16(tiles[64]), 2, "wgmma.mma_async")
    check_one_row("one row fp8", fp8(linear_fp8.plan_for(1, 2048, 4096, 132).tile))
    check("many rows fp8", fp8_many(), 1, "wgmma.mma_async")
    for gated in (False, True):
        for _, tile in linear.ONE_ROW:
            check_one_row(f"{tile} {gated}", bf16(tile, gated))
        for _, tile in (pair for pairs in linear.WHOLE_ROWS.values() for pair in pairs):
            if not gated or tile.outputs > 1:
                check_whole_rows(f"{tile} {gated}", tile, 1024, gated)
        for tile in linear.TILES:
            for splits in (1, 4):
                check(f"{tile} {gated} {splits}", bf16(tile, gated, splits))
        for blocked in (True, False):
            for tile in {tile for _, tiles in linear_fp8.ONE_ROW for _, tile in tiles}:
                check_one_row(f"fp8 {tile} {gated}", fp8(tile, gated, blocked))
            for tile in linear_fp8.TILES:
                check(f"fp8 {tile} {gated}", fp8(tile, gated, blocked))
            check(f"fp8 many {gated} {blocked}", fp8_many(gated, blocked), 1, "wgmma.mma_async")


if __name__ == "__main__":
    main("all" in sys.argv[1:])
