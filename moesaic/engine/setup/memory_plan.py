"""The memory of every rank, planned from shapes without loading the model or starting a rank."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from moesaic.comm.collectives.collective import ShapeOnlyCollective, WindowCollective
from moesaic.comm.collectives.device_collective import DeviceCollective
from moesaic.comm.collectives.pipeline import PipeSpec
from moesaic.comm.mesh import Mesh, RankPlace, mesh_of
from moesaic.config import ServerArgs
from moesaic.config.resolve import CHUNKS
from moesaic.core.speculation import MOST_DRAFTS
from moesaic.disagg.send_buffer import send_buffer_bytes
from moesaic.engine.runner.row_results import LOGIT_ROWS
from moesaic.engine.setup.dense_setup import dense_weights
from moesaic.engine.setup.device_memory import (
    GIB,
    CacheRequest,
    DeviceRoom,
    HostRoom,
    Room,
    StepBytes,
    TooLittleMemory,
    cache_dtype,
    gpu_room,
    gpu_sharers,
    planned_tokens,
    smaller_weights,
    total_memory,
)
from moesaic.engine.setup.expert_buffers import buffer_sizes
from moesaic.engine.setup.first_placement import fixes_slots
from moesaic.engine.setup.graph_sizes import mixed_graph_sizes
from moesaic.engine.setup.moe_setup import (
    StepLimits,
    kind_of,
    moe_context,
    report_buffers,
    weight_format,
)
from moesaic.engine.setup.rank_context import DEVICE_BYTES, RankContext, neighbours
from moesaic.engine.speculate.drafters import DraftModel, DraftSource, draft_source
from moesaic.layers.attention import Attention, Heads, LatentAttention
from moesaic.layers.parallel import Parallel
from moesaic.models.blocks import CausalLM
from moesaic.models.config import DTYPES, BuildContext, RawConfig, checkpoint_dtype
from moesaic.models.dense import DenseWeights
from moesaic.models.folder import ModelEosTokens, checked
from moesaic.models.registry import build_model
from moesaic.models.schemes import Scheme, detect_scheme
from moesaic.moe.context import MoeContext
from moesaic.moe.dispatch.base import CommContext
from moesaic.moe.layer import FusedMoE
from moesaic.moe.quant.weights import WeightFormat
from moesaic.moe.shape_only import ShapeOnlyGroup

DEFAULT_MAX_RUNNING = {"cpu": 64, "cuda": 256}
# The largest message of a collective and of a pipeline: longer ones are split.
COLLECTIVE_BYTES = 4 << 20
MESSAGE_BYTES = 1 << 20
# A logit of a draft model: in the model's dtype, and in float32; and a probability's logarithm.
DRAFT_LOGIT_BYTES = 2 + 4
LOG_BYTES = 4


@dataclass(frozen=True)
class RankShare:
    """The part of the model on one rank; sizes are in bytes."""

    place: RankPlace
    node: int
    layers: range
    moe_layers: tuple[int, ...]
    first_slot: int
    experts: tuple[int, ...]
    """The logical expert of each slot from `first_slot` on, the same in all `moe_layers`."""
    query_heads: int
    kv_heads: int
    dense_bytes: int
    expert_bytes: int
    cache_bytes_per_token: int
    a2a_bytes: int
    """The dispatchers' buffers, used or not."""
    collective_bytes: int
    step: StepBytes
    moving_bytes: int = 0
    """Buffers of experts that move (--enable-eplb)."""
    host_bytes: int = 0
    """Those in the memory of the node, if the rank computes on a GPU."""
    table_bytes: int = 0
    """The rotations of all positions."""
    draft_bytes: int = 0
    """The weights of the draft model."""
    draft_cache_bytes: int = 0
    """Its part of `cache_bytes_per_token`."""
    staging_bytes_per_token: int = 0
    """Prompts that have arrived from other instances, before they are moved to pages."""
    outlet_bytes: int = 0
    """Prompts on their way to other instances."""

    @property
    def weight_bytes(self) -> int:
        return self.dense_bytes + self.expert_bytes + self.draft_bytes

    @property
    def fixed_bytes(self) -> int:
        """Everything but the KV cache."""
        buffers = self.a2a_bytes + self.collective_bytes + self.moving_bytes
        return self.weight_bytes + self.table_bytes + buffers + self.outlet_bytes


@dataclass(frozen=True)
class MemoryPlan:
    args: ServerArgs
    mesh: Mesh
    model: ResolvedModel
    """Its backends are those of the first rank."""
    ranks: tuple[RankShare, ...]

    def cache_tokens(self, room: Room) -> int:
        """Tokens of each rank's KV cache: what fits on the fullest rank if each has this `room`.
        TooLittleMemory, with the redundant experts that do fit, if nothing does."""
        try:
            return self.tokens(room)
        except TooLittleMemory as error:
            raise TooLittleMemory(f"{error}{self.fewer_replicas(room)}") from None

    def tokens(self, room: Room) -> int:
        """The same without advice."""
        self._check_host_memory()
        model, smaller = self.model, smaller_weights(self.model.moe)
        wanted = model.limits.running * model.context_length
        requests = (
            CacheRequest(
                share.cache_bytes_per_token + share.staging_bytes_per_token,
                wanted,
                share.fixed_bytes,
                self.node_bytes[share.node],
                share.step,
            )
            for share in self.ranks
        )
        return min(planned_tokens(self.args, request, room, smaller) for request in requests)

    def _check_host_memory(self) -> None:
        most = max(share.host_bytes for share in self.ranks) * self.mesh.ranks_per_node
        if most > total_memory():
            raise ValueError(
                f"experts that move between nodes take {most / GIB:.1f} GiB of each node's memory "
                f"and this machine has {total_memory() / GIB:.1f} GiB: lower "
                "--eplb-max-bytes-per-step"
            )

    @cached_property
    def node_bytes(self) -> Counter[int]:
        """Everything but the KV caches of each node."""
        nodes: Counter[int] = Counter()
        for share in self.ranks:
            nodes[share.node] += share.fixed_bytes
        return nodes

    def fewer_replicas(self, room: Room) -> str:
        """The end of a refusal."""
        if not self.args.ep_num_redundant_experts or fixes_slots(self.args):
            return ""
        most = self.most_redundant(room)
        if most is None:
            return "; it does not fit without redundant experts either"
        return f"; with --ep-num-redundant-experts {most} it fits"

    def most_redundant(self, room: Room) -> int | None:
        """The most redundant experts, fewer than planned, with which all fits; None if it does not
        without any."""

        def is_refused(number: int) -> bool:
            args = replace(self.args, ep_num_redundant_experts=number)
            try:
                self.model.with_redundant(number).plan(args).tokens(room)
            except TooLittleMemory:
                return True
            return False

        refused = bisect_left(range(self.args.ep_num_redundant_experts), True, key=is_refused)
        return refused - 1 if refused else None


def plan_memory(args: ServerArgs) -> MemoryPlan:
    """`args` are resolved and name a folder; ValueError if the model cannot be split this way."""
    return ResolvedModel.of(args, _shape_only_rank(mesh_of(args), 0)).plan(args)


def free_room(args: ServerArgs) -> Room:
    """What each rank may use of this machine, before any has started."""
    if args.device == "cuda":
        return gpu_room().part(gpu_sharers(args))
    return HostRoom.now(mesh_of(args).ranks_per_node)


def check_rank(args: ServerArgs, model: ResolvedModel, share: RankShare, room: Room) -> None:
    """TooLittleMemory if the ranks do not fit. While they would if all were like this one, the
    others need not be planned: where they do not, the largest rank of the node finds out."""
    try:
        model.plan(args, [share]).tokens(room)
    except TooLittleMemory:
        model.plan(args).cache_tokens(room)


def loaded_tokens(args: ServerArgs, model: ResolvedModel, share: RankShare, room: Room) -> int:
    """Tokens of this rank's KV cache in the `room` that is left when all ranks have loaded. They
    may hold more than was planned: the advice of a refusal counts that."""
    alike = model.plan(args, [share])
    held = share.fixed_bytes if isinstance(room, DeviceRoom) else alike.node_bytes[share.node]
    before = room.after(-held)
    try:
        return alike.tokens(before)
    except TooLittleMemory as error:
        whole = model.plan(args)
        if isinstance(room, HostRoom):  # which ranks share that are not alike
            return whole.cache_tokens(room.after(-whole.node_bytes[share.node]))
        raise TooLittleMemory(f"{error}{whole.fewer_replicas(before)}") from None


def check_plan(args: ServerArgs) -> None:
    """Logs the backends and buffers of the ranks before they start; ValueError for bad flags."""
    first = _shape_only_rank(mesh_of(args), 0)
    model = ResolvedModel.of(args, first)
    report_buffers(model.moe, model.shape_only_part(model.parallel(first)))


@dataclass(frozen=True)
class ResolvedModel:
    """A model's config, resolved with the flags."""

    raw: RawConfig
    scheme: Scheme
    limits: StepLimits
    moe: MoeContext
    context_length: int
    cache_dtype: torch.dtype
    dense: DenseWeights | None
    num_experts: int
    """Of a layer that has some; 0 in a model without any."""
    draft: DraftSource | None = None
    """Of the model that makes drafts on the same ranks."""

    @property
    def num_layers(self) -> int:
        return self.raw.integer("num_hidden_layers")

    @property
    def top_k(self) -> int:
        return self.raw.integer("num_experts_per_tok")

    @property
    def eos_ids(self) -> frozenset[int]:
        """For engines without a tokenizer; a tokenizer's take precedence."""
        return checked(self.raw.data, ModelEosTokens, self.raw.source).all_ids

    @classmethod
    def of(cls, args: ServerArgs, ranks: RankContext) -> ResolvedModel:
        folder = Path(args.model_path)
        raw = RawConfig.read(folder)
        dtype = checkpoint_dtype(raw) if args.dtype == "auto" else DTYPES[args.dtype]
        length = context_length(args, raw)
        limits = step_limits(args, ranks.mesh, length)
        scheme = detect_scheme(raw, folder)
        weights = weight_format(args.quantization, scheme.method, scheme.expert_format)
        whole = shape_only_model(raw, dtype, weights, args.enable_waterfill)
        _check_heads(raw, whole, ranks.mesh.attention_tp)
        moe = moe_context(args, dtype, weights, limits, whole, ranks)
        dense = dense_weights(scheme, folder, moe)
        layers = (module for module in whole.modules() if isinstance(module, FusedMoE))
        experts = next((layer.config.num_experts for layer in layers), 0)
        model = cls(raw, scheme, limits, moe, length, cache_dtype(args, dtype), dense, experts)
        return replace(model, draft=draft_source(args, model, ranks.mesh))

    def parallel(self, ranks: RankContext) -> Parallel:
        return ranks.parallel(self.num_layers, self.moe.deterministic)

    def shape_only_part(self, parallel: Parallel) -> CausalLM:
        """A rank's part of the model on the meta device."""
        group = ShapeOnlyGroup(parallel.stage.rank, parallel.stage.size)
        moe = replace(self.moe, comm=CommContext(group))
        with torch.device("meta"):
            return build_model(self.raw, BuildContext(1, moe, parallel, self.dense))

    def with_redundant(self, number: int) -> ResolvedModel:
        """The same model with as many redundant experts, in the default placement."""
        draft = None if self.draft is None else self.draft.with_redundant(number)
        return replace(self, moe=self.moe.with_redundant(number), draft=draft)

    def plan(self, args: ServerArgs, shares: Sequence[RankShare] = ()) -> MemoryPlan:
        """`shares`: those of one replica's ranks, or of one rank if all are alike."""
        mesh = mesh_of(args)
        places = (_shape_only_rank(mesh, rank) for rank in range(mesh.pp * mesh.tp))
        shares = shares or [
            self.share(args, place, self.shape_only_part(self.parallel(place))) for place in places
        ]
        ranks = (
            replace(shares[rank % len(shares)], place=mesh.place(rank), node=mesh.node_of(rank))
            for rank in range(mesh.world)
        )
        return MemoryPlan(args, mesh, self, tuple(ranks))

    def share(self, args: ServerArgs, ranks: RankContext, model: CausalLM) -> RankShare:
        """`model`: the rank's shape-only part."""
        moe, layers = self.moe, self.parallel(ranks).layers
        assert layers is not None
        experts = [module for module in model.modules() if isinstance(module, FusedMoE)]
        in_experts = sum(map(expert_bytes, experts))
        attention = (m for m in model.modules() if isinstance(m, Attention | LatentAttention))
        gpu = torch.device("cuda") if moe.resolved.device == "cuda" else None
        with torch.device("meta"):
            draft = None if self.draft is None else self.draft.build(model)
        size = self.cache_dtype.itemsize
        draft_cache = 0 if draft is None else draft.cache.bytes_per_token(size)
        role, token_bytes = args.disaggregation_mode, model.cache.bytes_per_token(size)
        sent_bytes = token_bytes + draft_cache * (draft is not None and draft.reads_target)
        sent = send_buffer_bytes(sent_bytes, self.context_length, kind_of(args))
        own = [] if draft is None else [one for one in draft.experts if one.context.max_replicas]
        moves = args.enable_eplb and experts + own
        moving = buffer_sizes(args, experts + own, ranks.stage_peers) if moves else None
        return RankShare(
            place=ranks.place,
            node=ranks.mesh.node_of(ranks.place.rank),
            layers=layers,
            moe_layers=tuple(layer.dispatcher.config.layer for layer in experts),
            first_slot=experts[0].layout.first_slot if experts else 0,
            experts=experts[0].local_experts if experts else (),
            query_heads=next(attention).num_heads,
            kv_heads=model.cache.num_heads,
            dense_bytes=model.nbytes - in_experts,
            expert_bytes=in_experts,
            cache_bytes_per_token=token_bytes + draft_cache,
            a2a_bytes=moe.buffers(layer.dispatcher.config for layer in experts).total
            + _other_buffers(moe, draft),
            collective_bytes=collective_bytes(
                ranks.mesh, self.limits, model.config.hidden_size, moe.dtype, gpu
            ),
            step=replace(
                StepBytes.of(model, self.limits, self.context_length),
                drafts=0 if draft is None else _draft_logits(args, self.limits, model),
            ),
            moving_bytes=moving.nbytes(ranks.mesh.tp, gpu or torch.device("cpu")) if moving else 0,
            host_bytes=moving.host_bytes if moving else 0,
            table_bytes=_table_bytes(model, draft) * self.context_length,  # of one position
            draft_bytes=0 if draft is None else draft.nbytes,
            draft_cache_bytes=draft_cache,
            staging_bytes_per_token=sent_bytes if role == "decode" else 0,
            outlet_bytes=sent if role == "prefill" else 0,
        )


def _table_bytes(model: CausalLM, draft: DraftModel | None) -> int:
    own = None if draft is None else draft.own_rope
    return model.rope.nbytes + (0 if own is None else own.nbytes)


def _draft_logits(args: ServerArgs, limits: StepLimits, model: CausalLM) -> int:
    """Bytes of the logits that a draft model computes at once, while the target's are kept; where
    it grows trees, also of the logarithms of their probabilities."""
    topk = args.speculative_eagle_topk or 1
    each = DRAFT_LOGIT_BYTES + LOG_BYTES * (topk > 1)
    return min(LOGIT_ROWS, limits.running * topk) * model.config.vocab_size * each


def _other_buffers(moe: MoeContext, draft: DraftModel | None) -> int:
    """The buffers of a draft model that does not use the target's."""
    if draft is None or not draft.experts:
        return 0
    own = draft.experts[0].context
    if own.resolved == moe.resolved:
        return 0
    return own.buffers(layer.dispatcher.config for layer in draft.experts).total


def _check_heads(raw: RawConfig, model: CausalLM, size: int) -> None:
    """ValueError if attention cannot be split over so many ranks: no flag of the experts that
    `moe_context` may suggest helps then."""
    layers = (layer for layer in model.modules() if isinstance(layer, Attention))
    if (first := next(layers, None)) is not None:
        try:
            Heads.of(first.config, 0, size)
        except ValueError as error:
            raise ValueError(f"{raw.source}: {error}") from None


def collective_bytes(
    mesh: Mesh,
    limits: StepLimits,
    hidden_size: int,
    dtype: torch.dtype,
    gpu: torch.device | None = None,
) -> int:
    """A rank's windows: of its stage, attention group and pipeline; on a GPU of the group, and of
    the stage if dense layers are split over several groups."""
    if gpu is not None:
        sizes = [mesh.attention_tp] + [mesh.tp] * mesh.dense_spans_groups
        most = neighbours(mesh)
        return sum(DeviceCollective.window_bytes(n, DEVICE_BYTES, gpu, most) for n in sizes)
    windows = [
        (size, WindowCollective.window_bytes(size, COLLECTIVE_BYTES))
        for size in {mesh.tp, mesh.attention_tp}
    ]
    if mesh.pp > 1:
        pipe = pipe_spec(mesh, limits, hidden_size, dtype)
        windows.append((mesh.pp, pipe.window_bytes(mesh.pp)))
    return sum(nbytes // size for size, nbytes in windows)


def max_running(args: ServerArgs, mesh: Mesh) -> int:
    """The most requests in a batch of one attention group."""
    asked = args.max_running_requests or DEFAULT_MAX_RUNNING[kind_of(args)]
    return -(-asked // mesh.dp)


def context_length(args: ServerArgs, raw: RawConfig) -> int:
    limit = raw.integer("max_position_embeddings")
    if args.context_length is None:
        return limit
    if args.context_length > limit:
        raise ValueError(
            f"--context-length {args.context_length} is longer than the model's "
            f"max_position_embeddings {limit}: give at most that"
        )
    return args.context_length


def chunk_tokens(args: ServerArgs, mesh: Mesh, context: int) -> int:
    """The most prompt tokens in a step of one attention group."""
    asked = args.chunked_prefill_size or CHUNKS[kind_of(args)]
    return context if asked < 0 else max(1, asked // mesh.dp)


def step_limits(args: ServerArgs, mesh: Mesh, context: int) -> StepLimits:
    running = max_running(args, mesh)
    drafts = most_drafts(args, running)
    tokens = chunk_tokens(args, mesh, context) + running + drafts
    on_gpu = kind_of(args) == "cuda"
    captured = max(mixed_graph_sizes(args, tokens), default=0) if on_gpu else 0
    return StepLimits(tokens, running + drafts, captured, drafts)


def most_drafts(args: ServerArgs, running: int) -> int:
    """The most drafts of a step: those of all requests, up to a bound."""
    if args.speculative_algorithm is None:
        return 0
    assert args.speculative_num_draft_tokens is not None, "the arguments are not resolved"
    each = args.speculative_num_draft_tokens - 1
    return min(running * each, MOST_DRAFTS)


def pipe_spec(mesh: Mesh, limits: StepLimits, hidden_size: int, dtype: torch.dtype) -> PipeSpec:
    """One slot more than steps in flight."""
    return PipeSpec(limits.tokens, hidden_size, dtype, MESSAGE_BYTES, mesh.pp + 1)


def _shape_only_rank(mesh: Mesh, rank: int) -> RankContext:
    place = mesh.place(rank)
    nodes = tuple(map(mesh.node_of, mesh.stage_ranks(place)))
    return RankContext(
        mesh=mesh,
        place=place,
        stage_peers=ShapeOnlyGroup(place.tp_rank, mesh.tp, nodes if len(set(nodes)) > 1 else ()),
        stage=ShapeOnlyCollective(place.tp_rank, mesh.tp),
        attention=ShapeOnlyCollective(place.attention_rank, mesh.attention_tp),
    )


def shape_only_model(
    raw: RawConfig, dtype: torch.dtype, weights: WeightFormat | None, waterfill: bool = False
) -> CausalLM:
    """The whole model on the meta device."""
    moe = replace(MoeContext.single(dtype, weights), waterfill=waterfill)
    with torch.device("meta"):
        return build_model(raw, BuildContext(1, moe))


def expert_bytes(layer: FusedMoE) -> int:
    biases = (bias for bias in (layer.b13, layer.b2) if bias is not None)
    matrices = layer.weights.w13_eJH.nbytes + layer.weights.w2_eHI.nbytes
    return matrices + sum(bias.nbytes for bias in biases)
