"""The experts' matrices in each weight format.

E experts · N rows · K columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from moesaic.moe.quant.codecs import Codec, Fp8, Int4, Int8, Mxfp4, Nvfp4, Plain, Plane

Planes = dict[str, Tensor]
Slice = slice  # WeightFormat has a method of that name


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix [N, K] is stored, as named planes."""

    name: str
    codec: Codec
    activation: str | None = None
    """The payload format that the matrix is multiplied with; None: the model's type."""
    ragged: bool = False
    """Whether the last blocks of a matrix may be smaller."""

    @property
    def quantised(self) -> bool:
        return not isinstance(self.codec, Plain)

    @property
    def group_size(self) -> int:
        """Columns per scale; 0: there are no scales, or one for a whole row."""
        return next((plane.cols for plane in self.codec.planes if plane.name == "scales"), 0)

    @property
    def block(self) -> tuple[int, int]:
        """The smallest rows and columns that a cut may separate."""
        planes = self.codec.planes
        return max(plane.rows for plane in planes), max(plane.cols for plane in planes)

    def planes(self, rows: int, cols: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        self.check(rows, cols)
        return {plane.name: (plane.shape(rows, cols), plane.dtype) for plane in self.codec.planes}

    def check(self, rows: int, cols: int) -> None:
        if rows < 1 or cols < 1:
            raise ValueError(f"a matrix of [{rows}, {cols}] has no weights")
        if not self.ragged and cols % self.block[1]:
            raise ValueError(
                f"{cols} columns do not fit weight format {self.name}: they must be a multiple of "
                f"{self.block[1]}"
            )

    def check_cut(self, size: int) -> None:
        """Whether the inner dimension, rows of one matrix and columns of the next, can be cut into
        shards of `size`."""
        multiple = lcm(*self.block)
        if size % multiple:
            raise ValueError(
                f"shards of {size} cut blocks of weight format {self.name}: their size must be a "
                f"multiple of {multiple}"
            )

    def encode(self, w_NK: Tensor) -> Planes:
        self.check(*w_NK.shape[-2:])
        names = (plane.name for plane in self.codec.planes)
        return dict(zip(names, self.codec.encode(w_NK), strict=True))

    def decode(self, planes: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Into `out` [N, K] of any float type, rounded once from float32."""
        return self.codec.decode([planes[plane.name] for plane in self.codec.planes], out)

    def error_bound(self, w_NK: Tensor) -> Tensor:
        """float64 [N, K]: the most by which encoding and decoding in float32 may change each
        element."""
        self.check(*w_NK.shape[-2:])
        return self.codec.error_bound(w_NK)

    def slice(self, planes: Mapping[str, Tensor], rows: slice, cols: slice) -> Planes:
        """Views of a part of the matrix; cuts must fall between blocks."""
        values = self.codec.planes[0]
        size_N = planes[values.name].shape[-2]
        size_K = planes[values.name].shape[-1] * values.cols
        cut_N = self._cut("rows", rows, size_N, self.block[0])
        cut_K = self._cut("columns", cols, size_K, self.block[1])
        return {
            plane.name: _view(planes[plane.name], plane, cut_N, cut_K)
            for plane in self.codec.planes
        }

    def _cut(self, what: str, part: Slice, size: int, multiple: int) -> range:
        cut = range(size)[part]
        inside = [at for at in (cut.start, cut.stop) if at % multiple and at != size]
        if inside or cut.step != 1:
            raise ValueError(
                f"{what} {cut.start}..{cut.stop} (step {cut.step}) of {size} cannot be cut out of "
                f"weight format {self.name}: cuts must be at multiples of {multiple}"
            )
        return cut


def _view(tensor: Tensor, plane: Plane, cut_N: range, cut_K: range) -> Tensor:
    tensor = tensor[..., cut_N.start // plane.rows : -(-cut_N.stop // plane.rows), :]
    if not plane.cols:
        return tensor
    return tensor[..., cut_K.start // plane.cols : -(-cut_K.stop // plane.cols)]


def int4_format(group: int, symmetric: bool = True) -> WeightFormat:
    """Four-bit weights with another group size than the usual 128, or encoded asymmetrically."""
    if group < 2 or group % 2:
        raise ValueError(f"int4 group size {group} must be a multiple of 2")
    return WeightFormat("int4_w4a16", Int4(group, symmetric))


WEIGHT_FORMATS = {
    format.name: format
    for format in (
        WeightFormat("fp32", Plain(torch.float32)),
        WeightFormat("fp16", Plain(torch.float16)),
        WeightFormat("bf16", Plain(torch.bfloat16)),
        WeightFormat("fp8_block", Fp8(rows=128, cols=128), activation="fp8", ragged=True),
        WeightFormat("fp8_channel", Fp8(), activation="fp8"),
        WeightFormat("fp8_tensor", Fp8(per_tensor=True), activation="fp8"),
        WeightFormat("int8_w8a8", Int8(), activation="int8"),
        WeightFormat("int8_w8a16", Int8()),
        int4_format(group=128),
        WeightFormat("nvfp4", Nvfp4(), activation="nvfp4"),
        WeightFormat("mxfp4", Mxfp4()),
    )
}


class ExpertMatrix:
    """One projection of all local experts: [E, parts * N, K].

    Gate and up are two parts: the blocks of each start anew. Planes are [E, parts, *shape of one
    part's plane] and uninitialised until `part` is filled. Unquantised weights are stored in the
    compute type.
    """

    def __init__(
        self,
        format: WeightFormat,
        experts: int,
        parts: int,
        rows: int,
        cols: int,
        dtype: torch.dtype,
    ) -> None:
        self.format = format
        self.dtype = dtype
        self.parts = parts
        self.shape = (experts, parts * rows, cols)
        self.planes: Planes = {
            name: torch.empty((experts, parts, *shape), dtype=stored if format.quantised else dtype)
            for name, (shape, stored) in format.planes(rows, cols).items()
        }
        self.plain: Tensor | None
        """[E, parts * N, K] where nothing needs decoding."""
        self.view_plain()

    def view_plain(self) -> None:
        """Call it when a plane has got other memory."""
        self.plain = None if self.format.quantised else self.planes["values"].flatten(1, 2)

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes.values())

    def part(self, expert: int, part: int) -> Planes:
        """Views to fill."""
        return {name: plane[expert, part] for name, plane in self.planes.items()}

    def all_parts(self) -> list[Planes]:
        """Views to fill, expert by expert and part by part."""
        views = [plane.flatten(0, 1).unbind() for plane in self.planes.values()]
        return [dict(zip(self.planes, part, strict=True)) for part in zip(*views, strict=True)]

    def dense(self, expert: int, out: Tensor | None = None) -> Tensor:
        """[parts * N, K] of one expert in the compute type; unquantised without `out`, a view."""
        if out is None and self.plain is not None:
            return self.plain[expert]
        if out is None:
            device = self.planes["values"].device
            out = torch.empty(self.shape[1:], dtype=self.dtype, device=device)
        one = {name: plane[expert] for name, plane in self.planes.items()}
        self.format.decode(one, out.unflatten(0, (self.parts, -1)))
        return out
