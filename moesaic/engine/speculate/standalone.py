"""Drafts by a smaller model with the target's vocabulary (STANDALONE), on the target's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from moesaic.comm.mesh import Mesh
from moesaic.config import ServerArgs
from moesaic.core.speculation import UNQUANTISED
from moesaic.core.step import Step
from moesaic.engine.setup.moe_setup import weight_format
from moesaic.engine.speculate.draft_moe import draft_moe
from moesaic.engine.speculate.drafters import DraftRows, register_draft_model
from moesaic.layers.context import AttentionStep
from moesaic.models.blocks import CausalLM
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.registry import build_model
from moesaic.models.schemes import Scheme, detect_scheme
from moesaic.models.weights import fill_randomly, load_weights, sync_input_scales
from moesaic.moe.context import DTYPE_NAMES, MoeContext
from moesaic.moe.layer import FusedMoE
from moesaic.moe.quant.weights import WEIGHT_FORMATS

if TYPE_CHECKING:
    from moesaic.engine.setup.memory_plan import ResolvedModel

FLAG = "--speculative-draft-model-path"


class StandaloneDraft:
    """A whole model, which needs nothing of the target but its tokens."""

    reads_target = False

    def __init__(self, net: CausalLM) -> None:
        self.net, self.cache, self.nbytes = net, net.cache, net.nbytes
        self.hidden_size, self.own_rope = net.config.hidden_size, net.rope
        self.experts = [module for module in net.modules() if isinstance(module, FusedMoE)]

    def of_target(self, rows_TW: Tensor) -> Tensor:
        return rows_TW

    def forward(
        self, rows: DraftRows, hidden_TH: Tensor, attention: AttentionStep, step: Step
    ) -> Tensor:
        found: Tensor = self.net(rows.next_ids_T, rows.positions_T, attention, step)
        return found

    def logits(self, hidden_RH: Tensor, counts: Sequence[int]) -> Tensor:
        return self.net.logits(hidden_RH, counts)

    def to_target(self, ids_R: Tensor) -> Tensor:
        return ids_R


@dataclass(frozen=True)
class StandaloneSource:
    raw: RawConfig
    folder: Path
    scheme: Scheme
    moe: MoeContext

    def build(self, main: CausalLM) -> StandaloneDraft:
        """Split over ranks as `main`; on the meta device if `main` is a shape."""
        config = main.config
        moe = replace(self.moe, comm=config.moe.comm)
        layers = range(self.raw.integer("num_hidden_layers"))
        parallel = replace(config.parallel, layers=layers)
        return StandaloneDraft(build_model(self.raw, BuildContext(config.positions, moe, parallel)))

    def load(self, draft: StandaloneDraft, args: ServerArgs) -> None:
        if args.load_format == "dummy":
            fill_randomly(draft.net, args.random_seed or 0)
        else:
            load_weights(draft.net, self.folder, self.scheme)
            sync_input_scales(draft.net, self.folder)

    def with_redundant(self, number: int) -> StandaloneSource:
        return replace(self, moe=self.moe.with_redundant(number))


def _source(args: ServerArgs, resolved: ResolvedModel, mesh: Mesh) -> StandaloneSource:
    assert args.speculative_draft_model_path is not None, "the flags are checked"
    folder = Path(args.speculative_draft_model_path)
    try:
        raw = RawConfig.read(folder, FLAG)
        _check(raw, resolved)
        scheme = detect_scheme(raw, folder)
        asked = args.speculative_draft_model_quantization
        plain = WEIGHT_FORMATS[DTYPE_NAMES[resolved.moe.dtype]]
        format = plain
        if asked != UNQUANTISED:
            format = weight_format(asked, scheme.method, scheme.expert_format) or plain
    except ValueError as error:
        raise ValueError(f"{FLAG}: {error}") from None
    moe = draft_moe(args, resolved.moe, format, resolved.limits, mesh, raw)
    return StandaloneSource(raw, folder, scheme, moe)


def _check(raw: RawConfig, resolved: ResolvedModel) -> None:
    words, theirs = raw.integer("vocab_size"), resolved.raw.integer("vocab_size")
    if words != theirs:
        raise ValueError(
            f"{raw.source}: vocab_size is {words}, and the target's is {theirs}: drafts must be "
            "tokens of the target, so give a model with the same tokenizer"
        )
    positions = raw.integer("max_position_embeddings")
    if positions < resolved.context_length:
        raise ValueError(
            f"{raw.source}: max_position_embeddings is {positions}, less than the context of "
            f"{resolved.context_length} tokens: lower --context-length to {positions}"
        )


register_draft_model("STANDALONE", _source)
