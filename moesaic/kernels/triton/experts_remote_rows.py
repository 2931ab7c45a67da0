"""Experts whose rows are stored on other ranks: the first product reads them there.

M rows of a tile · L lines of gate and up. H, I as in moesaic.kernels.experts.

No kernel copies the rows first: a tile's program loads pieces of its rows as it loads its lines of
weights, both while it multiplies. Every column of tiles loads the rows again. On a shared GPU these
loads hit the L2 cache, and a copy's traffic is saved; over NVLink each is another transfer, so this
pays only for few rows, when weights take the time, as in a decode step. `down` is the one of
experts_small.py.

The kernel that waited for the ranks' flags has made their rows visible (kernels/a2a.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from moesaic.kernels.cpu.experts import SwigluSpec
from moesaic.kernels.experts import Groups, Matrices, Rows
from moesaic.kernels.triton.experts_small import constants_of, fitting, planes_of
from moesaic.kernels.triton.experts_tiles import finish_gate_up, gate_up_lines, product, tile_rows
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next
from moesaic.kernels.tuning import TileConfig

# Alignment of rows whose length is a multiple of it; planes have a larger one.
COPIED = 16


def gate_up_remote(
    x: Rows, w13: Matrices, groups: Groups, activation: SwigluSpec, h: Rows, config: TileConfig
) -> Rows:
    """Rows have the type of the weights: for fp8 weights their sender has quantised them."""
    remote, config = x.remote, fitting(config, h)
    _, double, hidden = w13.shape
    assert remote is not None and groups.ids_K is None, "pairs must be sorted"
    assert x.values.dtype == w13.planes["values"].dtype, f"rows of {x.values.dtype}"
    assert (x.scales is None) == ("scales" not in w13.planes)
    inner = double // 2
    tiles = groups.tile_expert_X.numel() * triton.cdiv(inner, config.block_n)
    row_bytes, pdl = hidden * x.values.element_size(), dependent_launch(x.values)
    _gate_up_remote_kernel[(tiles,)](
        x.values, x.scales, remote.signals.bases_P, *planes_of(w13), h.values, h.scales,
        *groups.lists, remote.count, remote.values, remote.scales,
        x.scale, activation.alpha, activation.limit or 0.0,
        P=constants_of(config, groups, w13, activation),
        ALIGN=min(COPIED, row_bytes & -row_bytes), PDL=pdl.on,
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl.options,
    )  # fmt: skip
    return h


@triton.jit
def _remote_rows(bases, row_M, count, offset, WIDTH: tl.constexpr, like, ALIGN: tl.constexpr):
    """Addresses of rows of WIDTH elements of the type that `like` points to.

    Example: with two ranks of 3 rows each, row 4 is row 1 of the second rank.
    """
    TYPE: tl.constexpr = like.dtype.element_ty
    ROW_BYTES: tl.constexpr = WIDTH * (TYPE.primitive_bitwidth // 8)
    base_M = tl.load(bases + row_M // count) + offset
    address_M = base_M + (row_M % count).to(tl.int64) * ROW_BYTES
    return tl.multiple_of(address_M.to(tl.pointer_type(TYPE)), ALIGN)


@triton.jit(do_not_specialize=["rows"])
def _gate_up_remote_kernel(
    x, x_scales, bases, w, w_scales, bias, h, h_scales,
    order, first, count, tile_expert, tile_place, num_tiles, rows, values, scales,
    x_scale, alpha, limit, P: tl.constexpr, ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for each column of a tile. `x`, `x_scales` give types; they are not read."""
    columns: tl.constexpr = (P.INNER + P.BN - 1) // P.BN
    groups: tl.constexpr = (P.HIDDEN + P.BK - 1) // P.BK
    tile, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    # Waits first: `down` reads the tiles as soon as this kernel releases it.
    await_inputs(PDL)
    release_next(PDL)
    used = tl.load(num_tiles)
    expert, begin = tl.load(tile_expert + tile).to(tl.int64), tl.load(tile_place + tile)
    if tile < used:
        place_M, pair_M, valid_M = tile_rows(expert, begin, order, first, count, P.BM)
        line_L, scale_line_L = gate_up_lines(expert, column, P)
        row_M = pair_M // P.TOP_K
        x_M = _remote_rows(bases, row_M, rows, values, P.HIDDEN, x, ALIGN)
        if x_scales is None:
            x_scales_M = None
        else:
            x_scales_M = _remote_rows(bases, row_M, rows, scales, groups, x_scales, 4)
        acc_LM = product(
            x_M, x_scales_M, None, valid_M, w, w_scales, line_L, scale_line_L,
            P.HIDDEN, 2 * P.BN, P,
        )  # fmt: skip
        finish_gate_up(
            acc_LM, expert, begin, column, line_L, place_M, valid_M, bias, h, h_scales,
            order, first, count, x_scale, alpha, limit, P,
        )  # fmt: skip
