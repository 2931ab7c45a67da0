"""Products of a few rows on Hopper: all weights are in flight before the rows are available.

T rows · I inputs · O outputs. Each processor runs one program with whole matrix lines in units of
8; no sum crosses programs. A program copies its entire share to shared memory before it waits for
the previous kernel, then loads the rows into registers. The inputs go in steps of 128 bytes for
each warp, which copies and multiplies only these; at the end the warps' sums are added. Every
program reads all rows: with many rows linear.py is faster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.experts import Rows
from moesaic.kernels.triton.launch import dependent_launch, is_hopper, num_processors

# Lines that the matrix units multiply at once.
UNIT = 8
# One row is faster without tensor cores, in programs that share a processor.
FEWEST_ROWS = 2
# By the bytes of a number.
MOST_ROWS = {2: 16, 1: 32}
# Bytes of a processor's shared memory.
SHARED = 227 << 10
# Rows that are multiplied at once.
ROWS = 16
# The first one that divides the inputs into steps and fits.
WARPS = (8, 4)
# Bytes of rows and sums that a thread holds in registers, by the bytes of a number.
HELD = {2: 704, 1: 176}
# Fewer units than this share of the processors leave too many idle.
LEAST_FILLED = 0.75


@dataclass(frozen=True)
class LinearConstants:
    """Compile-time constants `P` of the kernel."""

    INPUTS: int
    UNITS: int
    """Units of a program."""
    ROWS: int
    WARPS: int
    PART: int
    """Steps whose rows are loaded at once."""
    SIZE: int = 2
    """Bytes of a number."""
    BLOCKED: bool = True
    """Whether weights of one byte have scales of blocks rather than lines."""
    PDL: bool = True

    @property
    def chunk(self) -> int:
        """A warp's inputs of a step; with one byte each, those of one scale."""
        return 128 // self.SIZE

    @property
    def slab(self) -> int:
        """The inputs of a step."""
        return self.chunk * self.WARPS

    @property
    def steps(self) -> int:
        return self.INPUTS // self.slab

    @property
    def groups(self) -> int:
        """Groups of inputs that share a scale."""
        return self.INPUTS // 128

    @property
    def width(self) -> int:
        """Numbers that a thread loads at once."""
        return 16 // self.SIZE

    @property
    def shared(self) -> int:
        return self.UNITS * 8 * (self.INPUTS * self.SIZE + self.WARPS * self.ROWS * 4)


@gluon.jit
def _copy_lines(w, buffers, first, num_outputs, P: gl.constexpr):
    """Copies all lines, one group of copies for each step; past the end the last line repeats."""
    STEPS: gl.constexpr = P.steps
    UNITS: gl.constexpr = P.UNITS
    layout: gl.constexpr = gl.BlockedLayout([1, 1, P.width], [1, 4, 8], [P.WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, P.WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    line = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    i = gl.arange(0, P.chunk, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    inner = (warp * P.chunk)[:, None, None] + i[None, None, :]
    for step in gl.static_range(STEPS):
        for unit in gl.static_range(UNITS):
            lines = gl.minimum(first + unit * 8 + line, num_outputs - 1).to(gl.int64) * P.INPUTS
            at = w + lines[None, :, None] + (inner + step * P.slab)
            async_copy.async_copy_global_to_shared(buffers[step * UNITS + unit], at)
        async_copy.commit_group()


@gluon.jit
def _load_rows(x, x_stride, row, num_rows, step, P: gl.constexpr, mma: gl.constexpr):
    """A step's chunks [W, T, chunk], in the layout of the matrix units."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, P.width)
    warp = gl.arange(0, P.WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, left)))
    t = row + gl.arange(0, P.ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))
    i = gl.arange(0, P.chunk, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))
    at = x + (t.to(gl.int64) * x_stride)[None, :, None]
    at = at + ((warp * P.chunk)[:, None, None] + i[None, None, :]) + step * P.slab
    return gl.load(at, mask=(t < num_rows)[None, :, None], other=0.0)


@gluon.jit
def _load_scales(x_scales, row, num_rows, step, P: gl.constexpr, mma: gl.constexpr):
    """Scales [W, T] of a step's chunks of the rows."""
    layout: gl.constexpr = gl.SliceLayout(2, mma)
    warp = gl.arange(0, P.WARPS, layout=gl.SliceLayout(1, layout))
    t = row + gl.arange(0, P.ROWS, layout=gl.SliceLayout(0, layout))
    at = x_scales + (t.to(gl.int64) * P.groups)[None, :] + (step * P.WARPS + warp)[:, None]
    return gl.load(at, mask=(t < num_rows)[None, :], other=0.0)


@gluon.jit
def _block_scales(w_scales, line, step, P: gl.constexpr, mma: gl.constexpr):
    """Scales [W] of a step's chunks of a unit."""
    warp = gl.arange(0, P.WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))
    return gl.load(w_scales + (line // 128 * P.groups + step * P.WARPS) + warp)


@gluon.jit
def _store_unit(total, first, row, unit, ends, P: gl.constexpr):
    """Stores a unit's outputs [T, 8]."""
    y, bias, w_scales, num_rows, num_outputs = ends
    layout: gl.constexpr = total.type.layout
    t = row + gl.arange(0, P.ROWS, layout=gl.SliceLayout(1, layout))
    o = first + unit * 8 + gl.arange(0, 8, layout=gl.SliceLayout(0, layout))
    at = (t.to(gl.int64) * num_outputs)[:, None] + o[None, :]
    inside = o < num_outputs
    if P.SIZE == 1 and not P.BLOCKED:
        total *= gl.load(w_scales + o, mask=inside, other=0.0)[None, :]
    if bias is not None:
        total += gl.load(bias + o, mask=inside, other=0.0).to(gl.float32)[None, :]
    kept = (t < num_rows)[:, None] & inside[None, :]
    gl.store(y + at, total.to(y.dtype.element_ty), mask=kept)


@gluon.jit
def _store(sums, staging, ends, first, row, P: gl.constexpr):
    """Adds the warps' sums [W, T, 8] of each unit in order, and stores the total."""
    UNITS: gl.constexpr = P.UNITS
    for unit in gl.static_range(UNITS):
        staging[unit].store(sums[unit])
    layout: gl.constexpr = gl.BlockedLayout([P.WARPS, 1, 1], [1, 4, 8], [1, P.WARPS, 1], [2, 1, 0])
    for unit in gl.static_range(UNITS):
        total = gl.sum(staging[unit].load(layout), 0)
        _store_unit(total, first, row, unit, ends, P)


@gluon.jit
def _multiply(found, buffers, blocks, sums, step, P: gl.constexpr, mma: gl.constexpr):
    """Adds a step's products, which with one-byte numbers are scaled first."""
    rows = found[0]
    UNITS: gl.constexpr = P.UNITS
    right: gl.constexpr = gl.DotOperandLayout(1, mma, P.width)
    added = ()
    for unit in gl.static_range(UNITS):
        lines = buffers[step * UNITS + unit].permute((0, 2, 1)).load(right)
        if P.SIZE == 1:
            by = found[1]
            if P.BLOCKED:
                by = by * blocks[step * UNITS + unit][:, None]
            product = mma_v2(rows, lines, gl.zeros_like(sums[unit]))
            added = added + (sums[unit] + product * by[:, :, None],)
        else:
            added = added + (mma_v2(rows, lines, sums[unit]),)
    return added


@gluon.jit(do_not_specialize=["num_rows"])
def rows_kernel(
    x, x_scales, w, w_scales, bias, y, num_rows, num_outputs, x_stride, P: gl.constexpr
):
    UNITS: gl.constexpr = P.UNITS
    STEPS: gl.constexpr = P.steps
    PART: gl.constexpr = P.PART
    WARPS: gl.constexpr = P.WARPS
    ROWS: gl.constexpr = P.ROWS
    CHUNK: gl.constexpr = P.chunk
    kind: gl.constexpr = w.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    # Every other line has its halves swapped, so that 8 threads read from different banks.
    halves: gl.constexpr = gl.SwizzledSharedLayout(CHUNK // 2, 1, 2, [2, 1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    # Separate buffers: in a single one, copies would wait for each other.
    buffers = ()
    for _ in gl.static_range(STEPS * UNITS):
        buffers = buffers + (gl.allocate_shared_memory(kind, [WARPS, 8, CHUNK], halves),)
    staging = ()
    for _ in gl.static_range(UNITS):
        staging = staging + (gl.allocate_shared_memory(gl.float32, [WARPS, ROWS, 8], flat),)
    first = gl.program_id(0) * (UNITS * 8)
    ends = (y, bias, w_scales, num_rows, num_outputs)
    if P.PDL:
        gdc_launch_dependents()
    _copy_lines(w, buffers, first, num_outputs, P)
    blocks = ()
    if P.SIZE == 1 and P.BLOCKED:
        for step in gl.static_range(STEPS):
            for unit in gl.static_range(UNITS):
                line = gl.minimum(first + unit * 8, num_outputs - 1)
                blocks = blocks + (_block_scales(w_scales, line, step, P, mma),)
    if P.PDL:
        gdc_wait()
    for row in range(0, num_rows, ROWS):
        sums = ()
        for _ in gl.static_range(UNITS):
            sums = sums + (gl.zeros([WARPS, ROWS, 8], gl.float32, mma),)
        for part in gl.static_range(0, STEPS, PART):
            rows = ()
            for step in gl.static_range(PART):
                at = part + step
                found = _load_rows(x, x_stride, row, num_rows, at, P, mma)
                if P.SIZE == 1:
                    scales = _load_scales(x_scales, row, num_rows, at, P, mma)
                    rows = rows + ((found, scales),)
                else:
                    rows = rows + ((found,),)
            for step in gl.static_range(PART):
                async_copy.wait_group(STEPS - 1 - part - step)
                sums = _multiply(rows[step], buffers, blocks, sums, part + step, P, mma)
        _store(sums, staging, ends, first, row, P)


def choose(x_TI: Tensor, weight_OI: Tensor, blocked: bool = True) -> LinearConstants | None:
    """None if this kernel cannot run or others are faster."""
    if not (x_TI.is_cuda and is_hopper(x_TI.device.index)):
        return None
    tensors = (x_TI, weight_OI)
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0 for t in tensors)
    if not aligned or x_TI.stride(1) != 1 or x_TI.dtype != weight_OI.dtype:
        return None
    size, on = x_TI.element_size(), dependent_launch(x_TI).on
    processors = num_processors(x_TI.device.index)
    return plan_for(len(x_TI), weight_OI.shape, size, processors, blocked, on)


@cache
def plan_for(
    rows: int,
    shape: tuple[int, ...],
    size: int,
    processors: int,
    blocked: bool = True,
    pdl: bool = True,
) -> LinearConstants | None:
    """Distributes the lines over one program for each processor; None if they do not fit."""
    outputs, inputs = shape
    units = -(-outputs // UNIT)
    if not FEWEST_ROWS <= rows <= MOST_ROWS.get(size, 0) or units < LEAST_FILLED * processors:
        return None
    share = -(-units // processors)
    for warps in WARPS:
        steps, odd = divmod(inputs * size, 128 * warps)
        plan = LinearConstants(inputs, share, ROWS, warps, 1, size, blocked, pdl)
        # Steps whose rows a thread can hold beside its sums.
        most = (HELD[size] - share * ROWS) // (4 * ROWS)
        if not odd and most > 0 and plan.shared <= SHARED:
            part = max(part for part in range(1, most + 1) if steps % part == 0)
            return replace(plan, PART=part)
    return None


def multiply(
    x: Rows,
    weight_OI: Tensor,
    w_scales: Tensor | None,
    bias_O: Tensor | None,
    y_TO: Tensor,
    plan: LinearConstants,
) -> Tensor:
    """Multiplies into `y_TO`; the plan must be for these rows."""
    outputs, pdl = len(weight_OI), dependent_launch(y_TO)
    rows_kernel[(-(-outputs // (UNIT * plan.UNITS)),)](
        x.values,
        x.scales,
        weight_OI,
        w_scales,
        bias_O,
        y_TO,
        len(y_TO),
        outputs,
        x.values.stride(0),
        plan,
        num_warps=plan.WARPS,
        **pdl.options,
    )
    return y_TO
