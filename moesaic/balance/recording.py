"""What the ranks have recorded of their forward passes, put together as SGLang's recorder has it.

n passes · S passes of all ranks · L layers of the model · M MoE layers of a rank · e local slots ·
P slots · E logical experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moesaic.balance.problem import Floats, Ints

# SGLang's key for what was gathered outside of micro-batches.
GATHERER: Final = "primary"
Counts = npt.NDArray[np.int32]
PassKey = tuple[int, int]
"""A replica of the model, and the number of a pass in it."""


@dataclass(frozen=True)
class RankPasses:
    """The passes that one rank has recorded. `layers`: its MoE layers, none where another rank
    counts for it; `slots`: the experts of all slots by layer (an index of `layers`) and version."""

    rank: int
    replica: int
    layers: Sequence[int]
    first_slot: int
    slots: Mapping[tuple[int, int], Sequence[int]]
    numbers: Sequence[int]
    versions_nM: Counts
    counts_nMe: Counts
    prefills: Sequence[bool] = field(default_factory=list)

    @property
    def num_local(self) -> int:
        return int(self.counts_nMe.shape[2])

    def local_experts(self, layer: int, version: int) -> Sequence[int]:
        return self.slots[layer, version][self.first_slot : self.first_slot + self.num_local]


@dataclass(frozen=True)
class MergedPasses:
    """The passes that every rank of their replica has recorded."""

    keys: list[PassKey]
    logical_SLE: Counts
    utilization: float | None
    """Mean over passes and layers of mean/max of the ranks' rows; None without any row."""
    num_incomplete: int
    """Passes that only some ranks have recorded: those around the start, or lost on some."""


def merge(ranks: Sequence[RankPasses], num_layers: int, num_experts: int) -> MergedPasses:
    """Sums the counts of all ranks."""
    counting = [rank for rank in ranks if rank.layers]
    keys, num_incomplete = _common_passes(counting)
    places = {key: place for place, key in enumerate(keys)}
    logical_SLE = np.zeros((len(keys), num_layers, num_experts), np.int32)
    for rank in counting:
        own, into = _rows_of(rank, places)
        _add_logical(rank, own, into, logical_SLE)
    return MergedPasses(keys, logical_SLE, _utilization(counting, places), num_incomplete)


def _common_passes(ranks: Sequence[RankPasses]) -> tuple[list[PassKey], int]:
    common: list[PassKey] = []
    num_seen = 0
    for replica in sorted({rank.replica for rank in ranks}):
        found = [set(rank.numbers) for rank in ranks if rank.replica == replica]
        whole = set.intersection(*found)
        num_seen += len(set.union(*found)) - len(whole)
        common += [(replica, number) for number in sorted(whole)]
    return common, num_seen


def _rows_of(rank: RankPasses, places: Mapping[PassKey, int]) -> tuple[Ints, Ints]:
    """The rank's rows that belong to merged passes, and the places of these."""
    found = [places.get((rank.replica, number), -1) for number in rank.numbers]
    into = np.array(found, np.int64)
    own = np.flatnonzero(into >= 0)
    return own, into[own]


def _add_logical(rank: RankPasses, own: Ints, into: Ints, logical_SLE: Counts) -> None:
    for index, layer in enumerate(rank.layers):
        versions = rank.versions_nM[own, index]
        for version in np.unique(versions).tolist():
            rows = versions == version
            counts_ne = rank.counts_nMe[own[rows], index]
            for slot, expert in enumerate(rank.local_experts(index, version)):
                logical_SLE[into[rows], layer, expert] += counts_ne[:, slot]


def _utilization(ranks: Sequence[RankPasses], places: Mapping[PassKey, int]) -> float | None:
    loads: dict[tuple[int, int], list[npt.NDArray[np.integer]]] = {}
    for rank in ranks:
        own, into = _rows_of(rank, places)
        sums_nM = rank.counts_nMe[own[np.argsort(into)]].sum(2)
        for index, layer in enumerate(rank.layers):
            loads.setdefault((rank.replica, layer), []).append(sums_nM[:, index])
    if not loads:
        return None
    shares = np.concatenate([balancedness(np.stack(found, 1)) for found in loads.values()])
    return float(shares.mean()) if len(shares) else None


def balancedness(loads_nD: npt.NDArray[np.integer]) -> Floats:
    """Mean over maximum of the ranks' loads, of each pass that has any."""
    loads_nD = loads_nD[loads_nD.any(1)]
    found: Floats = loads_nD.mean(1) / loads_nD.max(1, initial=1)
    return found


def stat_content(merged: MergedPasses) -> dict[str, Any]:
    """The content of a file of mode `stat`."""
    return {
        "rank": 0,
        "logical_count": merged.logical_SLE,
        "average_utilization_rate_over_window": merged.utilization,
    }
