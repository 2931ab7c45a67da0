"""16-bit products on CPUs without instructions for them: in float32, rounded once. torch would
multiply element by element, tens to hundreds of times slower.

B products · M, N rows and columns of a result · K summed · T tokens · I inputs · O outputs.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# Below this many float16 rows torch's own kernel is faster than widening the weights.
FEW = 16


@cache
def lacks_fast_products(dtype: torch.dtype) -> bool:
    """Whether this CPU has no fast products of a type. oneDNN claims float16 on Arm, but is slow
    wherever bfloat16 is missing."""
    sixteen = dtype in (torch.bfloat16, torch.float16)
    return sixteen and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _is_slow(x: Tensor) -> bool:
    return x.is_cpu and lacks_fast_products(x.dtype)


def mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    if _is_slow(a_MK):
        return torch.mm(a_MK.float(), b_KN.float()).to(a_MK.dtype)
    return torch.mm(a_MK, b_KN)


def bmm(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    if _is_slow(a_BMK):
        return torch.bmm(a_BMK.float(), b_BKN.float()).to(a_BMK.dtype)
    return torch.bmm(a_BMK, b_BKN)


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    few = x_TI.dtype == torch.float16 and len(x_TI) < FEW
    if _is_slow(x_TI) and not few:
        bias = None if bias_O is None else bias_O.float()
        return F.linear(x_TI.float(), weight_OI.float(), bias).to(x_TI.dtype)
    return F.linear(x_TI, weight_OI, bias_O)


def flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's attention kernel: the results and their log-sum-exps."""
    if _is_slow(q):
        if mask is not None and mask.is_floating_point():
            mask = mask.float()
        out, lse = _flash(q.float(), k.float(), v.float(), 0.0, causal, attn_mask=mask, scale=scale)
        return out.to(q.dtype), lse
    out, lse = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse
