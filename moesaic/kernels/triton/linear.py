"""Products of few rows with a large matrix, which is read once, at the speed of memory.

T rows · I inputs · O outputs. `_one_row` multiplies one row without tensor cores: a program has few
outputs and all inputs, and no sum crosses programs. `_few_rows` (on Hopper sometimes
linear_hopper.py) uses tensor cores; where outputs are too few to fill the GPU, it cuts the inputs
into splits, and the last program adds their sums in a fixed order, so that timing changes no bit.

Gated matrices hold gate, then up; a tile interleaves rows of both, so that pairs are in one thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import count

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.experts import Rows
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
    """A program computes rows x outputs, `inputs` at a time."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int = 1
    programs: int = 2
    """Splits aim at this many for each processor."""
    turned: bool = False
    """Compute w xᵀ, which Hopper's matrix units support for as few as 8 rows with 64 outputs."""
    registers: int | None = None
    """Limit for a thread, so that more programs fit; only norm_linear.py uses it."""


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    tile: LinearTile
    tiles: int
    splits: int
    prefetch: bool


# Beyond this many rows cuBLAS is faster.
FEW_ROWS = 64
# Tiles of whole matrix rows, loaded before x is available, so that all of a layer's matrix can be
# in flight: by padded length, then by the most outputs.
WHOLE_ROWS = {
    2048: (
        (1024, LinearTile(1, 2, 2048, 4)),
        (16_384, LinearTile(1, 8, 2048, 4)),
        (1 << 62, LinearTile(1, 4, 2048, 4)),
    ),
    4096: ((1024, LinearTile(1, 1, 4096, 4)), (1 << 62, LinearTile(1, 2, 4096, 4))),
}
# Shorter and longer rows in blocks, by the most outputs: smaller tiles give every processor work,
# larger ones read x less often.
ONE_ROW = (
    (1024, LinearTile(1, 2, 1024, 4)),
    (16_384, LinearTile(1, 4, 1024, 4)),
    (1 << 62, LinearTile(1, 8, 1024, 8)),
)
# Every program reads all rows, and every split stores a sum: more rows need wider tiles and fewer
# splits.
TILES = (
    LinearTile(8, 64, 128, 4, 6, programs=1, turned=True),
    LinearTile(16, 64, 128, 4, 5, programs=1, turned=True),
    LinearTile(32, 64, 128, 4, 4, programs=1, turned=True),
    LinearTile(64, 64, 64, 4, 6, programs=1, turned=True),
    LinearTile(128, 128, 64, 8, 4, programs=1),
)
# For deterministic mode, by the bytes of a number: float32 has no tensor cores.
INVARIANT = {2: LinearTile(64, 64, 64, 4, 4), 4: LinearTile(16, 32, 32, 4, 3)}
# The fewest blocks of inputs worth a split.
SPLIT_BLOCKS = 2
MAX_SPLITS = 16
# Matrices that fit the L2 cache beside others are prefetched before the rows are available.
PREFETCH_BYTES = 32 << 20
MAX_COUNTERS = 4096
MAX_STREAMS = 64


@triton.jit
def matrix_rows(first, num_outputs, BLOCK_O: tl.constexpr, GATED: tl.constexpr):
    """Matrix rows of a tile; past the end the last one repeats. Gated: of 6, 0 3 1 4 2 5."""
    place = first + tl.arange(0, BLOCK_O)
    if GATED:
        inner = num_outputs // 2
        rows = (place % 2) * inner + tl.minimum(place // 2, inner - 1)
    else:
        rows = tl.minimum(place, num_outputs - 1)
    return rows


@triton.jit
def prefetch_matrix(w, row_O, start, stop, num_inputs, LINES: tl.constexpr):
    """Prefetches inputs start .. stop of some rows, LINES cache lines at a time."""
    LINE: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
    for i in range(start, stop, LINES * LINE):
        column = tl.minimum(i + tl.arange(0, LINES) * LINE, stop - 1)
        prefetch_lines(w + row_O.to(tl.int64)[:, None] * num_inputs + column[None, :])


@triton.jit
def prefetch_tile(
    w, first, start, stop, num_outputs, num_inputs, BLOCK_O: tl.constexpr, GATED: tl.constexpr
):
    """Prefetches inputs start .. stop of a tile's rows (multiples of 16 bytes), a row at a time."""
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
    """Interleaved gate and up -> silu(gate) * up."""
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
def store_split(
    y, bias, acc_TO, partial, arrived, tile, split, num_tiles, num_rows, num_outputs,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Stores a split's sum. The last program of a tile adds all of them in order, stores the
    outputs and resets the counter."""
    if SPLITS == 1:
        store_tile(y, bias, acc_TO, tile, num_rows, num_outputs, BLOCK_T, BLOCK_O, GATED)
    else:
        t = tl.arange(0, BLOCK_T)[:, None]
        spot = t * BLOCK_O + tl.arange(0, BLOCK_O)[None, :]
        mine = (tile + split * num_tiles).to(tl.int64) * (BLOCK_T * BLOCK_O)
        tl.store(partial + mine + spot, acc_TO, mask=t < num_rows)
        tl.debug_barrier()  # All threads store before one of them counts.
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
        if before == SPLITS - 1:
            acc_TO = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
            # Loads of a large tile take too many registers.
            UNROLL: tl.constexpr = 4 if BLOCK_T * BLOCK_O < 8192 else 1
            for other in tl.range(SPLITS, loop_unroll_factor=UNROLL):
                first = (tile + other * num_tiles).to(tl.int64) * (BLOCK_T * BLOCK_O)
                # Bypasses the L1 cache, which does not see the writes of other processors.
                acc_TO += tl.load(
                    partial + first + spot, mask=t < num_rows, other=0.0, cache_modifier=".cg"
                )
            tl.store(arrived + tile, 0)
            store_tile(y, bias, acc_TO, tile, num_rows, num_outputs, BLOCK_T, BLOCK_O, GATED)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x, w, bias, y, partial, arrived, num_rows, num_outputs, num_inputs, x_stride, num_tiles,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr, EVEN: tl.constexpr, TURNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`EVEN`: the inputs are a multiple of BLOCK_I. More rows than a tile holds go to further
    programs, which requires SPLITS == 1."""
    tile, split = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * BLOCK_T
    x += first.to(tl.int64) * x_stride
    y += first.to(tl.int64) * (num_outputs // 2 if GATED else num_outputs)
    num_rows -= first
    row_O = matrix_rows(tile * BLOCK_O, num_outputs, BLOCK_O, GATED)
    share = tl.cdiv(tl.cdiv(num_inputs, BLOCK_I), SPLITS) * BLOCK_I
    start = split * share
    stop = tl.minimum(start + share, num_inputs)
    # Prefetching weights before the rows are available was measured to be slower.
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
    store_split(
        y, bias, acc_TO, partial, arrived, tile, split, num_tiles, num_rows, num_outputs,
        BLOCK_T, BLOCK_O, SPLITS, GATED,
    )  # fmt: skip


@triton.jit
def _one_row(
    x, w, bias, y, num_outputs, num_inputs,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, WHOLE: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Loads weights one block ahead, the first before x is available. `WHOLE`: the only one."""
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
    """Few rows of a type that tensor cores support."""
    few = len(x_TI) <= FEW_ROWS
    return few and x_TI.dtype == weight_OI.dtype and x_TI.element_size() == 2


def linear_float32(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return linear(x_TI, weight_OI, bias_O, torch.float32)


def logits(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return linear_float32(x_TI, weight_OI)


def linear_invariant(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Uses one tile and one order of summation for all numbers of rows and outputs."""
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
    """Multiplies into `y_TO`. `plan` overrides the default one, whose tiles hold few rows."""
    rows, (outputs, inputs) = len(x_TI), weight_OI.shape
    assert x_TI.shape[1] == inputs and weight_OI.is_contiguous() and y_TO.is_contiguous()
    if rows == 0 or outputs == 0:
        return y_TO
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    chosen = None if plan or gated else linear_hopper.choose(x_TI, weight_OI)
    if chosen:
        return linear_hopper.multiply(Rows(x_TI), weight_OI, None, bias_O, y_TO, chosen)
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
    tile = choose_tile(one_row, TILES, rows, outputs)
    return launch_of(tile, outputs, inputs, element_size, processors)


def filled(inputs: int) -> bool:
    """Whether padding to a power of two wastes little."""
    return 4 * inputs > 3 * triton.next_power_of_2(inputs)


def choose_tile(
    one_row: Iterable[tuple[int, LinearTile]], tiles: Iterable[LinearTile], rows: int, outputs: int
) -> LinearTile:
    if rows == 1:
        return next(tile for most, tile in one_row if outputs <= most)
    return next(tile for tile in tiles if rows <= tile.rows)


def launch_of(
    tile: LinearTile, outputs: int, inputs: int, element_size: int, processors: int
) -> LinearLaunch:
    """Chooses the number of splits."""
    prefetch = outputs * inputs * element_size <= PREFETCH_BYTES
    prefetch = prefetch and inputs * element_size % 16 == 0
    across, blocks = -(-outputs // tile.outputs), -(-inputs // tile.inputs)
    if tile.rows == 1:
        return LinearLaunch(tile, across, 1, prefetch)
    wanted = min(round(tile.programs * processors / across), blocks // SPLIT_BLOCKS, MAX_SPLITS)
    share = -(-blocks // max(1, wanted))
    return LinearLaunch(tile, across, -(-blocks // share), prefetch)


def processors_of(x: Tensor) -> int:
    """The interpreter pretends to have 4, so that tests cover splits."""
    return num_processors(x.device.index) if x.is_cuda else 4


def split_buffers(plan: LinearLaunch, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Buffers for the splits' sums and the tiles' counters."""
    if plan.splits == 1:
        return None, None
    assert plan.tiles <= MAX_COUNTERS, plan
    numbers = plan.splits * plan.tiles * plan.tile.rows * plan.tile.outputs
    partial = torch.empty(numbers, dtype=torch.float32, device=x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    return partial, counters(x.device)[_place_of(stream)]


@cache
def counters(device: torch.device) -> Tensor:
    """Zeros between kernels, a row for each stream. The first call allocates them and must not be
    captured in a CUDA graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("call the kernel once before it is captured in a CUDA graph")
    return torch.zeros(MAX_STREAMS, MAX_COUNTERS, dtype=torch.int32, device=device)


_streams = count()


@cache
def _place_of(stream: int) -> int:
    return next(_streams) % MAX_STREAMS
