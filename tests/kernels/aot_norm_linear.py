"""Compiles the kernel of a norm and its product for Hopper, as it is launched; a part of
aot_linear.py.

python -m tests.kernels.aot_norm_linear          # in CI
python -m tests.kernels.aot_norm_linear all      # one that could be
"""

from __future__ import annotations

import sys
from typing import Any

from moesaic.kernels.triton import norm_linear
from moesaic.kernels.triton.linear import LinearTile
from tests.kernels.aot import Usage, build

POINTERS = ("x", "residual", "norm", "w", "y", "sums")
REGISTERS = 65536
PROCESSORS = 132  # of an H200


def compiled(tile: LinearTile) -> Usage:
    types = dict.fromkeys(POINTERS, "*bf16") | {"eps": "fp32", "num_outputs": "i32"}
    constants = {"bias": None, "H": tile.inputs, "WARPS": tile.warps}
    constants |= {"BLOCK_O": tile.outputs, "BLOCK_I": tile.inputs, "PDL": True}
    options: dict[str, Any] = {"num_warps": tile.warps, "maxnreg": tile.registers}
    return build(norm_linear._norm_product, types, constants, aligned=("num_outputs",), **options)


def check(name: str, tile: LinearTile, outputs: int = 0) -> None:
    """All weights are on their way before the kernel waits; with `outputs`, those of the whole
    matrix: its programs fit on an H200 at once."""
    usage = compiled(tile)
    fitting = REGISTERS // (-(-usage.registers // 8) * 8 * 32 * tile.warps)
    print(
        f"{name:32} {usage.registers:4} registers {usage.local:4} local {usage.shared:6} shared"
        f" {fitting:2} on a processor"
    )
    assert usage.local == 0, f"{name} spills {usage.local} bytes"
    before = usage.ptx[: usage.ptx.index("griddepcontrol.wait")].count("ld.global.v4")
    weights = tile.outputs * tile.inputs * 2 // (tile.warps * 32 * 16)
    assert before >= weights, f"{name}: {before} loads of {weights} before it waits"
    programs = -(-outputs // tile.outputs)
    assert fitting * PROCESSORS >= programs, f"{name}: {fitting} of {programs} on a processor"


def main(everything: bool) -> None:
    check("2048", norm_linear.TILES[2048], 5120)
    if everything:
        check("4096", LinearTile(1, 4, 4096, 8))


if __name__ == "__main__":
    main("all" in sys.argv[1:])
