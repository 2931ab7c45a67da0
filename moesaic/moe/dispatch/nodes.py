"""Ranks on GPUs of several nodes: any backend inside of each node, a collective between nodes.

A nodes · C rows of a rank in a step · T <= C tokens of this rank · K chosen · H hidden · W bytes of
a row on the wire.

Kernels reach memory of one node only. So a token crosses to each other node once, in the payload's
format with its ids and weights, to the rank that has the same place there (the ranks with one place
form a rail). The node's own dispatcher takes the rows of all nodes to their experts, as if they
were this rank's. It also brings the results back, so that a node's part of a token is summed before
it crosses, once, and the token's rank adds up the parts in the order of nodes.

Nothing depends on what was chosen: every rank sends C rows to its rail. With top 8 and two nodes
0.4% of tokens have no expert on the other one, with four 10%. So nothing is counted, the host waits
for nothing, and a step can be captured in a graph.

In deterministic mode the sum must not depend on which experts share a node. Then every pair crosses
as a row of its own with one expert, unquantised, and the token's rank weights and sums the results
in the order of k.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moesaic.comm.collectives.collective import WindowCollective
from moesaic.comm.collectives.device_collective import rail_collective
from moesaic.comm.collectives.nccl_collective import NcclCollective
from moesaic.core.overlap import Overlap
from moesaic.core.step import Step
from moesaic.kernels.experts import weigh_pairs
from moesaic.moe.dispatch.base import BaseDispatcher, CommContext, DispatchConfig
from moesaic.moe.dispatch.device.payload_rows import encoded_rows
from moesaic.moe.dispatch.device.side_streams import SideStreams
from moesaic.moe.formats import CombineInput, DispatchOutput, TopKOutput
from moesaic.moe.placement import EpLayout
from moesaic.moe.quant.payload import PAYLOAD_FORMATS, Payload
from moesaic.moe.registry import BufferSpec, Provider
from moesaic.observe.spans import Spans

# Columns of a wire row begin at multiples of this, so that they can be viewed as any type.
ALIGN = 16


@dataclass(frozen=True, slots=True)
class RailSpec:
    """The collective between nodes, which all layers share. `part_bytes`: the most that a rank
    gives."""

    nodes: int
    part_bytes: int

    def nbytes(self, size: int) -> int:
        """What is given and what arrives, which is then decoded."""
        return (2 * self.nodes + 1) * self.part_bytes


@dataclass(frozen=True, slots=True)
class WireRow:
    """The columns of a row between nodes, in bytes: values, scales, ids, weights."""

    config: DispatchConfig

    @property
    def planes(self) -> list[tuple[str, int, torch.dtype]]:
        config = self.config
        rows = [
            (plane.name, plane.width(config.hidden_size), plane.dtype)
            for plane in config.payload.codec.planes
        ]
        return [*rows, ("ids", config.top_k, torch.int32), ("weights", config.top_k, torch.float32)]

    @property
    def nbytes(self) -> int:
        return sum(_aligned(width * dtype.itemsize) for _, width, dtype in self.planes)

    def views(self, wire_NW: Tensor) -> dict[str, Tensor]:
        """The columns of rows, not copies."""
        found, end = {}, 0
        for name, width, dtype in self.planes:
            found[name] = wire_NW[:, end : end + width * dtype.itemsize].view(dtype)
            end += _aligned(width * dtype.itemsize)
        return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class NodeRoute:
    """Tokens of this rank that are on their way; `rows`: C. `inner` is what the node's dispatcher
    has to be given next."""

    lane: int
    rows: int
    x_TH: Tensor
    topk: TopKOutput
    inner: Any
    overlaps: bool = False
    """Whether transfers run beside the step's stream."""
    y_TH: Tensor | None = None
    """The result, where it is made there."""


class NodeDispatcher(BaseDispatcher):
    name = "nodes"

    def __init__(self, config: DispatchConfig, comm: CommContext, provider: Provider) -> None:
        super().__init__(config, comm)
        self.spans = Spans()  # the inner dispatcher records
        self.node, self.nodes = comm.group.rail.rank, comm.group.rail.size
        self._routes: dict[int, NodeRoute] = {}
        """The tokens of each lane that are between dispatch and combine."""
        self.slots = slots_of_node(config.layout, self.nodes, self.node)
        inner = inner_config(config, self.nodes)
        self.row = wire_row(inner)
        self.inner: BaseDispatcher = provider.make(
            inner, replace(comm, group=comm.group.node_peers)
        )
        spec = rail_spec(config, self.nodes)
        device = torch.get_default_device()
        self.sides = SideStreams.of(comm, config.lanes)
        self.rail: WindowCollective | NcclCollective = comm.shared(
            spec, lambda: rail_collective(comm.group.rail, spec.part_bytes, comm.timeout, device)
        )

    def set_global_scale(self, scale: float) -> None:
        super().set_global_scale(scale)
        self.inner.set_global_scale(scale)
        self.row = wire_row(inner_config(self.config, self.nodes))

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> NodeRoute:
        overlaps = step.overlap != Overlap.OFF and self.sides.exist
        with self.sides.beside(step.lane) if overlaps else nullcontext():
            route = self._send(x_TH, topk, step)
        return replace(route, overlaps=overlaps)

    def _send(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> NodeRoute:
        """Between the nodes, then inside of this one."""
        config, count = self.config, x_TH.shape[0]
        rows = count if config.replicated else self._rows_of(count, step)
        ids_TK = _masked(topk.ids_TK, step.num_tokens_1)
        tokens = replace(topk, ids_TK=ids_TK)
        x_NH, sent, each = x_TH, tokens, 1
        if config.deterministic:  # a row for each pair
            each = config.top_k
            x_NH = x_TH.repeat_interleave(each, 0)
            ids_N1 = ids_TK.reshape(-1, 1)
            sent = TopKOutput(ids_N1, torch.ones_like(ids_N1, dtype=torch.float32))
        if not config.replicated:
            x_NH, sent = self._cross(x_NH, sent, rows * each)
        local = replace(sent, ids_TK=self._local(sent.ids_TK))
        now = Step(step.prefill, step.lane, rows=x_NH.shape[0], overlap=step.overlap)
        inner = self.inner.dispatch_a(x_NH, local, now)
        return NodeRoute(step.lane, rows, x_TH, tokens, inner)

    def _rows_of(self, count: int, step: Step) -> int:
        """C, equal on all ranks and at least one."""
        rows = max(1, step.rows or max(step.counts, default=0))
        if count > rows:
            raise ValueError(
                f"{self.operation('dispatch')}: {count} tokens are more than the {rows} rows of a "
                "rank in this step: give Step.rows, the most of any rank, the same on all"
            )
        return rows

    def _cross(self, x_NH: Tensor, sent: TopKOutput, rows: int) -> tuple[Tensor, TopKOutput]:
        """The rows of this rank's rail, of all nodes in order."""
        count, payload = x_NH.shape[0], self.row.config.payload
        wire = torch.empty(rows, self.row.nbytes, dtype=torch.uint8, device=x_NH.device)
        views = self.row.views(wire)
        for name, tensor in encoded_rows(self.row.config, x_NH).planes.items():
            _bytes(views[name][:count]).copy_(_bytes(tensor))
        views["ids"][count:] = -1
        views["ids"][:count] = sent.ids_TK
        views["weights"][:count] = sent.weights_TK
        self.traffic.dispatch_rows += rows * (self.nodes - 1)
        self.traffic.dispatch_bytes += wire.nbytes * (self.nodes - 1)
        counts = [rows] * self.nodes
        arrived = self.row.views(self.rail.gather_rows(wire, counts, self.operation("dispatch")))
        parts = [arrived[plane.name].contiguous() for plane in payload.codec.planes]
        rows_NH = payload.wrap(parts, self.row.config.global_scale)
        return _dense(rows_NH, self.config.dtype), TopKOutput(
            arrived["ids"].contiguous(), arrived["weights"].contiguous()
        )

    def _local(self, ids_NK: Tensor) -> Tensor:
        """Slots of this node by their number here; -1 for others."""
        local = ids_NK - self.slots.start
        return torch.where((local >= 0) & (local < len(self.slots)), local, -1)

    def _dispatch_b(self, route: NodeRoute) -> DispatchOutput:
        """The handle stays the inner one, which a fused function reads."""
        if route.overlaps:
            self.sides.join(route.lane)
        output = self.inner.dispatch_b(route.inner)
        self._routes[route.lane] = replace(route, inner=output.handle)
        return output

    def _combine_a(self, results: CombineInput) -> NodeRoute:
        found = (route for route in self._routes.values() if route.inner is results.handle)
        route = next(found)
        del self._routes[route.lane]  # it holds the rows of all nodes
        if not route.overlaps:
            return replace(route, inner=self.inner.combine_a(results))
        with self.sides.beside(route.lane):
            route = replace(route, inner=self.inner.combine_a(results))
            return replace(route, y_TH=self._return(route))

    def _combine_b(self, route: NodeRoute) -> Tensor:
        if route.y_TH is None:
            return self._return(route)
        self.sides.join(route.lane)
        return route.y_TH

    def _return(self, route: NodeRoute) -> Tensor:
        """Inside of this node, then between the nodes."""
        config, operation = self.config, self.operation("combine")
        y_NH = self.inner.combine_b(route.inner)
        ids_TK, weights_TK = route.topk.ids_TK, route.topk.weights_TK
        each, count = config.top_k if config.deterministic else 1, ids_TK.shape[0]
        if config.replicated:
            parts = self.rail.gather_rows(y_NH, [y_NH.shape[0]] * self.nodes, operation)
        else:
            parts = self.rail.exchange_rows(y_NH, operation)
        rows = y_NH.shape[0] if config.replicated else route.rows * each
        self.traffic.combine_rows += rows * (self.nodes - 1)
        self.traffic.combine_bytes += rows * (self.nodes - 1) * y_NH.shape[1] * y_NH.itemsize
        first, *others = parts.unflatten(0, (self.nodes, rows))[:, : count * each].unbind(0)
        total = first.float()
        for other in others:
            total += other
        y_TH = total.to(config.dtype)
        if not config.deterministic:
            return y_TH
        return weigh_pairs(y_TH, ids_TK, weights_TK, y_TH.new_empty(count, y_TH.shape[1]))


def inner_config(config: DispatchConfig, nodes: int) -> DispatchConfig:
    """The config of the dispatcher inside of a node, which takes the rows of all nodes."""
    layout, each, top_k = config.layout, 1, config.top_k
    if config.deterministic:
        each, top_k = top_k, 1
    times = each if config.replicated else nodes * each
    ranks, width = layout.size // nodes, layout.moe_tp_size
    slots = slots_of_node(layout, nodes, 0)
    inside = EpLayout(len(slots), max(1, ranks // width), min(ranks, width), layout.rank % ranks)
    return replace(
        config,
        layout=inside,
        top_k=top_k,
        max_tokens=times * config.max_tokens,
        max_decode_tokens=times * config.max_decode_tokens,
    )


def slots_of_node(layout: EpLayout, nodes: int, node: int) -> range:
    """The slots that the ranks of a node hold, whole or in slices."""
    ranks, width = layout.size // nodes, layout.moe_tp_size
    if ranks % width and width % ranks:
        raise ValueError(
            f"{width} ranks share an expert, and a node has {ranks}: choose --tp-size and "
            "--ep-size so that one divides the other"
        )
    groups = max(1, ranks // width)
    first = node * ranks // width
    return range(first * layout.slots_per_rank, (first + groups) * layout.slots_per_rank)


def rail_spec(config: DispatchConfig, nodes: int) -> RailSpec:
    inner = inner_config(config, nodes)
    rows = inner.max_tokens if config.replicated else inner.max_tokens // nodes
    result = config.hidden_size * config.dtype.itemsize
    return RailSpec(nodes, max(rows * wire_row(inner).nbytes, inner.max_tokens * result))


def node_buffers(provider: Provider, nodes: int, config: DispatchConfig) -> list[BufferSpec]:
    """The buffers of a dispatcher with this config."""
    return [*provider.buffers(inner_config(config, nodes)), rail_spec(config, nodes)]


def wire_row(inner: DispatchConfig) -> WireRow:
    if not inner.deterministic:
        return WireRow(inner)
    formats = PAYLOAD_FORMATS.values()
    plain = (form for form in formats if form.scales is None and form.values.dtype == inner.dtype)
    return WireRow(replace(inner, payload=next(plain), global_scale=1.0))


def _masked(ids_TK: Tensor, num_tokens_1: Tensor | None) -> Tensor:
    """Rows that pad a fixed shape have no experts."""
    if num_tokens_1 is None:
        return ids_TK.int()
    row_T1 = torch.arange(ids_TK.shape[0], device=ids_TK.device).unsqueeze(1)
    return torch.where(row_T1 < num_tokens_1, ids_TK, -1).int()


def _dense(rows: Payload, dtype: torch.dtype) -> Tensor:
    """Quantised rows in float32: the inner dispatcher encodes them again, to the same values but
    for the last bit of a scale."""
    plain = rows.scales is None and rows.values.dtype == dtype
    return rows.values if plain else rows.dense(torch.float32)


def _bytes(tensor: Tensor) -> Tensor:
    """Not every device copies all types of one byte."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
