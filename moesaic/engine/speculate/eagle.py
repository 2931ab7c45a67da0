"""Drafts by a head that was trained for the target (EAGLE, EAGLE3). EAGLE without a folder is the
layer for multi-token prediction in the target's own checkpoint (nextn.py)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torch import Tensor

from moesaic.comm.mesh import Mesh
from moesaic.config import ServerArgs
from moesaic.core.step import Step
from moesaic.engine.speculate.draft_head import DraftHead
from moesaic.engine.speculate.drafters import DraftRows, DraftSource, register_draft_model
from moesaic.engine.speculate.nextn import nextn_source
from moesaic.engine.speculate.token_map import hot_tokens
from moesaic.layers.context import AttentionStep
from moesaic.models.blocks import CausalLM
from moesaic.models.eagle import EagleHead, build_head, fill_head
from moesaic.models.eagle_config import HeadConfig, read_head
from moesaic.models.schemes import Scheme, detect_scheme
from moesaic.models.weights import fill_randomly
from moesaic.moe.layer import FusedMoE

if TYPE_CHECKING:
    from moesaic.engine.setup.memory_plan import ResolvedModel

logger = logging.getLogger(__name__)

FLAG = "--speculative-draft-model-path"
# Flags that only draft models with experts read.
OF_EXPERTS: Final = (
    "speculative_moe_runner_backend",
    "speculative_moe_a2a_backend",
    "speculative_draft_model_quantization",
)


class EagleDraft:
    reads_target = True
    experts: Sequence[FusedMoE] = ()

    def __init__(self, net: EagleHead) -> None:
        self.net, self.cache, made = net, net.cache, net.made
        self.head = DraftHead(net.own_or_main_head(), made.token_map, made.cuts_target)
        self.nbytes = net.nbytes + self.head.nbytes
        self.hidden_size, self.own_rope = net.config.hidden_size, net.rope

    def of_target(self, rows_TW: Tensor) -> Tensor:
        return self.net.of_target(rows_TW)

    def forward(
        self, rows: DraftRows, hidden_TH: Tensor, attention: AttentionStep, step: Step
    ) -> Tensor:
        found: Tensor = self.net(rows.next_ids_T, rows.positions_T, hidden_TH, attention, step)
        return found

    def store(self, rows: DraftRows, hidden_TH: Tensor, attention: AttentionStep) -> None:
        self.net.store(rows.next_ids_T, rows.positions_T, hidden_TH, attention)

    def logits(self, hidden_RH: Tensor, counts: Sequence[int]) -> Tensor:
        return self.head(self.net.normed(hidden_RH), counts)

    def to_target(self, ids_R: Tensor) -> Tensor:
        return self.head.to_target(ids_R)


@dataclass(frozen=True)
class EagleSource:
    made: HeadConfig
    scheme: Scheme

    def build(self, main: CausalLM) -> EagleDraft:
        """Split over ranks as `main`, whose output then has what the head reads."""
        return EagleDraft(build_head(self.made, main))

    def load(self, draft: EagleDraft, args: ServerArgs) -> None:
        if args.load_format == "dummy":
            fill_randomly(draft.net, args.random_seed or 0)
        else:
            fill_head(draft.net, self.scheme)
        draft.head.copy_rows()

    def with_redundant(self, number: int) -> EagleSource:
        return self


def _source(args: ServerArgs, resolved: ResolvedModel, mesh: Mesh) -> DraftSource:
    if args.speculative_draft_model_path is None:
        return nextn_source(args, resolved, mesh)
    folder = Path(args.speculative_draft_model_path)
    is_third = args.speculative_algorithm == "EAGLE3"
    tokens = hot_tokens(args, resolved.raw.integer("vocab_size"))
    try:
        random = args.load_format == "dummy"
        made = read_head(folder, resolved.raw, is_third, tokens, random)
        scheme = detect_scheme(made.raw, folder)
    except ValueError as error:
        raise ValueError(f"{FLAG}: {error}") from None
    if (branches := args.speculative_eagle_topk or 1) > made.draft_vocab_size:
        raise ValueError(
            f"--speculative-eagle-topk is {branches}, and {folder} proposes among "
            f"{made.draft_vocab_size} tokens: give at most that"
        )
    if made.taps:
        logger.info("draft model: it reads hidden states before layers %s", list(made.taps))
    positions = made.raw.integer("max_position_embeddings", resolved.context_length)
    if positions < resolved.context_length:
        logger.info(
            "draft model: trained for %d positions: behind them, up to %d, drafts may be worse",
            positions,
            resolved.context_length,
        )
    for name in OF_EXPERTS:
        if getattr(args, name) is not None:
            logger.info("draft model: --%s: a head has no experts", name.replace("_", "-"))
    return EagleSource(made, scheme)


for algorithm in ("EAGLE", "NEXTN", "EAGLE3"):
    register_draft_model(algorithm, _source)
