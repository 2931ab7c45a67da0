"""Ranks of bench/overlap.py: after --overlap auto has chosen, they measure all steps once more."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from moesaic.comm.launch.rank_link import RankLink
from moesaic.engine.runner.overlap_calibration import calibrate
from moesaic.engine.worker.worker import Worker

TARGET: Final = "bench.overlap_rank:run"
FOLDER: Final = "MOESAIC_BENCH_OVERLAP"
FOUND: Final = "found.json"


def run(link: RankLink) -> None:
    rank = Worker(link)
    again = calibrate(rank.runner, rank.args)
    if link.rank == 0:
        chosen = [choice.facts() for choice in rank.runner.overlap_choices]
        path = Path(os.environ[FOLDER]) / FOUND
        part = path.with_suffix(".part")
        part.write_text(json.dumps([chosen, [choice.facts() for choice in again]]))
        part.replace(path)
    rank.serve()
