"""Ranks of bench/nodes_engine.py that record kernels.

Ranks of later stages have no scheduler to ask how many requests decode, so all ranks go by what
they agreed on in the last step: they record the same steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from torch import Tensor

from bench import ep_rank
from bench.ep_rank import Recorder
from moesaic.comm.launch.rank_link import RankLink
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import StepAgreement
from moesaic.engine.worker.worker import Worker

TARGET: Final = "bench.nodes_rank:run"


class AgreedRecorder(Recorder):
    """In place of a rank's step and of its agreement."""

    def __init__(self, rank: Worker, folder: Path) -> None:
        super().__init__(rank, folder)
        self._agreement = StepAgreement(0)
        stage = rank.loop.stage
        self._agree = stage.agree
        stage.agree = self.agree  # type: ignore[method-assign]

    def agree(self, step: InflightStep) -> Tensor | None:
        x_TH = self._agree(step)
        self._agreement = step.agreement
        return x_TH

    def _decoding(self) -> int:
        """Of all groups: a pipeline has as many steps in flight as stages, which share them."""
        told = self._agreement
        return 0 if told.prefill else sum(told.counts) * self._rank.mesh.pp


def run(link: RankLink) -> None:
    ep_rank.serve(link, AgreedRecorder)
