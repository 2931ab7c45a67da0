"""One product of experts with many rows: its sizes, configuration and kernel constants.

K inner size · N columns of one part. Both experts_large.py and experts_hopper.py compute it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from moesaic.kernels.experts import Matrices, Rows

FP8 = torch.float8_e4m3fn
PLAIN, CHANNEL, BLOCK = 0, 1, 2
SCALING = {
    "bf16": PLAIN,
    "fp16": PLAIN,
    "fp32": PLAIN,
    "fp8_channel": CHANNEL,
    "fp8_tensor": CHANNEL,
    "fp8_block": BLOCK,
}


@dataclass(frozen=True, slots=True)
class LargeConfig:
    """`block_m`: places of a tile, as `Groups.block`. `block_n`: columns of each block of a strip.
    `block_k`: channels of a step. `group`: neighbouring tiles that share a strip's weights in the
    L2 cache. `occupancy`: programs of a processor. `copies`: load weights by TMA if possible.
    `specialised`: use experts_hopper.py if possible, with `ring` stages and, if `tall`, with tall
    items."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8
    occupancy: int = 1
    copies: bool = True
    specialised: bool = True
    ring: int = 4
    tall: bool = True


@dataclass(frozen=True, slots=True)
class Product:
    """`columns`: of a part. `strip`: columns between strips; `half`: rows of weights between a
    strip's two blocks. `promote`: sums of 128 channels are scaled separately."""

    inner: int
    columns: int
    parts: int
    scaling: int
    promote: bool
    gather: bool

    def strip(self, config: LargeConfig) -> int:
        return config.block_n * (3 - self.parts)

    def half(self, config: LargeConfig) -> int:
        return self.columns if self.parts == 2 else config.block_n

    def num_strips(self, config: LargeConfig) -> int:
        return -(-self.columns // self.strip(config))


def product_of(x: Rows, w: Matrices, gather: bool) -> Product:
    if w.format not in SCALING:
        raise ValueError(f"weight format {w.format} has no kernel for many rows; has {[*SCALING]}")
    return _product(w.shape, w.parts, SCALING[w.format], x.values.dtype, gather)


@cache
def _product(
    shape: tuple[int, int, int], parts: int, scaling: int, dtype: torch.dtype, gather: bool
) -> Product:
    # The matrix units sum fp8 products in fewer bits than float32: at most 128 of them.
    promote = scaling == BLOCK or dtype == FP8
    return Product(shape[2], shape[1] // parts, parts, scaling, promote, gather)


def constants(product: Product, top_k: int, config: LargeConfig) -> dict[str, Any]:
    return {
        "K": product.inner,
        "N": product.columns,
        "PARTS": product.parts,
        "TOP_K": top_k,
        "SCALING": product.scaling,
        "PROMOTE": product.promote,
        "GATHER": product.gather,
        "STRIP": product.strip(config),
        "HALF": product.half(config),
        "NUM_STRIPS": product.num_strips(config),
        "BM": config.block_m,
        "BN": config.block_n,
        "BK": config.block_k,
        "GROUP": config.group,
    }
