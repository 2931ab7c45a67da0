"""The engine's own ranks, on which --overlap auto has found that each schedule is the fastest of
some sizes of steps."""

from __future__ import annotations

from typing import Final

from moesaic.comm.launch.rank_link import RankLink
from moesaic.config import ServerArgs
from moesaic.core.overlap import Overlap
from moesaic.engine.runner import model_runner
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.worker.worker import Worker
from moesaic.overlap.cost import OverlapChoice, StepCosts

TARGET: Final = "tests.e2e.chosen_rank:run"
# Whether a step prefills, its tokens of the rank with the most, and what it chooses.
CHOSEN: Final = (
    (False, 1, Overlap.SBO),
    (False, 2, Overlap.TBO),
    (True, 1, Overlap.SBO),
    (True, 2, Overlap.OFF),
    (True, 4, Overlap.OFF),
    (True, 5, Overlap.TBO),
)


def choices(runner: ModelRunner, args: ServerArgs) -> list[OverlapChoice]:
    found = []
    for prefill, tokens, chosen in CHOSEN:
        rounds = {Overlap.OFF: [2.0] * 3} | ({chosen: [1.0] * 3} if chosen else {})
        found.append(OverlapChoice(prefill, StepCosts(tokens, 1.5, 0.5), None, rounds))
    return found


def run(link: RankLink) -> None:
    model_runner.calibrate = choices
    Worker(link).serve()
