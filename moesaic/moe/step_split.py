"""`lp`: every step with prompts splits the pairs of replicated experts so as to spare the fullest
rank (kernels/split.py).

E experts · D ranks with slots · R redundant slots · P ranks with tokens · T tokens · K chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.comm.collectives.collective import Collective, SingleRank, WindowCollective
from moesaic.comm.collectives.device_collective import DeviceCollective, rail_collective
from moesaic.kernels.split import ReplicaTable, count_pairs, fill_replicas, take_replicas
from moesaic.moe.dispatch.base import CommContext
from moesaic.moe.placement import EMPTY, EpLayout, Placement, overwrite


@dataclass(frozen=True, slots=True)
class CountsSpec:
    """The collective in which ranks exchange how many pairs they have of each expert; all layers
    share it."""

    most_experts: int
    device: str
    """Whose backends compute: cpu or cuda."""

    @property
    def part_bytes(self) -> int:
        return 4 * self.most_experts

    def nbytes(self, size: int) -> int:
        if self.device == "cpu":
            return WindowCollective.window_bytes(size, self.part_bytes) // size
        return DeviceCollective.window_bytes(size, self.part_bytes, torch.device(self.device))

    def make(self, comm: CommContext) -> Collective:
        if comm.group.size == 1:
            return SingleRank()
        if self.device == "cpu":
            return WindowCollective(comm.group, self.part_bytes, comm.timeout)
        device = torch.get_default_device()
        if comm.group.nodes:
            return rail_collective(comm.group, self.part_bytes, comm.timeout, device)
        return DeviceCollective.create(comm.group, self.part_bytes, comm.timeout, device)


class StepSplit:
    """Turns logical experts into slots by the counts of the step. All ranks call it in every layer,
    also without tokens. Tables are updated in place: captured graphs read the new ones."""

    def __init__(
        self, placement: Placement, layout: EpLayout, ranks: Collective, layer: int = 0
    ) -> None:
        """`ranks`: those with different tokens; a single one where all have the same."""
        self.num_experts = placement.num_experts
        self._layout, self._ranks = layout, ranks
        self._operation = f"counts of experts, layer {layer}"
        self._rows = replica_rows(placement, layout)
        self._tables: dict[torch.device, ReplicaTable] = {}

    def update(self, placement: Placement) -> None:
        self._rows = replica_rows(placement, self._layout)
        for table in self._tables.values():
            for tensor, rows in zip(_tensors(table), self._rows, strict=True):
                overwrite(tensor, torch.tensor(rows))

    def __call__(self, ids_TK: Tensor) -> Tensor:
        """Ids of -1 stay -1."""
        table = self.table_on(ids_TK.device)
        counts = count_pairs(ids_TK, self.num_experts)
        ranks = self._ranks
        counts_PE = ranks.gather_rows(counts.count_E[None], [1] * ranks.size, self._operation)
        ends_ED = fill_replicas(counts_PE, table, ranks.rank)
        return take_replicas(ids_TK, counts, ends_ED, table)

    def table_on(self, device: torch.device) -> ReplicaTable:
        if device not in self._tables:
            with torch.inference_mode(False):  # or updates outside of that mode would fail
                self._tables[device] = ReplicaTable(
                    *(torch.tensor(rows, dtype=torch.int32, device=device) for rows in self._rows)
                )
        return self._tables[device]


Rows = tuple[Sequence[Sequence[int]], Sequence[int], Sequence[int]]


def replica_rows(placement: Placement, layout: EpLayout) -> Rows:
    """The lists of a `ReplicaTable`. There is at most one expert with replicas for each redundant
    slot, so the sizes do not depend on the placement."""
    slots_ED = [[-1] * layout.ep_size for _ in range(placement.num_experts)]
    for slot, expert in reversed(list(enumerate(placement.slots))):
        if expert != EMPTY:
            slots_ED[expert][slot // layout.slots_per_rank] = slot
    there = [[slot for slot in slots if slot >= 0] for slots in slots_ED]
    single_E = [slots[0] if len(slots) == 1 else -1 for slots in there]
    several = [expert for expert, slots in enumerate(there) if len(slots) > 1]
    room = len(placement.slots) - placement.num_experts
    return slots_ED, single_E, several + [-1] * (room - len(several))


def _tensors(table: ReplicaTable) -> tuple[Tensor, Tensor, Tensor]:
    return table.slots_ED, table.single_E, table.several_R
