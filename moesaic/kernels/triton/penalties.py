"""Penalties; the twin is in kernels/penalties.py.

A program of `_counts_kernel` reads the counters of a block of tokens, and logits only where a token
occurs: 4 bytes a token and row, and 8 more where one does. `_edits_kernel` has one program a row.
Floating-point products and sums are not fused, so that the bits are those of the host.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.penalties import IN_PROMPT, PACKED, PenaltyTables
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next
from moesaic.kernels.triton.sampling_parts import float64_at

NUMBERS = tl.constexpr(PACKED.size // 8)
PROMPT = tl.constexpr(IN_PROMPT)
BLOCK = 2048
EDITS = 256


# Where a transfer of several columns puts these varies.
@triton.jit(do_not_specialize=["packed_ptr", "drafts_ptr"])
def _counts_kernel(
    logits_ptr, counts_ptr, packed_ptr, drafts_ptr, V, stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    release_next(PDL)
    packed_ptr += tl.program_id(0).to(tl.int64) * NUMBERS
    logits_ptr += tl.load(packed_ptr) * stride
    counts_ptr += tl.load(packed_ptr + 1) * V
    repetition = float64_at(packed_ptr + 2).to(tl.float32)
    frequency, presence = float64_at(packed_ptr + 3), float64_at(packed_ptr + 4)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        words = tl.load(counts_ptr + token, token < V, 0)
        drafts_ptr += tl.load(packed_ptr + 7)
        for n in range(tl.load(packed_ptr + 8)):
            words += (token == tl.load(drafts_ptr + n)).to(tl.int32)
        occurs = (words != 0) & (token < V)
        count = words % PROMPT
        amount = (count.to(tl.float64) * frequency + presence).to(tl.float32)
        x = tl.load(logits_ptr + token, occurs, 0.0)
        by = tl.zeros_like(x) + repetition
        x = tl.where(x > 0, tl.math.div_rn(x, by), x * by)
        tl.store(logits_ptr + token, x - tl.where(count == 0, 0.0, amount), occurs)


@triton.jit(do_not_specialize=["packed_ptr", "size"])
def _edits_kernel(
    logits_ptr, ids_ptr, amounts_ptr, packed_ptr, V, stride, size,
    EDITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    release_next(PDL)
    packed_ptr += tl.program_id(0).to(tl.int64) * NUMBERS
    logits_ptr += tl.load(packed_ptr) * stride
    ids_ptr += tl.load(packed_ptr + 1) * size
    amounts_ptr += tl.load(packed_ptr + 1) * size
    biases, ends = tl.load(packed_ptr + 5), tl.load(packed_ptr + 6)
    for start in range(0, biases, EDITS):
        place = start + tl.arange(0, EDITS)
        token = tl.load(ids_ptr + place, place < biases, V)
        x = tl.load(logits_ptr + token, token < V, 0.0)
        amount = tl.load(amounts_ptr + place, place < biases, 0.0)
        tl.store(logits_ptr + token, x + amount, token < V)
    tl.debug_barrier()  # A forbidden token may have a bias.
    for start in range(0, ends, EDITS):
        place = start + tl.arange(0, EDITS)
        token = tl.load(ids_ptr + biases + place, place < ends, V)
        x = tl.load(logits_ptr + token, token < V, 0.0)
        tl.store(logits_ptr + token, x - float("inf"), token < V)


def penalise_rows(
    logits_RV: Tensor, tables: PenaltyTables, packed: Tensor, drafts_D: Tensor
) -> None:
    rows, vocab = len(packed) // NUMBERS.value, logits_RV.shape[1]
    if not rows:
        return
    assert logits_RV.stride(1) == 1 and tables.counts_SV.shape[1] == vocab, logits_RV.stride()
    assert packed.is_contiguous() and drafts_D.is_contiguous()
    pdl = dependent_launch(logits_RV)
    fixed = {"enable_fp_fusion": False, "PDL": pdl.on, **pdl.options}
    sizes = (vocab, logits_RV.stride(0))
    _counts_kernel[(rows, triton.cdiv(vocab, BLOCK))](
        logits_RV, tables.counts_SV, packed, drafts_D, *sizes, BLOCK=BLOCK, **fixed
    )
    _edits_kernel[(rows,)](
        logits_RV, tables.edit_ids_SE, tables.amounts_SE, packed, *sizes,
        tables.edit_ids_SE.shape[1], EDITS=EDITS, **fixed,
    )  # fmt: skip
