"""Rows of x copied to their places: what experts_large.py can do instead of gathering as it goes.

It costs the bytes of all places once more, written and read, but then the copy engine can load them.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from moesaic.kernels.experts import Groups, Rows
from moesaic.kernels.triton.launch import await_inputs, dependent_launch


def gather_rows(x: Rows, groups: Groups) -> Rows:
    """The row of each place; what is at places that are nobody's is left as it was."""
    values = x.values.new_empty(groups.num_places, x.values.shape[1])
    scales = None if x.scales is None else x.scales.new_empty(len(values), x.scales.shape[1])
    pdl = dependent_launch(values)
    gather_kernel[(len(values),)](
        x.values,
        x.scales,
        groups.order_P,
        groups.first_E,
        groups.count_E,
        values,
        scales,
        K=values.shape[1],
        GROUPS=0 if scales is None else scales.shape[1],
        EXPERTS=len(groups.count_E),
        TOP_K=groups.top_k,
        CHUNK=min(2048, triton.next_power_of_2(values.shape[1])),
        PDL=pdl.on,
        **pdl.options,
    )
    return replace(x, values=values, scales=scales)


@triton.jit
def gather_kernel(
    x,
    x_scales,
    order,
    first_place,
    count,
    out,
    out_scales,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_inputs(PDL)
    place = tl.program_id(0).to(tl.int64)
    if place < tl.load(first_place + EXPERTS - 1) + tl.load(count + EXPERTS - 1):
        row = (tl.load(order + place) // TOP_K).to(tl.int64)
        for k in range(0, K, CHUNK):
            at = k + tl.arange(0, CHUNK)
            tl.store(out + place * K + at, tl.load(x + row * K + at, mask=at < K), mask=at < K)
        if GROUPS:
            for group in range(0, GROUPS, 32):
                at = group + tl.arange(0, 32)
                scales = tl.load(x_scales + row * GROUPS + at, mask=at < GROUPS)
                tl.store(out_scales + place * GROUPS + at, scales, mask=at < GROUPS)
