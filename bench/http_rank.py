"""A server whose rank computes nothing, for bench.http_streams.

    python -m bench.http_rank --model-path tiny:qwen3_moe ...    # flags of moesaic serve

Its planner, messages and supervisor are the engine's own; only the model is left out, so that
streams can be many and fast on a small machine. Each token is an ASCII letter.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from torch import Tensor

from moesaic.comm.launch.rank_link import RankLink
from moesaic.engine.schedule.plan import (
    FinishedStep,
    ItemResult,
    StepAgreement,
    StepHandle,
    StepPlan,
    StepResult,
)

MODULE: Final = "bench.http_rank"
# Tiny models have a byte-level tokenizer that begins with "!".
LETTER_A: Final = ord("a") - ord("!")
# A named pipe: the rank takes a byte from it for each step. Without it, steps follow at once.
STEPS: Final = "MOESAIC_BENCH_STEPS"


class LetterRunner:
    """In place of a rank's `ModelRunner.begin`. `steps`: a file descriptor of the pipe."""

    def __init__(self, steps: int | None) -> None:
        self._steps = steps

    def begin(
        self, plan: StepPlan, agreement: StepAgreement | None = None, x_TH: Tensor | None = None
    ) -> StepHandle:
        if self._steps is not None:
            os.read(self._steps, 1)
        items = [
            ItemResult(token_ids=[LETTER_A + item.first % 26] if item.sample is not None else ())
            for item in plan.items
        ]
        tokens = (LETTER_A + plan.decodes.first % 26).tolist()
        return FinishedStep(StepResult(items, token_ids=tokens))


def run(link: RankLink) -> None:
    from moesaic.engine.worker.worker import Worker

    rank = Worker(link)
    pipe = os.environ.get(STEPS)
    runner = LetterRunner(os.open(pipe, os.O_RDWR) if pipe else None)
    rank.runner.begin = runner.begin  # type: ignore[method-assign]
    rank.serve()


def main() -> int:
    from moesaic.cli.main import main as command
    from moesaic.engine.frontend import core_client

    core_client.TARGET = f"{MODULE}:run"
    return command(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
