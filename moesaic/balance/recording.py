"""What the ranks have recorded of their forward passes, put together as SGLang's recorder has it.

n passes · S passes of all ranks · L layers of the model · M MoE layers of a rank · e local slots ·
P slots · E logical experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moesaic.balance.pass_records import PLACEMENT_KEY
from moesaic.balance.problem import Floats, Ints

# SGLang's key for what was gathered outside of micro-batches.
GATHERER: Final = "primary"
Counts = npt.NDArray[np.int32]
NO_PASS: Final = -1


@dataclass(frozen=True)
class RankPasses:
    """The passes that one rank has recorded. `layers`: its MoE layers; `counts`: whether it counts
    for them; `slots`: the experts of all slots by layer (an index of `layers`) and version."""

    rank: int
    replica: int
    layers: Sequence[int]
    counts: bool
    first_slot: int
    slots: Mapping[tuple[int, int], Sequence[int]]
    numbers: Sequence[int]
    versions_nM: Counts
    counts_nMe: Counts
    details: Sequence[Mapping[str, Any]] = ()
    """More fields of each pass's record."""

    @property
    def num_local(self) -> int:
        return int(self.counts_nMe.shape[2])

    def local_experts(self, layer: int, version: int) -> Sequence[int]:
        return self.slots[layer, version][self.first_slot : self.first_slot + self.num_local]


@dataclass(frozen=True)
class CommonPasses:
    """`numbers`: by replica, the passes that all of its ranks have recorded; `last`: by replica,
    the last pass that no rank has still to record; `incomplete`: passes up to it that only some
    ranks have, as they did not start or were not full at the same time."""

    numbers: Mapping[int, Collection[int]]
    last: Mapping[int, int]
    incomplete: int


def common_passes(recorded: Sequence[tuple[int, Collection[int]]]) -> CommonPasses:
    """`recorded`: of each rank, its replica and the numbers of its passes."""
    numbers: dict[int, set[int]] = {}
    last: dict[int, int] = {}
    incomplete = 0
    for replica in sorted({replica for replica, _ in recorded}):
        found = [set(some) for of, some in recorded if of == replica]
        last[replica] = min(max(some, default=NO_PASS) for some in found)
        numbers[replica] = set.intersection(*found)
        seen = {number for number in set.union(*found) if number <= last[replica]}
        incomplete += len(seen - numbers[replica])
    return CommonPasses(numbers, last, incomplete)


def merged_counts(ranks: Sequence[RankPasses], num_layers: int, num_experts: int) -> Counts:
    """[S, L, E]: the sums over ranks, which have the same passes within a replica."""
    counting = [rank for rank in ranks if rank.counts]
    keys = sorted({(rank.replica, number) for rank in counting for number in rank.numbers})
    places = {key: place for place, key in enumerate(keys)}
    logical_SLE = np.zeros((len(keys), num_layers, num_experts), np.int32)
    for rank in counting:
        into = np.array([places[rank.replica, number] for number in rank.numbers], np.int64)
        _add_logical(rank, into, logical_SLE)
    return logical_SLE


def _add_logical(rank: RankPasses, into: Ints, logical_SLE: Counts) -> None:
    for index, layer in enumerate(rank.layers):
        versions = rank.versions_nM[:, index]
        for version in np.unique(versions).tolist():
            rows = versions == version
            counts_ne = rank.counts_nMe[rows, index]
            for slot, expert in enumerate(rank.local_experts(index, version)):
                logical_SLE[into[rows], layer, expert] += counts_ne[:, slot]


def utilization(ranks: Sequence[RankPasses]) -> float | None:
    """Mean over passes and layers of mean/max of the ranks' rows; None without any row."""
    loads: dict[tuple[int, int], list[npt.NDArray[np.integer]]] = {}
    for rank in ranks:
        sums_nM = rank.counts_nMe[np.argsort(rank.numbers, kind="stable")].sum(2)
        for index, layer in enumerate(rank.layers if rank.counts else ()):
            loads.setdefault((rank.replica, layer), []).append(sums_nM[:, index])
    shares = [balancedness(np.stack(found, 1)) for found in loads.values()]
    joined = np.concatenate(shares) if shares else np.zeros(0)
    return float(joined.mean()) if len(joined) else None


def balancedness(loads_nD: npt.NDArray[np.integer]) -> Floats:
    """Mean over maximum of the ranks' loads, of each pass that has any."""
    loads_nD = loads_nD[loads_nD.any(1)]
    found: Floats = loads_nD.mean(1) / loads_nD.max(1, initial=1)
    return found


def stat_content(ranks: Sequence[RankPasses], num_layers: int, num_experts: int) -> dict[str, Any]:
    """The content of a file of mode `stat`."""
    return {
        "rank": 0,
        "logical_count": merged_counts(ranks, num_layers, num_experts),
        "average_utilization_rate_over_window": utilization(ranks),
    }


def last_placement(ranks: Sequence[RankPasses], num_layers: int, num_experts: int) -> Ints:
    """[L, P]: the experts of all slots after the last pass, from the ranks of one replica. Layers
    without experts have a trivial placement."""
    num_slots = max((len(slots) for rank in ranks for slots in rank.slots.values()), default=0)
    slots_LP = np.tile(np.arange(num_slots) % max(1, num_experts), (num_layers, 1))
    for rank in ranks:
        for (index, _), slots in sorted(rank.slots.items()):  # the last version comes last
            slots_LP[rank.layers[index]] = slots
    return slots_LP


def pass_content(
    rank: RankPasses, last_LP: Ints, ranks: Sequence[int], replicas: int = 1
) -> dict[str, Any]:
    """The content of one rank's file of mode `per_pass` or `per_token`: counts of the slots that
    the rank has computed. `ranks`: those whose files belong together. Beyond SGLang's fields, a
    pass that ran before experts moved has the placement that it followed."""
    local = slice(rank.first_slot, rank.first_slot + rank.num_local)
    counts_nLP = np.zeros((len(rank.numbers), *last_LP.shape), np.int32)
    if rank.numbers:  # without any pass, as before the first start, there may be no placement
        counts_nLP[:, list(rank.layers), local] = rank.counts_nMe
    placements: dict[tuple[int, ...], Ints] = {}
    records = []
    for n, number in enumerate(rank.numbers):
        record = {
            "forward_pass_id": number * replicas + rank.replica,
            "rank": rank.rank,
            "gatherer_key": GATHERER,
            "global_physical_count": counts_nLP[n],
            **(rank.details[n] if rank.details else {}),
        }
        versions = tuple(rank.versions_nM[n].tolist())
        if versions not in placements:
            placements[versions] = _placement_of(rank, versions, last_LP)
        if placements[versions] is not last_LP:
            record[PLACEMENT_KEY] = placements[versions]
        records.append(record)
    return {
        "records": records,
        "last_physical_to_logical_map": last_LP,
        "rank": rank.rank,
        "ranks": list(ranks),
    }


def _placement_of(rank: RankPasses, versions: tuple[int, ...], last_LP: Ints) -> Ints:
    slots_LP = last_LP.copy()
    for index, version in enumerate(versions):
        slots_LP[rank.layers[index]] = rank.slots[index, version]
    return last_LP if (slots_LP == last_LP).all() else slots_LP
