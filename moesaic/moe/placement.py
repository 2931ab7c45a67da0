"""Where experts lie: logical experts in physical slots, slots on ranks.

E logical experts · S slots · N ids · K chosen · X replicas of an expert at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moesaic.kernels.routing import SlotTable


@dataclass(frozen=True, slots=True)
class EpLayout:
    """Slots lie in blocks of one size on `ep_size` groups of `moe_tp_size` ranks; the ranks of a
    group share each of its experts by slices of the intermediate dimension."""

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

    def local(self, ids: Tensor) -> Tensor:
        """Numbers among this rank's slots, -1 for those of others and for none."""
        if self.ep_size == 1:
            return ids
        local = ids - self.first_slot
        return torch.where(local.clamp(0, self.slots_per_rank - 1) == local, local, -1)

    def owner(self, ids: Tensor) -> Tensor:
        """The group of each slot; -1 for none."""
        return torch.div(ids, self.slots_per_rank, rounding_mode="floor")


@dataclass(frozen=True)
class Placement:
    """Which logical expert each slot holds. An expert may have several slots (replicas)."""

    num_experts: int
    slots: tuple[int, ...]

    def __post_init__(self) -> None:
        missing = sorted(set(range(self.num_experts)) - set(self.slots))
        unknown = sorted(set(self.slots) - set(range(self.num_experts)))
        if missing or unknown:
            raise ValueError(
                f"a placement of {self.num_experts} experts must hold each of them: "
                f"missing {missing[:5]}, unknown {unknown[:5]}"
            )

    @classmethod
    def trivial(cls, num_experts: int, redundant: int = 0) -> Placement:
        """Slot i holds expert i modulo their number."""
        return cls(num_experts, tuple(i % num_experts for i in range(num_experts + redundant)))

    def copied(self, groups: int, copies: int) -> Placement:
        """Slots lie in `groups` blocks; each block so many times in a row."""
        size = len(self.slots) // groups
        blocks = (self.slots[start : start + size] for start in range(0, len(self.slots), size))
        return Placement(self.num_experts, tuple(e for block in blocks for e in block * copies))

    @cached_property
    def is_identity(self) -> bool:
        return self.slots == tuple(range(self.num_experts))

    def table(self) -> tuple[Tensor, Tensor]:
        """[E, X] slots of each expert (the first repeated as padding) and how many it has."""
        replicas: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.slots):
            replicas[expert].append(slot)
        width = max(map(len, replicas))
        padded = [found + found[:1] * (width - len(found)) for found in replicas]
        return torch.tensor(padded), torch.tensor([len(found) for found in replicas])


class SlotMap:
    """Turns logical ids into slots. With replicas a token takes them in turn by its row, so that
    ranks which see the same tokens agree."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._slots_EX, self._count_E = placement.table()
        self._tables: dict[torch.device, SlotTable] = {}

    def table_on(self, device: torch.device) -> SlotTable | None:
        """For the kernel that routes; None where experts are their own slots."""
        if self.placement.is_identity:
            return None
        if device not in self._tables:
            slots_EX, count_E = (t.to(device, torch.int32) for t in self.placement.table())
            self._tables[device] = SlotTable(slots_EX, count_E)
        return self._tables[device]

    def __call__(self, ids_NK: Tensor) -> Tensor:
        """Ids of -1 stay -1."""
        if self.placement.is_identity:
            return ids_NK
        known_NK = ids_NK.clamp(min=0)
        row_N1 = torch.arange(len(ids_NK), device=ids_NK.device).unsqueeze(1)
        slots_NK = self._slots_EX[known_NK, row_N1 % self._count_E[known_NK]]
        return torch.where(ids_NK < 0, -1, slots_NK)
