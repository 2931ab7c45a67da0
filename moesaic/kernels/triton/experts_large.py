"""Experts with many rows: the products of moesaic.kernels.experts near the matrix units' rate.

P places · H hidden · I intermediate · N columns of one part of a product · K its inner size.

One program for each processor walks over items: a tile of `block_m` places times a strip of two
column blocks, which are gate and up of the same channels, or neighbours in the second product.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moesaic.kernels.cpu.experts import SwigluSpec
from moesaic.kernels.experts import Groups, Matrices, Rows, operand
from moesaic.kernels.quantise import FP8_GROUP
from moesaic.kernels.triton import experts_hopper
from moesaic.kernels.triton.experts_product import (
    LargeConfig,
    Product,
    ProductConstants,
    ProductOutput,
    constants,
    product_of,
)
from moesaic.kernels.triton.experts_tiles import activate
from moesaic.kernels.triton.launch import HOPPER, await_inputs, dependent_launch, num_processors
from moesaic.kernels.triton.quantise import as_fp8, fp8_scales


def large_config(x: Rows, w: Matrices, block: int | None = None) -> LargeConfig:
    """The default configuration, for tiles of `block` places if given. A step is 128 bytes of a row
    of weights, one line of TMA's widest swizzle (`operand` converts the rows); a tile has 128 x 256
    sums, half of the registers.

    Items and rounds of 132 processors with tiles of 128 (of 64) places, where the expected last
    tile of an expert is half empty:

        rows, experts                tiles        gate and up        down
        Qwen3     65,536 of 128     576 (1088)   3456: 26.2 of 27   4608: 34.9 of 35
        DeepSeek   8,192 of 32       80 (144)    1280:  9.7 of 10   2240: 17.0 of 17
        Mixtral   16,384 of 8       132 (260)   14784:  112 of 112  2112: 16.0 of 16

    The last round wastes 3% at most. The specialised kernel claims items dynamically, skips halves
    of tiles without rows, and shares an expert's last two tiles by columns where that reads less
    (`tall`): by count that saves 7% of Mixtral with 512 tokens, 1.5% with 2,048, 3.5% of DeepSeek,
    2% of Qwen3. Tiles of 64 would waste 6, 12 and 2% of their rows instead of 12, 25 and 3%, but at
    full rate they would read 80 bytes a cycle for each processor instead of 48, and the L2 cache
    gives about 50. So 128."""
    return _large_config(w.planes["values"].dtype, _copy_engine(x.values), block)


@cache
def _large_config(dtype: torch.dtype, copies: bool, block: int | None) -> LargeConfig:
    step = 128 // dtype.itemsize
    if dtype == torch.float32:
        return LargeConfig(
            block_m=block or 64, block_n=32, block_k=step, stages=2, specialised=False
        )
    if block is None:
        # Before Hopper the matrix units read both operands from registers: too many for 128 places.
        block = 128 if copies else 64
    return LargeConfig(block_m=block, block_k=step)


def gate_up_large(
    x: Rows, w13: Matrices, groups: Groups, activation: SwigluSpec, h: Rows, config: LargeConfig
) -> Rows:
    """`gate_up` of moesaic.kernels.experts; tiles of `groups` are `config.block_m` places."""
    # Rows are quantised once, not by every tile that reads them.
    x = operand(x, w13)
    product = product_of(x, w13, groups.order_P is not None, activation.limit is not None)
    if h.scales is not None and (config.block_n != FP8_GROUP or product.N % FP8_GROUP):
        raise ValueError(
            f"h is quantised by {FP8_GROUP} channels, but has blocks of {config.block_n} of "
            f"{product.N}"
        )
    out = ProductOutput(h.values, h.scales, activation=activation)
    _launch(x, w13, groups, product, out, config)
    return h


def down_large(
    h: Rows,
    w2: Matrices,
    groups: Groups,
    weights_RK: Tensor | None,
    y: Tensor,
    config: LargeConfig,
) -> Tensor:
    """`down` of moesaic.kernels.experts; tiles of `groups` are `config.block_m` places."""
    h = operand(h, w2)
    product = product_of(h, w2, groups.order_P is not None)
    _launch(h, w2, groups, product, ProductOutput(y, weights=weights_RK), config)
    return y


def _launch(
    x: Rows, w: Matrices, groups: Groups, product: Product, out: ProductOutput, config: LargeConfig
) -> None:
    if groups.block != config.block_m:
        raise ValueError(f"tiles of {groups.block} places, but the kernel takes {config.block_m}")
    if not groups.num_places or not len(x.values):
        return
    on_gpu = config.specialised and x.values.is_cuda
    if on_gpu and experts_hopper.can_run(x, w, out.values, product, config):
        experts_hopper.launch(x, w, groups, product, out, config)
        return
    pdl = dependent_launch(x.values)
    values = w.planes["values"]
    copies = _copy_engine(x.values) and config.copies and _can_describe(values)
    block = [config.block_n, config.block_k]
    experts_kernel[(_num_programs(x.values, groups, product, config),)](
        x.values,
        x.scales,
        _descriptor(values, block) if copies else values,
        w.planes.get("scales"),
        w.bias_EN,
        *groups.lists,
        out.values,
        out.scales,
        out.weights,
        x.scale,
        *out.numbers,
        P=_constants(product, groups.top_k, config, pdl.on),
        COPIES=copies,
        IEEE=x.values.dtype == torch.float32,
        num_warps=config.warps,
        num_stages=config.stages,
        **pdl.options,
    )


@cache
def _constants(product: Product, top_k: int, config: LargeConfig, pdl: bool) -> ProductConstants:
    return ProductConstants(**constants(product, top_k, config, pdl))


def _num_programs(x: Tensor, groups: Groups, product: Product, config: LargeConfig) -> int:
    """At most as many as there can be items."""
    most = len(groups.tile_expert_X) * product.num_strips(config)
    processors = num_processors(x.device.index) if x.is_cuda else 3
    return min(most, processors * config.occupancy)


def _copy_engine(x: Tensor) -> bool:
    return not x.is_cuda or _has_copy_engine(x.device.index)


@cache
def _has_copy_engine(device: int | None) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= HOPPER


def _can_describe(values: Tensor) -> bool:
    """TMA needs rows of whole 16 bytes."""
    return values.shape[-1] * values.element_size() % 16 == 0 and values.data_ptr() % 16 == 0


def _descriptor(values: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(values.view(-1, values.shape[-1]), block)


@triton.jit
def place_item(item, num_tiles, NUM_STRIPS: tl.constexpr, GROUP: tl.constexpr):
    """Tile and strip of an item: tiles of a group vary first, then strips, then groups."""
    first = item // (GROUP * NUM_STRIPS) * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    within = item % (GROUP * NUM_STRIPS)
    return first + within % size, within // size


@triton.jit
def _strip_rows(w, row, k, limit, P: tl.constexpr, COPIES: tl.constexpr):
    """Loads [BN, BK] of the weights from `row` on; rows from `limit` on are undefined."""
    if COPIES:
        block = w.load([row, k])
    else:
        rows = tl.minimum(row + tl.arange(0, P.BN), limit - 1).to(tl.int64)
        ks = k + tl.arange(0, P.BK)
        inside = ks[None, :] < P.K if P.K % P.BK else None
        other = 0.0 if P.K % P.BK else None
        block = tl.load(w + rows[:, None] * P.K + ks[None, :], mask=inside, other=other)
    return block


@triton.jit
def _sums(
    x, x_scales, w, w_scales, rows, expert, column,
    P: tl.constexpr, COPIES: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """The two blocks [BM, BN] of a strip from `column` on, in float32."""
    PRECISION: tl.constexpr = "ieee" if IEEE else "tf32"
    row = expert * P.rows + column
    end = (expert + 1) * P.rows
    offsets_k = tl.arange(0, P.BK)
    x_rows = x + rows[:, None] * P.K
    first_scale = w_scales
    second_scale = w_scales
    if P.SCALING == 2:
        near = expert.to(tl.int64) * (P.PARTS * P.row_blocks) + column // 128
        if P.PARTS == 2:
            far = near + P.row_blocks
        else:
            far = tl.minimum(near + P.BN // 128, (expert + 1).to(tl.int64) * P.row_blocks - 1)
        first_scale += near * P.inner_blocks
        second_scale += far * P.inner_blocks
    first = tl.full([P.BM, P.BN], 0.0, tl.float32)
    second = tl.full([P.BM, P.BN], 0.0, tl.float32)
    for k in range(0, P.K, P.BK):
        inside = (k + offsets_k)[None, :] < P.K if P.K % P.BK else None
        other = 0.0 if P.K % P.BK else None
        a = tl.load(x_rows + (k + offsets_k)[None, :], mask=inside, other=other)
        b = _strip_rows(w, row, k, end, P, COPIES)
        c = _strip_rows(w, row + P.HALF, k, end, P, COPIES)
        b = b.to(a.dtype).T
        c = c.to(a.dtype).T
        if P.PROMOTE:
            scale = tl.full([P.BM], 1.0, tl.float32)
            if x_scales is not None:
                scale = tl.load(x_scales + rows * P.inner_blocks + k // 128)
            near_scale = scale
            far_scale = scale
            if P.SCALING == 2:
                near_scale = scale * tl.load(first_scale + k // 128)
                far_scale = scale * tl.load(second_scale + k // 128)
            first += tl.dot(a, b, input_precision=PRECISION) * near_scale[:, None]
            second += tl.dot(a, c, input_precision=PRECISION) * far_scale[:, None]
        else:
            first = tl.dot(a, b, first, input_precision=PRECISION)
            second = tl.dot(a, c, second, input_precision=PRECISION)
    return first, second


@triton.jit
def _finish(block, w_scales, bias, scale, at, inside, SCALING: tl.constexpr):
    """Applies the column scales and the bias, stored at `at`."""
    if SCALING == 1:
        block = block * (tl.load(w_scales + at, mask=inside, other=0.0) * scale)[None, :]
    else:
        block = block * scale
    if bias is not None:
        block += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    return block


@triton.jit
def _store_quantised(h, out, out_scales, places, column, valid, N: tl.constexpr, BN: tl.constexpr):
    scales = fp8_scales(tl.max(tl.abs(h), 1), 1)
    tl.store(out_scales + places * (N // BN) + column // BN, scales, mask=valid)
    h = as_fp8(h * (1.0 / scales)[:, None])
    columns = column + tl.arange(0, BN)
    to = out + places[:, None] * N + columns[None, :]
    tl.store(to, h, mask=valid[:, None])


@triton.jit
def experts_kernel(
    x,
    x_scales,
    w,
    w_scales,
    bias,
    order,
    first_place,
    count,
    tile_expert,
    tile_place,
    num_tiles,
    out,
    out_scales,
    weights,
    scale,
    alpha,
    limit,
    P: tl.constexpr,
    COPIES: tl.constexpr,
    IEEE: tl.constexpr,
):
    await_inputs(P.PDL)
    tiles = tl.load(num_tiles)
    # Not flattened into one loop: resetting the sums inside it would serialise the products.
    for item in tl.range(tl.program_id(0), tiles * P.NUM_STRIPS, tl.num_programs(0)):
        tile, strip = place_item(item, tiles, P.NUM_STRIPS, P.GROUP)
        expert = tl.load(tile_expert + tile)
        places = tl.load(tile_place + tile) + tl.arange(0, P.BM)
        end = tl.load(first_place + expert) + tl.load(count + expert)
        valid = places < end
        # Places past the end repeat the last one: their sums are never stored.
        places = tl.minimum(places, end - 1).to(tl.int64)
        rows = places
        if P.GATHER:
            rows = (tl.load(order + places) // P.TOP_K).to(tl.int64)
        column = strip * P.STRIP
        first, second = _sums(x, x_scales, w, w_scales, rows, expert, column, P, COPIES, IEEE)
        columns = column + tl.arange(0, P.BN)
        at = expert.to(tl.int64) * (P.PARTS * P.N) + columns
        inside = columns < P.N
        if P.PARTS == 2:
            gate = _finish(first, w_scales, bias, scale, at, inside, P.SCALING)
            up = _finish(second, w_scales, bias, scale, at + P.N, inside, P.SCALING)
            h = activate(gate, up, alpha, limit, P.LIMITED)
            if out_scales is not None:
                _store_quantised(h, out, out_scales, places, column, valid, P.N, P.BN)
            else:
                to = out + places[:, None] * P.N + columns[None, :]
                mask = valid[:, None] & inside[None, :]
                tl.store(to, h.to(out.dtype.element_ty), mask=mask)
        else:
            pairs = places
            if P.SCATTER:
                pairs = tl.load(order + places).to(tl.int64)
            weight = tl.full([P.BM], 1.0, tl.float32)
            if weights is not None:
                weight = tl.load(weights + pairs)
            to = out + pairs[:, None] * P.N + columns[None, :]
            mask = valid[:, None]
            y = _finish(first, w_scales, bias, scale, at, inside, P.SCALING) * weight[:, None]
            tl.store(to, y.to(out.dtype.element_ty), mask=mask & inside[None, :])
            inside = columns + P.BN < P.N
            y = _finish(second, w_scales, bias, scale, at + P.BN, inside, P.SCALING)
            y *= weight[:, None]
            tl.store(to + P.BN, y.to(out.dtype.element_ty), mask=mask & inside[None, :])
