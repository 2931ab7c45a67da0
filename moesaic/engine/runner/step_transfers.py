"""What a step moves between this rank's pages and other instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from moesaic.core.disagg import KVSend
from moesaic.disagg.receiver import KVReceiver
from moesaic.disagg.sender import KVSender
from moesaic.engine.schedule.plan import PlanItem, StepPlan
from moesaic.layers.paged_cache import PagedCache, PageTable, to_device

# Of the caches that are sent: the place of a draft model's.
DRAFT: Final = 1
Outgoing = list[tuple[KVSend, Tensor]]
"""What a step sends, and the slots in which it is."""


@dataclass(frozen=True, slots=True)
class StepTransfers:
    """A prefill instance has a `sender`, a decode instance a `receiver`."""

    sender: KVSender | None = None
    receiver: KVReceiver | None = None

    def receive(self, plan: StepPlan, caches: Sequence[PagedCache], table: PageTable) -> None:
        """Moves prompts that have arrived to their pages, before the step reads them; not that of a
        request which has ended meanwhile: nobody takes what the step computes for it."""
        for item in plan.items if self.receiver is not None else ():
            if item.kv_from is not None:
                assert self.receiver is not None
                if (staged := self.receiver.staged(item.kv_from)) is None:
                    continue
                slots_T = _slots(item, staged.first, staged.stop, caches[0], table)
                staged.move_to(caches, slots_T)

    def outgoing(self, plan: StepPlan, cache: PagedCache, table: PageTable) -> Outgoing:
        """Of a step that is computed: later ones may change the table."""
        if self.sender is None:
            return []
        orders = ((item, item.kv_send) for item in plan.items)
        return [
            (order, _slots(item, order.first, order.stop, cache, table))
            for item, order in orders
            if order is not None
        ]

    def send(self, outgoing: Outgoing, cache: PagedCache, which: int = 0) -> None:
        for order, slots_T in outgoing:
            assert self.sender is not None
            self.sender.send(order, cache, slots_T, which)


def _slots(item: PlanItem, first: int, stop: int, cache: PagedCache, table: PageTable) -> Tensor:
    positions = np.arange(first, stop, dtype=np.int32)
    rows = np.full(len(positions), item.row * table.max_pages, np.int32)
    slots = table.slots(cache.page_size, rows, positions).astype(np.int64)
    return to_device(slots, cache.keys.device)
