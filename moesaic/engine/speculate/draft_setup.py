"""What the flags of speculation mean for a rank: draft trees or chains, and its draft model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from moesaic.config import ServerArgs
from moesaic.core.speculation import Speculation
from moesaic.engine.setup.device_memory import GIB
from moesaic.engine.setup.memory_plan import ResolvedModel
from moesaic.engine.speculate.draft_moe import log_moves
from moesaic.engine.speculate.draft_phase import DraftPhase

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def verifies_trees(runner: ModelRunner, speculation: Speculation | None) -> bool:
    if speculation is None or not speculation.asks_for_trees:
        return False
    if runner.kind == "cuda" and runner.moe.deterministic and speculation.topk > 1:
        raise ValueError(
            f"--speculative-eagle-topk {speculation.topk} with "
            "--enable-deterministic-inference on a GPU: the bits of a row would depend on "
            "where its branch is stored: give 1"
        )
    if runner.kind == "cuda" and runner.moe.deterministic:
        logger.info("drafts are chains: --enable-deterministic-inference on a GPU")
        return False
    return True


def load_draft(
    runner: ModelRunner, args: ServerArgs, resolved: ResolvedModel, speculation: Speculation | None
) -> DraftPhase | None:
    """None where no model on the ranks makes drafts."""
    if resolved.draft is None or speculation is None:
        return None
    with runner.device:
        model = resolved.draft.build(runner.model)
    resolved.draft.load(model, args)
    logger.info(
        "draft model: %.2f GiB of weights; each step proposes up to %d tokens, and the next "
        "verifies up to %d of a request",
        model.nbytes / GIB,
        speculation.num_steps,
        speculation.num_draft_tokens,
    )
    log_moves(args, model.experts)
    return DraftPhase(runner, model, speculation, args.watchdog_timeout)
