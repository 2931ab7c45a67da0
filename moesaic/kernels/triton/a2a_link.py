"""The emulated link on the device; kernels/link.py has the twins and describes the words. `place`
and `lane` are those of a2a_signals.py, LINK is the byte offset of the words, 0 without a link."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moesaic.core.link import COST_BITS
from moesaic.kernels.a2a import ChannelCall, FailureWords
from moesaic.kernels.link import LinkState, LinkWord, link_offset
from moesaic.kernels.triton.a2a_signals import bit, byte_at, execute, now
from moesaic.kernels.triton.launch import INTERPRETED

COST, LATENCY, FREE = (tl.constexpr(word.value) for word in LinkState)
ABORT = tl.constexpr(FailureWords.ABORT.value)
START, DUE, BYTES, ROWS, PAIRS, ROWS_TO, PAIRS_TO = (tl.constexpr(word.value) for word in LinkWord)
NUM_WORDS = tl.constexpr(len(LinkWord))
COST_SHIFT = tl.constexpr(COST_BITS)
FAR = tl.constexpr((1 << 63) - 1)
LOOKS = tl.constexpr(256)


def load_arguments(call: ChannelCall) -> dict[str, Any]:
    """Arguments of kernels that signal; `counts`: where the numbers of rows or pairs are."""
    signals, load = call.signals, call.load
    word = LinkWord.PAIRS if load.pairs else LinkWord.ROWS
    counts = link_offset(signals, load.channel, word) if signals.link else 0
    return {"counts": counts, "unit": load.unit, "fixed": load.fixed, "LINK": signals.link}


@triton.jit
def _words(base, LINK: tl.constexpr, channel, word: tl.constexpr, SIZE: tl.constexpr):
    """The address of a row of words in a region."""
    row = channel.to(tl.int64) * NUM_WORDS + word
    return byte_at(base, LINK + row * (SIZE * 8), tl.int64, 8)


@triton.jit
def book_transfer(place, LINK: tl.constexpr, nbytes, active, lane, SIZE: tl.constexpr):
    """Puts `nbytes` for each rank behind what is on this rank's link, and tells the ranks. Call it
    before the flags are raised."""
    bases_ptr, state_ptr, rank, _, channel = place
    others = (lane < SIZE) & (lane != rank) & bit(active, lane)
    took = (tl.sum(tl.where(others, nbytes, 0), 0) * tl.load(state_ptr + COST)) >> COST_SHIFT
    # Kernels of two lanes may book at once.
    tl.atomic_max(state_ptr + FREE, tl.min(now(lane), 0))
    begin = tl.atomic_add(state_ptr + FREE, took)
    due = begin + took + tl.load(state_ptr + LATENCY)
    bases = tl.load(bases_ptr + lane, lane < SIZE, 0)
    zero = tl.zeros_like(lane).to(tl.int64)
    tl.store(_words(bases, LINK, channel, START, SIZE) + rank, zero + begin, others)
    tl.store(_words(bases, LINK, channel, DUE, SIZE) + rank, zero + due, others)
    tl.store(_words(bases, LINK, channel, BYTES, SIZE) + rank, nbytes, others)


@triton.jit
def book_results(place, LINK: tl.constexpr, counts, unit, fixed, active, lane, SIZE: tl.constexpr):
    """Books `fixed` bytes for each rank, and `unit` for each of its rows or pairs."""
    bases_ptr, _, rank, _, _ = place
    at = byte_at(tl.load(bases_ptr + rank), counts, tl.int64, 8)
    came = tl.load(at + lane, lane < SIZE, 0, cache_modifier=".cg")
    book_transfer(place, LINK, came * unit + fixed, active, lane, SIZE)


@triton.jit
def count_sent(place, LINK: tl.constexpr, rows, pairs, lane, SIZE: tl.constexpr):
    """Adds what a program has sent to each rank; call it before the program counts as ended."""
    bases_ptr, _, rank, _, channel = place
    home = tl.load(bases_ptr + rank)
    tl.atomic_add(_words(home, LINK, channel, ROWS_TO, SIZE) + lane, rows, lane < SIZE)
    tl.atomic_add(_words(home, LINK, channel, PAIRS_TO, SIZE) + lane, pairs, lane < SIZE)


@triton.jit
def book_rows(place, LINK: tl.constexpr, unit, active, lane, SIZE: tl.constexpr):
    """Books what all programs have sent, in the last one, and tells each rank how many rows."""
    bases_ptr, _, rank, _, channel = place
    home = tl.load(bases_ptr + rank)
    zero = tl.zeros_like(lane).to(tl.int64)
    # All threads of the program have added.
    tl.debug_barrier()
    rows = tl.atomic_xchg(_words(home, LINK, channel, ROWS_TO, SIZE) + lane, zero, lane < SIZE)
    pairs = tl.atomic_xchg(_words(home, LINK, channel, PAIRS_TO, SIZE) + lane, zero, lane < SIZE)
    there = (lane < SIZE) & bit(active, lane)
    rows, pairs = tl.where(there, rows, 0), tl.where(there, pairs, 0)
    bases = tl.load(bases_ptr + lane, lane < SIZE, 0)
    tl.store(_words(bases, LINK, channel, ROWS, SIZE) + rank, rows, there)
    tl.store(_words(bases, LINK, channel, PAIRS, SIZE) + rank, pairs, there)
    book_transfer(place, LINK, rows * unit, active, lane, SIZE)


@triton.jit
def await_arrival(place, failure_ptr, LINK: tl.constexpr, here, active, lane, SIZE: tl.constexpr):
    """Waits until all transfers would have arrived, if their flags have been seen (`here`), or
    until the host aborts. The interpreter's clock stands still, so there it does not wait."""
    bases_ptr, state_ptr, rank, _, channel = place
    home = tl.load(bases_ptr + rank)
    others = (lane < SIZE) & (lane != rank) & bit(active, lane) & here
    start = tl.load(
        _words(home, LINK, channel, START, SIZE) + lane, others, FAR, cache_modifier=".cg"
    )
    due = tl.load(_words(home, LINK, channel, DUE, SIZE) + lane, others, 0, cache_modifier=".cg")
    nbytes = tl.load(
        _words(home, LINK, channel, BYTES, SIZE) + lane, others, 0, cache_modifier=".cg"
    )
    took = (tl.sum(nbytes, 0) * tl.load(state_ptr + COST)) >> COST_SHIFT
    passed = tl.min(start, 0) + took + tl.load(state_ptr + LATENCY)
    until = tl.max(due, 0)
    until = tl.where((until > 0) & (passed > until), passed, until)
    if not INTERPRETED:
        left = tl.max((now(lane) < until).to(tl.int32), 0)
        looks = 0
        while left != 0:
            execute("nanosleep.u32 200", lane)
            left = tl.max((now(lane) < until).to(tl.int32), 0)
            looks += 1
            if looks % LOOKS == 0:
                word = tl.load(failure_ptr + ABORT + lane, lane == 0, 0, volatile=True)
                left = tl.where(tl.max((word != 0).to(tl.int32), 0) != 0, 0, left)
    tl.debug_barrier()
