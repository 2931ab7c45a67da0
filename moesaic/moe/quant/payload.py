"""Rows of hidden states as they travel between ranks, in one of several formats.

T rows (tokens) · H hidden. Everywhere [T] may be [e, M]: M rows of each of e experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from moesaic.moe.quant.codecs import WHOLE, Codec, Fp8, Int8, Mxfp4, Nvfp4, Plain, Plane


@dataclass(frozen=True, slots=True)
class PayloadFormat:
    """How a row of H channels is written.

    A global scale (nvfp4 only) is a constant of the layer that all ranks know; it does not travel.
    """

    name: str
    codec: Codec
    multiple: int = 1
    """H must be a multiple of it."""

    @property
    def values(self) -> Plane:
        return self.codec.planes[0]

    @property
    def scales(self) -> Plane | None:
        return self.codec.planes[1] if len(self.codec.planes) > 1 else None

    @property
    def has_global_scale(self) -> bool:
        return isinstance(self.codec, Nvfp4)

    def group(self, hidden: int) -> int:
        """Channels per scale; 0 where there are none."""
        if self.scales is None:
            return 0
        return hidden if self.scales.cols == WHOLE else self.scales.cols

    def value_width(self, hidden: int) -> int:
        """Elements of the stored tensor per row."""
        return self.values.width(hidden)

    def row_bytes(self, hidden: int) -> int:
        """The bytes of values and scales."""
        return sum(plane.width(hidden) * plane.dtype.itemsize for plane in self.codec.planes)

    def check(self, hidden: int) -> None:
        if hidden < 1 or hidden % self.multiple:
            raise ValueError(
                f"hidden size {hidden} does not fit payload {self.name}: "
                f"it must be a multiple of {self.multiple}"
            )

    def encode(self, x_TH: Tensor, global_scale: float = 1.0) -> Payload:
        """A row with a NaN or an infinity: that group of channels decodes to NaN, other rows stay
        as they are. Unquantised formats keep NaN and infinities where they stand."""
        self.check(x_TH.shape[-1])
        values, *scales = self.at(global_scale).encode(x_TH)
        return Payload(values, scales[0] if scales else None, self, global_scale)

    def error_bound(self, x_TH: Tensor, global_scale: float = 1.0) -> Tensor:
        """float64, in the shape of x: the most by which encoding and decoding in float32 may change
        each element. Infinite where the outcome is not finite."""
        self.check(x_TH.shape[-1])
        return self.at(global_scale).error_bound(x_TH)

    def at(self, global_scale: float) -> Codec:
        if isinstance(self.codec, Nvfp4):
            return replace(self.codec, global_scale=global_scale)
        if global_scale != 1.0:
            raise ValueError(
                f"payload {self.name} has no global scale, but {global_scale} is given"
            )
        return self.codec


PAYLOAD_FORMATS = {
    format.name: format
    for format in (
        PayloadFormat("fp32", Plain(torch.float32)),
        PayloadFormat("fp16", Plain(torch.float16)),
        PayloadFormat("bf16", Plain(torch.bfloat16)),
        PayloadFormat("fp8", Fp8(cols=128)),
        PayloadFormat("int8", Int8()),
        PayloadFormat("nvfp4", Nvfp4(global_scale=1.0), multiple=16),
        PayloadFormat("mxfp4", Mxfp4(), multiple=32),
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """Values with the scales that their format needs."""

    values: Tensor
    scales: Tensor | None
    format: PayloadFormat
    global_scale: float = 1.0

    def __post_init__(self) -> None:
        self.format.at(self.global_scale)
        _check_tensor(self.format, self.format.values, self.values, None)
        self.format.check(self.hidden_size)
        plane = self.format.scales
        if plane is None:
            if self.scales is not None:
                raise ValueError(f"payload {self.format.name} has no scales, but some are given")
            return
        shape = (*self.values.shape[:-1], plane.width(self.hidden_size))
        if self.scales is None:
            raise ValueError(
                f"payload {self.format.name} needs scales: {plane.dtype} {list(shape)} for values "
                f"{list(self.values.shape)}"
            )
        _check_tensor(self.format, plane, self.scales, shape)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def hidden_size(self) -> int:
        return self.values.shape[-1] * self.format.values.cols

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded rows: [T, H]."""
        return (*self.values.shape[:-1], self.hidden_size)

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.format.row_bytes(self.hidden_size)

    def dense(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """[T, H] in `dtype`; where that is how the values are stored, the values themselves."""
        if out is None:
            if self.values.dtype == dtype and self.scales is None:
                return self.values
            out = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        if out.dtype != dtype or out.shape != self.shape:
            raise ValueError(
                f"out is {out.dtype} {list(out.shape)}, but {dtype} {list(self.shape)} is wanted"
            )
        tensors = [self.values] if self.scales is None else [self.values, self.scales]
        return self.format.at(self.global_scale).decode(tensors, out)

    def select(self, index: Tensor) -> Payload:
        """Entries of the first dimension."""
        scales = None if self.scales is None else _select(self.scales, index)
        return replace(self, values=_select(self.values, index), scales=scales)


def _check_tensor(
    format: PayloadFormat, plane: Plane, tensor: Tensor, shape: tuple[int, ...] | None
) -> None:
    if tensor.dtype != plane.dtype or tensor.dim() < 2:
        raise ValueError(
            f"{plane.name} of payload {format.name} must be {plane.dtype} with two dimensions or "
            f"more, not {tensor.dtype} {list(tensor.shape)}"
        )
    if shape is not None and tensor.shape != shape:
        raise ValueError(
            f"{plane.name} of payload {format.name} must be {list(shape)}, not {list(tensor.shape)}"
        )


def _select(tensor: Tensor, index: Tensor) -> Tensor:
    """Eight-bit types travel as bytes: not every device can index float8."""
    if tensor.dtype.itemsize > 1:
        return tensor.index_select(0, index)
    return tensor.view(torch.uint8).index_select(0, index).view(tensor.dtype)
