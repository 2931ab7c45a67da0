"""What the MoE layers of a model share: resolved backends, ranks, limits, buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from moesaic.comm.collectives.collective import SingleRank
from moesaic.comm.collectives.device_collective import DeviceCollective
from moesaic.comm.collectives.group import Peers, RankGroup
from moesaic.comm.collectives.nccl_collective import NcclCollective
from moesaic.core.link import EmulatedLink
from moesaic.moe.backends import load_backends
from moesaic.moe.dispatch.base import BaseDispatcher, CommContext, DispatchConfig
from moesaic.moe.dispatch.device.exchange import DeviceExchange
from moesaic.moe.dispatch.host.exchange import LANES
from moesaic.moe.dispatch.nodes import NodeDispatcher, node_buffers
from moesaic.moe.expert_load import DeviceCounters
from moesaic.moe.placement import EpLayout, Placement, SlotMap, redundant_slots
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from moesaic.moe.quant.weights import WEIGHT_FORMATS, WeightFormat
from moesaic.moe.registry import A2A_REGISTRY, BufferSpec, MoeProblem, Provider, modes_of, resolve
from moesaic.moe.replicas import DYNAMIC, FAKE, LP, SourceRank, replica_choice
from moesaic.moe.runner.base import Workspace
from moesaic.moe.shape_only import ShapeOnlyDispatcher, ShapeOnlyGroup
from moesaic.moe.step_split import CountsSpec, StepSplit

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class LayerBuffers:
    payload: str
    row_bytes: int
    """Sent for each token."""
    nbytes: int
    """This rank's buffers for the layer; other layers may share them."""


@dataclass(frozen=True, slots=True)
class BufferReport:
    layers: dict[int, LayerBuffers]
    total: int
    """The bytes of all layers; a shared buffer counts once."""


@dataclass(frozen=True)
class MoeContext:
    resolved: MoeProblem
    """The backends in use, chosen for `reasons`."""
    reasons: tuple[str, ...]
    dtype: torch.dtype
    comm: CommContext
    max_tokens: int = 8192
    """The most of a rank in a step."""
    max_decode_tokens: int = 128
    """The most of a rank in a step without prefill."""
    redundant_experts: int = 0
    """Redundant slots, to which those are added that an even distribution needs."""
    placements: Mapping[int, Placement] = field(default_factory=dict)
    """By layer, where it is not the default one."""
    max_replicas: int = 0
    """Slots that an expert may get when the placement changes; 0: it never changes."""
    dispatch_algorithm: str = DYNAMIC
    """How tokens choose among replicas (moe/replicas.py)."""
    copies: int = 1
    """Copies of each block of experts, on adjacent ranks, instead of slices of it."""
    waterfill: bool = False
    """Whether shared experts are routed ones that every token takes, with a slot on each rank."""
    deterministic: bool = False
    replicated: bool = False
    lanes: int = LANES
    """Micro-batches that may be in flight at once."""
    dispatch_programs: int = 0
    """The most programs of normal mode's kernels on a GPU; 0: no limit."""
    combine_programs: int = 0
    workspace: Workspace = field(default_factory=Workspace)
    counters: DeviceCounters = field(default_factory=DeviceCounters)

    @classmethod
    def make(
        cls,
        problem: MoeProblem,
        dtype: torch.dtype,
        group: Peers | None = None,
        timeout: float = 60.0,
        link: EmulatedLink | None = None,
        overlaps: bool = False,
        **options: Any,
    ) -> MoeContext:
        """Resolves `auto`; ValueError with advice if nothing works."""
        load_backends()
        choice = resolve(problem)
        comm = CommContext(group or RankGroup.alone(), timeout, link=link, overlaps=overlaps)
        made = partial(cls, choice.problem, choice.reasons, dtype, comm)
        return made(workspace=Workspace(choice.problem.device), **options)

    @classmethod
    def single(
        cls, dtype: torch.dtype, weights: WeightFormat | None = None, device: str = "cpu"
    ) -> MoeContext:
        """One rank; unquantised unless a format is given."""
        name = DTYPE_NAMES[dtype]
        weights = weights or WEIGHT_FORMATS[name]
        return cls.make(MoeProblem(weights=weights, dtype=name, device=device), dtype)

    @property
    def weight_format(self) -> WeightFormat:
        return self.resolved.weights

    def placement(self, num_experts: int, layer: int = 0, num_shared: int = 0) -> Placement:
        """`num_shared`: how many of the experts, the last ones, are shared."""
        if layer in self.placements:
            return self.placements[layer]
        groups, routed = self.resolved.ep // self.copies, num_experts - num_shared
        redundant = redundant_slots(routed, self.redundant_experts, groups)
        placement = Placement.trivial(routed, redundant)
        if num_shared:
            placement = placement.with_everywhere(num_shared, groups)
        return placement if self.copies == 1 else placement.copied(groups, self.copies)

    def with_redundant(self, number: int) -> MoeContext:
        """The same with at most as many redundant experts, in the default placement."""
        most = min(number, self.redundant_experts)
        return replace(self, redundant_experts=most, placements={})

    def layout(self, num_slots: int) -> EpLayout:
        return EpLayout(num_slots, self.resolved.ep, self.resolved.moe_tp, self.comm.group.rank)

    def slot_map(
        self, placement: Placement, layout: EpLayout, first_shared: int | None = None
    ) -> SlotMap:
        """Shared experts, those from `first_shared` on, are taken on this rank where it can be."""
        source = SourceRank(layout, tuple(self.comm.group.nodes))
        choice = replica_choice(self.dispatch_algorithm, source, self.replicated, first_shared)
        return SlotMap(placement, self.max_replicas, choice)

    def step_split(self, placement: Placement, layout: EpLayout, layer: int) -> StepSplit | None:
        """For `lp` with redundant slots; ranks with the same tokens have nothing to exchange."""
        if self.dispatch_algorithm != LP or len(placement.slots) == placement.num_experts:
            return None
        spec = self._counts_spec(layout)
        if spec is None or isinstance(self.comm.group, ShapeOnlyGroup):
            return StepSplit(placement, layout, SingleRank(), layer)
        ranks = self.comm.shared(spec, lambda: spec.make(self.comm))
        return StepSplit(placement, layout, ranks, layer)

    def _counts_spec(self, layout: EpLayout) -> CountsSpec | None:
        """The collective in which ranks exchange counts, if they do."""
        if self.dispatch_algorithm != LP or self.replicated or layout.size == 1:
            return None
        return CountsSpec(layout.num_slots, self.resolved.device)

    @property
    def fakes_routing(self) -> bool:
        return self.dispatch_algorithm == FAKE

    def dispatch_config(
        self, layout: EpLayout, top_k: int, hidden_size: int, layer: int
    ) -> DispatchConfig:
        """A backend without another mode for prefill takes all steps in the one it has."""
        backend = A2A_REGISTRY[self.resolved.a2a]
        both = len(modes_of(self.resolved)) > 1
        prefills = "prefill" in backend.phases and "prefill" in self.resolved.phases
        return DispatchConfig(
            layout=layout,
            top_k=top_k,
            hidden_size=hidden_size,
            dtype=self.dtype,
            payload=PAYLOAD_FORMATS[self.resolved.payload],
            max_tokens=self.max_tokens,
            max_decode_tokens=(
                self.max_tokens if prefills and not both else self.max_decode_tokens
            ),
            layer=layer,
            deterministic=self.deterministic,
            replicated=self.replicated,
            mode=self.resolved.mode,
            lanes=self.lanes,
            dispatch_programs=self.dispatch_programs,
            combine_programs=self.combine_programs,
            activation=self.weight_format.activation,
        )

    def make_dispatcher(self, config: DispatchConfig) -> BaseDispatcher:
        if isinstance(self.comm.group, ShapeOnlyGroup):
            return ShapeOnlyDispatcher(config, self.comm)
        if self.spans_nodes:
            return NodeDispatcher(config, self.comm, self._provider)
        dispatcher: BaseDispatcher = self._provider.make(config, self.comm)
        return dispatcher

    @property
    def nodes(self) -> int:
        return len(set(self.comm.group.nodes)) or 1

    @property
    def spans_nodes(self) -> bool:
        """Whether rows cross by a collective: windows of hosts reach other nodes by themselves."""
        return self.resolved.device == "cuda" and self.nodes > 1

    @property
    def _provider(self) -> Provider:
        return A2A_REGISTRY[self.resolved.a2a].provider(self.resolved.device)

    def check(self) -> None:
        """Raises the errors of kernels whose waits have failed; the kernels themselves go on. Call
        it when their results have arrived; it does not wait for the device."""
        for exchange in self.comm.buffers.values():
            if isinstance(exchange, DeviceExchange | DeviceCollective | NcclCollective):
                exchange.check()

    def buffers(self, configs: Iterable[DispatchConfig]) -> BufferReport:
        """The buffers that dispatchers of these layers will allocate."""
        buffers, size = self._provider.buffers, self.comm.group.size
        if self.spans_nodes:
            buffers, size = partial(node_buffers, self._provider, self.nodes), size // self.nodes
        specs: dict[BufferSpec, int] = {}
        layers = {}
        for config in configs:
            found = [*buffers(config)]
            if (counts := self._counts_spec(config.layout)) is not None:
                found.append(counts)
            specs |= {spec: spec.nbytes(size) for spec in found}
            layers[config.layer] = LayerBuffers(
                config.payload.name,
                config.payload.row_bytes(config.hidden_size),
                sum(spec.nbytes(size) for spec in found),
            )
        return BufferReport(layers, sum(specs.values()))
