"""Draft heads of EAGLE and EAGLE-3 in their published layout: one dense decoder layer that reads
hidden states of the target.

Row i joins the target's hidden states for token i with the embedding of token i + 1, and predicts
token i + 2. Behind the target's rows a head continues its own output.

EAGLE joins the target's normed output. EAGLE-3 joins the hidden states before three of its layers,
and predicts among tokens of its own, which `d2t` maps to the target's.

T tokens · H hidden of the head · W numbers in an output row of the target · X in a row that the
head's attention projects · R rows with logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moesaic.core.step import PREFILL, Step
from moesaic.layers.attention import Attention, Heads
from moesaic.layers.context import AttentionStep, CacheSpec, ForwardContext
from moesaic.layers.embedding import LMHead
from moesaic.layers.linear import Linear
from moesaic.layers.module import MatrixSlot, Module, ModuleList, TensorSlot
from moesaic.layers.norm import RMSNorm
from moesaic.layers.rotary import RotaryTable
from moesaic.models.blocks import CausalLM, dense_mlp
from moesaic.models.config import BuildContext, ModelConfig, common_config
from moesaic.models.eagle_config import NUM_TAPS, HeadConfig
from moesaic.models.schemes import Scheme
from moesaic.models.weights import load_weights


class HeadLayer(Module):
    """Attention over joined rows, and a dense layer. Norms of what is joined are the head's own."""

    def __init__(self, made: HeadConfig, config: ModelConfig, rope: RotaryTable) -> None:
        super().__init__()
        raw, files, is_third = made.raw, made.files, made.files.is_third
        number = config.layers.start
        slides = raw.flag("use_sliding_window", False)
        attention = config.attention(
            raw,
            input_size=2 * config.hidden_size if is_third else None,
            qkv_bias=files.in_layer("self_attn.q_proj.bias"),
            output_bias=files.in_layer("self_attn.o_proj.bias"),
            qk_norm_eps=config.rms_norm_eps if files.in_layer("self_attn.q_norm.weight") else None,
            window=raw.integer("sliding_window", 4096) if slides else None,
        )
        bias, inner = files.in_layer("mlp.gate_proj.bias"), raw.integer("intermediate_size")
        # The original layer of EAGLE has no norm in front of its attention.
        has_norm = is_third or files.in_layer("input_layernorm.weight")
        self.input_layernorm = config.norm() if has_norm else None
        self.hidden_norm = config.norm() if is_third else None
        self.self_attn = Attention(attention, number, rope, config.dtype, config.parallel)
        self.post_attention_layernorm = config.norm()
        self.mlp = dense_mlp(config, number, inner, bias, "mlp of the draft head")

    def store(self, x_TX: Tensor, ctx: ForwardContext) -> None:
        """Only puts the rows' keys and values into the cache."""
        self.self_attn.store(self.self_attn.qkv_proj(x_TX), ctx)

    def forward(self, x_TX: Tensor, residual_TH: Tensor, ctx: ForwardContext) -> Tensor:
        attention = self.self_attn
        mixed_TH = attention(attention.qkv_proj(x_TX), ctx)
        normed_TH, sum_TH = self.post_attention_layernorm.add(mixed_TH, residual_TH)
        found_TH: Tensor = sum_TH + self.mlp(normed_TH, ctx.step)
        return found_TH


class EagleHead(Module):
    """A head on this rank, split as the target's layers."""

    def __init__(self, made: HeadConfig, main: CausalLM) -> None:
        super().__init__()
        self.made = made
        parallel = main.config.parallel
        behind = main.config.num_layers
        parallel = replace(parallel, layers=range(behind, behind + 1))
        context = BuildContext(main.config.positions, main.config.moe, parallel)
        self.config = config = common_config(made.raw, context, eps=1e-6)
        heads = config.attention(made.raw)
        dim, group = heads.head_dim, parallel.attention
        kv_heads = len(Heads.of(heads, group.rank, group.size).kv)
        self.cache = CacheSpec(1, kv_heads, dim, dim)
        self.rope = RotaryTable(made.raw.rope(dim), config.positions)
        # In a tuple, torch does not take them for modules of this one: they are already loaded.
        self._main = main.model.embed_tokens, main.lm_head
        self.embed_tokens = config.embedding() if made.own_embedding else None
        self._make_joins()
        self.layer = HeadLayer(made, config, self.rope)
        self.renamed = {"layer": made.files.layer}
        self.lm_head = None
        if made.own_head:
            self.lm_head = replace(config, vocab_size=made.draft_vocab_size).head()

    def _make_joins(self) -> None:
        size = self.config.hidden_size
        linear = self.config.linear(size, bias=self.made.files.has("fc.bias"))
        self.fc = Linear(replace(linear, inputs=2 * size))

    def of_target(self, rows_TW: Tensor) -> Tensor:
        """What the head joins, from the target's output."""
        return rows_TW[:, : self.made.target_size]

    def forward(
        self,
        next_ids_T: Tensor,
        positions_T: Tensor,
        hidden_TH: Tensor,
        attention: AttentionStep,
        step: Step = PREFILL,
    ) -> Tensor:
        """`next_ids_T`: the token after that of each row, at the row's position. `hidden_TH`: of
        `of_target`, or the head's own output for the row before."""
        ctx = ForwardContext(self.rope.at(positions_T), attention, step)
        found_TH: Tensor = self.layer(*self._joined(next_ids_T, hidden_TH), ctx)
        return found_TH

    def store(
        self, next_ids_T: Tensor, positions_T: Tensor, hidden_TH: Tensor, attention: AttentionStep
    ) -> None:
        """Only puts the rows' entries into the cache."""
        ctx = ForwardContext(self.rope.at(positions_T), attention)
        self.layer.store(self._joined(next_ids_T, hidden_TH)[0], ctx)

    def _joined(self, next_ids_T: Tensor, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer's attention takes, and the residual."""
        both_TX = torch.cat((self._embedded(next_ids_T), hidden_TH), dim=-1)
        joined_TH, norm = self.fc(both_TX), self.layer.input_layernorm
        return joined_TH if norm is None else norm(joined_TH), joined_TH

    def _embedded(self, ids_T: Tensor) -> Tensor:
        embedding = self.embed_tokens or self._main[0]
        assert embedding is not None, "the first stage has one"
        found_TH: Tensor = embedding(ids_T)
        return found_TH

    def normed(self, hidden_RH: Tensor) -> Tensor:
        """What `own_or_main_head` takes."""
        return hidden_RH

    def own_or_main_head(self) -> LMHead:
        head = self.lm_head or self._main[1]
        assert head is not None, "only the last stage predicts"
        return head

    @property
    def nbytes(self) -> int:
        """The bytes of all weights but the target's."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def checkpoint_slots(self) -> Iterator[TensorSlot | MatrixSlot]:
        for slot in self.slots(""):
            stem = "" if slot.name.startswith("lm_head.") else self.made.files.stem
            yield replace(slot, name=f"{stem}{slot.name}")

    def is_optional(self, name: str) -> bool:
        return name in ("d2t", "t2d") or name.endswith("rotary_emb.inv_freq")


class Eagle3Head(EagleHead):
    def _make_joins(self) -> None:
        config, made = self.config, self.made
        size, joined = config.hidden_size, NUM_TAPS * made.target_size
        linear = config.linear(size, bias=made.files.has("fc.bias"))
        self.fc = Linear(replace(linear, inputs=joined))
        eps, dtype = config.rms_norm_eps, config.dtype
        self.input_norm = self.fc_norm = None
        if "norm_before_fc" in made.variants:
            self.input_norm = RMSNorm(joined, eps, dtype)
        if "fc_norm" in made.variants:
            each = (RMSNorm(made.target_size, eps, dtype) for _ in range(NUM_TAPS))
            self.fc_norm = ModuleList(each)
        self.norm = config.norm()

    def of_target(self, rows_TW: Tensor) -> Tensor:
        tapped_TX = rows_TW[:, self.made.target_size :]
        if self.fc_norm is not None:
            parts = tapped_TX.split(self.made.target_size, dim=-1)
            normed = [norm(x.contiguous()) for norm, x in zip(self.fc_norm, parts, strict=True)]
            tapped_TX = torch.cat(normed, dim=-1)
        if self.input_norm is not None:
            tapped_TX = self.input_norm(tapped_TX.contiguous())
        return self.fc(tapped_TX.contiguous())

    def forward(
        self,
        next_ids_T: Tensor,
        positions_T: Tensor,
        hidden_TH: Tensor,
        attention: AttentionStep,
        step: Step = PREFILL,
    ) -> Tensor:
        found_TH = super().forward(next_ids_T, positions_T, hidden_TH, attention, step)
        return self.norm(found_TH) if self._gives_normed else found_TH

    def _joined(self, next_ids_T: Tensor, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        assert layer.input_layernorm is not None and layer.hidden_norm is not None
        embedded_TH, normed_TH = self._embedded(next_ids_T), layer.hidden_norm(hidden_TH)
        joined_TX = torch.cat((layer.input_layernorm(embedded_TH), normed_TH), dim=-1)
        is_normed = "norm_before_residual" in self.made.variants
        return joined_TX, normed_TH if is_normed else hidden_TH

    @property
    def _gives_normed(self) -> bool:
        return "norm_output" in self.made.variants

    def normed(self, hidden_RH: Tensor) -> Tensor:
        return hidden_RH if self._gives_normed else self.norm(hidden_RH)


def build_head(made: HeadConfig, main: CausalLM) -> EagleHead:
    """Weights are not loaded yet. `main`: the whole target, which then also gives the hidden states
    that the head reads."""
    kind = Eagle3Head if made.files.is_third else EagleHead
    try:
        head = kind(made, main).eval()
    except ValueError as error:
        named = made.raw.source in str(error)
        raise error if named else ValueError(f"{made.raw.source}: {error}") from error
    if made.taps:
        main.tap(made.taps)
    return head


def fill_head(head: EagleHead, scheme: Scheme) -> None:
    """Loads the weights."""
    load_weights(head, head.made.files.folder, scheme, lambda raw: head)
