"""Rows of a device in the format in which they travel."""

from __future__ import annotations

from torch import Tensor

from moesaic.kernels.quantise import quantise_rows
from moesaic.moe.dispatch.base import DispatchConfig
from moesaic.moe.quant.payload import Payload


def encoded_rows(config: DispatchConfig, x_TH: Tensor) -> Payload:
    """Some formats have a kernel; torch encodes the others."""
    payload = config.payload
    if payload.name in ("fp8", "int8"):
        values = quantise_rows(x_TH, "fp8" if payload.name == "fp8" else "int8")
        return Payload(*values, payload)
    return config.encode(x_TH)
