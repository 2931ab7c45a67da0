"""What `down_row` takes of a Hopper GPU, for the shapes that the benchmarks have.

    python -m tests.kernels.aot_experts_row [--all]

Run without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import sys

from moesaic.kernels.triton.experts_row import RowTile, _down_row_kernel, row_tile
from moesaic.kernels.tuning import ITEM_BYTES
from tests.kernels.aot import Usage, build

# H, I, chosen.
SHAPES = {"qwen3_30b": (2048, 768, 8), "mixtral": (4096, 14336, 2), "dsv3": (7168, 2048, 8)}


def usage_of(format: str, hidden: int, inner: int, top_k: int, tile: RowTile) -> Usage:
    types = {"h": "*bf16", "w": f"*{format}", "ids": "*i32", "weights": "*fp32", "y": "*bf16"}
    constants = {
        "bias": None, "HIDDEN": hidden, "INNER": inner, "K": top_k,
        "BO": tile.outputs, "BI": tile.inputs, "AHEAD": tile.ahead, "PDL": True,
    }  # fmt: skip
    return build(_down_row_kernel, types, constants, num_warps=tile.warps)


def check(name: str, format: str) -> None:
    """Weights are on their way before the kernel waits, by 16 bytes; nothing is spilled."""
    hidden, inner, top_k = SHAPES[name]
    item = ITEM_BYTES[format]
    tile = row_tile(inner, item)
    usage = usage_of(format, hidden, inner, top_k, tile)
    print(f"{name} {format} {tile}: {usage.registers} registers, {usage.shared} bytes shared")
    assert usage.local == 0, usage.local
    before, after = usage.ptx.split("griddepcontrol.wait")
    loads = tile.outputs * tile.inputs * item // (16 * 32 * tile.warps)
    wide = r"ld\.global(\.\w+)*\.v(4\.b32|2\.b64)"
    assert len(re.findall(wide, before)) == tile.ahead * loads
    assert len(re.findall(wide, after)) >= (top_k * (inner // tile.inputs) - tile.ahead) * loads
    assert after.index("griddepcontrol.launch_dependents") > 0


def main() -> None:
    check("qwen3_30b", "bf16")
    if "--all" in sys.argv:
        for name in SHAPES:
            for format in ("bf16", "fp32"):
                check(name, format)


if __name__ == "__main__":
    main()
