"""MoE layers without memory or peers, built on the meta device to count bytes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.core.step import Step
from moesaic.moe.dispatch.base import BaseDispatcher
from moesaic.moe.formats import CombineInput, DispatchOutput, TopKOutput


class ShapeOnlyGroup(RankGroup):
    """A rank of a group that does not run."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None, None, "outline", 0.0)
        self.rank, self.size = rank, size


class ShapeOnlyDispatcher(BaseDispatcher):
    """Has a config and no buffers."""

    name = "outline"

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> Any:
        raise NotImplementedError("an outline does not compute")

    def _dispatch_b(self, pending: Any) -> DispatchOutput:
        raise NotImplementedError("an outline does not compute")

    def _combine_a(self, results: CombineInput) -> Any:
        raise NotImplementedError("an outline does not compute")

    def _combine_b(self, pending: Any) -> Tensor:
        raise NotImplementedError("an outline does not compute")
