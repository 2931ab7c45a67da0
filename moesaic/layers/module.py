"""The base of all layers: a module that knows which checkpoint tensors it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A place to fill from a checkpoint.

    `shape` is the whole tensor's shape in the checkpoint; with `index` only that entry of its first
    dimension is read; `arrange` turns what was read into the layout of `into`.
    """

    name: str
    into: Tensor
    shape: tuple[int, ...]
    index: int | None = None
    arrange: Callable[[Tensor], Tensor] | None = None


def slot(name: str, into: Tensor) -> TensorSlot:
    return TensorSlot(name, into, tuple(into.shape))


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Module(nn.Module):
    """Attribute names are checkpoint names but for those in `renamed`; a layer that fuses tensors
    overrides `slots`."""

    renamed: Mapping[str, str] = MappingProxyType({})

    def slots(self, prefix: str) -> Iterator[TensorSlot]:
        for name, tensor in self.named_parameters(recurse=False):
            yield slot(prefix + name, tensor)
        for name, child in self.named_children():
            assert isinstance(child, Module), f"{prefix}{name} is not a moesaic layer"
            yield from child.slots(f"{prefix}{self.renamed.get(name, name)}.")


class ModuleList(nn.ModuleList, Module):
    pass
