"""A decoder layer as a list of operations, between which a schedule may switch micro-batches.

T tokens of an attention group · H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from torch import Tensor

from moesaic.core.step import Step
from moesaic.kernels.experts import PairSum
from moesaic.layers.context import ForwardContext
from moesaic.moe.formats import CombineInput, DispatchOutput, TopKOutput


class OnceState:
    """What operations hand to those behind them. An operation sets a field that is not set, or
    deletes one that nobody reads any more, which frees its memory."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            raise AttributeError(f"{name} is set: no operation may replace what another has left")
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        """Python calls it for fields that are not set."""
        raise AttributeError(f"no operation has set {name} of {type(self).__name__}")


class LayerState(OnceState):
    """One micro-batch in one decoder layer. An own layer may subclass it for further fields."""

    ctx: ForwardContext
    hidden_TH: Tensor | PairSum
    """The layer's input, which its first norm adds to `residual_TH`."""
    residual_TH: Tensor | None
    mixed_TH: Tensor
    """The attention's output, which the second norm adds to `residual_TH`."""
    x_TH: Tensor
    """The normed rows that the block takes; `sum_TH` is what they were normed from."""
    sum_TH: Tensor
    step: Step
    given: TopKOutput | None
    """The experts of the rows, if the norm has chosen them."""
    own_x_TH: Tensor
    """The rows that this rank takes to the experts; all, unless ranks share them."""
    own_step: Step
    chosen: TopKOutput
    shared_gate_T1: Tensor | None
    sent: Any
    """The dispatch that is in flight."""
    rows: DispatchOutput
    results: CombineInput
    returning: Any
    """The combine that is in flight."""
    y_TH: Tensor | PairSum
    """The block's result, without shared experts."""
    shared_inner: tuple[Tensor, slice | None]
    """The shared experts' first half."""
    shared_TH: Tensor | None

    @property
    def output(self) -> Tensor | PairSum:
        """The block's output, after its last operation."""
        shared_TH: Tensor | None = self.__dict__.get("shared_TH")
        if shared_TH is None:
            return self.y_TH
        assert isinstance(self.y_TH, Tensor), "shared experts exclude a deferred reduce"
        return self.y_TH + shared_TH


Operation = Callable[[Any], None]
Marked = TypeVar("Marked", bound=Callable[..., None])


class YieldOperation:
    """A point where transfers are in flight and another micro-batch may run."""

    def __call__(self, state: OnceState) -> None:
        """No-op for a single micro-batch."""


YIELD: Final = YieldOperation()


def fills_wait(operation: Marked) -> Marked:
    """Marks an operation that needs nothing of the transfer in flight. Where nothing overlaps, it
    runs last."""
    operation.fills_wait = True  # type: ignore[attr-defined]
    return operation


def plain_order(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """The operations of a batch that overlaps nothing."""
    kept = [op for op in operations if not isinstance(op, YieldOperation)]
    return tuple(sorted(kept, key=lambda op: getattr(op, "fills_wait", False)))


@dataclass(slots=True)
class MicroBatch:
    """Rows between two layers: the next norm adds `x_TH` to `residual_TH`."""

    ctx: ForwardContext
    x_TH: Tensor | PairSum | None
    residual_TH: Tensor | None = None


class OverlapLayer(Protocol):
    """A layer that a schedule can run."""

    def ops(self) -> Sequence[Operation]:
        """What a micro-batch goes through, with a `YieldOperation` wherever transfers are in
        flight."""

    def begin(self, batch: MicroBatch) -> OnceState:
        """The state of a micro-batch that enters the layer, and takes its rows."""

    def end(self, state: Any, batch: MicroBatch) -> None:
        """Gives the rows back to the micro-batch."""
