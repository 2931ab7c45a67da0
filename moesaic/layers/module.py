"""The base of all layers: a module that knows which checkpoint tensors it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that a rank holds: `where` of `shape`, nothing in it for the whole."""

    shape: tuple[int, ...]
    where: tuple[slice, ...] = ()

    @classmethod
    def of(cls, shape: tuple[int, ...], *held: range) -> Shard:
        if all(part == range(size) for part, size in zip(held, shape, strict=True)):
            return cls(shape)
        return cls(shape, tuple(slice(part.start, part.stop) for part in held))


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A place to fill from a checkpoint.

    `shape` is the whole tensor's shape in the checkpoint; with `index` only that entry of its first
    dimension is read, with `cut` only that part; `arrange` turns what was read into the layout of
    `into`.
    """

    name: str
    into: Tensor
    shape: tuple[int, ...]
    index: int | None = None
    arrange: Callable[[Tensor], Tensor] | None = None
    cut: tuple[slice, ...] = ()


class MatrixFormat(Protocol):
    """How a matrix is stored, as named planes."""

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that cannot be cut apart."""

    def planes(self, rows: int, cols: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types."""

    def encode(self, w_NK: Tensor) -> dict[str, Tensor]: ...

    def decode(self, planes: Mapping[str, Tensor], out: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class MatrixSlot:
    """A matrix [N, K] to fill that may be quantised, as its format says: `into` holds its planes.

    `shape` is that of the whole matrix, of which this rank holds `rows` and `cols`. A stacked
    checkpoint holds it as entry `index` of [E, N, K]; `interleaved`: its rows are every second one
    of the stacked ones, from this one on. `set_input_scale` is called with the calibrated scale of
    what the matrix is multiplied with, where the checkpoint has one.
    """

    name: str
    into: Mapping[str, Tensor]
    format: MatrixFormat
    shape: tuple[int, int]
    rows: slice
    cols: slice
    index: int | None = None
    interleaved: int | None = None
    set_input_scale: Callable[[float], None] | None = None


def slot(name: str, into: Tensor, cut: Shard | None = None) -> TensorSlot:
    cut = cut or Shard(tuple(into.shape))
    return TensorSlot(name, into, cut.shape, cut=cut.where)


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Module(nn.Module):
    """Attribute names are checkpoint names but for those in `renamed`; `cuts` says which of the
    parameters are parts of a tensor; a layer that fuses tensors overrides `slots`."""

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
