"""Rows as they travel: values and scales of each payload format.

T rows · H channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.quantise import quantise_rows

PLAIN = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def encode_rows(x_TH: Tensor, payload: str, scale: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """Values and scales in the format `payload` of moe.quant.payload."""
    if payload in PLAIN:
        return x_TH.to(PLAIN[payload]), None
    if payload in ("fp8", "int8"):
        return quantise_rows.twin(x_TH, payload)
    raise NotImplementedError(payload)
