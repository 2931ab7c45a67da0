"""Multi-token prediction (MTP, "next-n") of DeepSeek-V3: layers behind the last one that predict
the token after the next.

Row i of the first MTP layer joins the main model's normed output for token i with the embedding of
token i + 1, and predicts token i + 2. Each further layer takes the output of the layer before it
and predicts one token further.

T tokens · H hidden · R rows with logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moesaic.core.step import PREFILL, Step
from moesaic.kernels.experts import summed
from moesaic.layers.context import AttentionStep, ForwardContext
from moesaic.layers.embedding import Embedding, LMHead
from moesaic.layers.linear import Linear
from moesaic.layers.module import MatrixSlot, Module, ModuleList, TensorSlot
from moesaic.models.blocks import CausalLM, DecoderLayer
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import ModelConfig, RawConfig
from moesaic.models.deepseek_v2 import LayerParts
from moesaic.models.deepseek_v3 import variant_of
from moesaic.models.schemes import Scheme
from moesaic.models.weights import build_whole, load_weights, sync_input_scales
from moesaic.moe.context import MoeContext
from moesaic.moe.layer import FusedMoE

ARCHITECTURE = "DeepseekV3ForCausalLM"


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """The layers with an own embedding or head in the checkpoint; others use the main model's."""

    embeddings: frozenset[int] = frozenset()
    heads: frozenset[int] = frozenset()

    @classmethod
    def of(cls, checkpoint: Checkpoint, layers: range) -> OwnWeights:
        def having(module: str) -> frozenset[int]:
            return frozenset(
                layer
                for layer in layers
                if any(name.startswith(f"{_stem(layer)}{module}.") for name in checkpoint.location)
            )

        return cls(having("embed_tokens"), having("shared_head.head"))


class SharedHead(Module):
    """`head` is None if the main model's is used."""

    def __init__(self, config: ModelConfig, own_head: bool) -> None:
        super().__init__()
        self.norm = config.norm()
        self.head = config.head() if own_head else None


class NextNLayer(DecoderLayer):
    """A decoder layer with a projection that joins its two inputs, and a head."""

    def __init__(self, parts: LayerParts, layer: int, own: OwnWeights) -> None:
        config = parts.config
        super().__init__(config, parts.attention(layer), parts.mlp(layer))
        self.enorm, self.hnorm = config.norm(), config.norm()
        size = config.hidden_size
        self.eh_proj = Linear(replace(config.linear(size), inputs=2 * size))
        self.embed_tokens = config.embedding() if layer in own.embeddings else None
        self.shared_head = SharedHead(config, layer in own.heads)

    def join(self, embedded_TH: Tensor, hidden_TH: Tensor) -> Tensor:
        return self.eh_proj(torch.cat((self.enorm(embedded_TH), self.hnorm(hidden_TH)), dim=-1))


class NextN(Module):
    """All MTP layers of a model, or a rank's part of them; they belong to the last stage. `cache`
    describes their KV cache, which is separate from the main model's."""

    def __init__(
        self, parts: LayerParts, embedding: Embedding | None, head: LMHead, own: OwnWeights
    ) -> None:
        """`embedding`, `head`: those of the main model."""
        super().__init__()
        config, self.rope, self.cache = parts.config, parts.rope, parts.cache()
        self.config = config
        # In a tuple, torch does not take them for modules of this one: they are already loaded.
        self._main = embedding, head
        self.embed_tokens = None
        if embedding is None and not own.embeddings.issuperset(config.layers):
            self.embed_tokens = config.embedding()
        self.layers = ModuleList(NextNLayer(parts, layer, own) for layer in config.layers)
        self.layers.renamed = {str(i): str(layer) for i, layer in enumerate(config.layers)}

    def forward(
        self,
        next_ids_T: Tensor,
        positions_T: Tensor,
        hidden_TH: Tensor,
        attention: AttentionStep,
        step: Step = PREFILL,
        depth: int = 0,
    ) -> Tensor:
        """`next_ids_T`: the token after that of each row, at the row's position. `hidden_TH`: the
        main model's output, or at a greater `depth` that of the MTP layer before."""
        layer = self._layer(depth)
        ctx = ForwardContext(self.rope.at(positions_T), attention, step)
        x_TH, residual_TH = layer(self._joined(layer, next_ids_T, hidden_TH), ctx)
        return residual_TH + summed(x_TH)

    def store(
        self, next_ids_T: Tensor, positions_T: Tensor, hidden_TH: Tensor, attention: AttentionStep
    ) -> None:
        """Puts the rows' entries into the first layer's cache, which need its input alone: neither
        its attention nor its experts run."""
        layer = self._layer(0)
        ctx = ForwardContext(self.rope.at(positions_T), attention)
        layer.store(self._joined(layer, next_ids_T, hidden_TH), ctx)

    def _joined(self, layer: NextNLayer, next_ids_T: Tensor, hidden_TH: Tensor) -> Tensor:
        embedding = layer.embed_tokens or self._main[0] or self.embed_tokens
        assert embedding is not None, "NextN makes one if the main model has none"
        return layer.join(embedding(next_ids_T), hidden_TH)

    def logits(self, x_RH: Tensor, rows: Sequence[int] = (), depth: int = 0) -> Tensor:
        """Logits of the token after the next; `rows` as in the main model's `logits`."""
        return self.head(self.norm(x_RH, depth), rows, depth)

    def norm(self, x_TH: Tensor, depth: int = 0) -> Tensor:
        normed_TH: Tensor = self._layer(depth).shared_head.norm(x_TH)
        return normed_TH

    def head(self, normed_RH: Tensor, rows: Sequence[int] = (), depth: int = 0) -> Tensor:
        return self.own_or_main_head(depth)(normed_RH, rows)

    def own_or_main_head(self, depth: int = 0) -> LMHead:
        return self._layer(depth).shared_head.head or self._main[1]

    def _layer(self, depth: int) -> NextNLayer:
        layer = self.layers[depth]
        assert isinstance(layer, NextNLayer)
        return layer

    @property
    def nbytes(self) -> int:
        """The bytes of all weights but the main model's."""
        experts = (module.weights for module in self.modules() if isinstance(module, FusedMoE))
        return sum(parameter.nbytes for parameter in self.parameters()) + sum(
            weights.w13_eJH.nbytes + weights.w2_eHI.nbytes for weights in experts
        )

    def checkpoint_slots(self) -> Iterator[TensorSlot | MatrixSlot]:
        return self.slots("model.")

    def is_optional(self, name: str) -> bool:
        """Whether the tensor belongs to the main model."""
        ours = any(name.startswith(_stem(layer)) for layer in self.config.layers)
        return not ours or name.endswith("rotary_emb.inv_freq")


def build_nextn(
    raw: RawConfig,
    main: CausalLM,
    own: OwnWeights,
    moe: MoeContext | None = None,
    count: int | None = None,
) -> NextN:
    """Weights are not loaded yet. `main`: the whole model or its last stage. `moe`: of the layers'
    experts, unset: `main`'s. `count`: the first layers only."""
    assert main.lm_head is not None, "only the last stage predicts"
    layers = nextn_layers(raw)[:count]
    parallel = replace(main.config.parallel, layers=layers)
    config = replace(main.config, parallel=parallel, moe=moe or main.config.moe)
    parts = LayerParts(raw, config, variant_of(raw), main.rope)
    return NextN(parts, main.model.embed_tokens, main.lm_head, own).eval()


def load_nextn(main: CausalLM, folder: Path, scheme: Scheme | None = None) -> NextN:
    """The MTP layers of `main`'s checkpoint, sharded and quantised like `main`."""
    raw = RawConfig.read(folder)
    with Checkpoint(folder) as checkpoint:
        own = OwnWeights.of(checkpoint, nextn_layers(raw))
    model = build_nextn(raw, main, own)
    fill_nextn(model, folder, own, scheme)
    return model


def fill_nextn(model: NextN, folder: Path, own: OwnWeights, scheme: Scheme | None = None) -> None:
    """Loads the weights."""
    count = len(model.config.layers)

    def whole(raw: RawConfig) -> NextN:
        return build_nextn(raw, build_whole(raw), own, count=count)

    load_weights(model, folder, scheme, whole)
    sync_input_scales(model, folder)


def nextn_layers(raw: RawConfig) -> range:
    names = raw.list_of("architectures", str)
    if ARCHITECTURE not in names:
        raise ValueError(
            f"{raw.source}: multi-token prediction is not supported for architectures {names}, "
            f"only for {ARCHITECTURE}"
        )
    number = raw.integer("num_nextn_predict_layers", 0, minimum=0)
    if number == 0:
        raise ValueError(
            f"{raw.source}: num_nextn_predict_layers is 0: this checkpoint has no layers for "
            "multi-token prediction; use one that has (of tiny: models, "
            "tiny:deepseek_v3,num_nextn_predict_layers=1)"
        )
    first = raw.integer("num_hidden_layers")
    return range(first, first + number)


def _stem(layer: int) -> str:
    return f"model.layers.{layer}."
