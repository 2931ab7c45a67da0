"""Products of bfloat16 on CPUs that have no instructions for it: in float32, rounded once. There
torch multiplies element by element, tens to hundreds of times slower."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@cache
def lacks_bfloat16() -> bool:
    """Whether this CPU has no fast products of bfloat16."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _is_slow(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.is_cpu and lacks_bfloat16()


def mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    if _is_slow(a_MK):
        return torch.mm(a_MK.float(), b_KN.float()).bfloat16()
    return torch.mm(a_MK, b_KN)


def bmm(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    if _is_slow(a_BMK):
        return torch.bmm(a_BMK.float(), b_BKN.float()).bfloat16()
    return torch.bmm(a_BMK, b_BKN)


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    if _is_slow(x_TI):
        bias = None if bias_O is None else bias_O.float()
        return F.linear(x_TI.float(), weight_OI.float(), bias).bfloat16()
    return F.linear(x_TI, weight_OI, bias_O)


def flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's attention kernel: the results, and the logarithms of the sums of exponentials."""
    if _is_slow(q):
        if mask is not None and mask.is_floating_point():
            mask = mask.float()
        out, lse = _flash(q.float(), k.float(), v.float(), 0.0, causal, attn_mask=mask, scale=scale)
        return out.bfloat16(), lse
    out, lse = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse
