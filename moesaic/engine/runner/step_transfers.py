"""What a step moves between this rank's pages and other instances."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from moesaic.disagg.receiver import KVReceiver
from moesaic.disagg.sender import KVSender
from moesaic.engine.schedule.plan import PlanItem, StepPlan
from moesaic.layers.paged_cache import PagedCache, PageTable, to_device


@dataclass(frozen=True, slots=True)
class StepTransfers:
    """A prefill instance has a `sender`, a decode instance a `receiver`."""

    sender: KVSender | None = None
    receiver: KVReceiver | None = None

    def receive(self, plan: StepPlan, cache: PagedCache, table: PageTable) -> None:
        """Moves prompts that have arrived to their pages, before the step reads them."""
        for item in plan.items if self.receiver is not None else ():
            if item.kv_from is not None:
                assert self.receiver is not None
                staged = self.receiver.staged(item.kv_from)
                staged.move_to(cache, _slots(item, staged.first, staged.stop, cache, table))

    def send(self, plan: StepPlan, cache: PagedCache, table: PageTable) -> None:
        """Sends what the step has computed."""
        for item in plan.items if self.sender is not None else ():
            if (order := item.kv_send) is not None:
                assert self.sender is not None
                slots_T = _slots(item, order.first, order.stop, cache, table)
                self.sender.send(order, cache, slots_T)


def _slots(item: PlanItem, first: int, stop: int, cache: PagedCache, table: PageTable) -> Tensor:
    positions = np.arange(first, stop, dtype=np.int32)
    rows = np.full(len(positions), item.row * table.max_pages, np.int32)
    slots = table.slots(cache.page_size, rows, positions).astype(np.int64)
    return to_device(slots, cache.keys.device)
