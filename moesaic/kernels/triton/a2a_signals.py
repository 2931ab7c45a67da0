"""Flags that ranks raise in each other's memory, on the device; kernels/a2a.py has the protocol.

`state`, `failure` and `bases` are those of SignalPlanes; `place` is (bases, state, rank, offset of
the flags, channel). `lane` numbers the threads of a program, at least one for each rank: so no two
threads load the same flag at different times and then disagree on whether to go on. All threads of
a program decide by a maximum over them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moesaic.kernels.a2a import (
    COUNT_MASK,
    COUNT_SHIFT,
    GENERATION_SHIFT,
    DeviceStateWord,
    Failure,
    FailureWords,
    SignalPlanes,
)
from moesaic.kernels.triton.launch import INTERPRETED, dependent_launch

# Arguments that vary by step or layer, and must not specialise a kernel.
VARYING = ["rank", "channel", "tag", "rows", "num_rows"]
GENERATION, TIMEOUT_NS, ACTIVE, BROKEN, CHANNELS = (tl.constexpr(w.value) for w in DeviceStateWord)
ABORT, FAILURE, CHANNEL, PEERS, SEEN, WANTED = (tl.constexpr(w.value) for w in FailureWords)
_, TIMEOUT, OUT_OF_STEP, ABORTED = (tl.constexpr(reason.value) for reason in Failure)
COUNT_BITS, GENERATION_BITS = tl.constexpr(COUNT_SHIFT), tl.constexpr(GENERATION_SHIFT)
TURNS = tl.constexpr(COUNT_MASK)
# The state of a peer; the worst of all peers counts.
HERE, BEHIND, GIVEN_UP, BEYOND = (tl.constexpr(level) for level in range(4))
# Polls of the flags between two looks at the clock and at the host's memory, which is slow. The
# interpreter runs no peers meanwhile, so there the first look is the last.
LOOKS = tl.constexpr(4 if INTERPRETED.value else 256)


def lanes(size: int, warps: int) -> int:
    """Threads of a program, or ranks if there are more."""
    return max(32 * warps, triton.next_power_of_2(size))


def window_arguments(signals: SignalPlanes, warps: int) -> dict[str, Any]:
    """Arguments and launch options that all kernels of a window share."""
    pdl = dependent_launch(signals.state)
    return {
        "bases_ptr": signals.bases_P,
        "state_ptr": signals.state,
        "rank": signals.rank,
        "SIZE": signals.size,
        "num_warps": warps,
        "PDL": pdl.on,
        **pdl.options,
    }


def signal_arguments(signals: SignalPlanes, warps: int) -> dict[str, Any]:
    """The same for kernels that signal or wait."""
    return {
        **window_arguments(signals, warps),
        "flags": signals.flags,
        "LANES": lanes(signals.size, warps),
        "SCOPE": signals.scope,
    }


@triton.jit
def bit(mask, place):
    """Whether bit `place` is set; a shift by more than 63 is undefined."""
    return ((mask >> tl.minimum(place, 63)) & 1) != 0


@triton.jit
def groups_of(ids, SLOTS: tl.constexpr):
    """The group of each slot; -1 for none."""
    return tl.where(ids < 0, -1, ids // SLOTS)


@triton.jit
def all_bases(bases_ptr, SIZE: tl.constexpr):
    """Keeps the regions' addresses in registers; after a store they would be loaded again."""
    bases = ()
    for rank in tl.static_range(SIZE):
        bases = bases + (tl.load(bases_ptr + rank),)
    return bases


@triton.jit
def byte_at(base, offset, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """A pointer to byte `offset` of a region, a multiple of ALIGN."""
    return tl.multiple_of((base + offset).to(tl.pointer_type(TYPE)), ALIGN)


@triton.jit
def _load_flags(at, asks, otherwise, SCOPE: tl.constexpr):
    """Loads flags in the threads that ask; their ranks' earlier writes are visible afterwards."""
    if INTERPRETED:
        return tl.where(asks, tl.load(at), otherwise)
    else:
        return tl.inline_asm_elementwise(
            f"""
            {{
            .reg .pred asks;
            setp.ne.u32 asks, $2, 0;
            mov.b64 $0, $3;
            @asks ld.acquire.{SCOPE}.global.b64 $0, [$1];
            }}
            """,
            "=&l,l,r,l",
            [at, asks.to(tl.int32), otherwise],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )


@triton.jit
def execute(instruction: tl.constexpr, lane):
    """Executes an instruction without operands in every thread."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            instruction + "; mov.u32 $0, $1;", "=r,r", [lane], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def now(lane):
    """The time in nanoseconds."""
    if INTERPRETED:
        return lane.to(tl.int64)
    else:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [lane], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit
def active_ranks(state_ptr, lane):
    """One bit for each active rank; 0 once a wait has failed. That may happen concurrently, so one
    thread reads for the whole program."""
    broken = tl.max(tl.load(state_ptr + BROKEN + lane, lane == 0, 0, volatile=True), 0)
    return tl.where(broken != 0, 0, tl.load(state_ptr + ACTIVE))


@triton.jit
def times_raised(at):
    """How often a rank has raised a channel. Loads past the L1 cache: programs of the kernel before
    may have cached the line before one of them wrote it."""
    return tl.load(at, cache_modifier=".cg")


@triton.jit
def flag_word(state_ptr, count, tag):
    generation = tl.load(state_ptr + GENERATION)
    return (generation << GENERATION_BITS) + ((count & TURNS) << COUNT_BITS) + tag


@triton.jit
def _ahead(seen, wanted):
    """Above 0 if `seen` is newer than `wanted`, below 0 if it is older."""
    generations = (seen >> GENERATION_BITS) - (wanted >> GENERATION_BITS)
    # The 32 bits below the generation wrap around as counts do.
    return tl.where(generations == 0, (seen - wanted).to(tl.int32).to(tl.int64), generations)


@triton.jit
def raise_flags(place, word, active, lane, SIZE: tl.constexpr, SCOPE: tl.constexpr):
    """Raises this rank's flag in all regions. Ranks that see it also see all earlier writes of the
    program's threads, and those that these waited for."""
    bases_ptr, _, rank, flags, channel = place
    offset = flags + (channel.to(tl.int64) * SIZE + rank) * 8
    at = tl.load(bases_ptr + lane, lane < SIZE, 0) + offset
    # One thread releases the writes of another.
    tl.debug_barrier()
    tl.atomic_xchg(
        at.to(tl.pointer_type(tl.int64)),
        tl.zeros_like(lane).to(tl.int64) + word,
        mask=(lane < SIZE) & bit(active, lane),
        sem="release",
        scope=SCOPE,
    )


@triton.jit
def signal_once(place, active, lane, tag, SIZE: tl.constexpr, SCOPE: tl.constexpr):
    """Counts and raises the flags, in one program of a kernel; returns the word."""
    _, state_ptr, _, _, channel = place
    count = times_raised(state_ptr + CHANNELS + 2 * channel) + (active != 0)
    word = flag_word(state_ptr, count, tag)
    raise_counted(place, count, word, active, lane, SIZE, SCOPE)
    return word


@triton.jit
def raise_counted(place, count, word, active, lane, SIZE: tl.constexpr, SCOPE: tl.constexpr):
    """Stores the count, and raises the flags."""
    _, state_ptr, _, _, channel = place
    # All threads have loaded the count before it is stored.
    tl.debug_barrier()
    tl.store(state_ptr + CHANNELS + 2 * channel, count)
    raise_flags(place, word, active, lane, SIZE, SCOPE)


@triton.jit
def is_last(arrived_ptr, SCOPE: tl.constexpr):
    """Whether this is the last program of the kernel to arrive. Its next writes are ordered behind
    the writes of all others, within SCOPE."""
    tl.debug_barrier()
    before = tl.full((), 0, tl.int64)
    if tl.num_programs(0) > 1:
        before = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope=SCOPE)
    last = before == tl.num_programs(0) - 1
    if last:
        tl.store(arrived_ptr, 0)
    return last


@triton.jit
def await_flags(place, failure_ptr, wanted, active, lane, SIZE: tl.constexpr, SCOPE: tl.constexpr):
    """Polls until all peers have written `wanted`, one has written something newer, time is up, or
    the host aborts. Returns whether all have."""
    bases_ptr, state_ptr, rank, flags, channel = place
    offset = flags + channel.to(tl.int64) * (SIZE * 8)
    at = byte_at(tl.load(bases_ptr + rank), offset, tl.int64, 8) + tl.minimum(lane, SIZE - 1)
    counts = (lane < SIZE) & bit(active, lane)
    deadline = now(lane) + tl.load(state_ptr + TIMEOUT_NS)
    here = tl.zeros_like(lane).to(tl.int64) + wanted
    seen = _load_flags(at, counts, here, SCOPE)
    level = _worst(seen, wanted, counts)
    looks = 0
    aborted = 0
    while level == BEHIND:
        if looks > LOOKS:
            execute("nanosleep.u32 100", lane)
        seen = _load_flags(at, counts, here, SCOPE)
        level = _worst(seen, wanted, counts)
        looks += 1
        if (level == BEHIND) & (looks % LOOKS == 0):
            word = tl.load(failure_ptr + ABORT + lane, lane == 0, 0, volatile=True)
            aborted = tl.max((word != 0).to(tl.int32), 0)
            late = tl.max(((now(lane) > deadline) | INTERPRETED).to(tl.int32), 0)
            level = tl.where((aborted | late) != 0, GIVEN_UP, level)
    if level != HERE:
        _record_failure(state_ptr, failure_ptr, seen, wanted, counts, lane, channel, aborted)
    # What one thread has acquired is visible to all.
    tl.debug_barrier()
    return level == HERE


@triton.jit
def _worst(seen, wanted, counts):
    ahead = _ahead(seen, wanted)
    levels = tl.where(ahead > 0, BEYOND, tl.where(ahead < 0, BEHIND, HERE))
    return tl.max(tl.where(counts, levels, HERE), 0)


@triton.jit
def _record_failure(state_ptr, failure_ptr, seen, wanted, counts, lane, channel, aborted):
    """Records the missing peers and the first one's flag, in the first program that gives up."""
    beyond = counts & (_ahead(seen, wanted) > 0)
    strange = tl.max(beyond.to(tl.int32), 0) != 0
    missing = tl.where(strange, beyond, counts & (seen != wanted))
    peers = tl.sum(tl.where(missing, tl.full(lane.shape, 1, tl.int64) << (lane & 63), 0), 0)
    first = tl.min(tl.where(missing, lane, 64), 0)
    flag = tl.sum(tl.where(lane == first, seen, 0), 0)
    why = tl.where(aborted != 0, ABORTED, TIMEOUT)
    if tl.atomic_xchg(state_ptr + BROKEN, 1) == 0:
        tl.store(failure_ptr + CHANNEL, channel.to(tl.int64))
        tl.store(failure_ptr + PEERS, peers)
        tl.store(failure_ptr + SEEN, tl.where(peers == 0, wanted, flag))
        tl.store(failure_ptr + WANTED, wanted)
        # The host sees the reason last.
        execute("fence.acq_rel.sys", lane)
        tl.store(failure_ptr + FAILURE, tl.where(strange, OUT_OF_STEP, why).to(tl.int64))
