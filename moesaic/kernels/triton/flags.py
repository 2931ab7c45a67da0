"""Flags between ranks, as kernels raise and await them (kernels/a2a.py).

Every thread of a program asks for one rank's flag (THREADS of them, at least as many as ranks), and
what all of them found is reduced to one number before the program goes on by it. So its threads
agree, however the flags change between two of their loads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moesaic.kernels.a2a import COUNT_SHIFT, GENERATION_SHIFT, Desk, Failure, State
from moesaic.kernels.triton.launch import INTERPRETED

_COUNT_SHIFT = tl.constexpr(COUNT_SHIFT)
_GENERATION_SHIFT = tl.constexpr(GENERATION_SHIFT)
_GENERATION = tl.constexpr(int(State.GENERATION))
_TIMEOUT_NS = tl.constexpr(int(State.TIMEOUT_NS))
_ACTIVE = tl.constexpr(int(State.ACTIVE))
_BROKEN = tl.constexpr(int(State.BROKEN))
_ABORT = tl.constexpr(int(Desk.ABORT))
_FAILURE = tl.constexpr(int(Desk.FAILURE))
_CHANNEL = tl.constexpr(int(Desk.CHANNEL))
_PEERS = tl.constexpr(int(Desk.PEERS))
_SEEN = tl.constexpr(int(Desk.SEEN))
_WANTED = tl.constexpr(int(Desk.WANTED))
_TIMEOUT = tl.constexpr(int(Failure.TIMEOUT))
_OUT_OF_STEP = tl.constexpr(int(Failure.OUT_OF_STEP))
_ABORTED = tl.constexpr(int(Failure.ABORTED))
# A look at the desk, which is the host's memory, takes as long as many looks at flags.
_LOOKS = tl.constexpr(256)
# A look takes the interpreter longer than this.
_INTERPRETED_NS = tl.constexpr(50_000)


@triton.jit
def flag_word(state, count, tag):
    generation = tl.load(state + _GENERATION).to(tl.int64)
    return (generation << _GENERATION_SHIFT) | (count.to(tl.int64) << _COUNT_SHIFT) | tag


@triton.jit
def is_broken(state, THREADS: tl.constexpr):
    """The same for all threads, also while another program finds that it is."""
    return tl.max(tl.load(state + _BROKEN + tl.zeros([THREADS], tl.int32), volatile=True), 0)


@triton.jit
def raise_flags(bases, state, place, word, P: tl.constexpr, THREADS: tl.constexpr):
    """`place`: byte offset of this rank's flag. Whoever sees it sees what this program wrote
    before, and what others wrote that it has seen."""
    tl.debug_barrier()
    peer = tl.arange(0, THREADS)
    active = (peer < P) & (((tl.load(state + _ACTIVE) >> peer) & 1) != 0)
    base = tl.load(bases + peer, mask=peer < P, other=0)
    flag = (base + place).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(flag, word + tl.zeros_like(base), mask=active, sem="release", scope="sys")


@triton.jit
def await_flags(
    bases, state, desk, flags, channel, word, rank, P: tl.constexpr, THREADS: tl.constexpr
):
    """Whether all ranks have raised theirs on a channel; else it is on the desk why not."""
    peer = tl.arange(0, THREADS)
    active = (peer < P) & (((tl.load(state + _ACTIVE) >> peer) & 1) != 0)
    own = tl.load(bases + rank) + flags + channel.to(tl.int64) * (P * 8)
    flag = (own + peer * 8).to(tl.pointer_type(tl.int64))
    timeout = tl.load(state + _TIMEOUT_NS)
    started = _clock(peer, 0)
    looks = 0
    seen = tl.load(flag, mask=active, other=word, volatile=True)
    waits = tl.max((seen != word).to(tl.int32), 0)
    abort = 0
    while waits == 1:
        looks += 1
        late = _clock(peer, looks) - started > timeout
        seen = tl.load(flag, mask=active, other=word, volatile=True)
        strange = active & (seen > word)
        if looks % _LOOKS == 0:
            abort = tl.max(
                tl.load(desk + _ABORT + tl.zeros_like(peer), volatile=True).to(tl.int32), 0
            )
        given_up = strange | ((late | (abort != 0)) & (seen != word))
        waits = tl.max(tl.where(given_up, 2, (seen != word).to(tl.int32)), 0)
    if waits == 2:
        if tl.atomic_xchg(state + _BROKEN, 1) == 0:
            _complain(desk, channel, word, seen, active, abort, peer)
    _acquire(peer)
    tl.debug_barrier()
    return waits == 0


@triton.jit
def _complain(desk, channel, word, seen, active, abort, peer):
    """Who is not here; of those, the first one's flag."""
    strange = active & (seen > word)
    ahead = tl.max(strange.to(tl.int32), 0)
    missing = tl.where(ahead != 0, strange, active & (seen != word))
    first = tl.min(tl.where(missing, peer, 64), 0)
    bits = tl.where(missing, tl.full(seen.shape, 1, tl.int64) << (peer & 63), 0)
    tl.store(desk + _CHANNEL, channel.to(tl.int64))
    tl.store(desk + _PEERS, tl.sum(bits, 0))
    tl.store(desk + _SEEN, tl.sum(tl.where(peer == first, seen, 0), 0))
    tl.store(desk + _WANTED, word)
    failure = tl.where(ahead != 0, _OUT_OF_STEP, tl.where(abort != 0, _ABORTED, _TIMEOUT))
    # The host looks at this word first, and reads the others if it is there.
    tl.debug_barrier()
    tl.atomic_xchg(desk + _FAILURE, failure.to(tl.int64), sem="release", scope="sys")


@triton.jit
def _clock(peer, looks):
    """Nanoseconds, of each thread; the interpreter counts its looks."""
    if INTERPRETED:
        return tl.zeros_like(peer).to(tl.int64) + looks * _INTERPRETED_NS
    else:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [peer], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit
def _acquire(peer):
    """What was written before the flags that this thread has seen is there for it."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r,r", [peer],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
