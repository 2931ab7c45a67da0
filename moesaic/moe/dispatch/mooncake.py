"""`mooncake`: the low-latency layout for ranks that may go missing.

Whoever steers the ranks gives every one of them the same list of active ranks. Nobody waits for
the others, nothing is taken from them, and pairs whose expert lies with them add nothing. A rank
that is late is reported as PeerTimeout, which names it; after agreeing on a new list all that go on
call `resume` with the same new number and redo the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from moesaic.kernels.cpu.rows import Terms
from moesaic.moe.dispatch.low_latency import LowLatencyDispatcher
from moesaic.moe.registry import UNQUANTIZED, A2aBackend, register_a2a


class MooncakeDispatcher(LowLatencyDispatcher):
    name = "mooncake"

    @property
    def active_ranks(self) -> list[int]:
        return list(self.exchange.active)

    def resume(self, active_ranks: Sequence[int], generation: int) -> None:
        """Go on with these ranks; `generation` is higher than any before it."""
        self.lanes.restart(generation, active_ranks)

    def reachable(self, terms: Terms) -> Terms:
        """Results of a group are a whole only if all ranks that share it take part."""
        active = torch.zeros(self.layout.size, dtype=torch.bool)
        active[self.exchange.active] = True
        whole_G = active.view(self.layout.ep_size, -1).all(1)
        assert terms.owners_TS is not None
        places = torch.where(whole_G[terms.owners_TS], terms.places_TS, -1)
        return replace(terms, places_TS=places)


MOONCAKE = register_a2a(
    A2aBackend(
        name="mooncake",
        summary="low_latency with a list of active ranks: the others are neither awaited nor used",
        formats={"low_latency": "deepep_ll"},
        payloads=(*UNQUANTIZED, "fp8", "int8", "nvfp4", "mxfp4"),
        providers={"cpu": MooncakeDispatcher},
        buffers=lambda config: (MooncakeDispatcher.buffer_spec(config),),
    )
)
