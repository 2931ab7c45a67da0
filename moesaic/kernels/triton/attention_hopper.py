"""Prefill attention on Hopper, with specialised warps.

An item is a tile of 128 rows and a key/value head, as in attention_prefill.py; a program handles
many. Four warps load queries, then blocks of keys and values, 16 bytes a thread. Two groups of four
warps attend, with 64 rows each. A ring of stages connects them: barriers `ready` count arrivals in
a stage, barriers `empty` its readers. The loaders run up to a ring ahead, and so fetch the next
item while the others finish theirs. Each group keeps two products in flight, the scores of the next
block and the values of this one, and computes the softmax meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from moesaic.kernels.attention import PREFILL_ROWS, LayerPages, PrefillRows, Queries, Softmax
from moesaic.kernels.triton.attention_blocks import (
    LOG2_E,
    LOWEST,
    PACKED,
    first_fitting,
    prefill_arguments,
    strides,
)
from moesaic.kernels.triton.attention_loads import (
    count_items,
    first_key,
    item_of,
    load_items,
    look_up,
    row_heads,
    row_layout,
)
from moesaic.kernels.triton.launch import dependent_launch, is_hopper, num_processors

ROWS = PREFILL_ROWS
# Registers of a thread before the 12 warps redistribute them: 65,536 in all.
REGISTERS = 168
ATTENDING, LOADING = gl.constexpr(200), gl.constexpr(104)


@dataclass(frozen=True)
class RingConfig:
    block: int
    """Keys of a block."""
    stages: int
    """Blocks of keys, and of values, in the ring."""
    tiles: int = 2
    """Query tiles in a ring of their own."""
    turns: bool = True
    """Whether the two groups multiply in turn, each computing its softmax meanwhile."""


# By the most bytes of a token's keys of one head.
CONFIGS = (
    (128, RingConfig(128, 3)),
    (256, RingConfig(128, 2)),
    (384, RingConfig(64, 3, tiles=1, turns=False)),
)


def choose_config(key_bytes: int) -> RingConfig:
    return first_fitting(CONFIGS, key_bytes)


@dataclass(frozen=True)
class AttentionConstants:
    """Compile-time constants `P` of the kernel."""

    GROUP: int
    PER_TILE: int
    D1: int
    D2: int
    V: int
    PAGE: int
    WINDOW: int
    ring: RingConfig
    PDL: bool = True

    @property
    def positions(self) -> int:
        return ROWS // self.PER_TILE

    @property
    def member_blocks(self) -> int:
        return -(-self.GROUP // self.PER_TILE)

    def first_position(self, which: int) -> int:
        """First position of a group's rows, relative to the tile."""
        return 64 * which // self.PER_TILE

    def last_position(self, which: int) -> int:
        """With turns both groups attend all blocks, so that each has equally many turns."""
        last = self.positions - 1
        return last if self.ring.turns else min((64 * which + 63) // self.PER_TILE, last)


@gluon.jit
def _exp2(x):
    """Flushes subnormal results to zero, which saves three of four instructions."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _order_before_wait(sums):
    """Keeps the assembler from waiting for the pending products before it computes `sums`: it does
    not move a wait across a branch. The branch is never taken, as sums are not negative."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 least;
        .reg .pred negative;
        min.f32 least, $2, $3;
        setp.lt.f32 negative, least, 0f00000000;
        @negative nanosleep.u32 0;
        mov.f32 $0, $2;
        mov.f32 $1, $3;
        }""",
        "=f,=f,f,f", [sums], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def _score(place, step, buffers, barriers, P: gl.constexpr, WHICH: gl.constexpr):
    """Starts [64, BLOCK] of queries times keys."""
    q1_bufs, q2_bufs, k1_bufs, k2_bufs, _, _ = buffers
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P.ring.block, 16])
    stage = step % P.ring.stages
    mbarrier.wait(barriers[2].index(stage), step // P.ring.stages & 1)
    # Threads, not the copy engine, wrote the block: fence it from the matrix units.
    fence_async_shared()
    BLOCK: gl.constexpr = P.ring.block
    s = gl.zeros([64, BLOCK], gl.float32, mma)
    k1 = k1_bufs.index(stage).permute((1, 0))
    q1 = q1_bufs.index(place).slice(64 * WHICH, 64)
    s = warpgroup_mma(q1, k1, s, use_acc=False, is_async=True)
    if P.D2 > 0:
        k2 = k2_bufs.index(stage).permute((1, 0))
        q2 = q2_bufs.index(place).slice(64 * WHICH, 64)
        s = warpgroup_mma(q2, k2, s, is_async=True)
    return s


@gluon.jit
def _mix(p, acc, step, buffers, barriers, P: gl.constexpr):
    """Starts weights times values."""
    stage = step % P.ring.stages
    mbarrier.wait(barriers[4].index(stage), step // P.ring.stages & 1)
    fence_async_shared()
    return warpgroup_mma(p, buffers[4].index(stage), acc, is_async=True)


@gluon.jit
def _hide(s, start, position, P: gl.constexpr, mma: gl.constexpr):
    """Masks the keys that a row does not see."""
    n = start + gl.arange(0, P.ring.block, layout=gl.SliceLayout(0, mma))
    seen = n[None, :] <= position[:, None]
    if P.WINDOW > 0:
        seen = seen & (n[None, :] > position[:, None] - P.WINDOW)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _softmax(s, total, top, scale):
    """Weights of a block, and the factor that rescales the earlier sums."""
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    p = _exp2(s * scale - new_top[:, None])
    share = _exp2(top - new_top)
    return p, share, total * share + gl.sum(p, 1), new_top


@gluon.jit
def _weights(p, out, P: gl.constexpr):
    """Converts the weights to the left operand of a product, in place."""
    mixed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P.V, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mixed, 2)
    return gl.convert_layout(p.to(out.dtype.element_ty), left)


@gluon.jit
def _attend_block(
    state, start, place, step, turn, position, scale, out, buffers, barriers,
    P: gl.constexpr, WHICH: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Computes scores and softmax of block `step` while the previous block's values are summed."""
    acc, p, total, top = state
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P.ring.block, 16])
    mixed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P.V, 16])
    if P.ring.turns:
        mbarrier.wait(barriers[6].index(WHICH), turn & 1 ^ 1 ^ WHICH)
    s = _score(place, step, buffers, barriers, P, WHICH)
    acc = _mix(p, acc, step - 1, buffers, barriers, P)
    if P.ring.turns:
        mbarrier.arrive(barriers[6].index(1 - WHICH), count=1)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(barriers[3].index(step % P.ring.stages), count=1)
    if MASKED:
        s = _hide(s, start, position, P, mma)
    new_p, share, total, top = _softmax(s, total, top, scale)
    total = _order_before_wait(total)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(barriers[5].index((step - 1) % P.ring.stages), count=1)
    acc = acc * gl.convert_layout(share, gl.SliceLayout(1, mixed))[:, None]
    return acc, _weights(new_p, out, P), total, top


@gluon.jit
def _drain(step, count, barriers, P: gl.constexpr):
    """Releases blocks that only the other group sees."""
    _, _, k_ready, k_empty, v_ready, v_empty, _ = barriers
    for _ in range(count):
        stage = step % P.ring.stages
        phase = step // P.ring.stages & 1
        mbarrier.wait(k_ready.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_ready.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        step += 1


@gluon.jit
def _finish(acc, total, top, sinks, numbers, part, v_scale, P: gl.constexpr):
    """Same as in attention_blocks.py."""
    mixed: gl.constexpr = acc.type.layout
    if sinks is not None:
        _, member = row_heads(numbers, part, 0, P)
        head = part // P.member_blocks * P.GROUP + gl.minimum(member, P.GROUP - 1)
        sink = gl.load(sinks + head).to(gl.float32) * 1.4426950408889634
        new_top = gl.maximum(top, sink)
        share = _exp2(top - new_top)
        total = total * share + _exp2(sink - new_top)
        acc = acc * gl.convert_layout(share, gl.SliceLayout(1, mixed))[:, None]
    inverse = v_scale / gl.where(total > 0, total, 1.0)
    return acc * gl.convert_layout(inverse, gl.SliceLayout(1, mixed))[:, None]


@gluon.jit
def _store(acc, staging, ends, offset, start, length, part, P: gl.constexpr, WHICH: gl.constexpr):
    """Stores through shared memory, so that each thread writes 16 bytes."""
    out, out_row, out_head = ends
    layout: gl.constexpr = row_layout(P.V)
    staging.store(acc.to(out.dtype.element_ty))
    block = staging.load(layout)
    numbers = 64 * WHICH + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    query, member = row_heads(numbers, part, offset, P)
    kept = (numbers < P.positions * P.PER_TILE) & (query < length) & (member < P.GROUP)
    head = part // P.member_blocks * P.GROUP + member
    at = (start + query).to(gl.int64) * out_row + head * out_head
    d = gl.arange(0, P.V, layout=gl.SliceLayout(0, layout))
    gl.store(out + at[:, None] + d[None, :], block, mask=kept[:, None])


@gluon.jit
def _attend(
    tables, buffers, barriers, ends, sinks, parts, items, scale, v_scale,
    P: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P.ring.block, 16])
    mixed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P.V, 16])
    V: gl.constexpr = P.V
    q_ready, q_empty, _k_ready, k_empty, _v_ready, v_empty, _turns = barriers
    out = ends[0]
    numbers = 64 * WHICH + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    step = 0
    # Turns before this item, less one: its first block takes none.
    turn = -1
    _seq, offset, start, length, kv_len = look_up(item_of(0, items), parts, tables)
    for number in range(count_items(items)):
        part = item_of(number, items) % parts
        oldest = kv_len - length + offset
        position = oldest + numbers // P.PER_TILE
        low = first_key(oldest, P)
        high = gl.minimum(oldest + P.positions, kv_len)
        mine = gl.minimum(oldest + P.last_position(WHICH) + 1, kv_len)
        count = (high - low + P.ring.block - 1) // P.ring.block
        blocks = (mine - low + P.ring.block - 1) // P.ring.block
        # Blocks that all rows see entirely; the first one is always masked.
        plain = gl.minimum((oldest + P.first_position(WHICH) + 1) // P.ring.block, blocks)
        if P.WINDOW > 0:
            plain = 1
        plain = gl.maximum(plain, 1)
        place = number % P.ring.tiles
        mbarrier.wait(q_ready.index(place), number // P.ring.tiles & 1)
        s = _score(place, step, buffers, barriers, P, WHICH)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(step % P.ring.stages), count=1)
        s = _hide(s, low, position, P, mma)
        top = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, mma))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, mma))
        p, _share, total, top = _softmax(s, total, top, scale)
        p = _weights(p, out, P)
        acc = gl.zeros([64, V], gl.float32, mixed)
        for j in range(1, plain):
            acc, p, total, top = _attend_block(
                (acc, p, total, top), low + j * P.ring.block, place, step + j, turn + j, position,
                scale, out, buffers, barriers, P, WHICH, False,
            )  # fmt: skip
        for j in range(plain, blocks):
            acc, p, total, top = _attend_block(
                (acc, p, total, top), low + j * P.ring.block, place, step + j, turn + j, position,
                scale, out, buffers, barriers, P, WHICH, True,
            )  # fmt: skip
        mbarrier.arrive(q_empty.index(place), count=1)
        last = step + blocks - 1
        acc = _mix(p, acc, last, buffers, barriers, P)
        # Loaded while the last product is in flight.
        following = look_up(item_of(number + 1, items), parts, tables)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v_empty.index(last % P.ring.stages), count=1)
        _drain(step + blocks, count - blocks, barriers, P)
        acc = _finish(acc, total, top, sinks, numbers, part, v_scale, P)
        _store(acc, buffers[5].index(WHICH), ends, offset, start, length, part, P, WHICH)
        step += count
        turn += count - 1
        _seq, offset, start, length, kv_len = following


@gluon.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=PACKED)
def attention_kernel(
    q1,
    q2,
    keys,
    values,
    out,
    sinks,
    tiles,
    starts,
    lengths,
    kv_lens,
    first_p,
    pages_p,
    q1_row,
    q1_head,
    q2_row,
    q2_head,
    k_slot,
    k_head,
    v_slot,
    v_head,
    out_row,
    out_head,
    parts,
    scale,
    v_scale,
    P: gl.constexpr,
):
    STAGES: gl.constexpr = P.ring.stages
    TILES: gl.constexpr = P.ring.tiles
    kind: gl.constexpr = keys.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q1_bufs = gl.allocate_shared_memory(kind, [TILES, 128, P.D1], wide)
    k1_bufs = gl.allocate_shared_memory(kind, [STAGES, P.ring.block, P.D1], wide)
    q2_bufs = q1_bufs
    k2_bufs = k1_bufs
    if P.D2 > 0:
        q2_bufs = gl.allocate_shared_memory(kind, [TILES, 128, P.D2], wide)
        k2_bufs = gl.allocate_shared_memory(kind, [STAGES, P.ring.block, P.D2], wide)
    v_bufs = gl.allocate_shared_memory(kind, [STAGES, P.ring.block, P.V], wide)
    staging = gl.allocate_shared_memory(kind, [2, 64, P.V], wide)
    q_ready = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # Each of the 128 loading threads signals its own copies.
    for i in gl.static_range(TILES):
        mbarrier.init(q_ready.index(i), count=128)
        mbarrier.init(q_empty.index(i), count=2)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=128)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=128)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    if P.PDL:
        gdc_wait()
    items = gl.load(tiles) * parts
    tables = (tiles, starts, lengths, kv_lens, first_p, pages_p)
    buffers = (q1_bufs, q2_bufs, k1_bufs, k2_bufs, v_bufs, staging)
    barriers = (q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, turns)
    q = (q1, q2, q1_row, q1_head, q2_row, q2_head)
    cache = (keys, values, k_slot, k_head, v_slot, v_head)
    ends = (out, out_row, out_head)
    gl.warp_specialize(
        [
            (_attend, (tables, buffers, barriers, ends, sinks, parts, items, scale, v_scale, P, 0)),
            (_attend, (tables, buffers, barriers, ends, sinks, parts, items, scale, v_scale, P, 1)),
            (load_items, (q, cache, tables, buffers, barriers, parts, items, P)),
        ],
        [4, 4],
        [ATTENDING, LOADING],
    )


def can_run(q: Queries, cache: LayerPages, out_TNV: Tensor) -> bool:
    """Requires a Hopper GPU, separate keys and values in the queries' 2-byte type, 64 or 128
    channels (keys also 128 + 64), and aligned rows. `q` comes from `two_parts`."""
    rest = 0 if q.rest is None else q.rest.shape[-1]
    tensors = [q.values, cache.keys, out_TNV, *(x for x in (q.rest, cache.values) if x is not None)]
    return (
        q.values.is_cuda
        and is_hopper(q.values.device.index)
        and cache.values is not None
        and all(x.dtype == q.values.dtype and x.element_size() == 2 for x in tensors)
        and (q.values.shape[-1], rest) in ((64, 0), (128, 0), (128, 64))
        and cache.value_dim in (64, 128)
        and all(x.data_ptr() % 16 == 0 for x in tensors)
        and all(stride % 16 == 0 for x in tensors for stride in strides(x))
    )


def plan_of(
    q: Queries, cache: LayerPages, window: int | None, config: RingConfig, pdl: bool
) -> AttentionConstants:
    group = q.values.shape[1] // cache.keys.shape[2]
    return AttentionConstants(
        GROUP=group,
        PER_TILE=min(group, ROWS),
        D1=q.values.shape[-1],
        D2=0 if q.rest is None else q.rest.shape[-1],
        V=cache.value_dim,
        PAGE=cache.page_size,
        WINDOW=window or 0,
        ring=config,
        PDL=pdl,
    )


def launch(
    q: Queries, cache: LayerPages, batch: PrefillRows, softmax: Softmax, out_TNV: Tensor
) -> None:
    assert cache.values is not None
    config = choose_config(2 * cache.keys.shape[-1])
    pdl = dependent_launch(out_TNV)
    plan = plan_of(q, cache, softmax.window, config, pdl.on)
    tiles_X2 = batch.tiles(plan.positions)
    parts = cache.keys.shape[2] * plan.member_blocks
    items = (len(tiles_X2) - 1) * parts
    attention_kernel[(min(items, num_processors(out_TNV.device.index)),)](
        *prefill_arguments(q, cache, batch, softmax, out_TNV, tiles_X2),
        parts,
        softmax.scale * cache.k_scale * LOG2_E,
        cache.v_scale,
        plan,
        num_warps=4,
        maxnreg=REGISTERS,
        **pdl.options,
    )
