"""Products of float8 matrices with float8 rows, which have a scale per 128 channels.

T rows · I inputs · O outputs · G groups of 128 inputs. Rows in another type are quantised
beforehand, as every program repeating it would take longer than loading its weights. Sums are
float32; every 128 inputs are scaled as they are added.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.experts import Rows
from moesaic.kernels.linear import Fp8Matrix, multiplied_fp8, quantise_groups
from moesaic.kernels.quantise import silu_mul
from moesaic.kernels.triton import linear_hopper
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next
from moesaic.kernels.triton.linear import (
    LinearLaunch,
    LinearTile,
    choose_tile,
    launch_of,
    matrix_rows,
    prefetch_matrix,
    processors_of,
    split_buffers,
    store_split,
    store_tile,
)

logger = logging.getLogger(__name__)

GROUP = tl.constexpr(128)
# By the most numbers of a matrix: rows beyond which torch's own product is faster.
FEW_ROWS = ((1 << 23, 128), (1 << 62, 64))
# By the most inputs, then by the most outputs. A tile has 16 inputs for each thread, which so has a
# piece of all outputs.
HUGE = 1 << 62
ONE_ROW = (
    (2048, ((1024, LinearTile(1, 2, 2048, 4)), (HUGE, LinearTile(1, 8, 2048, 4)))),
    (4096, ((1024, LinearTile(1, 2, 1024, 2)), (HUGE, LinearTile(1, 8, 2048, 4)))),
    (
        HUGE,
        (
            (1024, LinearTile(1, 2, 1024, 2)),
            (16_384, LinearTile(1, 4, 1024, 2)),
            (HUGE, LinearTile(1, 8, 2048, 4)),
        ),
    ),
)
TILES = (
    LinearTile(16, 32, 128, 4, 6),
    LinearTile(32, 64, 128, 4, 5),
    LinearTile(64, 64, 128, 4, 6, programs=1),
    LinearTile(128, 64, 128, 8, 5, programs=1),
)
MANY = LinearTile(128, 128, 128, 8, 4)
# Row tiles that run concurrently, so that they share matrix rows in the cache.
BAND = 16
PROBE_ERROR = 1e-2


@triton.jit
def tile_scales(
    scales, tile, group, num_groups, num_outputs,
    BLOCK_O: tl.constexpr, BLOCKED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Scales of gate and up for one group of inputs. A tile is part of one block, a gated tile of
    one block of gate and one of up; otherwise both scales are the same."""
    if not BLOCKED:
        gate = tl.full((), 1.0, tl.float32)
        up = gate
    elif GATED:
        block = tile * BLOCK_O // (2 * GROUP)
        gate = tl.load(scales + block * num_groups + group)
        up = tl.load(scales + (block + num_outputs // (2 * GROUP)) * num_groups + group)
    else:
        gate = tl.load(scales + (tile * BLOCK_O // GROUP) * num_groups + group)
        up = gate
    return gate, up


@triton.jit
def scaled(product_TO, scale_T, gate, up, BLOCK_O: tl.constexpr, GATED: tl.constexpr):
    """Scales a product over one group of inputs by the scales of the rows and of the tile."""
    if GATED:
        scale_O = tl.where(tl.arange(0, BLOCK_O) % 2 == 0, gate, up)
        product_TO *= scale_T[:, None] * scale_O[None, :]
    else:
        product_TO *= (scale_T * gate)[:, None]
    return product_TO


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x, x_scales, w, w_scales, bias, y, partial, arrived,
    num_rows, num_outputs, num_inputs, x_stride, num_tiles,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, SPLITS: tl.constexpr, BLOCKED: tl.constexpr,
    GATED: tl.constexpr, EVEN: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`EVEN`: inputs are a multiple of 128. Scales are loaded one iteration ahead."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row_O = matrix_rows(tile * BLOCK_O, num_outputs, BLOCK_O, GATED)
    num_groups = tl.cdiv(num_inputs, GROUP)
    share = tl.cdiv(num_groups, SPLITS)
    start = split * share
    stop = tl.minimum(start + share, num_groups)
    release_next(PDL)
    if PDL and PREFETCH:
        limit = tl.minimum(stop * GROUP, num_inputs)
        prefetch_matrix(w, row_O, start * GROUP, limit, num_inputs, 4)
    await_inputs(PDL)
    t, i = tl.arange(0, BLOCK_T), tl.arange(0, GROUP)
    x_at = x + t.to(tl.int64)[:, None] * x_stride + i[None, :]
    w_at = w + row_O.to(tl.int64)[:, None] * num_inputs + i[None, :]
    here = t < num_rows
    scales_at = x_scales + tl.where(here, t, 0) * num_groups
    scale_T = tl.load(scales_at + start)
    gate, up = tile_scales(w_scales, tile, start, num_groups, num_outputs, BLOCK_O, BLOCKED, GATED)
    acc_TO = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for group in range(start, stop):
        at = group * GROUP
        ahead = tl.minimum(group + 1, num_groups - 1)
        next_T = tl.load(scales_at + ahead)
        next_gate, next_up = tile_scales(
            w_scales, tile, ahead, num_groups, num_outputs, BLOCK_O, BLOCKED, GATED
        )
        if EVEN:
            x_TI = tl.load(x_at + at, mask=here[:, None], other=0.0)
            w_OI = tl.load(w_at + at)
        else:
            inside = (i < num_inputs - at)[None, :]
            x_TI = tl.load(x_at + at, mask=here[:, None] & inside, other=0.0)
            w_OI = tl.load(w_at + at, mask=inside, other=0.0)
        acc_TO += scaled(tl.dot(x_TI, w_OI.T), scale_T, gate, up, BLOCK_O, GATED)
        scale_T, gate, up = next_T, next_gate, next_up
    if not BLOCKED:
        acc_TO *= tl.load(w_scales + row_O)[None, :]
    store_split(
        y, bias, acc_TO, partial, arrived, tile, split, num_tiles, num_rows, num_outputs,
        BLOCK_T, BLOCK_O, SPLITS, GATED,
    )  # fmt: skip


@triton.jit
def _piece_sums(
    w_OI, x, x_scales, w_scales, row_O, at, num_inputs, num_groups,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCKED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Scaled sums [O, P] of P pieces of 16 inputs, from `at` on. A thread loads and sums a piece
    itself, and reuses its part of x for all outputs of the tile."""
    PIECES: tl.constexpr = BLOCK_I // 16
    i = tl.arange(0, BLOCK_I)
    if EVEN:
        x_I = tl.load(x + at + i).to(tl.float32)
        w_OI = w_OI.to(tl.float32)
    else:
        inside = i < num_inputs - at
        x_I = tl.load(x + at + i, mask=inside, other=0.0).to(tl.float32)
        w_OI = tl.where(inside[None, :], w_OI.to(tl.float32), 0.0)
    group_P = (at + tl.arange(0, PIECES) * 16) // GROUP
    valid_P = group_P < num_groups
    sum_OP = tl.sum(tl.reshape(w_OI * x_I[None, :], [BLOCK_O, PIECES, 16]), 2)
    sum_OP *= tl.load(x_scales + group_P, mask=valid_P, other=0.0)[None, :]
    if BLOCKED:
        scales_at = w_scales + (row_O // GROUP)[:, None] * num_groups + group_P[None, :]
        sum_OP *= tl.load(scales_at, mask=valid_P[None, :], other=0.0)
    return sum_OP


@triton.jit
def _one_row(
    x, x_scales, w, w_scales, bias, y, num_outputs, num_inputs,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCKED: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`EVEN`: inputs are a multiple of BLOCK_I. Uses no tensor cores, as in linear.py. Weights are
    not carried across iterations, as that would unpack and repack their bytes."""
    tile = tl.program_id(0)
    row_O = matrix_rows(tile * BLOCK_O, num_outputs, BLOCK_O, GATED)
    num_groups = tl.cdiv(num_inputs, GROUP)
    i = tl.arange(0, BLOCK_I)
    w_at = w + row_O.to(tl.int64)[:, None] * num_inputs + i[None, :]
    release_next(PDL)
    w_OI = tl.load(w_at, mask=None if EVEN else (i < num_inputs)[None, :])
    if PDL and PREFETCH:
        prefetch_matrix(w, row_O, BLOCK_I, num_inputs, num_inputs, 16)
    await_inputs(PDL)
    acc_OP = _piece_sums(
        w_OI, x, x_scales, w_scales, row_O, 0, num_inputs, num_groups,
        BLOCK_O, BLOCK_I, BLOCKED, EVEN,
    )  # fmt: skip
    for at in range(BLOCK_I, num_inputs, BLOCK_I):
        w_OI = tl.load(w_at + at, mask=None if EVEN else (i < num_inputs - at)[None, :])
        acc_OP += _piece_sums(
            w_OI, x, x_scales, w_scales, row_O, at, num_inputs, num_groups,
            BLOCK_O, BLOCK_I, BLOCKED, EVEN,
        )  # fmt: skip
    acc_1O = tl.sum(acc_OP, 1)[None, :]
    if not BLOCKED:
        acc_1O *= tl.load(w_scales + row_O)[None, :]
    store_tile(y, bias, acc_1O, tile, 1, num_outputs, 1, BLOCK_O, GATED)


@triton.jit
def _many_rows(
    x, x_scales, w, w_scales, bias, y, num_rows, num_outputs, num_inputs, row_tiles, output_tiles,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BAND: tl.constexpr, BLOCKED: tl.constexpr,
    GATED: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Runs the tiles in bands of BAND row tiles, one output tile after the other."""
    release_next(PDL)
    await_inputs(PDL)
    place = tl.program_id(0)
    band = place // (BAND * output_tiles)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    inside_band = place - band * BAND * output_tiles
    first = (band * BAND + inside_band % height) * BLOCK_T
    tile = inside_band // height
    t = first + tl.arange(0, BLOCK_T)
    kept = tl.minimum(t, num_rows - 1)
    row_O = matrix_rows(tile * BLOCK_O, num_outputs, BLOCK_O, GATED)
    i = tl.arange(0, GROUP)
    x_at = x + kept.to(tl.int64)[:, None] * num_inputs + i[None, :]
    w_at = w + row_O.to(tl.int64)[:, None] * num_inputs + i[None, :]
    num_groups = tl.cdiv(num_inputs, GROUP)
    x_scales += kept.to(tl.int64) * num_groups
    acc_TO = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for group in range(num_groups):
        at = group * GROUP
        if EVEN:
            x_TI, w_OI = tl.load(x_at + at), tl.load(w_at + at)
        else:
            inside = (i < num_inputs - at)[None, :]
            x_TI = tl.load(x_at + at, mask=inside, other=0.0)
            w_OI = tl.load(w_at + at, mask=inside, other=0.0)
        scale_T = tl.load(x_scales + group)
        gate, up = tile_scales(
            w_scales, tile, group, num_groups, num_outputs, BLOCK_O, BLOCKED, GATED
        )
        acc_TO += scaled(tl.dot(x_TI, w_OI.T), scale_T, gate, up, BLOCK_O, GATED)
    if not BLOCKED:
        acc_TO *= tl.load(w_scales + row_O)[None, :]
    width = num_outputs // 2 if GATED else num_outputs
    y += first.to(tl.int64) * width
    store_tile(y, bias, acc_TO, tile, num_rows - first, num_outputs, BLOCK_T, BLOCK_O, GATED)


def linear_fp8(x: Rows, weight: Fp8Matrix, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    return _product(x, weight, bias_O, dtype, gated=False)


def gate_up_silu_fp8(
    x: Rows, weight: Fp8Matrix, bias_O: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return _product(x, weight, bias_O, dtype, gated=True)


def _product(
    x: Rows, weight: Fp8Matrix, bias_O: Tensor | None, dtype: torch.dtype, gated: bool
) -> Tensor:
    rows = len(x.values)
    if _torch_is_faster(x.values, weight, bias_O, dtype):
        y_TO = _by_torch(x, weight, dtype)
        return silu_mul(y_TO) if gated else y_TO
    if x.scales is None:
        x = quantise_groups(x.values)
    outputs = len(weight.values) // (2 if gated else 1)
    y_TO = x.values.new_empty(rows, outputs, dtype=dtype)
    multiply = multiply_few if rows <= TILES[-1].rows else multiply_many
    return multiply(x, weight, bias_O, y_TO, gated)


def multiply_few(
    x: Rows,
    weight: Fp8Matrix,
    bias_O: Tensor | None,
    y_TO: Tensor,
    gated: bool,
    plan: LinearLaunch | None = None,
) -> Tensor:
    """Multiplies quantised rows into `y_TO`. `plan` overrides the default one."""
    rows, (outputs, inputs) = len(x.values), weight.values.shape
    _check(x, weight, y_TO)
    if rows == 0 or outputs == 0:
        return y_TO
    values = x.values if x.values.stride(1) == 1 else x.values.contiguous()
    others = plan or gated
    chosen = None if others else linear_hopper.choose(values, weight.values, weight.rows > 1)
    if chosen:
        x = Rows(values, x.scales)
        return linear_hopper.multiply(x, weight.values, weight.scales, bias_O, y_TO, chosen)
    tensors = (values, x.scales, weight.values, weight.scales, bias_O, y_TO)
    plan = plan or plan_for(rows, outputs, inputs, processors_of(values))
    tile, pdl = plan.tile, dependent_launch(values)
    assert tile.inputs % GROUP.value == 0 and (tile.rows == 1 or tile.inputs == GROUP.value), tile
    constants = {
        "BLOCK_O": tile.outputs,
        "BLOCKED": weight.rows > 1,
        "GATED": gated,
        "EVEN": inputs % tile.inputs == 0,
        "PREFETCH": plan.prefetch,
        "PDL": pdl.on,
        "num_warps": tile.warps,
        **pdl.options,
    }
    if tile.rows == 1:
        _one_row[(plan.tiles,)](*tensors, outputs, inputs, BLOCK_I=tile.inputs, **constants)
        return y_TO
    partial, arrived = split_buffers(plan, values)
    _few_rows[(plan.tiles, plan.splits)](
        *tensors, partial, arrived, rows, outputs, inputs, values.stride(0), plan.tiles,
        BLOCK_T=tile.rows, SPLITS=plan.splits, num_stages=tile.stages, **constants,
    )  # fmt: skip
    return y_TO


@cache
def plan_for(rows: int, outputs: int, inputs: int, processors: int) -> LinearLaunch:
    one_row = next(tiles for most, tiles in ONE_ROW if inputs <= most)
    return launch_of(choose_tile(one_row, TILES, rows, outputs), outputs, inputs, 1, processors)


def multiply_many(
    x: Rows,
    weight: Fp8Matrix,
    bias_O: Tensor | None,
    y_TO: Tensor,
    gated: bool,
    tile: LinearTile = MANY,
) -> Tensor:
    """Multiplies quantised rows, at least one, into `y_TO`."""
    rows, (outputs, inputs) = len(x.values), weight.values.shape
    _check(x, weight, y_TO)
    assert x.values.is_contiguous()
    row_tiles, output_tiles = -(-rows // tile.rows), -(-outputs // tile.outputs)
    pdl = dependent_launch(x.values)
    _many_rows[(row_tiles * output_tiles,)](
        x.values, x.scales, weight.values, weight.scales, bias_O, y_TO,
        rows, outputs, inputs, row_tiles, output_tiles,
        BLOCK_T=tile.rows, BLOCK_O=tile.outputs, BAND=BAND, BLOCKED=weight.rows > 1, GATED=gated,
        EVEN=inputs % GROUP.value == 0, PDL=pdl.on,
        num_warps=tile.warps, num_stages=tile.stages, **pdl.options,
    )  # fmt: skip
    return y_TO


def _check(x: Rows, weight: Fp8Matrix, y_TO: Tensor) -> None:
    outputs, inputs = weight.values.shape
    assert x.values.shape[1] == inputs and y_TO.is_contiguous(), (x.values.shape, inputs)
    assert weight.values.is_contiguous() and weight.scales.is_contiguous()
    assert x.scales is not None and x.scales.is_contiguous() and x.scale == 1.0
    groups = -(-inputs // GROUP.value) if weight.rows > 1 else 1
    assert weight.scales.shape == (-(-outputs // weight.rows), groups), weight.scales.shape
    halves = outputs // 2 % weight.rows == 0 or y_TO.shape[1] == outputs
    assert halves, f"up begins inside a block of scales: {outputs} rows"


def scales_by_column(
    x_TI: Tensor, weight: Fp8Matrix, bias_O: Tensor | None, dtype: torch.dtype
) -> bool:
    return len(x_TI) % 4 == 0 and _torch_is_faster(x_TI, weight, bias_O, dtype)


def _torch_is_faster(
    x_TI: Tensor, weight: Fp8Matrix, bias_O: Tensor | None, dtype: torch.dtype
) -> bool:
    """Whether there are many rows, in a form that torch's blockwise product supports."""
    few = next(rows for most, rows in FEW_ROWS if weight.values.numel() <= most)
    if len(x_TI) <= few:
        return False
    whole = all(size % GROUP.value == 0 for size in weight.values.shape)
    fits = weight.rows == GROUP.value and whole and bias_O is None and dtype == torch.bfloat16
    return fits and x_TI.is_cuda and _torch_works(x_TI.device)


def _by_torch(x: Rows, weight: Fp8Matrix, dtype: torch.dtype) -> Tensor:
    """cuBLAS requires row scales stored by column, and rows and blocks in multiples of 4."""
    if x.scales is None:
        x = quantise_groups(x.values, by_column=True)
    assert x.scales is not None
    rows, blocks = len(x.values), weight.scales.shape[1]
    values, scales = x.values, x.scales
    if rows % 4:
        # As bytes: padding does not support float8 everywhere.
        values = F.pad(values.view(torch.uint8), (0, 0, 0, -rows % 4)).view(values.dtype)
        scales = F.pad(scales, (0, 0, 0, -rows % 4))
    of_weight = F.pad(weight.scales, (0, -blocks % 4)) if blocks % 4 else weight.scales
    y_TO = F.scaled_mm(
        values,
        weight.values.t(),
        scales.t().contiguous().t(),
        F.ScalingType.BlockWise1x128,
        of_weight.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )
    return y_TO[:rows]


@cache
def _torch_works(device: torch.device) -> bool:
    """Probes once, with a known product."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("multiply many rows once before capturing it in a CUDA graph")
    problem = _problem_with(lambda x, weight: _by_torch(x, weight, torch.bfloat16), device)
    logger.info(
        "float8 products of many rows by blocks: %s",
        f"Triton, as torch.nn.functional.scaled_mm fails ({problem})" if problem else "torch",
    )
    return not problem


def _problem_with(product: Callable[[Rows, Fp8Matrix], Tensor], device: torch.device) -> str:
    """Describes how `product` differs from the twin; empty if it does not."""
    generator = torch.Generator(device).manual_seed(0)
    x_TI = torch.randn(258, 640, device=device, generator=generator)
    w_OI = torch.randn(384, 640, device=device, generator=generator)
    # Blocks of different magnitudes reveal a misplaced scale.
    magnitudes = torch.linspace(0.1, 10, 15, device=device).view(3, 5)
    w_OI *= magnitudes.repeat_interleave(128, 0).repeat_interleave(128, 1)
    x_TI *= torch.linspace(0.1, 10, 258, device=device)[:, None]
    weight, off = Fp8Matrix.of(w_OI), 0.0
    # Rows as in a step, and a number of rows that is no multiple of 4.
    for x in (quantise_groups(x_TI[:256], by_column=True), quantise_groups(x_TI)):
        try:
            y_TO = product(x, weight)
        except Exception as error:  # unsupported by this version or GPU
            return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        expected = multiplied_fp8(x, weight)
        off = max(off, float((y_TO.float() - expected).norm() / expected.norm()))
    return "" if off < PROBE_ERROR else f"relative error {off:.2g}"
