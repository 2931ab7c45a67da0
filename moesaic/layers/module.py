"""The base of all layers: a module that declares its checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor on this rank; without `where` all of it."""

    shape: tuple[int, ...]
    where: tuple[slice, ...] = ()

    @classmethod
    def of(cls, shape: tuple[int, ...], *held: range) -> Shard:
        if all(part == range(size) for part, size in zip(held, shape, strict=True)):
            return cls(shape)
        return cls(shape, tuple(slice(part.start, part.stop) for part in held))


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor to fill from a checkpoint."""

    name: str
    into: Tensor
    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint."""
    index: int | None = None
    """If given, reads only this entry of the first dimension."""
    arrange: Callable[[Tensor], Tensor] | None = None
    """Turns the tensor that was read into the layout of `into`."""
    cut: tuple[slice, ...] = ()
    """If given, reads only this part."""


class MatrixFormat(Protocol):
    """How a matrix is stored as named planes."""

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block, which cannot be split."""

    def planes(self, rows: int, cols: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each plane."""


@dataclass(frozen=True, slots=True)
class MatrixSlot:
    """A matrix [N, K] to fill, possibly quantised: `into` has the planes of `format`."""

    name: str
    into: Mapping[str, Tensor]
    format: MatrixFormat
    shape: tuple[int, int]
    """Shape of the whole matrix; this rank holds `rows` and `cols` of it."""
    rows: slice
    cols: slice
    index: int | None = None
    """Its entry in a stack [E, N, K]."""
    interleaved: int | None = None
    """If given, its rows are every second one of the stacked rows, from this row on."""
    set_input_scale: Callable[[float], None] | None = None
    """Receives the calibrated scale of the matrix's input, if the checkpoint has one."""


def slot(name: str, into: Tensor, cut: Shard | None = None) -> TensorSlot:
    cut = cut or Shard(tuple(into.shape))
    return TensorSlot(name, into, cut.shape, cut=cut.where)


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Module(nn.Module):
    """Attribute names are checkpoint names, except those in `renamed`. `shards` has the parameters
    that are parts of a tensor. A layer that fuses tensors overrides `slots`."""

    renamed: Mapping[str, str] = MappingProxyType({})
    shards: Mapping[str, Shard] = MappingProxyType({})

    def slots(self, prefix: str) -> Iterator[TensorSlot | MatrixSlot]:
        for name, tensor in self.named_parameters(recurse=False):
            yield slot(prefix + name, tensor, self.shards.get(name))
        for name, child in self.named_children():
            assert isinstance(child, Module), f"{prefix}{name} is not a moesaic layer"
            yield from child.slots(f"{prefix}{self.renamed.get(name, name)}.")


class ModuleList(nn.ModuleList, Module):
    pass
