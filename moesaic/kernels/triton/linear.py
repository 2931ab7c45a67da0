"""Products of few rows with a large matrix: the matrix is read once, as fast as memory gives it.

T rows · I inputs · O outputs. One row is multiplied without tensor cores (`_one_row`): a program
has few outputs and all inputs, so that nothing is summed across programs. More rows go through
tensor cores (`_few_rows`; on Hopper some by linear_hopper.py); where the outputs are too few to
fill the GPU, the inputs are cut into splits, and whoever ends last adds the splits' sums in their
order: timing does not change a bit.

Gated matrices hold gate and up behind each other; a tile takes rows of both in turn, so that pairs
end up in one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import count

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.quantise import silu_mul
from moesaic.kernels.triton import linear_hopper
from moesaic.kernels.triton.launch import (
    await_inputs,
    dependent_launch,
    num_processors,
    prefetch_lines,
    prefetch_rows,
    release_next,
)
from moesaic.kernels.triton.quantise import silu_times


@dataclass(frozen=True, slots=True)
class LinearTile:
    """What one program computes at a time: rows x outputs, by `inputs` at a time. `programs`: for
    each processor, that splits aim at. `turned`: w xᵀ rather than x wᵀ, which
    Hopper's matrix units take with as few as 8 rows beside 64 outputs. `registers`: the most that a
    thread may have, so that more programs fit; norm_linear.py heeds it."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int = 1
    programs: int = 2
    turned: bool = False
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    tile: LinearTile
    tiles: int
    splits: int
    prefetch: bool


# Beyond so many rows cuBLAS is faster.
FEW_ROWS = 64
# Rows of a matrix that are loaded at once, before x is there, so that all of a layer's matrix can
# be on its way: by their padded length, then by the number of outputs.
WHOLE_ROWS = {
    2048: (
        (1024, LinearTile(1, 2, 2048, 4)),
        (16_384, LinearTile(1, 8, 2048, 4)),
        (1 << 62, LinearTile(1, 4, 2048, 4)),
    ),
    4096: ((1024, LinearTile(1, 1, 4096, 4)), (1 << 62, LinearTile(1, 2, 4096, 4))),
}
# Shorter and longer rows, by blocks.
ONE_ROW = (
    # Up to so many outputs: a smaller tile gives every processor work, a larger one reads x less.
    (1024, LinearTile(1, 2, 1024, 4)),
    (16_384, LinearTile(1, 4, 1024, 4)),
    (1 << 62, LinearTile(1, 8, 1024, 8)),
)
# Every program reads all rows, and every split lays down a sum: more rows want wider tiles and
# fewer splits.
TILES = (
    LinearTile(8, 64, 128, 4, 6, programs=1, turned=True),
    LinearTile(16, 64, 128, 4, 5, programs=1, turned=True),
    LinearTile(32, 64, 128, 4, 4, programs=1, turned=True),
    LinearTile(64, 64, 64, 4, 6, programs=1, turned=True),
    LinearTile(128, 128, 64, 8, 4, programs=1),
)
# Of deterministic mode, by the bytes of a number: float32 has no tensor cores.
INVARIANT = {2: LinearTile(64, 64, 64, 4, 4), 4: LinearTile(16, 32, 32, 4, 3)}
# The fewest blocks of inputs worth a split.
SPLIT_BLOCKS = 2
MAX_SPLITS = 16
# A matrix that the L2 cache can hold beside others is asked for before the rows are there.
PREFETCH_BYTES = 32 << 20
MAX_COUNTERS = 4096
MAX_STREAMS = 64


@triton.jit
def matrix_rows(first, num_outputs, BLOCK_O: tl.constexpr, GATED: tl.constexpr):
    """Rows of the matrix in a tile; beyond its end the last one again. Gated: of 6, from 0 on:
    0 3 1 4 2 5."""
    place = first + tl.arange(0, BLOCK_O)
    if GATED:
        inner = num_outputs // 2
        rows = (place % 2) * inner + tl.minimum(place // 2, inner - 1)
    else:
        rows = tl.minimum(place, num_outputs - 1)
    return rows


@triton.jit
def prefetch_matrix(w, row_O, start, stop, num_inputs, LINES: tl.constexpr):
    """Inputs start .. stop of some rows, by LINES lines of the cache at a time."""
    LINE: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
    for i in range(start, stop, LINES * LINE):
        column = tl.minimum(i + tl.arange(0, LINES) * LINE, stop - 1)
        prefetch_lines(w + row_O.to(tl.int64)[:, None] * num_inputs + column[None, :])


@triton.jit
def prefetch_tile(
    w, first, start, stop, num_outputs, num_inputs, BLOCK_O: tl.constexpr, GATED: tl.constexpr
):
    """Inputs start .. stop of a tile's rows, one request a row. A row is a multiple of 16 bytes."""
    SIZE: tl.constexpr = w.dtype.element_ty.primitive_bitwidth // 8
    if GATED:
        at, rows = first // 2, tl.minimum(BLOCK_O, num_outputs - first) // 2
        up = w + (num_outputs // 2 + at).to(tl.int64) * num_inputs + start
        prefetch_rows(up, num_inputs * SIZE, rows, (stop - start) * SIZE)
    else:
        at, rows = first, tl.minimum(BLOCK_O, num_outputs - first)
    place = w + at.to(tl.int64) * num_inputs + start
    prefetch_rows(place, num_inputs * SIZE, rows, (stop - start) * SIZE)


@triton.jit
def silu_pairs(acc_TO, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr):
    """Gate and up in turn -> silu(gate) * up."""
    gate, up = tl.split(tl.reshape(acc_TO, [BLOCK_T, BLOCK_O // 2, 2]))
    return silu_times(gate, up, tl.float32)


@triton.jit
def store_tile(
    y, bias, acc_TO, tile, num_rows, num_outputs,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    if bias is not None:
        row_O = matrix_rows(tile * BLOCK_O, num_outputs, BLOCK_O, GATED)
        acc_TO += tl.load(bias + row_O).to(tl.float32)[None, :]
    BLOCK: tl.constexpr = BLOCK_O // 2 if GATED else BLOCK_O
    width = num_outputs // 2 if GATED else num_outputs
    if GATED:
        acc_TO = silu_pairs(acc_TO, BLOCK_T, BLOCK_O)
    t, o = tl.arange(0, BLOCK_T)[:, None], (tile * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (t < num_rows) & (o < width)
    tl.store(y + t.to(tl.int64) * width + o, acc_TO.to(y.dtype.element_ty), mask=mask)


@triton.jit
def add_splits(
    acc_TO, partial, arrived, tile, split, num_tiles, num_rows,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Lays down a split's sum; whoever is last of a tile gets all of them, added in their order,
    and sets the counter back. Returns whether this is the last, and the sum."""
    t = tl.arange(0, BLOCK_T)[:, None]
    spot = t * BLOCK_O + tl.arange(0, BLOCK_O)[None, :]
    mine = (tile + split * num_tiles).to(tl.int64) * (BLOCK_T * BLOCK_O)
    tl.store(partial + mine + spot, acc_TO, mask=t < num_rows)
    tl.debug_barrier()  # the counter is one thread's business, and it speaks for all of them
    before = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
    is_last = before == SPLITS - 1
    if is_last:
        acc_TO = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
        UNROLL: tl.constexpr = (
            4 if BLOCK_T * BLOCK_O < 8192 else 1
        )  # loads of a tile take registers
        for other in tl.range(SPLITS, loop_unroll_factor=UNROLL):
            place = partial + (tile + other * num_tiles).to(tl.int64) * (BLOCK_T * BLOCK_O) + spot
            # Not from the L1 cache, which does not see what other processors write.
            acc_TO += tl.load(place, mask=t < num_rows, other=0.0, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    return is_last, acc_TO


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x, w, bias, y, partial, arrived, num_rows, num_outputs, num_inputs, x_stride, num_tiles,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr, EVEN: tl.constexpr, TURNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`EVEN`: the inputs are a multiple of BLOCK_I. More rows than a tile has are computed by
    programs of their own, which only works without splits."""
    tile, split = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * BLOCK_T
    x += first.to(tl.int64) * x_stride
    y += first.to(tl.int64) * (num_outputs // 2 if GATED else num_outputs)
    num_rows -= first
    row_O = matrix_rows(tile * BLOCK_O, num_outputs, BLOCK_O, GATED)
    share = tl.cdiv(tl.cdiv(num_inputs, BLOCK_I), SPLITS) * BLOCK_I
    start = split * share
    stop = tl.minimum(start + share, num_inputs)
    # Asking for weights before the rows are there was measured, and took longer.
    release_next(PDL)
    await_inputs(PDL)
    t, i = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_I)
    x_at = x + t.to(tl.int64)[:, None] * x_stride + i[None, :]
    w_at = w + row_O.to(tl.int64)[:, None] * num_inputs + i[None, :]
    acc = tl.zeros([BLOCK_O, BLOCK_T] if TURNED else [BLOCK_T, BLOCK_O], tl.float32)
    for at in range(start, stop, BLOCK_I):
        if EVEN:
            x_TI = tl.load(x_at + at, mask=(t < num_rows)[:, None], other=0.0)
            w_OI = tl.load(w_at + at)
        else:
            inside = (i < num_inputs - at)[None, :]
            x_TI = tl.load(x_at + at, mask=(t < num_rows)[:, None] & inside, other=0.0)
            w_OI = tl.load(w_at + at, mask=inside, other=0.0)
        if TURNED:
            acc = tl.dot(w_OI, x_TI.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x_TI, w_OI.T, acc, input_precision="ieee")
    acc_TO = acc.T if TURNED else acc
    if SPLITS > 1:
        is_last, acc_TO = add_splits(
            acc_TO, partial, arrived, tile, split, num_tiles, num_rows, BLOCK_T, BLOCK_O, SPLITS
        )
        if is_last:
            store_tile(y, bias, acc_TO, tile, num_rows, num_outputs, BLOCK_T, BLOCK_O, GATED)
    else:
        store_tile(y, bias, acc_TO, tile, num_rows, num_outputs, BLOCK_T, BLOCK_O, GATED)


@triton.jit
def _one_row(
    x, w, bias, y, num_outputs, num_inputs,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, WHOLE: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first block of weights is under way before x is there; then always one block ahead.
    `WHOLE`: it is the only one."""
    tile = tl.program_id(0)
    row_O = matrix_rows(tile * BLOCK_O, num_outputs, BLOCK_O, GATED)
    i = tl.arange(0, BLOCK_I)
    w_at = w + row_O.to(tl.int64)[:, None] * num_inputs + i[None, :]
    release_next(PDL)
    if EVEN:
        next_OI = tl.load(w_at)
    else:
        next_OI = tl.load(w_at, mask=(i < num_inputs)[None, :], other=0.0)
    if WHOLE:
        await_inputs(PDL)
        x_I = tl.load(x + i, mask=i < num_inputs, other=0.0)
        acc_OI = next_OI.to(tl.float32) * x_I.to(tl.float32)[None, :]
    else:
        if PDL and PREFETCH:
            prefetch_tile(
                w, tile * BLOCK_O, BLOCK_I, num_inputs, num_outputs, num_inputs, BLOCK_O, GATED
            )
        await_inputs(PDL)
        acc_OI = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
        for at in range(0, num_inputs, BLOCK_I):
            w_OI = next_OI
            ahead = at + BLOCK_I
            if EVEN:
                next_OI = tl.load(w_at + ahead, mask=ahead < num_inputs)
                x_I = tl.load(x + at + i)
            else:
                next_OI = tl.load(w_at + ahead, mask=(i < num_inputs - ahead)[None, :], other=0.0)
                x_I = tl.load(x + at + i, mask=i < num_inputs - at, other=0.0)
            acc_OI += w_OI.to(tl.float32) * x_I.to(tl.float32)[None, :]
    acc_1O = tl.sum(acc_OI, 1)[None, :]
    store_tile(y, bias, acc_1O, tile, 1, num_outputs, 1, BLOCK_O, GATED)


def linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    if not _fits(x_TI, weight_OI):
        return _many_rows(x_TI, weight_OI, bias_O, dtype or x_TI.dtype)
    y_TO = x_TI.new_empty(len(x_TI), len(weight_OI), dtype=dtype or x_TI.dtype)
    return multiply(x_TI, weight_OI, bias_O, y_TO, gated=False)


def gate_up_silu(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    if not _fits(x_TI, weight_OI):
        return silu_mul(F.linear(x_TI, weight_OI, bias_O))
    y_TO = x_TI.new_empty(len(x_TI), len(weight_OI) // 2)
    return multiply(x_TI, weight_OI, bias_O, y_TO, gated=True)


def _fits(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Few rows of a type that tensor cores know."""
    few = len(x_TI) <= FEW_ROWS
    return few and x_TI.dtype == weight_OI.dtype and x_TI.element_size() == 2


def linear_float32(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return linear(x_TI, weight_OI, bias_O, torch.float32)


def logits(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return linear_float32(x_TI, weight_OI)


def linear_invariant(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """One tile and one order of summing for all numbers of rows and outputs."""
    tile = INVARIANT[weight_OI.element_size()]
    plan = LinearLaunch(tile, -(-len(weight_OI) // tile.outputs), 1, prefetch=False)
    y_TO = x_TI.new_empty(len(x_TI), len(weight_OI))
    return multiply(x_TI, weight_OI, bias_O, y_TO, False, plan)


def _many_rows(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if dtype == x_TI.dtype:
        return F.linear(x_TI, weight_OI, bias_O)
    y_TO = torch.mm(x_TI, weight_OI.t(), out_dtype=dtype)
    return y_TO if bias_O is None else y_TO + bias_O


def multiply(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    y_TO: Tensor,
    gated: bool,
    plan: LinearLaunch | None = None,
) -> Tensor:
    """Into `y_TO`; `plan`: another than the usual one, which has tiles for a few rows."""
    rows, (outputs, inputs) = len(x_TI), weight_OI.shape
    assert x_TI.shape[1] == inputs and weight_OI.is_contiguous() and y_TO.is_contiguous()
    if rows == 0 or outputs == 0:
        return y_TO
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    chosen = None if plan or gated else linear_hopper.choose(x_TI, weight_OI)
    if chosen:
        return linear_hopper.multiply(x_TI, None, weight_OI, None, bias_O, y_TO, chosen)
    size, processors = weight_OI.element_size(), processors_of(x_TI)
    plan = plan or plan_for(rows, outputs, inputs, processors, size)
    tile, pdl = plan.tile, dependent_launch(x_TI)
    constants = {
        "BLOCK_O": tile.outputs,
        "BLOCK_I": tile.inputs,
        "GATED": gated,
        "EVEN": inputs % tile.inputs == 0,
        "PDL": pdl.on,
        "num_warps": tile.warps,
        **pdl.options,
    }
    if tile.rows == 1:
        constants |= {"WHOLE": inputs <= tile.inputs, "PREFETCH": plan.prefetch}
        _one_row[(plan.tiles,)](x_TI, weight_OI, bias_O, y_TO, outputs, inputs, **constants)
        return y_TO
    chunks = -(-rows // tile.rows)
    assert chunks == 1 or plan.splits == 1, plan
    partial, arrived = split_buffers(plan, x_TI)
    _few_rows[(plan.tiles, plan.splits, chunks)](
        x_TI, weight_OI, bias_O, y_TO, partial, arrived,
        rows, outputs, inputs, x_TI.stride(0), plan.tiles,
        BLOCK_T=tile.rows, SPLITS=plan.splits, TURNED=tile.turned, num_stages=tile.stages,
        **constants,
    )  # fmt: skip
    return y_TO


@cache
def plan_for(
    rows: int, outputs: int, inputs: int, processors: int, element_size: int = 2
) -> LinearLaunch:
    whole = WHOLE_ROWS.get(triton.next_power_of_2(inputs))
    one_row = whole if whole and filled(inputs) else ONE_ROW
    return plan_with(one_row, TILES, rows, outputs, inputs, element_size, processors)


def filled(inputs: int) -> bool:
    """Whether loading a power of two of them wastes little."""
    return 4 * inputs > 3 * triton.next_power_of_2(inputs)


def plan_with(
    one_row: tuple[tuple[int, LinearTile], ...],
    tiles: tuple[LinearTile, ...],
    rows: int,
    outputs: int,
    inputs: int,
    element_size: int,
    processors: int,
) -> LinearLaunch:
    """Which of the tiles, and how many splits of the inputs."""
    prefetch = outputs * inputs * element_size <= PREFETCH_BYTES
    prefetch = prefetch and inputs * element_size % 16 == 0
    if rows == 1:
        tile = next(tile for most, tile in one_row if outputs <= most)
        return LinearLaunch(tile, -(-outputs // tile.outputs), 1, prefetch)
    tile = next(tile for tile in tiles if rows <= tile.rows)
    across, blocks = -(-outputs // tile.outputs), -(-inputs // tile.inputs)
    wanted = min(round(tile.programs * processors / across), blocks // SPLIT_BLOCKS, MAX_SPLITS)
    share = -(-blocks // max(1, wanted))
    return LinearLaunch(tile, across, -(-blocks // share), prefetch)


def processors_of(x: Tensor) -> int:
    """In the interpreter there are as many as it takes to have splits in tests."""
    return num_processors(x.device.index) if x.is_cuda else 4


def split_buffers(plan: LinearLaunch, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Room for the splits' sums, and the tiles' counters."""
    if plan.splits == 1:
        return None, None
    assert plan.tiles <= MAX_COUNTERS, plan
    numbers = plan.splits * plan.tiles * plan.tile.rows * plan.tile.outputs
    partial = torch.empty(numbers, dtype=torch.float32, device=x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    return partial, counters(x.device)[_place_of(stream)]


@cache
def counters(device: torch.device) -> Tensor:
    """All zero between kernels. Kernels of one stream do not meet in them; each stream has its own.
    They are made by the first call, which must not be inside a CUDA graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("call the kernel once before it is captured in a CUDA graph")
    return torch.zeros(MAX_STREAMS, MAX_COUNTERS, dtype=torch.int32, device=device)


_streams = count()


@cache
def _place_of(stream: int) -> int:
    return next(_streams) % MAX_STREAMS
