"""Which replicas of an expert the tokens of a rank take (`--ep-dispatch-algorithm`).

`dynamic` splits a rank's rows evenly between all replicas; `static` sends all of them to the
nearest one. Both are tables that change only with the placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from moesaic.moe.placement import EpLayout, Placement, ReplicaChoice, all_replicas

DYNAMIC, STATIC, FAKE, LP = "dynamic", "static", "fake", "lp"


@dataclass(frozen=True, slots=True)
class SourceRank:
    """The rank whose tokens choose replicas. `nodes`: the node of each rank, empty if all are on
    one."""

    layout: EpLayout
    nodes: tuple[int, ...] = ()

    def node_of(self, rank: int) -> int:
        return self.nodes[rank] if self.nodes else 0

    def group_of(self, slot: int) -> int:
        """The group of ranks that hold a slot."""
        return slot // self.layout.slots_per_rank

    def node_of_slot(self, slot: int) -> int:
        return self.node_of(self.group_of(slot) * self.layout.moe_tp_size)


def replica_choice(
    algorithm: str, source: SourceRank, replicated: bool, first_shared: int | None = None
) -> ReplicaChoice:
    """The choice of a rank; `replicated`: all ranks have the same tokens and must choose alike.
    Experts from number `first_shared` on have the nearest replica with every algorithm."""
    if replicated:
        if algorithm == STATIC:
            raise ValueError(
                "--ep-dispatch-algorithm static: all ranks have the same tokens, so no replica is "
                "nearest to them: give dynamic, or another --moe-a2a-backend such as deepep"
            )
        return all_replicas
    if algorithm == STATIC:
        return partial(nearest_replicas, source=source)
    if first_shared is not None:
        return partial(rotated_and_shared, source=source, first_shared=first_shared)
    return partial(rotated_replicas, by=source.layout.rank)


def rotated_and_shared(
    placement: Placement, source: SourceRank, first_shared: int
) -> Sequence[tuple[int, ...]]:
    """All replicas of an expert that some tokens choose, the nearest of one that all choose: their
    ranks are even without sending any."""
    return [
        *rotated_replicas(placement, source.layout.rank)[:first_shared],
        *nearest_replicas(placement, source, first_shared),
    ]


def rotated_replicas(placement: Placement, by: int) -> Sequence[tuple[int, ...]]:
    """All replicas, from another one on for each rank: the first rows of all ranks would otherwise
    go to the first replica, and small decode steps have no other rows."""
    return [
        slots[by % len(slots) :] + slots[: by % len(slots)] if len(slots) > 1 else slots
        for slots in placement.replicas
    ]


def nearest_replicas(
    placement: Placement, source: SourceRank, first: int = 0
) -> Sequence[tuple[int, ...]]:
    """One replica of each expert from number `first` on: on this rank, else on its node, else on
    another node. Where several are as near, each gets equally many of the ranks."""
    return [
        slots if len(slots) == 1 else (nearest_of(slots, expert, source),)
        for expert, slots in enumerate(placement.replicas[first:], first)
    ]


def nearest_of(slots: tuple[int, ...], expert: int, source: SourceRank) -> int:
    """The slot that this rank takes, of one expert. All ranks compute the choices of all ranks:
    those with a replica first, then those with one on their node, then the others; each takes the
    replica with the fewest ranks so far. Ties go to another slot for each expert."""
    turn = expert % len(slots)
    order = slots[turn:] + slots[:turn]
    ranks_of = dict.fromkeys(order, 0)
    chosen: dict[int, int] = {}
    for is_near in (_on_rank, _on_node, _anywhere):
        for rank in range(source.layout.size):
            if rank in chosen:
                continue
            near = [slot for slot in order if is_near(slot, rank, source)]
            if near:
                chosen[rank] = min(near, key=ranks_of.__getitem__)
                ranks_of[chosen[rank]] += 1
    return chosen[source.layout.rank]


def _on_rank(slot: int, rank: int, source: SourceRank) -> bool:
    return source.group_of(slot) == rank // source.layout.moe_tp_size


def _on_node(slot: int, rank: int, source: SourceRank) -> bool:
    return source.node_of_slot(slot) == source.node_of(rank)


def _anywhere(slot: int, rank: int, source: SourceRank) -> bool:
    return True
