"""What every rank of a command line would hold, without loading the model or starting a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moesaic.comm.collectives.collective import ShapeOnlyCollective, WindowCollective
from moesaic.comm.collectives.device_collective import DeviceCollective
from moesaic.comm.collectives.pipeline import PipeSpec
from moesaic.comm.mesh import Mesh, RankPlace, mesh_of
from moesaic.config import ServerArgs
from moesaic.config.resolve import CHUNKS
from moesaic.engine.setup.dense_setup import dense_weights
from moesaic.engine.setup.device_memory import (
    StepBytes,
    cache_dtype,
    check_weights_fit,
    device_cache_tokens,
    gpu_room,
    gpu_sharers,
    smaller_weights,
)
from moesaic.engine.setup.kv_memory import (
    DEFAULT_FREE_SHARE,
    GIB,
    cache_tokens,
    free_memory,
    total_memory,
)
from moesaic.engine.setup.moe_setup import (
    StepLimits,
    kind_of,
    moe_context,
    report_buffers,
    weight_format,
)
from moesaic.engine.worker.rank_context import DEVICE_BYTES, RankContext, neighbours
from moesaic.layers.attention import Attention, LatentAttention
from moesaic.layers.context import CacheSpec
from moesaic.layers.parallel import Parallel
from moesaic.models.blocks import CausalLM
from moesaic.models.config import DTYPES, BuildContext, RawConfig, checkpoint_dtype
from moesaic.models.dense import DenseWeights
from moesaic.models.registry import build_model
from moesaic.models.schemes import detect_scheme
from moesaic.moe.context import MoeContext
from moesaic.moe.dispatch.base import CommContext
from moesaic.moe.layer import FusedMoE
from moesaic.moe.quant.weights import WeightFormat
from moesaic.moe.shape_only import ShapeOnlyGroup

DEFAULT_MAX_RUNNING = {"cpu": 64, "cuda": 256}
# What a collective and a pipe carry in one piece: more goes in several, each with a signal.
COLLECTIVE_BYTES = 4 << 20
MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class RankShare:
    """What one rank holds; sizes in bytes. `experts`: the logical expert of each of its slots from
    `first_slot` on, the same in all of `moe_layers`."""

    place: RankPlace
    node: int
    layers: range
    moe_layers: tuple[int, ...]
    first_slot: int
    experts: tuple[int, ...]
    query_heads: int
    kv_heads: int
    dense_bytes: int
    expert_bytes: int
    cache: CacheSpec
    cache_bytes_per_token: int
    a2a_bytes: int
    """Of the dispatchers' buffers, whether they are touched or not."""
    collective_bytes: int
    step: StepBytes

    @property
    def fixed_bytes(self) -> int:
        """Whatever the size of the KV cache."""
        return self.dense_bytes + self.expert_bytes + self.a2a_bytes + self.collective_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """`moe`: the backends of the first rank, with nothing left open, and why they were chosen.
    `wanted`: the tokens for which a serving group has use in its KV cache."""

    mesh: Mesh
    dtype: torch.dtype
    num_layers: int
    context_length: int
    limits: StepLimits
    moe: MoeContext
    ranks: tuple[RankShare, ...]
    wanted: int
    sharers: int = 1
    """Ranks on the GPU with most of them."""

    def of_node(self, node: int) -> Sequence[RankShare]:
        return [share for share in self.ranks if share.node == node]

    def fixed_bytes(self, node: int) -> int:
        return sum(share.fixed_bytes for share in self.of_node(node))

    def check_memory(self) -> None:
        """ValueError where a machine like this one cannot hold the ranks of a node."""
        if self.moe.choice.device == "cuda":
            most = max(share.fixed_bytes for share in self.ranks)
            room = gpu_room().part(self.sharers)
            check_weights_fit("the model", most, room, smaller_weights(self.moe))
            return
        most = max(map(self.fixed_bytes, range(self.mesh.nnodes)))
        if most > total_memory():
            count = self.mesh.ranks_per_node
            raise ValueError(
                f"weights and buffers of the {count} rank{'s' * (count > 1)} of a node take "
                f"{most / GIB:.1f} GiB and this machine has {total_memory() / GIB:.1f} GiB: use "
                f"more nodes (--nnodes), {smaller_weights(self.moe)}"
            )

    def cache_tokens(self, args: ServerArgs) -> int:
        """Tokens in the KV cache of each rank: what fits on the rank with the least room for them,
        if all nodes are like this machine."""
        return min(self._tokens_of(args, share) for share in self.ranks)

    def _tokens_of(self, args: ServerArgs, share: RankShare) -> int:
        sharers, size = self.mesh.ranks_per_node, cache_dtype(args, self.dtype).itemsize
        if self.moe.choice.device == "cuda":
            room = gpu_room().part(self.sharers).after(share.fixed_bytes)
            return device_cache_tokens(args, share.cache, size, self.wanted, room, share.step)
        if args.max_total_tokens is not None or args.mem_fraction_static is not None:
            fixed = share.fixed_bytes
            return cache_tokens(args, share.cache, size, fixed, self.wanted, sharers)
        # The flags leave it to what is free once all ranks of the node have loaded.
        free = max(0, free_memory() - self.fixed_bytes(share.node))
        budget = int(DEFAULT_FREE_SHARE * free / sharers)
        page = args.page_size
        tokens = min(budget // share.cache_bytes_per_token, -(-self.wanted // page) * page)
        if tokens < page:
            raise ValueError(
                f"nothing is left for a KV cache: {free_memory() / GIB:.1f} GiB of this machine "
                f"are free and the ranks of a node take {self.fixed_bytes(share.node) / GIB:.1f} "
                "GiB without it: free some, or use more nodes (--nnodes)"
            )
        return tokens // page * page


def lay_out(args: ServerArgs) -> MemoryPlan:
    """Of resolved arguments whose model is a folder; ValueError where the model cannot be cut
    so."""
    subject = PlannedModel.of(args)
    mesh, raw = subject.mesh, subject.raw
    shares = [subject.share(rank) for rank in range(mesh.pp * mesh.tp)]
    return MemoryPlan(
        mesh=mesh,
        dtype=subject.moe.dtype,
        num_layers=subject.num_layers,
        context_length=context_length(args, raw),
        limits=subject.limits,
        moe=subject.moe,
        ranks=tuple(_moved(shares[rank % len(shares)], mesh, rank) for rank in range(mesh.world)),
        wanted=max_running(args, mesh) * context_length(args, raw),
        sharers=gpu_sharers(args),
    )


def preview(args: ServerArgs) -> None:
    """Before ranks are started: ValueError for what they could not do, and logs what they will."""
    subject = PlannedModel.of(args)
    first = _outline_rank(subject.mesh, 0)
    parallel = first.parallel(subject.num_layers, subject.moe.deterministic)
    report_buffers(subject.moe, outline(subject.raw, subject.moe, parallel))


@dataclass(frozen=True)
class PlannedModel:
    """What is laid out: a model's declarations, and what the flags make of them."""

    raw: RawConfig
    mesh: Mesh
    limits: StepLimits
    moe: MoeContext
    context_length: int
    cache_dtype: torch.dtype
    dense: DenseWeights | None

    @property
    def gpu(self) -> torch.device | None:
        return torch.device("cuda") if self.moe.choice.device == "cuda" else None

    @property
    def num_layers(self) -> int:
        return self.raw.integer("num_hidden_layers")

    @classmethod
    def of(cls, args: ServerArgs) -> PlannedModel:
        folder, mesh = Path(args.model_path), mesh_of(args)
        raw = RawConfig.read(folder)
        dtype = checkpoint_dtype(raw) if args.dtype == "auto" else DTYPES[args.dtype]
        scheme = detect_scheme(raw, folder)
        weights = weight_format(args.quantization, scheme.method, scheme.expert_format)
        length = context_length(args, raw)
        limits = step_limits(args, mesh, length)
        whole = whole_outline(raw, dtype, weights)
        moe = moe_context(args, dtype, weights, limits, whole, _outline_rank(mesh, 0))
        dense = dense_weights(scheme, folder, moe)
        return cls(raw, mesh, limits, moe, length, cache_dtype(args, dtype), dense)

    def share(self, rank: int) -> RankShare:
        ranks = _outline_rank(self.mesh, rank)
        moe, parallel = self.moe, ranks.parallel(self.num_layers, self.moe.deterministic)
        model = outline(self.raw, moe, parallel, self.dense)
        experts = [module for module in model.modules() if isinstance(module, FusedMoE)]
        of_experts = sum(map(expert_bytes, experts))
        assert parallel.layers is not None
        return RankShare(
            place=ranks.place,
            node=self.mesh.node_of(rank),
            layers=parallel.layers,
            moe_layers=tuple(layer.dispatcher.config.layer for layer in experts),
            first_slot=experts[0].layout.first_slot if experts else 0,
            experts=experts[0].local_experts if experts else (),
            query_heads=_query_heads(model),
            kv_heads=model.cache.num_heads,
            dense_bytes=model.nbytes - of_experts,
            expert_bytes=of_experts,
            cache=model.cache,
            cache_bytes_per_token=model.cache.bytes_per_token(self.cache_dtype.itemsize),
            a2a_bytes=moe.buffers(layer.dispatcher.config for layer in experts).total,
            collective_bytes=collective_bytes(
                self.mesh, self.limits, model.config.hidden_size, moe.dtype, self.gpu
            ),
            step=StepBytes.of(model, self.limits, self.context_length),
        )


def collective_bytes(
    mesh: Mesh,
    limits: StepLimits,
    hidden_size: int,
    dtype: torch.dtype,
    gpu: torch.device | None = None,
) -> int:
    """Of a rank: for its stage, for the attention group where it is another, and for the pipe. On
    a GPU what is there."""
    if gpu is not None:
        size = mesh.attention_tp
        return DeviceCollective.window_bytes(size, DEVICE_BYTES, gpu, neighbours(mesh))
    windows = [
        (size, WindowCollective.window_bytes(size, COLLECTIVE_BYTES))
        for size in {mesh.tp, mesh.attention_tp}
    ]
    if mesh.pp > 1:
        pipe = pipe_spec(mesh, limits, hidden_size, dtype)
        windows.append((mesh.pp, pipe.window_bytes(mesh.pp)))
    return sum(nbytes // size for size, nbytes in windows)


def outline(
    raw: RawConfig, moe: MoeContext, parallel: Parallel, dense: DenseWeights | None = None
) -> CausalLM:
    """A rank's part of the model, without memory."""
    group = ShapeOnlyGroup(parallel.stage.rank, parallel.stage.size)
    with torch.device("meta"):
        context = BuildContext(1, replace(moe, comm=CommContext(group)), parallel, dense)
        return build_model(raw, context)


def max_running(args: ServerArgs, mesh: Mesh) -> int:
    """Requests in the batch of one attention group."""
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
    """Prompt tokens in a step of one attention group."""
    asked = args.chunked_prefill_size or CHUNKS[kind_of(args)]
    return context if asked < 0 else max(1, asked // mesh.dp)


def step_limits(args: ServerArgs, mesh: Mesh, context: int) -> StepLimits:
    """Of one attention group."""
    running = max_running(args, mesh)
    return StepLimits(chunk_tokens(args, mesh, context) + running, running)


def pipe_spec(mesh: Mesh, limits: StepLimits, hidden_size: int, dtype: torch.dtype) -> PipeSpec:
    """One slot more than steps that are under way."""
    return PipeSpec(limits.tokens, hidden_size, dtype, MESSAGE_BYTES, mesh.pp + 1)


def _outline_rank(mesh: Mesh, rank: int) -> RankContext:
    place = mesh.place(rank)
    return RankContext(
        mesh=mesh,
        place=place,
        stage_peers=ShapeOnlyGroup(place.tp_rank, mesh.tp),
        stage=ShapeOnlyCollective(place.tp_rank, mesh.tp),
        attention=ShapeOnlyCollective(place.attention_rank, mesh.attention_tp),
    )


def whole_outline(raw: RawConfig, dtype: torch.dtype, weights: WeightFormat | None) -> CausalLM:
    """The model as on one rank, without memory, to look up sizes."""
    with torch.device("meta"):
        return build_model(raw, BuildContext(1, MoeContext.single(dtype, weights)))


def _moved(share: RankShare, mesh: Mesh, rank: int) -> RankShare:
    """The same share in another replica."""
    return replace(share, place=mesh.place(rank), node=mesh.node_of(rank))


def expert_bytes(layer: FusedMoE) -> int:
    biases = (bias for bias in (layer.b13, layer.b2) if bias is not None)
    matrices = layer.weights.w13_eJH.nbytes + layer.weights.w2_eHI.nbytes
    return matrices + sum(bias.nbytes for bias in biases)


def _query_heads(model: CausalLM) -> int:
    """Of a layer: every stage has one, and every layer has attention."""
    kinds = (Attention, LatentAttention)
    return next(module.num_heads for module in model.modules() if isinstance(module, kinds))
