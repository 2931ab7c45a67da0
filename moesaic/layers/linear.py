"""Dense projections, whole or cut over ranks. T tokens, I inputs, O outputs, N heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.comm.collective import Collective
from moesaic.kernels.cpu import linear as kernel
from moesaic.layers import invariant
from moesaic.layers.module import Cut, Module, TensorSlot, parameter, slot

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
FEW_ROWS = 64


def product(deterministic: bool) -> Product:
    """What computes x W' + bias; in deterministic mode no row depends on its neighbours."""
    return invariant.linear if deterministic else fastest_linear


def fastest_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """For a few rows the compiled kernel reads bfloat16 weights faster than oneDNN does."""
    few = len(x_TI) <= FEW_ROWS and x_TI.dtype == weight_OI.dtype == torch.bfloat16
    if few and kernel.fits(weight_OI):
        return kernel.run(x_TI, weight_OI, bias_O)
    return F.linear(x_TI, weight_OI, bias_O)


def head_products(x_NTI: Tensor, w_NOI: Tensor, deterministic: bool) -> Tensor:
    """A product for each head."""
    if not deterministic:
        return torch.bmm(x_NTI, w_NOI.transpose(1, 2))
    linear = product(deterministic)
    return torch.stack([linear(x, w, None) for x, w in zip(x_NTI, w_NOI, strict=True)])


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Sizes are those of the whole layer."""

    inputs: int
    outputs: int
    dtype: torch.dtype
    bias: bool = False
    deterministic: bool = False


class Linear(Module):
    """`outputs` and `inputs`: those that this rank holds, all of them unless told otherwise."""

    def __init__(
        self, config: LinearConfig, outputs: range | None = None, inputs: range | None = None
    ) -> None:
        super().__init__()
        outputs = range(config.outputs) if outputs is None else outputs
        inputs = range(config.inputs) if inputs is None else inputs
        self.weight = parameter(len(outputs), len(inputs), dtype=config.dtype)
        self.bias = parameter(len(outputs), dtype=config.dtype) if config.bias else None
        self.product = product(config.deterministic)
        self.cuts = {
            "weight": Cut.of((config.outputs, config.inputs), outputs, inputs),
            "bias": Cut.of((config.outputs,), outputs),
        }

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.product(x_TI, self.weight, self.bias)


class RowLinear(Linear):
    """The ranks of a group bring some of the inputs each, which follow each other in `parts`.

    Each multiplies what it brings with its columns of the weights, and the sum over ranks is the
    result; the bias is added to the sum, once. Such a sum rounds otherwise than that of one rank:
    in deterministic mode every rank holds all the columns, and the inputs are put together.
    """

    def __init__(
        self, config: LinearConfig, parts: Sequence[range], group: Collective, operation: str
    ) -> None:
        """`parts`: the inputs that each rank of the group brings."""
        super().__init__(config, inputs=None if config.deterministic else parts[group.rank])
        self.group, self.operation, self.gathers = group, operation, config.deterministic
        self.widths = [len(part) for part in parts]
        assert len(parts) == group.size and sum(self.widths) == config.inputs, parts

    def forward(self, x_TI: Tensor, rows: slice | None = None) -> Tensor:
        """`rows`: those that this rank wants of the result; all by default."""
        rows = slice(0, len(x_TI)) if rows is None else rows
        if self.group.size == 1:
            return self.product(x_TI[rows], self.weight, self.bias)
        if self.gathers:
            all_TI = self.group.gather_columns(x_TI, self.widths, rows, self.operation)
            return self.product(all_TI, self.weight, self.bias)
        part_TO = self.product(x_TI, self.weight, None)
        sum_TO = self.group.sum_rows(part_TO, rows, self.operation)
        return sum_TO if self.bias is None else sum_TO + self.bias


@dataclass(frozen=True, slots=True)
class Part:
    """One of several projections: its outputs, and those of them that this rank holds."""

    outputs: int
    held: range


class MergedLinear(Linear):
    """Several projections of one input as one matrix product.

    `parts` has the checkpoint name of each, e.g. {"q_proj": Part(64, range(64)), …}; the outputs of
    the whole layer are theirs together.
    """

    def __init__(self, config: LinearConfig, parts: Mapping[str, Part]) -> None:
        assert config.outputs == sum(part.outputs for part in parts.values())
        sizes = [len(part.held) for part in parts.values()]
        super().__init__(config, outputs=range(sum(sizes)))
        self.parts, self.sizes = dict(parts), sizes

    def split(self, x_TI: Tensor) -> tuple[Tensor, ...]:
        return self.forward(x_TI).split(self.sizes, dim=-1)

    def slots(self, prefix: str) -> Iterator[TensorSlot]:
        # The merged layer has no name of its own in the checkpoint: drop the last part of the path.
        stem = prefix.rstrip(".").rpartition(".")[0]
        inputs = self.weight.shape[1]
        start = 0
        for name, part in self.parts.items():
            stop = start + len(part.held)
            cut = Cut.of((part.outputs, inputs), part.held, range(inputs))
            yield slot(f"{stem}.{name}.weight", self.weight[start:stop], cut)
            if self.bias is not None:
                cut = Cut.of((part.outputs,), part.held)
                yield slot(f"{stem}.{name}.bias", self.bias[start:stop], cut)
            start = stop
