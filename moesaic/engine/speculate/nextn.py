"""Drafts by the layer for multi-token prediction in the target's own checkpoint (NEXTN)."""

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
from moesaic.engine.speculate.draft_head import DraftHead
from moesaic.engine.speculate.draft_moe import draft_moe, is_as_target
from moesaic.engine.speculate.drafters import DraftRows
from moesaic.engine.speculate.token_map import hot_tokens
from moesaic.layers.context import AttentionStep
from moesaic.models.blocks import CausalLM
from moesaic.models.checkpoint import FLOATS, Checkpoint
from moesaic.models.nextn import NextN, OwnWeights, build_nextn, fill_nextn, nextn_layers
from moesaic.models.weights import fill_randomly
from moesaic.moe.context import DTYPE_NAMES, MoeContext
from moesaic.moe.expert_load import DeviceCounters
from moesaic.moe.layer import FusedMoE
from moesaic.moe.quant.weights import WEIGHT_FORMATS, WeightFormat

if TYPE_CHECKING:
    from moesaic.engine.setup.memory_plan import ResolvedModel


class NextNDraft:
    """The first such layer, which continues its own output, too: after its norm, as that of the
    target comes after its final norm."""

    reads_target = True
    own_rope = None

    def __init__(self, net: NextN, tokens: Sequence[int] | None = None) -> None:
        """`tokens`: the only ones that it may propose."""
        self.net, self.cache = net, net.cache
        self.head = DraftHead(net.own_or_main_head(), tokens, cut=tokens is not None)
        self.hidden_size, self.nbytes = net.config.hidden_size, net.nbytes + self.head.nbytes
        self.experts = [module for module in net.modules() if isinstance(module, FusedMoE)]

    def of_target(self, rows_TW: Tensor) -> Tensor:
        return rows_TW

    def forward(
        self, rows: DraftRows, hidden_TH: Tensor, attention: AttentionStep, step: Step
    ) -> Tensor:
        found: Tensor = self.net(rows.next_ids_T, rows.positions_T, hidden_TH, attention, step)
        return self.net.norm(found)

    def store(self, rows: DraftRows, hidden_TH: Tensor, attention: AttentionStep) -> None:
        self.net.store(rows.next_ids_T, rows.positions_T, hidden_TH, attention)

    def logits(self, hidden_RH: Tensor, counts: Sequence[int]) -> Tensor:
        return self.head(hidden_RH, counts)

    def to_target(self, ids_R: Tensor) -> Tensor:
        return self.head.to_target(ids_R)


@dataclass(frozen=True)
class NextNSource:
    """What the layer is built and loaded from."""

    resolved: ResolvedModel
    folder: Path
    own: OwnWeights
    moe: MoeContext | None = None
    """Of its experts; None: they are as the target's."""
    tokens: Sequence[int] | None = None

    def build(self, main: CausalLM) -> NextNDraft:
        """On `main`'s ranks; on the meta device if `main` is a shape."""
        own, target = self.moe, main.config.moe
        moe = replace(own or target, comm=target.comm)
        if own is None:
            moe = replace(moe, counters=DeviceCounters())
        net = build_nextn(self.resolved.raw, main, self.own, moe, count=1)
        return NextNDraft(net, self.tokens)

    def load(self, draft: NextNDraft, args: ServerArgs) -> None:
        if args.load_format == "dummy":
            fill_randomly(draft.net, args.random_seed or 0)
        else:
            fill_nextn(draft.net, self.folder, self.own, self.resolved.scheme)
        draft.head.copy_rows()

    def with_redundant(self, number: int) -> NextNSource:
        return self if self.moe is None else replace(self, moe=self.moe.with_redundant(number))


def nextn_source(args: ServerArgs, resolved: ResolvedModel, mesh: Mesh) -> NextNSource:
    folder = Path(args.model_path)
    try:
        layers = nextn_layers(resolved.raw)[:1]
    except ValueError as error:
        raise ValueError(f"--speculative-algorithm {args.speculative_algorithm}: {error}") from None
    own, stored = OwnWeights(), resolved.scheme.method
    if any(folder.glob("*.safetensors")):  # a shape has none
        with Checkpoint(folder) as checkpoint:
            own = OwnWeights.of(checkpoint, layers)
            if _has_floats(checkpoint, layers.start):
                stored = "none"
    format = _format(args, resolved, stored)
    moe = None
    if not is_as_target(args, resolved.moe, format):
        moe = draft_moe(args, resolved.moe, format, resolved.limits, mesh, resolved.raw)
    tokens = hot_tokens(args, resolved.raw.integer("vocab_size"))
    return NextNSource(resolved, folder, own, moe, tokens)


def _format(args: ServerArgs, resolved: ResolvedModel, stored: str) -> WeightFormat:
    """Of the layer's experts. `stored`: how the checkpoint quantises them."""
    asked, target = args.speculative_draft_model_quantization, resolved.moe.weight_format
    plain = WEIGHT_FORMATS[DTYPE_NAMES[resolved.moe.dtype]]
    if asked is None:
        return plain if stored != resolved.scheme.method else target
    if asked == UNQUANTISED:
        return plain
    try:
        return weight_format(asked, stored, resolved.scheme.expert_format) or plain
    except ValueError as error:
        raise ValueError(f"--speculative-draft-model-quantization: {error}") from None


def _has_floats(checkpoint: Checkpoint, layer: int) -> bool:
    """Whether a quantised checkpoint has the layer's experts as they were trained."""
    stem = f"model.layers.{layer}.mlp.experts."
    dtypes = {checkpoint.dtype(name) for name in checkpoint.location if name.startswith(stem)}
    return bool(dtypes) and dtypes <= set(FLOATS)
