"""A copy of the model, as the supervisor that leads sees it."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.comm.supervise.step_rollback import StepRollbacks


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
