"""MoE layers without memory or peers, built on the meta device to count bytes."""

from __future__ import annotations

from typing import Any

from moesaic.comm.collectives.group import RankGroup
from moesaic.moe.dispatch.base import BaseDispatcher


class ShapeOnlyGroup(RankGroup):
    """A rank of a group that does not run."""

    def __init__(self, rank: int, size: int, nodes: tuple[int, ...] = ()) -> None:
        super().__init__(None, None, "shape_only", 0.0)
        self.rank, self.size, self.nodes = rank, size, nodes


class ShapeOnlyDispatcher(BaseDispatcher):
    """Has a config and no buffers."""

    name = "shape_only"

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("a shape-only model does not compute")

    _dispatch_a = _dispatch_b = _combine_a = _combine_b = _refuse
