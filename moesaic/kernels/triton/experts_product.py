"""One product of experts with many rows: its sizes, configuration and kernel constants.

K inner size · N columns of one part. Both experts_large.py and experts_hopper.py compute it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.cpu.experts import SwigluSpec
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


@dataclass(frozen=True)
class Product:
    K: int
    N: int
    PARTS: int
    SCALING: int
    PROMOTE: bool
    """Sums of 128 channels are scaled separately."""
    GATHER: bool = False
    """Rows of x are found by pair."""
    SCATTER: bool = False
    """Results are stored by pair instead of by place."""
    LIMITED: bool = False

    def strip(self, config: LargeConfig) -> int:
        """Columns between strips."""
        return config.block_n * (3 - self.PARTS)

    def half(self, config: LargeConfig) -> int:
        """Rows of weights between a strip's two blocks."""
        return self.N if self.PARTS == 2 else config.block_n

    def num_strips(self, config: LargeConfig) -> int:
        return -(-self.N // self.strip(config))


@dataclass(frozen=True, slots=True)
class ProductOutput:
    values: Tensor
    scales: Tensor | None = None
    weights: Tensor | None = None
    """Factors of the pairs."""
    activation: SwigluSpec = field(default_factory=SwigluSpec)

    @property
    def numbers(self) -> tuple[float, float]:
        """The kernels' arguments `alpha` and `limit`."""
        return self.activation.alpha, self.activation.limit or 0.0


@dataclass(frozen=True, kw_only=True)
class ProductConstants(Product):
    """Compile-time constants `P` of a kernel. All are fields: the key of Triton's cache has these,
    and not the code of properties."""

    TOP_K: int
    STRIP: int
    HALF: int
    NUM_STRIPS: int
    BM: int
    BN: int
    BK: int
    GROUP: int
    PDL: bool
    rows: int
    """Rows of an expert's weights."""
    inner_blocks: int
    row_blocks: int
    """Blocks of 128 rows of a part."""


def product_of(x: Rows, w: Matrices, sorted_pairs: bool, limited: bool = False) -> Product:
    if w.format not in SCALING:
        raise ValueError(
            f"weight format {w.format} has no kernel for many rows: use one of {[*SCALING]}"
        )
    return _product(w.shape, w.parts, SCALING[w.format], x.values.dtype, sorted_pairs, limited)


@cache
def _product(
    shape: tuple[int, int, int],
    parts: int,
    scaling: int,
    dtype: torch.dtype,
    sorted_pairs: bool,
    limited: bool,
) -> Product:
    # The matrix units sum fp8 products in fewer bits than float32: at most 128 of them.
    promote = scaling == BLOCK or dtype == FP8
    # Gate and up gather their rows, down scatters its results.
    gather, scatter = sorted_pairs and parts == 2, sorted_pairs and parts == 1
    sizes = (shape[2], shape[1] // parts, parts)
    return Product(*sizes, scaling, promote, gather, scatter, limited)


def constants(product: Product, top_k: int, config: LargeConfig, pdl: bool) -> dict[str, Any]:
    """The fields of ProductConstants."""
    return {
        **vars(product),
        "TOP_K": top_k,
        "STRIP": product.strip(config),
        "HALF": product.half(config),
        "NUM_STRIPS": product.num_strips(config),
        "BM": config.block_m,
        "BN": config.block_n,
        "BK": config.block_k,
        "GROUP": config.group,
        "PDL": pdl,
        "rows": product.PARTS * product.N,
        "inner_blocks": -(-product.K // 128),
        "row_blocks": -(-product.N // 128),
    }
