"""Float8 and float4 matrices in checkpoints. N rows · K columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moesaic.models.checkpoint import FLOATS, TensorSpec
from moesaic.models.schemes.storage import Matrix, Source, Storage, blocks
from moesaic.moe.quant import numerics
from moesaic.moe.quant.weights import WEIGHT_FORMATS, Planes, WeightFormat

FP8 = ("F8_E4M3",)
BLOCK = 128
Layout = Literal["block", "channel", "tensor"]


def kept_as(name: str, weight_only: bool) -> WeightFormat:
    format = WEIGHT_FORMATS[name]
    return replace(format, activation=None) if weight_only else format


@dataclass(frozen=True)
class StoredFp8Matrix(Storage):
    """X.weight in e4m3 and X.`scale`, a factor even if its name says inverse."""

    layout: Layout
    scale: str = "weight_scale"
    weight_only: bool = False
    optional_suffixes: ClassVar[frozenset[str]] = frozenset({"input_scale", "activation_scale"})

    @property
    def format(self) -> WeightFormat:
        return kept_as(f"fp8_{self.layout}", self.weight_only)

    def tensors(self, matrix: Matrix) -> Mapping[str, TensorSpec]:
        size_N, size_K = matrix.shape
        shapes: dict[Layout, tuple[tuple[int, ...], ...]] = {
            "block": ((ceil(size_N / BLOCK), ceil(size_K / BLOCK)),),
            "channel": ((size_N, 1), (size_N,)),
            "tensor": ((), (1,), (1, 1)),
        }
        return {
            matrix.tensor("weight"): TensorSpec((matrix.shape,), FP8),
            matrix.tensor(self.scale): TensorSpec(shapes[self.layout], (*FLOATS, "F8_E8M0")),
        }

    def read(self, source: Source, rows: range, cols: range) -> Planes:
        values = source.read("weight", rows, cols)
        return {"values": values, "scales": self._scales(source, rows, cols)}

    def _scales(self, source: Source, rows: range, cols: range) -> Tensor:
        if self.layout == "block":
            return source.read(self.scale, blocks(rows, BLOCK), blocks(cols, BLOCK)).float()
        if self.layout == "channel":
            return source.read(self.scale, rows).float().view(-1, 1)
        return source.read(self.scale).float().view(1, 1).expand(len(rows), 1)

    def write(self, w_NK: Tensor, amax: Tensor) -> dict[str, Tensor]:
        planes = self.format.encode(w_NK)
        scales = planes["scales"][0] if self.layout == "tensor" else planes["scales"]
        return {"weight": planes["values"], self.scale: scales}


@dataclass(frozen=True)
class StoredNvfp4Matrix(Storage):
    """e2m1 pairs, an e4m3 scale per 16 columns and one global scale.

    ModelOpt writes the global scale (weight_scale_2) and that of the activations (input_scale),
    compressed-tensors the reciprocals of both.
    """

    compressed: bool = False
    weight_only: bool = False
    optional_suffixes: ClassVar[frozenset[str]] = frozenset({"input_scale", "input_global_scale"})
    shares_amax: ClassVar[bool] = True

    @property
    def format(self) -> WeightFormat:
        return kept_as("nvfp4", self.weight_only)

    @property
    def _names(self) -> tuple[str, str]:
        if self.compressed:
            return "weight_packed", "weight_global_scale"
        return "weight", "weight_scale_2"

    def tensors(self, matrix: Matrix) -> Mapping[str, TensorSpec]:
        size_N, size_K = matrix.shape
        values, whole = self._names
        scales = TensorSpec(((size_N, size_K // numerics.NVFP4_GROUP),), FP8)
        return {
            matrix.tensor(values): TensorSpec(((size_N, size_K // 2),), ("U8",)),
            matrix.tensor("weight_scale"): scales,
            matrix.tensor(whole): TensorSpec(((), (1,)), FLOATS),
        }

    def read(self, source: Source, rows: range, cols: range) -> Planes:
        values, whole = self._names
        stored = source.read(whole).float()
        factor = stored.reciprocal() if self.compressed else stored
        return {
            "values": source.read(values, rows, blocks(cols, 2)),
            "scales": source.read("weight_scale", rows, blocks(cols, numerics.NVFP4_GROUP)),
            "global": factor.view(1, 1).expand(len(rows), 1),
        }

    def input_scale(self, source: Source) -> float | None:
        """The calibrated global scale of the activations, if any."""
        suffix = "input_global_scale" if self.compressed else "input_scale"
        if not source.has(suffix):
            return None
        stored = float(source.read(suffix))
        return 1 / stored if self.compressed else stored

    def write(self, w_NK: Tensor, amax: Tensor) -> dict[str, Tensor]:
        """Writes ModelOpt's form. Without calibration activations have a global scale of 1."""
        assert not self.compressed
        whole = numerics.absmax_scales(amax, numerics.FP4_MAX * numerics.FP8_MAX)
        packed, scales, _ = numerics.encode_nvfp4(w_NK, whole)
        return {
            "weight": packed,
            "weight_scale": scales,
            "weight_scale_2": whole,
            "input_scale": torch.tensor(1.0),
        }


@dataclass(frozen=True)
class StoredMxfp4Matrix(Storage):
    """compressed-tensors: X.weight_packed [N, K / 2] of e2m1 pairs, the even column in the low
    nibble, and X.weight_scale [N, K / 32], exponents of two plus 127."""

    optional_suffixes: ClassVar[frozenset[str]] = frozenset({"input_global_scale"})

    @property
    def format(self) -> WeightFormat:
        return WEIGHT_FORMATS["mxfp4"]

    def tensors(self, matrix: Matrix) -> Mapping[str, TensorSpec]:
        size_N, size_K = matrix.shape
        scales = TensorSpec(((size_N, size_K // numerics.MXFP4_GROUP),), ("U8",))
        return {
            matrix.tensor("weight_packed"): TensorSpec(((size_N, size_K // 2),), ("U8",)),
            matrix.tensor("weight_scale"): scales,
        }

    def read(self, source: Source, rows: range, cols: range) -> Planes:
        return {
            "values": source.read("weight_packed", rows, blocks(cols, 2)),
            "scales": source.read("weight_scale", rows, blocks(cols, numerics.MXFP4_GROUP)),
        }

    def write(self, w_NK: Tensor, amax: Tensor) -> dict[str, Tensor]:
        planes = self.format.encode(w_NK)
        return {"weight_packed": planes["values"], "weight_scale": planes["scales"]}


@dataclass(frozen=True)
class Mxfp4Stack(Storage):
    """gpt-oss: X_blocks [E, N, K / 32, 16] of e2m1 pairs and X_scales [E, N, K / 32] of e8m0."""

    @property
    def format(self) -> WeightFormat:
        return WEIGHT_FORMATS["mxfp4"]

    def tensors(self, matrix: Matrix) -> Mapping[str, TensorSpec]:
        scales = (matrix.experts, matrix.stacked_rows, matrix.shape[1] // numerics.MXFP4_GROUP)
        return {
            matrix.tensor("blocks"): TensorSpec(((*scales, numerics.MXFP4_GROUP // 2),), ("U8",)),
            matrix.tensor("scales"): TensorSpec((scales,), ("U8",)),
        }

    def read(self, source: Source, rows: range, cols: range) -> Planes:
        index, in_stack = source.matrix.index, source.matrix.in_stack(rows)
        assert index is not None
        groups = blocks(cols, numerics.MXFP4_GROUP)
        return {
            "values": source.read("blocks", index, in_stack, groups).flatten(-2),
            "scales": source.read("scales", index, in_stack, groups),
        }

    def write(self, w_NK: Tensor, amax: Tensor) -> dict[str, Tensor]:
        planes = self.format.encode(w_NK)
        pairs = numerics.MXFP4_GROUP // 2
        return {"blocks": planes["values"].unflatten(-1, (-1, pairs)), "scales": planes["scales"]}
