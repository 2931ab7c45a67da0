"""Shared by the kernels of sampling.py and sampling_narrow.py."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from moesaic.kernels.triton.launch import INTERPRETED

WIDTH = tl.constexpr(128)
BLOCKS = tl.constexpr(32)
COLUMNS = tl.constexpr(6)


@triton.jit
def sort_key(x):
    """Sorts like the numbers; zeros are equal, and there is no NaN."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def token_weights(scores, scaling, min_p):
    """Integers in float64, with the bits of torch on the same kind of device. `scaling`: the best
    score, the temperature, and the weight of the best score."""
    best, temperature, scale = scaling
    share = tl.maximum(tl.math.div_rn(scores - best, tl.zeros_like(scores) + temperature), -80.0)
    if INTERPRETED:
        share = tl.exp(share)
    else:
        share = libdevice.exp(share)
    share = tl.where(share < min_p, 0.0, share) * scale
    # Below 2**23 this rounds to an integer, ties to even; above, all numbers are integers.
    return tl.where(share < 8388608.0, (share + 8388608.0) - 8388608.0, share).to(tl.float64)


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def uniform_at(seed, position):
    state = _mix(seed) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    return (_mix(state) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def float64_at(ptr):
    return tl.load(ptr).to(tl.float64, bitcast=True)


@triton.jit
def is_greedy(params_ptr):
    return (float64_at(params_ptr) < 1e-6) | (tl.load(params_ptr + 1) == 1)


@triton.jit
def top_k_of(params_ptr, V):
    """-1 if it keeps every token."""
    top_k = tl.load(params_ptr + 1)
    return tl.where(top_k < V, top_k, -1)


@triton.jit
def best_of(best_ptr, token_ptr, row, chunks, BLOCK_C: tl.constexpr):
    """The highest score of a row, and its first token."""
    chunk = tl.arange(0, BLOCK_C)
    mask = chunk < chunks
    bests = tl.load(best_ptr + row * chunks + chunk, mask, -float("inf"))
    tokens = tl.load(token_ptr + row * chunks + chunk, mask, 0x7FFFFFFF)
    best = tl.max(bests, 0)
    return best, tl.min(tl.where(bests == best, tokens, 0x7FFFFFFF), 0)
