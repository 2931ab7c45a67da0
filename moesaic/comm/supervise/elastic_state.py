"""What the supervisor of an elastic service knows of its ranks and of changes that go on."""

from __future__ import annotations

from dataclasses import dataclass, field

from moesaic.comm.supervise.restarts import Restarts
from moesaic.comm.supervise.step_rollback import StepRollbacks
from moesaic.core.stats import MembershipChange


@dataclass(slots=True)
class PendingChange:
    """A change that some ranks have yet to adopt, and when it began."""

    change: MembershipChange
    began: float


@dataclass(slots=True)
class RankLife:
    is_live: bool = True
    """It takes part in steps, or will once the others have abandoned theirs."""
    since: float = 0.0
    """When it returned, or was lost."""
    restart_at: float | None = None
    """When its process is to be started; None: it has been."""
    started: float = 0.0
    """When it was."""
    restarts: Restarts = field(default_factory=Restarts)
    cuts: list[float] = field(default_factory=list)
    """When it has lost a connection."""
    ready_at: float | None = None
    """Since when its process could serve, until it joins."""


@dataclass(slots=True)
class ElasticReplica:
    number: int
    rollbacks: StepRollbacks
    epoch: int = 1
    reset: set[int] = field(default_factory=set)
    """Serving groups that have lost a rank, until all ranks know."""
    adopting: set[int] = field(default_factory=set)
    """Ranks that have yet to adopt the epoch."""
    waits_since: float | None = None
    """Since when its ranks wait for one that is lost."""
    pending: list[PendingChange] = field(default_factory=list)
