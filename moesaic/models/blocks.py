"""What the families are built from: decoder layers, sparse blocks, the language model around them.

T tokens · H hidden · E experts · V vocabulary · R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.core.step import PREFILL, Step
from moesaic.layers.attention import Attention, LatentAttention
from moesaic.layers.context import AttentionStep, CacheSpec, ForwardContext
from moesaic.layers.embedding import Embedding
from moesaic.layers.linear import Linear
from moesaic.layers.module import MatrixSlot, Module, ModuleList, TensorSlot, parameter
from moesaic.layers.norm import RMSNorm
from moesaic.layers.rotary import RotaryTable
from moesaic.models.config import ModelConfig
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE
from moesaic.moe.topk import TopK


class Router(Module):
    """Logits of the experts, computed in float32 or in the model's own type."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        dtype: torch.dtype,
        bias: bool = False,
        float32: bool = False,
        correction_bias: bool = False,
    ) -> None:
        super().__init__()
        self.weight = parameter(num_experts, hidden_size, dtype=dtype)
        self.bias = parameter(num_experts, dtype=dtype) if bias else None
        self.e_score_correction_bias = (
            parameter(num_experts, dtype=torch.float32) if correction_bias else None
        )
        self.float32 = float32

    def forward(self, x_TH: Tensor) -> Tensor:
        if self.float32:
            return F.linear(x_TH.float(), self.weight.float())
        return F.linear(x_TH, self.weight, self.bias)


class SparseBlock(Module):
    """Router, top-k and routed experts; families add their shared experts."""

    def __init__(self, gate: Router, topk: TopK, experts: FusedMoE) -> None:
        super().__init__()
        topk.config.check(experts.config.num_experts)
        self.gate, self.topk, self.experts = gate, topk, experts

    def route(self, x_TH: Tensor) -> TopKOutput:
        return self.topk(self.gate(x_TH), self.gate.e_score_correction_bias, self.experts.slot_map)

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        return self.experts(x_TH, self.route(x_TH), step)


class DecoderLayer(Module):
    def __init__(
        self,
        config: ModelConfig,
        attention: Attention | LatentAttention,
        mlp: Module,
        mlp_name: str = "mlp",
    ) -> None:
        super().__init__()
        size, eps, dtype = config.hidden_size, config.rms_norm_eps, config.dtype
        self.input_layernorm = RMSNorm(size, eps, dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(size, eps, dtype)
        self.mlp = mlp
        self.renamed = {"mlp": mlp_name}

    def forward(self, x_TH: Tensor, ctx: ForwardContext) -> Tensor:
        x_TH = x_TH + self.self_attn(self.input_layernorm(x_TH), ctx)
        return x_TH + self.mlp(self.post_attention_layernorm(x_TH), ctx.step)


class Backbone(Module):
    def __init__(self, config: ModelConfig, layers: Iterable[DecoderLayer]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.dtype)
        self.layers = ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)

    def forward(self, ids_T: Tensor, ctx: ForwardContext) -> Tensor:
        x_TH = self.embed_tokens(ids_T)
        for layer in self.layers:
            x_TH = layer(x_TH, ctx)
        return self.norm(x_TH)


class CausalLM(Module):
    """A language model: `forward` gives hidden states, `logits` those of the wanted rows."""

    def __init__(
        self,
        config: ModelConfig,
        cache: CacheSpec,
        rope: RotaryTable,
        make_layer: Callable[[int], DecoderLayer],
    ) -> None:
        super().__init__()
        self.config, self.cache, self.rope = config, cache, rope
        self.model = Backbone(config, map(make_layer, range(config.num_layers)))
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, config.dtype)

    def forward(
        self, ids_T: Tensor, positions_T: Tensor, attention: AttentionStep, step: Step = PREFILL
    ) -> Tensor:
        cos, sin = self.rope.at(positions_T)
        return self.model(ids_T, ForwardContext(cos, sin, attention, step))

    def logits(self, x_RH: Tensor) -> Tensor:
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(x_RH, head.weight).float()

    @property
    def nbytes(self) -> int:
        """Of all weights."""
        experts = (module.weights for module in self.modules() if isinstance(module, FusedMoE))
        return sum(parameter.nbytes for parameter in self.parameters()) + sum(
            weights.w13_eJH.nbytes + weights.w2_eHI.nbytes for weights in experts
        )

    def checkpoint_slots(self) -> Iterator[TensorSlot | MatrixSlot]:
        return self.slots("")

    def is_optional(self, name: str) -> bool:
        """Tensors that checkpoints may carry and this model does not need: a tied head, buffers
        that are computed, layers past the last one (multi-token prediction)."""
        if name.endswith("rotary_emb.inv_freq"):
            return True
        if name == "lm_head.weight":
            return self.lm_head is None
        first = self.config.num_layers
        behind = range(first, first + self.config.num_nextn_layers)
        return any(name.startswith(f"model.layers.{layer}.") for layer in behind)
