"""Where experts reside: logical experts in physical slots, slots on ranks.

E logical experts · S slots · N ids · K chosen · X replicas of an expert at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from moesaic.kernels.routing import SlotTable, replica_of_row

# What a slot holds whose rank is lost.
EMPTY: Final = -1


@dataclass(frozen=True, slots=True)
class EpLayout:
    """Slots are distributed evenly over `ep_size` groups of `moe_tp_size` ranks; each rank of a
    group holds a slice of the intermediate dimension of all its experts."""

    num_slots: int
    ep_size: int = 1
    moe_tp_size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.num_slots % self.ep_size:
            more = -self.num_slots % self.ep_size
            raise ValueError(
                f"{self.num_slots} expert slots cannot be laid evenly over ep {self.ep_size}: "
                f"add {more} redundant slots (--ep-num-redundant-experts) or change --ep-size"
            )
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not one of 0..{self.size - 1}")

    @property
    def size(self) -> int:
        return self.ep_size * self.moe_tp_size

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.ep_size

    @property
    def ep_rank(self) -> int:
        return self.rank // self.moe_tp_size

    @property
    def moe_tp_rank(self) -> int:
        return self.rank % self.moe_tp_size

    @property
    def first_slot(self) -> int:
        return self.ep_rank * self.slots_per_rank

    def holds(self, slot: int) -> bool:
        """Whether the slot is one of this rank's."""
        return slot // self.slots_per_rank == self.ep_rank

    def local(self, ids: Tensor) -> Tensor:
        """Local slot numbers; -1 for slots of other ranks and for none."""
        if self.ep_size == 1:
            return ids
        local = ids - self.first_slot
        return torch.where(local.clamp(0, self.slots_per_rank - 1) == local, local, -1)

    def owner(self, ids: Tensor) -> Tensor:
        """The group of each slot; -1 for none."""
        return torch.div(ids, self.slots_per_rank, rounding_mode="floor")


def redundant_slots(experts: int, asked: int, ep_size: int) -> int:
    """The redundant slots for `asked` ones: as many more as an even distribution needs. 8 experts
    on 3 ranks have 1 for 0 or 1, and 4 for 2."""
    return asked + -(experts + asked) % ep_size


@dataclass(frozen=True)
class Placement:
    """Which logical expert each slot holds, or EMPTY. An expert may have several (replicas)."""

    num_experts: int
    slots: tuple[int, ...]

    def __post_init__(self) -> None:
        missing = sorted(set(range(self.num_experts)) - set(self.slots))
        unknown = sorted(set(self.slots) - set(range(EMPTY, self.num_experts)))
        if missing or unknown:
            raise ValueError(
                f"a placement of {self.num_experts} experts must hold each of them: "
                f"missing {missing[:5]}, unknown {unknown[:5]}"
            )

    @classmethod
    def trivial(cls, num_experts: int, redundant: int = 0) -> Placement:
        """Slot i holds expert i modulo their number."""
        return cls(num_experts, tuple(i % num_experts for i in range(num_experts + redundant)))

    def with_everywhere(self, experts: int, groups: int) -> Placement:
        """Adds `experts` more, each with a slot in every of `groups` blocks, behind the others."""
        size = len(self.slots) // groups
        blocks = (self.slots[start : start + size] for start in range(0, len(self.slots), size))
        more = range(self.num_experts, self.num_experts + experts)
        return Placement(more.stop, tuple(e for block in blocks for e in (*block, *more)))

    def copied(self, groups: int, copies: int) -> Placement:
        """Splits the slots into `groups` blocks and repeats each block `copies` times."""
        size = len(self.slots) // groups
        blocks = (self.slots[start : start + size] for start in range(0, len(self.slots), size))
        return Placement(self.num_experts, tuple(e for block in blocks for e in block * copies))

    @cached_property
    def is_identity(self) -> bool:
        return self.slots == tuple(range(self.num_experts))

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The slots of each expert."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.slots):
            if expert != EMPTY:
                found[expert].append(slot)
        return tuple(map(tuple, found))

    @property
    def most_replicas(self) -> int:
        return max(map(len, self.replicas))

    def table(self, width: int = 0) -> tuple[Tensor, Tensor]:
        """[E, X] slots of each expert, padded by the first, and how many it has."""
        return slot_table(self.replicas, width or self.most_replicas)


def slot_table(slots: Sequence[tuple[int, ...]], width: int) -> tuple[Tensor, Tensor]:
    """[E, X] these slots of each expert, padded by the first, and how many there are."""
    padded = [some + some[:1] * (width - len(some)) for some in slots]
    return torch.tensor(padded), torch.tensor([len(some) for some in slots])


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copies values of the host, on a GPU behind the steps that were begun and without waiting."""
    values = values.to(tensor.dtype)
    tensor.copy_(values.pin_memory() if tensor.is_cuda else values, non_blocking=True)


ReplicaChoice = Callable[[Placement], Sequence[tuple[int, ...]]]
"""The slots of each expert among which this rank's rows are split, in this order."""


def all_replicas(placement: Placement) -> Sequence[tuple[int, ...]]:
    return placement.replicas


class SlotMap:
    """Turns logical experts into slots: rows are split evenly between the slots that `choice` gives
    each expert, by the number of the row (`replica_of_row`). Ranks with the same tokens need the
    same choice.

    Tables have a fixed width of `max_replicas` and are updated in place: kernels in captured graphs
    read the new ones. With 0 the width is that of the placement, and an identity has no table."""

    def __init__(
        self, placement: Placement, max_replicas: int = 0, choice: ReplicaChoice = all_replicas
    ) -> None:
        self.placement, self.choice = placement, choice
        self.width = max_replicas or placement.most_replicas
        self._has_table = max_replicas > 0 or not placement.is_identity
        self._tables: dict[torch.device, SlotTable] = {}
        self._check(placement)

    def update(self, placement: Placement) -> None:
        """Routes by another placement of the same experts and slots, in the same tensors."""
        if not self._has_table:
            raise ValueError(
                "this slot map is a fixed identity: build it with max_replicas to change its "
                "placement"
            )
        self._check(placement)
        slots_EX, count_E = slot_table(self.choice(placement), self.width)
        for table in self._tables.values():
            overwrite(table.slots_EX, slots_EX)
            overwrite(table.count_E, count_E)
        self.placement = placement

    def _check(self, placement: Placement) -> None:
        old, new = self.placement, placement
        if (old.num_experts, len(old.slots)) != (new.num_experts, len(new.slots)):
            raise ValueError(
                f"a placement of {new.num_experts} experts in {len(new.slots)} slots does not fit "
                f"a layer with {old.num_experts} experts in {len(old.slots)} slots"
            )
        if new.most_replicas > self.width:
            raise ValueError(
                f"an expert with {new.most_replicas} replicas does not fit the slot table, which "
                f"holds {self.width} for each expert: use fewer, or build it with a larger "
                f"max_replicas"
            )

    def table_on(self, device: torch.device) -> SlotTable | None:
        """For the kernel that routes; None where every expert is always its own slot."""
        if not self._has_table:
            return None
        if device not in self._tables:
            slots_EX, count_E = slot_table(self.choice(self.placement), self.width)
            with torch.inference_mode(False):  # or updates outside of that mode would fail
                self._tables[device] = SlotTable(
                    slots_EX.to(device, torch.int32), count_E.to(device, torch.int32)
                )
        return self._tables[device]

    def __call__(self, ids_NK: Tensor) -> Tensor:
        """Ids of -1 stay -1."""
        table = self.table_on(ids_NK.device)
        if table is None:
            return ids_NK
        known_NK = ids_NK.clamp(min=0)
        row_N1 = torch.arange(len(ids_NK), device=ids_NK.device).unsqueeze(1)
        slots_NK = table.slots_EX[known_NK, replica_of_row(row_N1, table.count_E[known_NK])]
        return torch.where(ids_NK < 0, -1, slots_NK.to(ids_NK.dtype))
