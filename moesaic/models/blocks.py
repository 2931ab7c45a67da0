"""The parts of all families. T tokens · H hidden · R rows with logits · W numbers in an
output row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from moesaic.core.step import PREFILL, Step
from moesaic.kernels.experts import PairSum, summed
from moesaic.kernels.linear import linear_float32
from moesaic.kernels.norm import SumToNorm
from moesaic.kernels.routing import (
    MAX_NORM_ROWS,
    MAX_ROWS,
    RouterWeights,
    TopKInputs,
    norm_route_rows,
    route_rows,
)
from moesaic.layers.attention import Attention, AttentionConfig, Heads, LatentAttention
from moesaic.layers.context import AttentionStep, CacheSpec, ForwardContext
from moesaic.layers.invariant import sigmoid
from moesaic.layers.linear import Linear, LinearConfig, product
from moesaic.layers.mlp import GatedMLP
from moesaic.layers.module import MatrixSlot, Module, ModuleList, TensorSlot, parameter
from moesaic.layers.norm import RMSNorm
from moesaic.layers.parallel import Parallel
from moesaic.layers.rotary import RopeConfig, RotaryTable
from moesaic.models.config import ModelConfig, RawConfig
from moesaic.moe.context import MoeContext
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE, MoeConfig
from moesaic.moe.placement import SlotMap
from moesaic.moe.topk import TopK, with_shared_experts
from moesaic.observe.spans import SpanKind
from moesaic.overlap.operations import (
    YIELD,
    LayerState,
    MicroBatch,
    Operation,
    fills_wait,
    plain_order,
)


class Router(Module):
    """Logits of the experts, computed in float32 or in the model's own type."""

    def __init__(
        self, config: LinearConfig, float32: bool = False, correction_bias: bool = False
    ) -> None:
        """`config.outputs`: the number of experts."""
        super().__init__()
        experts, dtype = config.outputs, config.dtype
        self.weight = parameter(experts, config.inputs, dtype=dtype)
        self.bias = parameter(experts, dtype=dtype) if config.bias else None
        self.e_score_correction_bias = (
            parameter(experts, dtype=torch.float32) if correction_bias else None
        )
        self.float32, self.deterministic = float32, config.deterministic
        self.product = product(config.deterministic)
        # Allocated here: the first use may be inside of a graph capture.
        self._counter_1 = torch.zeros(1, dtype=torch.int32)

    def forward(self, x_TH: Tensor) -> Tensor:
        if self.float32 and self.deterministic:
            return self.product(x_TH.float(), self.weight.float(), None)
        if self.float32:
            return linear_float32(x_TH, self.weight, None)
        return self.product(x_TH, self.weight, self.bias)

    def fused(self, x_TH: Tensor) -> RouterWeights | None:
        """The input of the fused kernel, which is faster for a few rows on a GPU; else None."""
        if not x_TH.is_cuda or len(x_TH) > MAX_ROWS or self.deterministic:
            return None
        if self._counter_1.device != x_TH.device:
            self._counter_1 = torch.zeros(1, dtype=torch.int32, device=x_TH.device)
        return RouterWeights(self.weight, self.bias, not self.float32, self._counter_1)


class SparseBlock(Module):
    """Router, top-k, routed experts and, in some families, shared experts with a gate."""

    def __init__(
        self,
        gate: Router,
        topk: TopK,
        experts: FusedMoE,
        parallel: Parallel | None = None,
        shared_experts: GatedMLP | None = None,
        shared_expert_gate: Linear | None = None,
    ) -> None:
        super().__init__()
        topk.config.check(experts.config.num_routed)
        if experts.context.fakes_routing:
            topk = TopK(replace(topk.config, fake=True))
        self.gate, self.topk, self.experts = gate, topk, experts
        self.shared_experts, self.shared_expert_gate = shared_experts, shared_expert_gate
        self.parallel = parallel or Parallel()

    def ops(self) -> tuple[Operation, ...]:
        """The block as operations on a `LayerState`."""
        return (
            self._route,
            self._dispatch_a,
            YIELD,
            self._shared_inward,
            self._dispatch_b,
            self._run_experts,
            self._combine_a,
            YIELD,
            self._shared_outward,
            self._combine_b,
        )

    def forward(
        self, x_TH: Tensor, step: Step, chosen: TopKOutput | None = None
    ) -> Tensor | PairSum:
        """`chosen`: the experts, if `add_norm` has chosen them."""
        state = LayerState()
        state.x_TH, state.step, state.given = x_TH, step, chosen
        for operation in self.ops() if step.overlap else plain_order(self.ops()):
            operation(state)
        return state.output

    def _route(self, state: LayerState) -> None:
        """Ranks of an attention group have the same rows; each takes a part of them to the experts,
        unless the dispatcher needs all rows on all ranks."""
        if self.shared_experts is not None:
            state.shared_gate_T1 = self._shared_gate(state.x_TH)
        own = state.x_TH, state.step
        if not self._takes_all_rows:
            own = self._own_part(*own)
        state.own_x_TH, state.own_step = own
        state.chosen = state.given or self.route(*own)
        if state.step.routed is not None:
            state.step.routed.append(state.chosen.ids_TK[:, : self.experts.config.routed_top_k])

    def _dispatch_a(self, state: LayerState) -> None:
        dispatcher = self.experts.dispatcher
        state.sent = dispatcher.dispatch_a(state.own_x_TH, state.chosen, state.own_step)

    @fills_wait
    def _shared_inward(self, state: LayerState) -> None:
        if self.shared_experts is not None:
            state.shared_inner = self.shared_experts.inward(state.x_TH, state.step)

    @fills_wait
    def _shared_outward(self, state: LayerState) -> None:
        if self.shared_experts is None:
            return
        shared_TH = self.shared_experts.outward(*state.shared_inner)
        del state.shared_inner
        gate_T1 = state.shared_gate_T1
        state.shared_TH = shared_TH if gate_T1 is None else gate_T1 * shared_TH

    def _dispatch_b(self, state: LayerState) -> None:
        state.rows = self.experts.dispatcher.dispatch_b(state.sent)
        del state.sent

    def _run_experts(self, state: LayerState) -> None:
        alone = self.shared_experts is None and self._takes_all_rows
        defers_reduce = alone and self.experts.defers_reduce(len(state.x_TH))
        state.results = self.experts.run(state.rows, defers_reduce)
        del state.rows

    def _combine_a(self, state: LayerState) -> None:
        state.returning = self.experts.dispatcher.combine_a(state.results)
        del state.results

    def _combine_b(self, state: LayerState) -> None:
        y_TH = self.experts.dispatcher.combine_b(state.returning)
        del state.returning
        if not self._takes_all_rows:
            group, layer = self.parallel.attention, self.experts.dispatcher.config.layer
            counts = self.parallel.row_counts([len(state.x_TH)])
            own_TH = y_TH[: counts[group.rank]]
            y_TH = group.gather_rows(own_TH, counts, f"experts of layer {layer}")
        state.y_TH = y_TH

    def route(self, x_TH: Tensor, step: Step = PREFILL) -> TopKOutput:
        spans = self.experts.context.comm.spans
        begin = spans.clock()
        split = self.experts.split_of(step)
        slot_map = self.experts.slot_map if split is None else None
        chosen = self._choose(x_TH, step.num_tokens_1, slot_map)
        chosen = self._with_shared(chosen, x_TH, slot_map)
        if split is not None:
            chosen = TopKOutput(split(chosen.ids_TK), chosen.weights_TK)
        if begin:
            spans.add(SpanKind.ROUTER, begin, self.experts.dispatcher.config.layer, len(x_TH))
        return chosen

    def _choose(
        self, x_TH: Tensor, num_tokens_1: Tensor | None, slot_map: SlotMap | None
    ) -> TopKOutput:
        bias = self.gate.e_score_correction_bias
        router, spec = self.gate.fused(x_TH), self.topk.spec
        if router is None or spec is None:
            return self.topk(self.gate(x_TH), bias, slot_map, num_tokens_1)
        slots = None if slot_map is None else slot_map.table_on(x_TH.device)
        given = TopKInputs(spec, bias, num_tokens_1, slots)
        return TopKOutput(*route_rows(x_TH, router, given))

    def _with_shared(
        self, chosen: TopKOutput, x_TH: Tensor, slot_map: SlotMap | None
    ) -> TopKOutput:
        """With the shared experts, where they are among the routed ones."""
        config = self.experts.config
        if not config.num_shared:
            return chosen
        shared = range(config.num_routed, config.num_experts)
        return with_shared_experts(chosen, shared, self._shared_gate(x_TH), slot_map)

    def _shared_gate(self, x_TH: Tensor) -> Tensor | None:
        gate = self.shared_expert_gate
        return None if gate is None else sigmoid(gate(x_TH))

    def add_norm(
        self, norm: RMSNorm, x_TH: Tensor, residual_TH: Tensor, step: Step
    ) -> tuple[Tensor, Tensor, TopKOutput | None]:
        """As `norm.add`; with the chosen experts if one fused kernel norms and routes."""
        few = len(x_TH) <= MAX_NORM_ROWS and self._takes_all_rows
        few = few and self.experts.split_of(step) is None
        router, spec = self.gate.fused(x_TH) if few else None, self.topk.spec
        if router is None or spec is None:
            return *norm.add(x_TH, residual_TH), None
        spans = self.experts.context.comm.spans
        begin = spans.clock()
        bias, slot_map = self.gate.e_score_correction_bias, self.experts.slot_map
        rows = SumToNorm(x_TH, residual_TH, norm.weight, norm.eps)
        slots = slot_map.table_on(x_TH.device)
        given = TopKInputs(spec, bias, step.num_tokens_1, slots)
        made = norm_route_rows(rows, router, given)
        if begin:
            spans.add(SpanKind.ROUTER, begin, self.experts.dispatcher.config.layer, len(x_TH))
        chosen = self._with_shared(TopKOutput(made[2], made[3]), made[0], slot_map)
        return made[0], made[1], chosen

    @property
    def _takes_all_rows(self) -> bool:
        return takes_all_rows(self.parallel, self.experts.context)

    def _own_part(self, x_TH: Tensor, step: Step) -> tuple[Tensor, Step]:
        """This rank's part of the rows, and the step for it. With `step.rows` kernels run, which
        need at least one row: an empty part becomes a row of padding."""
        mine_TH = x_TH[self.parallel.own_rows(len(x_TH))]
        if not step.rows:
            return mine_TH, step
        tokens_1 = step.own_tokens_1
        if not len(mine_TH):
            mine_TH = x_TH[:1]
            if tokens_1 is None:
                tokens_1 = torch.zeros(1, dtype=torch.int32, device=x_TH.device)
        rows = self.parallel.most_rows(step.rows)
        return mine_TH, replace(step, rows=rows, num_tokens_1=tokens_1)


def takes_all_rows(parallel: Parallel, context: MoeContext) -> bool:
    """Whether a rank takes all rows of its attention group to the experts, or a part of them."""
    return parallel.attention.size == 1 or context.replicated


def dense_mlp(
    config: ModelConfig, layer: int, inner: int, bias: bool = False, name: str = "mlp"
) -> GatedMLP:
    return GatedMLP(config.linear(inner, bias), config.parallel, f"{name} of layer {layer}")


def moe_config(
    raw: RawConfig, config: ModelConfig, experts: str, inner: str, **options: Any
) -> MoeConfig:
    """`experts`, `inner`: the family's keys for the number of experts and their inner size."""
    return MoeConfig(
        num_experts=raw.integer(experts),
        hidden_size=config.hidden_size,
        intermediate_size=raw.integer(inner),
        top_k=raw.integer("num_experts_per_tok"),
        **options,
    )


@runtime_checkable
class OverlapBlock(Protocol):
    """A block that communicates: a schedule may switch to another micro-batch at its yields."""

    def ops(self) -> tuple[Operation, ...]:
        """The block as operations on a `LayerState`."""

    def add_norm(
        self, norm: RMSNorm, x_TH: Tensor, residual_TH: Tensor, step: Step
    ) -> tuple[Tensor, Tensor, TopKOutput | None]:
        """As `norm.add`; with the chosen experts if one fused kernel norms and routes."""


class DecoderLayer(Module):
    """Attention and a block: experts, or a dense layer."""

    def __init__(
        self,
        config: ModelConfig,
        attention: Attention | LatentAttention,
        mlp: Module,
        mlp_name: str = "mlp",
    ) -> None:
        super().__init__()
        self.input_layernorm = config.norm()
        self.self_attn = attention
        self.post_attention_layernorm = config.norm()
        self.mlp = mlp
        self._spans = config.moe.comm.spans
        self.renamed = {"mlp": mlp_name}
        self.announce: Callable[[], None] | None = None
        """Called whenever a batch enters the layer."""
        self.is_tapped = False
        """Whether the hidden states before the layer are kept."""

    def ops(self) -> tuple[Operation, ...]:
        """The layer as operations on a `LayerState`. A schedule may switch between two states with
        different lanes at each `YieldOperation`."""
        if isinstance(self.mlp, OverlapBlock):
            return self._attend, self._norm_and_choose, *self.mlp.ops()
        return self._attend, self._norm, self._run_dense

    @cached_property
    def _orders(self) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
        """The operations where nothing overlaps, and where something does."""
        operations = self.ops()
        return plain_order(operations), operations

    def forward(
        self, x_TH: Tensor | PairSum, ctx: ForwardContext, residual_TH: Tensor | None = None
    ) -> tuple[Tensor | PairSum, Tensor]:
        """Takes and returns (x, residual): the next norm adds them to the hidden state."""
        state = self.begin(MicroBatch(ctx, x_TH, residual_TH))
        for operation in self._orders[bool(ctx.step.overlap)]:
            operation(state)
        return state.output, state.sum_TH

    def store(self, x_TH: Tensor, ctx: ForwardContext) -> None:
        """Only puts the rows' keys and values into the cache, without the layer's output."""
        attention = self.self_attn
        attention.store(attention.norm_and_project(self.input_layernorm, x_TH, None)[0], ctx)

    def begin(self, batch: MicroBatch) -> LayerState:
        if self.announce is not None:
            self.announce()
        assert batch.x_TH is not None, "the layer before has ended"
        state = LayerState()
        state.ctx, state.step = batch.ctx, batch.ctx.step
        state.hidden_TH, state.residual_TH = batch.x_TH, batch.residual_TH
        batch.x_TH = batch.residual_TH = None
        return state

    def end(self, state: LayerState, batch: MicroBatch) -> None:
        batch.x_TH, batch.residual_TH = state.output, state.sum_TH

    def _attend(self, state: LayerState) -> None:
        begin, attention = self._spans.clock(), self.self_attn
        hidden_TH, norm = state.hidden_TH, self.input_layernorm
        rows_TX, residual_TH = attention.norm_and_project(norm, hidden_TH, state.residual_TH)
        del state.hidden_TH, state.residual_TH
        if self.is_tapped:
            state.ctx.tapped.append(residual_TH)
        state.residual_TH, state.mixed_TH = residual_TH, attention(rows_TX, state.ctx)
        if begin:
            self._spans.add(SpanKind.ATTENTION, begin, attention.layer, len(hidden_TH))

    def _norm_and_choose(self, state: LayerState) -> None:
        assert isinstance(self.mlp, OverlapBlock) and state.residual_TH is not None
        state.x_TH, state.sum_TH, state.given = self.mlp.add_norm(
            self.post_attention_layernorm, state.mixed_TH, state.residual_TH, state.step
        )
        del state.mixed_TH, state.residual_TH

    def _norm(self, state: LayerState) -> None:
        norm = self.post_attention_layernorm
        state.x_TH, state.sum_TH = norm.add(state.mixed_TH, state.residual_TH)
        del state.mixed_TH, state.residual_TH

    def _run_dense(self, state: LayerState) -> None:
        state.y_TH = self.mlp(state.x_TH, state.step)


class Backbone(Module):
    """A stage's decoder layers, with the embedding before the first and the norm after the last."""

    def __init__(self, config: ModelConfig, make_layer: Callable[[int], DecoderLayer]) -> None:
        super().__init__()
        self.embed_tokens = config.embedding() if config.parallel.is_first else None
        self.layers = ModuleList(map(make_layer, config.layers))
        self.layers.renamed = {str(i): str(layer) for i, layer in enumerate(config.layers)}
        self.norm = config.norm() if config.parallel.is_last else None
        self.is_end_tapped = False
        """Whether the hidden states behind the last layer are kept, before the norm."""

    def forward(self, ids_T: Tensor, ctx: ForwardContext, x_TH: Tensor | None) -> Tensor:
        batch = MicroBatch(ctx, self.embed(ids_T, x_TH))
        for layer in self.layers:
            batch.x_TH, batch.residual_TH = layer(batch.x_TH, ctx, batch.residual_TH)
        return self.normed(batch)

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def embed(self, ids_T: Tensor, x_TH: Tensor | None) -> Tensor:
        if self.embed_tokens is not None:
            x_TH = self.embed_tokens(ids_T)
        assert x_TH is not None, "a later stage needs the hidden states of the one before it"
        return x_TH

    def normed(self, batch: MicroBatch) -> Tensor:
        """The stage's output."""
        x_TH, residual_TH = batch.x_TH, batch.residual_TH
        assert x_TH is not None, "all layers have ended"
        if self.norm is not None:
            normed_TH, sum_TH = self.norm.add(x_TH, residual_TH)
            tapped = [*batch.ctx.tapped, *([sum_TH] if self.is_end_tapped else [])]
            return torch.cat((normed_TH, *tapped), dim=-1) if tapped else normed_TH
        return summed(x_TH) if residual_TH is None else residual_TH + summed(x_TH)


class CausalLM(Module):
    """A language model, or a rank's part of it; `forward` returns hidden states."""

    def __init__(
        self,
        config: ModelConfig,
        cache: CacheSpec,
        rope: RotaryTable,
        make_layer: Callable[[int], DecoderLayer],
    ) -> None:
        super().__init__()
        self.config, self.cache, self.rope = config, cache, rope
        self.model = Backbone(config, make_layer)
        self.output_size = config.hidden_size
        """Numbers in a row of `forward`."""
        self.lm_head = None
        if config.parallel.is_last:
            self.lm_head = config.head(
                self.model.embed_tokens if config.tie_word_embeddings else None
            )
        if config.tie_word_embeddings:
            self.renamed = {"lm_head": "model.embed_tokens"}

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attention: AttentionStep,
        step: Step = PREFILL,
        x_TH: Tensor | None = None,
    ) -> Tensor:
        """`x_TH`: the hidden states of the previous stage, if any. The last stage norms its own;
        behind each of them are those of the tapped layers."""
        return self.model(ids_T, ForwardContext(self.rope.at(positions_T), attention, step), x_TH)

    def tap(self, layers: Collection[int]) -> None:
        """From now on rows of `forward` end with the hidden states before these layers, in their
        order; the number of layers stands for those behind the last one. Only whole models."""
        assert self.config.parallel.is_first and self.config.parallel.is_last
        for number, layer in enumerate(self.model.decoder_layers):
            layer.is_tapped = number in layers
        self.model.is_end_tapped = self.config.num_layers in layers
        self.output_size = (1 + len(layers)) * self.config.hidden_size

    def logits(self, x_RW: Tensor, rows: Sequence[int] = ()) -> Tensor:
        """`rows`: the number of rows of each attention group, if there are several; then all ranks
        of the last stage call this together, also with zero rows. Only the first rank of an
        attention group gets logits."""
        assert self.lm_head is not None, "only the last stage has logits"
        return self.lm_head(x_RW[:, : self.config.hidden_size].contiguous(), rows)

    @property
    def nbytes(self) -> int:
        """The bytes of all weights."""
        experts = (module.weights for module in self.modules() if isinstance(module, FusedMoE))
        return sum(parameter.nbytes for parameter in self.parameters()) + sum(
            weights.w13_eJH.nbytes + weights.w2_eHI.nbytes for weights in experts
        )

    def checkpoint_slots(self) -> Iterator[TensorSlot | MatrixSlot]:
        return self.slots("")

    def is_optional(self, name: str) -> bool:
        """Whether the model ignores this tensor: a tied head, a computed buffer, an MTP layer."""
        if name.endswith("rotary_emb.inv_freq"):
            return True
        if name == "lm_head.weight":
            return self.config.tie_word_embeddings
        first = self.config.num_layers
        behind = range(first, first + self.config.num_nextn_layers)
        return any(name.startswith(f"model.layers.{layer}.") for layer in behind)


def grouped_query_model(
    config: ModelConfig,
    attention: AttentionConfig,
    rope: RopeConfig,
    make_mlp: Callable[[int], Module],
    window: Callable[[int], int | None] | None = None,
    mlp_name: str = "mlp",
) -> CausalLM:
    """`window`: the sliding window of each layer, if layers differ."""
    table, group = RotaryTable(rope, config.positions), config.parallel.attention
    heads, dim = Heads.of(attention, group.rank, group.size), attention.head_dim
    cache = CacheSpec(len(config.layers), len(heads.kv), dim, dim)

    def make_layer(layer: int) -> DecoderLayer:
        spec = attention if window is None else replace(attention, window=window(layer))
        attend = Attention(spec, layer, table, config.dtype, config.parallel)
        return DecoderLayer(config, attend, make_mlp(layer), mlp_name)

    return CausalLM(config, cache, table, make_layer)
