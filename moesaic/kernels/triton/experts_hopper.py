"""The products of experts_large.py on Hopper, with specialised warps.

K inner size · N columns of a part · one item: 128 places x two blocks of 128 columns, a strip.

Four warps load: weights by TMA, rows by TMA or, if gathered, by 16 bytes a thread. Two groups of
four warps multiply 64 places each, and store them. A ring of stages connects them: barrier `ready`
counts the arrivals in a stage, `empty` the groups that have released it. The loaders are up to a
ring ahead, so they fetch the next item's first steps while the others store. The second group
starts one step after the first, so that one scales or stores while the other multiplies.

Items differ: a tile of at most 64 rows takes half the time. So a program claims its next item from
a global counter when it begins one. Then the tiles of an expert are at one strip at the same time,
and its weights are read from memory once.

An item of 64 rows reads as many weights as one of 128, which takes longer than its products. So
where an expert's last two tiles have 129 to 192 rows, each takes all of these rows, but half of the
columns: a tall item, which reads 40 KB a step for 3/4 of the products, instead of 48 for all and 40
for half. There the first group multiplies 128 places, the other 64, with as many registers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from moesaic.kernels.experts import Groups, Matrices, Rows
from moesaic.kernels.triton.experts_epilogue import (
    activate,
    find_targets,
    finish,
    quantise,
    split_columns,
    split_rows,
    store_block,
)
from moesaic.kernels.triton.experts_items import QUEUE, locate_item, receive_item, send_item
from moesaic.kernels.triton.experts_loads import load_tall, load_wide
from moesaic.kernels.triton.experts_product import (
    FP8,
    LargeConfig,
    Product,
    ProductConstants,
    ProductOutput,
    constants,
)
from moesaic.kernels.triton.experts_sums import plain_sums, scaled_sums
from moesaic.kernels.triton.launch import dependent_launch, is_hopper, num_processors

# Registers of a thread before groups reallocate them: 65,536 in all.
REGISTERS = 168


@dataclass(frozen=True, kw_only=True)
class ExpertsConstants(ProductConstants):
    STAGES: int
    SHARES: tuple[int, int]
    """Registers of the second group (the first has as many) and of the loading warps."""
    SCALED: bool
    TALL: bool
    """Whether an expert's last two tiles become tall items if they have 129 to 192 rows."""

    steps: int
    halves: bool
    """Whether items load 64 rows of each part."""


@gluon.jit
def _load(x, descs, counter, tables, ring, queue, P: gl.constexpr):
    tiles = gl.load(tables[5])
    total = tiles * P.NUM_STRIPS
    THREADS: gl.constexpr = 32 * gl.num_warps()
    each: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    threads = gl.arange(0, THREADS, layout=each)
    one = gl.full([THREADS], 1, gl.int32, each)
    strip, expert, place, end = locate_item(gl.program_id(0), tables, tiles, P)
    number = 0
    step = 0
    while strip >= 0:
        # In flight while the item is loaded. There are as many claims as items: the last resets it.
        claim = gl.atomic_add(counter + threads, one, mask=threads == 0, sem="relaxed")
        found = (strip, expert, place, end)
        if not P.TALL or strip < P.NUM_STRIPS:
            step = load_wide(x, descs, found, tables[0], ring, step, P)
        else:
            step = load_tall(x, descs, found, tables[0], ring, step, P)
        gl.store(counter + threads, one - 1, mask=(threads == 0) & (claim == total - 1))
        item = gl.max(gl.where(threads == 0, claim, 0), 0) + gl.num_programs(0)
        strip, expert, place, end = locate_item(item, tables, tiles, P)
        send_item(queue, number, (strip, expert, place, end))
        number += 1


@gluon.jit
def _work(step, found, ring, given, P: gl.constexpr, WHICH: gl.constexpr):
    """Computes 64 places of an item."""
    order, scales, ends, numbers = given
    bias, out, out_scales, weights, staging = ends
    scale, alpha, limit = numbers
    strip, expert, place, end = found
    place += 64 * WHICH
    column = strip * P.STRIP
    KSTEP: gl.constexpr = 32 if P.PROMOTE else 16
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, KSTEP])
    places = place + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    pairs = places
    if weights is not None and P.SCATTER:
        pairs = gl.load(order + places, mask=places < end, other=0)
    if P.PROMOTE:
        rows = gl.minimum(places, end - 1)
        if P.GATHER:
            rows = gl.load(order + rows) // P.TOP_K
        first, second, step = scaled_sums(ring, step, scales, rows, expert, column, P, WHICH)
        # Not earlier: registers are short.
        targets = find_targets(out, order, place, end, P, 128)
    else:
        targets = find_targets(out, order, place, end, P, 128)
        sums, step = plain_sums(ring, step, P, 64 * WHICH, 64, 256)
    if weights is not None:
        # Overlaps with the last product.
        weight = gl.load(weights + pairs, mask=places < end, other=0.0)
    if not P.PROMOTE:
        sums = warpgroup_mma_wait(0, deps=(sums,))
        first, second = split_columns(sums, mma)
        mbarrier.arrive(ring[3].index((step + P.STAGES - 1) % P.STAGES), count=1)
    first = finish(first, scales, bias, scale, expert, column, P, mma)
    staged = staging.index(WHICH)
    if P.PARTS == 2:
        second = finish(second, scales, bias, scale, expert, column + P.HALF, P, mma)
        h = activate(first, second, alpha, limit, P)
        if out_scales is not None:
            h = quantise(h, out_scales, places, end, column, P)
        store_block(h, staged, out, targets, column, P)
    else:
        if weights is not None:
            first = first * weight[:, None]
        store_block(first, staged, out, targets, column, P)
        second = finish(second, scales, bias, scale, expert, column + 128, P, mma)
        if weights is not None:
            second = second * weight[:, None]
        store_block(second, staged, out, targets, column + 128, P)
    return step


@gluon.jit
def _work_tall(step, found, ring, given, P: gl.constexpr, WHICH: gl.constexpr):
    """Computes 128 or 64 places of a tall item: blocks of 128 columns, or of 64 and 64."""
    BLOCKS: gl.constexpr = 2 - WHICH
    order, scales, ends, numbers = given
    bias, out, _, weights, staging = ends
    scale, alpha, limit = numbers
    strip, expert, place, end = found
    place += 128 * WHICH
    column = (strip - P.NUM_STRIPS) * (P.STRIP // 2)
    ROWS: gl.constexpr = 64 * BLOCKS
    WIDTH: gl.constexpr = 128 // P.PARTS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    places = place + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma))
    pairs = places
    if weights is not None and P.SCATTER:
        pairs = gl.load(order + places, mask=places < end, other=0)
    targets = find_targets(out, order, place, end, P, WIDTH)
    more_targets = targets
    if BLOCKS == 2:
        more_targets = find_targets(out, order, place + 64, end, P, WIDTH)
    a_bufs, b_bufs, ready, empty = ring
    turned = (b_bufs, a_bufs, ready, empty)
    sums, step = plain_sums(turned, step, P, 128 * WHICH, ROWS, 128)
    if weights is not None:
        weight = gl.load(weights + pairs, mask=places < end, other=0.0)
    sums = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(empty.index((step + P.STAGES - 1) % P.STAGES), count=1)
    if P.PARTS == 2:
        gate, up = split_columns(sums, mma)
        gate = finish(gate, scales, bias, scale, expert, column, P, mma)
        up = finish(up, scales, bias, scale, expert, column + P.HALF, P, mma)
        block = activate(gate, up, alpha, limit, P)
    else:
        block = finish(sums, scales, bias, scale, expert, column, P, mma)
        if weights is not None:
            block = block * weight[:, None]
    staged = staging.index(WHICH).slice(0, WIDTH, dim=1)
    if BLOCKS == 2:
        upper, lower = split_rows(block, mma)
        store_block(upper, staged, out, targets, column, P)
        store_block(lower, staged, out, more_targets, column, P)
    else:
        store_block(block, staged, out, targets, column, P)
    return step


@gluon.jit
def _skip(step, ring, P: gl.constexpr):
    """Releases the stages of an item without rows for this group."""
    _, _, ready, empty = ring
    for _ in range(P.steps):
        mbarrier.wait(ready.index(step % P.STAGES), step // P.STAGES & 1)
        mbarrier.arrive(empty.index(step % P.STAGES), count=1)
        step += 1
    return step


@gluon.jit
def _multiply(tables, ring, queue, scales, ends, numbers, P: gl.constexpr, WHICH: gl.constexpr):
    given = (tables[0], scales, ends, numbers)
    strip, expert, place, end = locate_item(gl.program_id(0), tables, gl.load(tables[5]), P)
    number = 0
    step = 0
    if WHICH == 1:
        mbarrier.wait(ring[2].index(1), 0, pred=strip >= 0)
    while strip >= 0:
        found = (strip, expert, place, end)
        if not P.TALL or strip < P.NUM_STRIPS:
            if place + 64 * WHICH < end:
                step = _work(step, found, ring, given, P, WHICH)
            else:
                step = _skip(step, ring, P)
        else:
            step = _work_tall(step, found, ring, given, P, WHICH)
        strip, expert, place, end = receive_item(queue, number)
        number += 1


@gluon.jit
def experts_kernel(
    x,
    x_desc,
    x_scales,
    w_desc,
    half_desc,
    w_scales,
    bias,
    order,
    first_place,
    count,
    tile_expert,
    tile_place,
    num_tiles,
    counter,
    out,
    out_scales,
    weights,
    scale,
    alpha,
    limit,
    P: gl.constexpr,
):
    STAGES: gl.constexpr = P.STAGES
    out_type: gl.constexpr = out.dtype.element_ty
    a_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 128, P.BK], w_desc.layout)
    b_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 256, P.BK], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    values = gl.allocate_shared_memory(gl.int32, [QUEUE, 4], flat)
    made = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], mbarrier.MBarrierLayout())
    staged: gl.constexpr = gl.NVMMASharedLayout(128, out_type.primitive_bitwidth, 2)
    staging = gl.allocate_shared_memory(out_type, [2, 64, 128], staged)
    for i in gl.static_range(STAGES):
        # With gathered rows each of 128 threads arrives for its own copies.
        mbarrier.init(ready.index(i), count=129 if P.GATHER else 1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(QUEUE):
        mbarrier.init(made.index(i), count=1)
    fence_async_shared()
    if P.PDL:
        gdc_wait()
    tables = (order, first_place, count, tile_expert, tile_place, num_tiles)
    ring = (a_bufs, b_bufs, ready, empty)
    queue = (values, made)
    scales = (x_scales, w_scales)
    ends = (bias, out, out_scales, weights, staging)
    numbers = (scale, alpha, limit)
    loaders: gl.constexpr = 4 if P.GATHER else 1
    gl.warp_specialize(
        [
            (_multiply, (tables, ring, queue, scales, ends, numbers, P, 0)),
            (_multiply, (tables, ring, queue, scales, ends, numbers, P, 1)),
            (_load, (x, (x_desc, w_desc, half_desc), counter, tables, ring, queue, P)),
        ],
        [4, loaders],
        P.SHARES,
    )


def can_run(x: Rows, w: Matrices, out: Tensor, product: Product, config: LargeConfig) -> bool:
    """Requires a Hopper GPU, tiles of 128 x (128 + 128), steps of 128 bytes, and at least as many
    steps as the ring has stages."""
    values = w.planes["values"]
    return (
        is_hopper(x.values.device.index)
        and config.block_m == config.block_n == 128
        and config.ring >= 2
        and config.block_k * x.values.element_size() == 128
        and values.dtype == x.values.dtype
        and (values.dtype == FP8) == product.PROMOTE
        and out.element_size() <= 2
        and product.K % config.block_k == 0
        and product.K // config.block_k >= config.ring
        and all(t.data_ptr() % 16 == 0 and t.is_contiguous() for t in (x.values, values, out))
    )


@cache
def plan_of(
    product: Product, top_k: int, config: LargeConfig, pdl: bool = True, scaled: bool = False
) -> ExpertsConstants:
    tall = config.tall and not product.PROMOTE
    return ExpertsConstants(
        **constants(product, top_k, config, pdl),
        STAGES=config.ring,
        SHARES=_shares(product),
        SCALED=scaled,
        TALL=tall,
        steps=product.K // config.block_k,
        halves=tall and product.PARTS == 2,
    )


def _shares(product: Product) -> tuple[int, int]:
    if not product.GATHER:
        return 232, 40
    return (224, 56) if product.PROMOTE else (208, 88)


def launch(
    x: Rows, w: Matrices, groups: Groups, product: Product, out: ProductOutput, config: LargeConfig
) -> None:
    pdl = dependent_launch(x.values)
    plan = plan_of(product, groups.top_k, config, pdl.on, x.scale != 1.0)
    assert out.scales is None or not plan.TALL, "tall items are not quantised"
    values = w.planes["values"]
    rows = None if product.GATHER else _descriptor(x.values, 64, config)
    halves = _descriptor(values, 64, config) if plan.halves else None
    most = len(groups.tile_expert_X) * plan.NUM_STRIPS
    experts_kernel[(min(most, num_processors(x.values.device.index)),)](
        x.values,
        rows,
        x.scales,
        _descriptor(values, 128, config),
        halves,
        w.planes.get("scales"),
        w.bias_EN,
        *groups.lists,
        _counter(groups),
        out.values,
        out.scales,
        out.weights,
        x.scale,
        *out.numbers,
        plan,
        num_warps=4,
        maxnreg=REGISTERS,
        **pdl.options,
    )


def _counter(groups: Groups) -> Tensor:
    """A zero on the device, which the kernel resets."""
    if groups.counters is not None:
        return groups.counters
    return torch.zeros(1, dtype=torch.int32, device=groups.first_E.device)


def _descriptor(values: Tensor, rows: int, config: LargeConfig) -> TensorDescriptor:
    """Describes `rows` lines of a step in the swizzle of the matrix units. Skips the constructor's
    checks, which take longer than a launch: `can_run` has made them."""
    made = TensorDescriptor.__new__(TensorDescriptor)
    width = values.shape[-1]
    made.base, made.shape, made.strides = values, [values.numel() // width, width], [width, 1]
    made.block_shape, made.layout = [rows, config.block_k], _swizzled(values.element_size())
    return made


@cache
def _swizzled(element_size: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(128, 8 * element_size, 2)
