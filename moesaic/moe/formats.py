"""The data between the stages of a MoE layer.

T tokens of this rank · H hidden · K experts of a token · E physical slots · e local slots ·
R rows received · M = P * C rows at most for one local slot · P ranks · C token cap of a rank.

A format is a pair of frozen dataclasses with one name: what dispatch gives and what combine takes.
Invalid rows and ids are -1; their contents are garbage and must not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from moesaic.kernels.experts import RemoteRows
from moesaic.moe.quant.payload import Payload


@dataclass(frozen=True, slots=True)
class TopKOutput:
    """The slots of each token, -1 for none, and their float32 weights, applied downstream once."""

    ids_TK: Tensor
    weights_TK: Tensor


@dataclass(frozen=True)
class DispatchOutput:
    """`handle` is opaque; it returns to the dispatcher with the results."""

    format: ClassVar[str]
    in_blocks: ClassVar[bool] = False
    """Whether each local slot has a block of rows."""
    is_fused: ClassVar[bool] = False
    """Whether one function replaces both permutes and the runner."""
    handle: Any

    def slot_rows(self, slots: int) -> Sequence[int] | None:
        """The rows of each local slot; None: not known yet."""
        return None


@dataclass(frozen=True)
class CombineInput:
    """`count_e`: rows that each slot has computed, where only the device knows (int32)."""

    format: ClassVar[str]
    handle: Any
    count_e: Tensor | None = field(default=None, kw_only=True)

    def slot_rows(self, slots: int) -> Sequence[int] | None:
        """The rows of each local slot, if the dispatch output did not know them."""
        return None


DISPATCH_FORMATS: dict[str, type[DispatchOutput]] = {}
Output = TypeVar("Output", bound=type[DispatchOutput])


def dispatch_format(cls: Output) -> Output:
    """Registers a format by its name, for the registrations of runners."""
    if cls.format in DISPATCH_FORMATS:
        raise ValueError(f"dispatch format {cls.format!r} is registered twice")
    DISPATCH_FORMATS[cls.format] = cls
    return cls


@dispatch_format
@dataclass(frozen=True)
class StandardDispatchOutput(DispatchOutput):
    """Rows with the local slots they go to; the runner applies the weights."""

    format = "standard"
    x: Payload  # [R, H]
    ids_RK: Tensor
    weights_RK: Tensor | None
    y_OH: Tensor | None = field(default=None, kw_only=True)
    """A buffer that peers read: results may be written to its front."""
    y_NH: Tensor | None = field(default=None, kw_only=True)
    """If given, the results of all pairs (N = R * K) go here, unweighted; combine applies the
    weights, and `weights_RK` may be None."""
    expected_pairs: int | None = field(default=None, kw_only=True)
    """How many pairs are likely local; None: all of them."""
    remote: RemoteRows | None = field(default=None, kw_only=True)
    """Where rows reside that were not sent; `x` then only shows their format."""

    def slot_rows(self, slots: int) -> Sequence[int]:
        rows: list[int] = (self.ids_RK.flatten() + 1).bincount(minlength=slots + 1)[1:].tolist()
        return rows


@dispatch_format
@dataclass(frozen=True)
class NormalDispatchOutput(StandardDispatchOutput):
    """Each token once per rank, in the order of ranks and tokens; post-permute applies the weights.
    A dispatcher that knows the rows of each local slot may give them."""

    format = "deepep_normal"
    rows_e: list[int] | None = None

    def slot_rows(self, slots: int) -> Sequence[int]:
        return super().slot_rows(slots) if self.rows_e is None else self.rows_e


@dispatch_format
@dataclass(frozen=True)
class LowLatencyDispatchOutput(DispatchOutput):
    """A fixed block of rows for each local slot, of which the first `masked_m` are filled. Results
    may be written to `y_eMH`, where other ranks read them; combine applies the weights. `count_e`
    (int32) replaces `masked_m` where only the device knows it."""

    format = "deepep_ll"
    in_blocks = True
    x: Payload  # [e, M, H]
    masked_m: list[int]
    y_eMH: Tensor
    count_e: Tensor | None = field(default=None, kw_only=True)

    def slot_rows(self, slots: int) -> Sequence[int] | None:
        return self.masked_m if self.count_e is None else None


@dispatch_format
@dataclass(frozen=True)
class FusedDispatchOutput(DispatchOutput):
    """Nothing has moved: a fused function does all the rest."""

    format = "fused"
    is_fused = True
    x_TH: Tensor
    topk: TopKOutput


@dataclass(frozen=True)
class RowsCombineInput(CombineInput):
    """One weighted row for each row received."""

    format = "rows"
    y_RH: Tensor
    pairs: bool = False
    """Instead one unweighted row for each valid (row, k), in that order, so that the token's rank
    sums them in a fixed order. With `count_e` one for each (row, k), valid or not."""


@dataclass(frozen=True)
class DeferredCombineInput(CombineInput):
    """One weighted row for each (row, k): the next norm sums them."""

    format = "deferred"
    y_NH: Tensor


@dataclass(frozen=True)
class LowLatencyCombineInput(CombineInput):
    format = "deepep_ll"
    y_eMH: Tensor


@dataclass(frozen=True)
class FusedCombineInput(CombineInput):
    format = "fused"
    y_TH: Tensor
    rows_e: list[int] | None = None

    def slot_rows(self, slots: int) -> Sequence[int] | None:
        return self.rows_e
