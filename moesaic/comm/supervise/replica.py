"""A copy of the model, as the supervisor that leads sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from moesaic.comm.mesh import Mesh
from moesaic.comm.supervise.step_rollback import StepRollbacks
from moesaic.core.rank_state import RankSnapshot


@dataclass(slots=True)
class Replica:
    """While `awake`, its ranks step together until they send Asleep; else they wait for a Wake."""

    ranks: range
    groups: range
    rollbacks: StepRollbacks
    awake: bool = False
    round: int = 0
    poked: bool = False
    """Wake its ranks although there is no request."""


def overview_of(
    mesh: Mesh, seen: Mapping[int, RankSnapshot], facts: Mapping[int, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Where each rank is in the mesh, what it holds, and what it does now."""
    return [
        {"rank": rank, "place": mesh.describe(rank), **facts[rank]}
        | (msgspec.structs.asdict(seen[rank]) | {"state": seen[rank].state.name.lower()})
        for rank in sorted(seen)
        if rank in facts
    ]
