"""Dense projections, whole or sharded over ranks. T tokens, I inputs, O outputs, N heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from moesaic.comm.collectives.collective import Collective
from moesaic.kernels.cpu import widened
from moesaic.kernels.experts import PairSum, Rows
from moesaic.kernels.linear import (
    Fp8Matrix,
    gate_up_silu,
    gate_up_silu_fp8,
    heads_invariant,
    linear,
    linear_fp8,
    norm_linear,
    scales_by_column,
)
from moesaic.kernels.norm import SumToNorm, add_rms_norm_fp8
from moesaic.kernels.quantise import FP8_GROUP, silu_mul
from moesaic.layers import invariant
from moesaic.layers.module import (
    MatrixFormat,
    MatrixSlot,
    Module,
    Shard,
    TensorSlot,
    parameter,
    slot,
)
from moesaic.layers.norm import RMSNorm

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def product(deterministic: bool) -> Product:
    """Computes x W' + bias; in deterministic mode rows are independent of each other."""
    return invariant.linear if deterministic else linear


def head_products(x_NTI: Tensor, w_NOI: Tensor, deterministic: bool) -> Tensor:
    """One product per head."""
    if not deterministic:
        return widened.bmm(x_NTI, w_NOI.transpose(1, 2))
    if x_NTI.is_cuda:
        return heads_invariant(x_NTI, w_NOI)
    pairs = zip(x_NTI, w_NOI, strict=True)
    return torch.stack([invariant.linear(x, w) for x, w in pairs])


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """The sizes of the whole layer."""

    inputs: int
    outputs: int
    dtype: torch.dtype
    bias: bool = False
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A matrix of the checkpoint, and the part of it that a layer holds from row `start` on."""

    name: str
    start: int
    shape: tuple[int, int]
    rows: range
    cols: range

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + len(self.rows))


class Linear(Module):
    """Holds `outputs` and `inputs` of the matrix on this rank, by default all. The matrix is
    `weight` in the model's type; or with a `format` the planes `values` and `scales`, which are
    multiplied as stored."""

    values: nn.Parameter
    scales: nn.Parameter

    def __init__(
        self, config: LinearConfig, outputs: range | None = None, inputs: range | None = None
    ) -> None:
        super().__init__()
        outputs = range(config.outputs) if outputs is None else outputs
        inputs = range(config.inputs) if inputs is None else inputs
        self.deterministic, self.dtype = config.deterministic, config.dtype
        self.weight: nn.Parameter = parameter(len(outputs), len(inputs), dtype=config.dtype)
        self.bias = parameter(len(outputs), dtype=config.dtype) if config.bias else None
        self.product = product(config.deterministic)
        self.format: MatrixFormat | None = None
        shape = (config.outputs, config.inputs)
        self.pieces: tuple[StoredPart, ...] = (StoredPart("", 0, shape, outputs, inputs),)

    def forward(self, x_TI: Tensor | Rows) -> Tensor:
        """`Rows` are quantised for this layer (`RowLinear.quantised_input`)."""
        return self.multiply(x_TI, self.bias)

    def multiply(self, x_TI: Tensor | Rows, bias_O: Tensor | None) -> Tensor:
        if isinstance(x_TI, Rows):
            assert self.format is not None
            return linear_fp8(x_TI, self._fp8(self.format), bias_O, self.dtype)
        if self.format is None:
            return self.product(x_TI, self.weight, bias_O)
        return linear_fp8(Rows(x_TI), self._fp8(self.format), bias_O, x_TI.dtype)

    def _fp8(self, format: MatrixFormat) -> Fp8Matrix:
        return Fp8Matrix(self.values, self.scales, format.block[0])

    def unsupported_reason(self, format: MatrixFormat) -> str:
        """Why the matrix cannot be stored in this format; empty if it can."""
        if self.deterministic:
            return "deterministic mode has no float8 product"
        for piece in self.pieces:
            ends_matrix = piece is self.pieces[-1]
            for what, held, size, block, may_end in (
                ("rows", piece.rows, piece.shape[0], format.block[0], ends_matrix),
                ("columns", piece.cols, piece.shape[1], format.block[1], True),
            ):
                whole_end = not held.stop % block or (may_end and held.stop == size)
                if not held or held.start % block or not whole_end:
                    ends = f"{held.start}..{held.stop}"
                    return f"{what} {ends} of {size} are not whole blocks of {block}"
        return ""

    def use_format(self, format: MatrixFormat) -> None:
        """Stores the matrix as planes. Call it before weights are loaded."""
        assert not self.unsupported_reason(format), self.unsupported_reason(format)
        rows, cols = self.weight.shape
        device = self.weight.device
        del self.weight
        self.format = format
        for name, (shape, dtype) in format.planes(rows, cols).items():
            plane = torch.empty(shape, dtype=dtype, device=device)
            setattr(self, name, nn.Parameter(plane, requires_grad=False))

    def matrix_names(self, prefix: str) -> list[str]:
        """Names of its matrices in the checkpoint."""
        return [f"{self._stem(prefix, piece)}weight" for piece in self.pieces]

    def _stem(self, prefix: str, piece: StoredPart) -> str:
        return prefix

    def slots(self, prefix: str) -> Iterator[TensorSlot | MatrixSlot]:
        for piece in self.pieces:
            stem = self._stem(prefix, piece)
            yield self._matrix_slot(f"{stem}weight", piece)
            if self.bias is not None:
                shard = Shard.of(piece.shape[:1], piece.rows)
                yield slot(f"{stem}bias", self.bias[piece.place], shard)

    def _matrix_slot(self, name: str, piece: StoredPart) -> TensorSlot | MatrixSlot:
        if self.format is None:
            shard = Shard.of(piece.shape, piece.rows, piece.cols)
            return slot(name, self.weight[piece.place], shard)
        rows, cols = (slice(held.start, held.stop) for held in (piece.rows, piece.cols))
        block = self.format.block[0]
        scales = slice(piece.start // block, -(-piece.place.stop // block))
        planes = {"values": self.values[piece.place], "scales": self.scales[scales]}
        return MatrixSlot(name, planes, self.format, piece.shape, rows, cols)


def linears(module: Module, prefix: str = "") -> Iterator[tuple[str, Linear]]:
    """All projections of a module, each with the prefix of its names in the checkpoint."""
    for name, child in module.named_children():
        assert isinstance(child, Module)
        path = f"{prefix}{module.renamed.get(name, name)}."
        if isinstance(child, Linear):
            yield path, child
        else:
            yield from linears(child, path)


class RowLinear(Linear):
    """Each rank of a group multiplies its part of the inputs with its columns of the weights; the
    result is the sum over ranks. The bias is added once, to the sum.

    A sum over ranks rounds differently than a single product: in deterministic mode every rank
    holds all columns, and the inputs are gathered.
    """

    def __init__(
        self, config: LinearConfig, parts: Sequence[range], group: Collective, operation: str
    ) -> None:
        """`parts`: the inputs of each rank, in order."""
        super().__init__(config, inputs=None if config.deterministic else parts[group.rank])
        self.group, self.operation, self.gathers = group, operation, config.deterministic
        self.widths = [len(part) for part in parts]
        assert len(parts) == group.size and sum(self.widths) == config.inputs, parts

    def forward(self, x_TI: Tensor | Rows, rows: slice | None = None) -> Tensor:
        """`rows`: the rows of the result that this rank needs, by default all; `Rows` need all."""
        if isinstance(x_TI, Rows):
            assert rows is None and not self.gathers
        elif self.group.size == 1:
            x_TI = x_TI if rows is None else x_TI[rows]
        elif self.gathers:
            rows = slice(0, len(x_TI)) if rows is None else rows
            all_TI = self.group.gather_columns(x_TI, self.widths, rows, self.operation)
            return self.multiply(all_TI, self.bias)
        if self.group.size == 1:
            return self.multiply(x_TI, self.bias)
        part_TO = self.multiply(x_TI, None)
        rows = slice(0, len(part_TO)) if rows is None else rows
        sum_TO = self.group.sum_rows(part_TO, rows, self.operation)
        return sum_TO if self.bias is None else sum_TO + self.bias

    def quantised_input(self, like: Tensor) -> Rows | None:
        """An empty buffer for `like`'s number of input rows in float8, which a kernel may fill
        directly; None if this layer takes unquantised rows."""
        if self.format is None:
            return None
        rows, inputs = len(like), self.values.shape[1]
        bias_O = self.bias if self.group.size == 1 else None
        by_column = scales_by_column(like, self._fp8(self.format), bias_O, self.dtype)
        shape = (rows, -(-inputs // FP8_GROUP))
        scales = torch.empty(shape[::-1] if by_column else shape, device=like.device)
        values_TI = like.new_empty(rows, inputs, dtype=torch.float8_e4m3fn)
        return Rows(values_TI, scales.t() if by_column else scales)


@dataclass(frozen=True, slots=True)
class OutputPart:
    """One of several merged projections: its outputs, and those on this rank."""

    outputs: int
    held: range


class MergedLinear(Linear):
    """Several projections of one input as one product; `parts` are by checkpoint name."""

    def __init__(self, config: LinearConfig, parts: Mapping[str, OutputPart]) -> None:
        assert config.outputs == sum(part.outputs for part in parts.values())
        sizes = [len(part.held) for part in parts.values()]
        super().__init__(config, outputs=range(sum(sizes)))
        self.sizes = sizes
        columns = range(config.inputs)
        starts = accumulate(sizes, initial=0)
        self.pieces = tuple(
            StoredPart(name, start, (part.outputs, config.inputs), part.held, columns)
            for start, (name, part) in zip(starts, parts.items(), strict=False)
        )

    def norm_and_project(
        self, norm: RMSNorm, x_TH: Tensor | PairSum, residual_TH: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Projects the output of `norm.add`; also returns the sum."""
        if residual_TH is None or not len(x_TH) or self.deterministic:
            normed_TH, sum_TH = norm.add(x_TH, residual_TH)
            some = self(normed_TH) if len(x_TH) else normed_TH.new_empty(0, sum(self.sizes))
            return some, sum_TH
        if self.format is None:
            rows = SumToNorm(x_TH, residual_TH, norm.weight, norm.eps)
            return norm_linear(rows, self.weight, self.bias)
        matrix = self._fp8(self.format)
        by_column = scales_by_column(residual_TH, matrix, self.bias, self.dtype)
        normed, sum_TH = add_rms_norm_fp8(x_TH, residual_TH, norm.weight, norm.eps, by_column)
        return linear_fp8(normed, matrix, self.bias, self.dtype), sum_TH

    def gated(self, x_TI: Tensor) -> Tensor:
        """silu of the first half of the outputs times the second half."""
        if self.format is not None:
            return gate_up_silu_fp8(Rows(x_TI), self._fp8(self.format), self.bias, x_TI.dtype)
        if not self.deterministic:
            return gate_up_silu(x_TI, self.weight, self.bias)
        return silu_mul(self(x_TI))

    def _stem(self, prefix: str, piece: StoredPart) -> str:
        # The merged layer has no name in the checkpoint: drop the last part of the path.
        return f"{prefix.rstrip('.').rpartition('.')[0]}.{piece.name}."
