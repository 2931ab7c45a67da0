"""A MoE block as a list of operations, between which a schedule may switch micro-batches.

T tokens of an attention group · H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moesaic.core.step import Step
from moesaic.kernels.experts import PairSum
from moesaic.moe.formats import CombineInput, DispatchOutput, TopKOutput


@dataclass(slots=True)
class LayerState:
    """One micro-batch in one block; the operations fill its fields."""

    x_TH: Tensor
    step: Step
    chosen: TopKOutput | None = None
    """The experts of the rows, if the norm before the block has chosen them."""
    own_x_TH: Tensor = field(init=False)
    """The rows that this rank takes to the experts; all, unless ranks share them."""
    own_step: Step = field(init=False)
    shared_gate_T1: Tensor | None = None
    handle: Any = None
    """The dispatch or combine that is in flight."""
    rows: DispatchOutput | None = None
    results: CombineInput | None = None
    routed_TH: Tensor | PairSum | None = None
    shared_TH: Tensor | None = None

    def __post_init__(self) -> None:
        self.own_x_TH, self.own_step = self.x_TH, self.step

    @property
    def output(self) -> Tensor | PairSum:
        """The block's output, after its last operation."""
        assert self.routed_TH is not None
        if self.shared_TH is None:
            return self.routed_TH
        assert isinstance(self.routed_TH, Tensor), "shared experts exclude a deferred reduce"
        return self.routed_TH + self.shared_TH


class YieldOperation:
    """A point where transfers are in flight and another micro-batch may run."""

    def __call__(self, state: LayerState) -> None:
        """No-op for a single micro-batch."""


Operation = Callable[[LayerState], None]
YIELD = YieldOperation()
