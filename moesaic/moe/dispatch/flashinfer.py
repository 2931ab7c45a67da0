"""`flashinfer`: one-sided. Dispatch puts rows into the windows of the ranks that need them, combine
gets results from theirs and adds them up. A rank without tokens puts a count of zero, nothing else.

P ranks · C tokens of a rank at most · T tokens of this rank · K chosen · G expert groups ·
R rows received, those of source p from p * C on · H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moesaic.comm.windows.factory import create_window
from moesaic.comm.windows.link import HostLink
from moesaic.comm.windows.window import PlaneSpec, SharedWindow, window_bytes
from moesaic.core.step import Step
from moesaic.kernels.cpu.rows import Terms, sum_rows
from moesaic.moe.dispatch.base import CommContext, DispatchConfig, RowSpec, wire_dtype
from moesaic.moe.dispatch.device.rows import DeviceRowsDispatcher
from moesaic.moe.dispatch.host.exchange import LANES, TAGS, ExchangeSignal, Lanes
from moesaic.moe.dispatch.host.windowed import WindowDispatcher
from moesaic.moe.dispatch.local import device_provider
from moesaic.moe.formats import CombineInput, RowsCombineInput, StandardDispatchOutput, TopKOutput
from moesaic.moe.quant.payload import Payload
from moesaic.moe.registry import UNQUANTIZED, A2aBackend, Provider, register_a2a


@dataclass(frozen=True, slots=True)
class PutSpec(RowSpec):
    tokens: int
    size: int
    pairs: bool

    def planes(self) -> list[PlaneSpec]:
        """Rows of source p start at p * C of a lane; lanes follow each other."""
        rows = LANES * self.size * self.tokens
        each = self.top_k if self.pairs else 1
        return [
            *self.host_planes(rows),
            PlaneSpec("counts", (LANES, self.size), torch.int64),
            PlaneSpec("results", (rows * each, self.hidden_size), self.dtype),
            TAGS,
        ]

    def nbytes(self, size: int) -> int:
        return window_bytes(self.planes(), size) // size


@dataclass(frozen=True, slots=True)
class PutRoute:
    lane: int
    sent_TG: Tensor
    """The row of each token in this rank's part of each group; -1 for none."""
    topk: TopKOutput
    counts: list[int] = field(default_factory=list)
    """Rows received from each rank."""
    valid_RK: Tensor | None = None
    """Which slots of the received rows are local."""


class FlashInferDispatcher(WindowDispatcher):
    name = "flashinfer"

    def __init__(self, config: DispatchConfig, comm: CommContext) -> None:
        super().__init__(config, comm)
        self.spec = self.buffer_spec(config)
        planes, channels = self.spec.planes(), LANES * len(ExchangeSignal)
        self.lanes = comm.shared(
            self.spec,
            lambda: Lanes(create_window(comm.group, planes, comm.timeout, channels, comm.link)),
        )
        self.window: SharedWindow = self.lanes.window

    @classmethod
    def buffer_spec(cls, config: DispatchConfig) -> PutSpec:
        size, pairs = config.layout.size, config.deterministic
        return PutSpec.of(config, tokens=config.max_tokens, size=size, pairs=pairs)

    def _first(self, lane: int, source: int) -> int:
        return (lane * self.layout.size + source) * self.spec.tokens

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> PutRoute:
        if len(x_TH) > self.spec.tokens:
            raise ValueError(
                f"{self.operation('dispatch')}: {len(x_TH)} tokens are more than the "
                f"{self.spec.tokens} that the buffers were made for: raise the limit of tokens in "
                f"a step"
            )
        lane, x = step.lane, self.config.encode(x_TH)
        self.lanes.acquire(lane, self.operation("dispatch"))
        groups_TK, width = self.layout.owner(topk.ids_TK), self.layout.moe_tp_size
        sent_TG = torch.full((len(x_TH), self.layout.ep_size), -1)
        for group in range(self.layout.ep_size):
            tokens = (groups_TK == group).any(1).nonzero().squeeze(1)
            sent_TG[tokens, group] = torch.arange(len(tokens))
            first = group * self.layout.slots_per_rank
            ids = torch.where(groups_TK == group, topk.ids_TK - first, -1).int()
            for rank in range(group * width, (group + 1) * width):
                self._put(rank, lane, tokens, x, ids, topk.weights_TK)
        self.signal(ExchangeSignal.TOKENS_READY, lane)
        return PutRoute(lane, sent_TG, topk)

    def _put(
        self, rank: int, lane: int, tokens: Tensor, x: Payload, ids_TK: Tensor, weights_TK: Tensor
    ) -> None:
        start = self._first(lane, self.layout.rank)
        put = self.window.put
        for name, tensor in x.planes.items():
            put(name, rank, start, tensor.view(wire_dtype(tensor.dtype)), tokens)
        put("ids", rank, start, ids_TK, tokens)
        put("weights", rank, start, weights_TK, tokens)
        count = self.window.plane("counts", rank)[lane, self.layout.rank]
        count.fill_(len(tokens))
        self.window.touch(count, (rank,))
        if self.window.link is not None:
            self.window.link.carry(rank, len(tokens) * self.row_bytes)
        if rank != self.layout.rank:
            self.note_dispatch(len(tokens))

    def _dispatch_b(self, pending: PutRoute) -> StandardDispatchOutput:
        """Copies only the filled rows: buffers hold many more than a decode step has."""
        lane = pending.lane
        self.wait(ExchangeSignal.TOKENS_READY, lane)
        told: list[int] = self.window.plane("counts")[lane].tolist()
        active = set(self.lanes.active)
        counts = [count if rank in active else 0 for rank, count in enumerate(told)]

        def filled(name: str) -> Tensor:
            plane, first = self.window.plane(name), self._first(lane, 0)
            starts = range(first, self._first(lane + 1, 0), self.spec.tokens)
            pairs = zip(starts, counts, strict=True)
            return torch.cat([plane[start : start + count] for start, count in pairs])

        payload = self.config.payload
        planes = (filled(plane.name).view(plane.dtype) for plane in payload.codec.planes)
        x = payload.wrap(planes, self.config.global_scale)
        ids_RK, weights_RK = filled("ids").long(), filled("weights")
        self.verify(ExchangeSignal.TOKENS_READY, lane)
        route = replace(pending, counts=counts, valid_RK=ids_RK >= 0)
        return StandardDispatchOutput(route, x, ids_RK, weights_RK)

    def _combine_a(self, results: CombineInput) -> PutRoute:
        assert isinstance(results, RowsCombineInput)
        route: PutRoute = results.handle
        if self.window.link is not None:
            self._carry_results(self.window.link, route, results.pairs)
        if results.pairs:
            self._put_pairs(route, results.y_RH)
        else:
            target = self.window.plane("results")
            for source, rows in enumerate(results.y_RH.split(route.counts)):
                start = self._first(route.lane, source)
                place = target[start : start + len(rows)]
                place.copy_(rows)
                self.window.touch(place, (source,))
        self.signal(ExchangeSignal.RESULTS_READY, route.lane)
        return route

    def _carry_results(self, link: HostLink, route: PutRoute, pairs: bool) -> None:
        assert route.valid_RK is not None
        unit = self.config.hidden_size * self.config.dtype.itemsize
        for source, valid_RK in enumerate(route.valid_RK.split(route.counts)):
            link.carry(source, unit * (int(valid_RK.sum()) if pairs else len(valid_RK)))

    def _put_pairs(self, route: PutRoute, y_NH: Tensor) -> None:
        """A row has room for a result of each of its K."""
        assert route.valid_RK is not None
        top_k = self.spec.top_k
        starts = [self._first(route.lane, source) for source in range(self.layout.size)]
        rows_R = torch.cat(
            [torch.arange(n) + start for start, n in zip(starts, route.counts, strict=True)]
        )
        places = (rows_R.unsqueeze(1) * top_k + torch.arange(top_k))[route.valid_RK]
        target = self.window.plane("results")
        target.index_copy_(0, places, y_NH)
        for source, (start, count) in enumerate(zip(starts, route.counts, strict=True)):
            self.window.touch(target[start * top_k : (start + count) * top_k], (source,))

    def _combine_b(self, route: PutRoute) -> Tensor:
        self.wait(ExchangeSignal.RESULTS_READY, route.lane)
        y = self.window.stacked("results")
        width, rank = self.layout.moe_tp_size, self.layout.rank
        wanted = self.reachable(self._wanted(route))
        y_TH, foreign = sum_rows(y.flatten(0, 1), wanted, y.shape[1], width, rank)
        self.verify(ExchangeSignal.RESULTS_READY, route.lane)
        self.note_combine(foreign)
        self.lanes.release(route.lane)
        return y_TH

    def _wanted(self, route: PutRoute) -> Terms:
        first = self._first(route.lane, self.layout.rank)
        sent_TG, topk = route.sent_TG, route.topk
        if not self.spec.pairs:
            owners = torch.arange(self.layout.ep_size).expand_as(sent_TG)
            return Terms(owners, torch.where(sent_TG < 0, -1, sent_TG + first), None)
        owners_TK = self.layout.owner(topk.ids_TK).clamp(min=0)
        rows_TK = (sent_TG.gather(1, owners_TK) + first) * self.spec.top_k
        rows_TK = rows_TK + torch.arange(self.spec.top_k)
        return Terms(owners_TK, torch.where(topk.ids_TK < 0, -1, rows_TK), topk.weights_TK)


class DeviceFlashInfer(DeviceRowsDispatcher):
    """Ids and weights always travel with their rows."""

    name = "flashinfer"
    weights_travel = True


register_a2a(
    A2aBackend(
        name="flashinfer",
        summary="one-sided: dispatch puts into the windows of others, combine gets from them",
        formats={"normal": "standard", "low_latency": "standard"},
        payloads=(*UNQUANTIZED, "fp8", "int8", "nvfp4", "mxfp4"),
        providers={
            "cpu": Provider(FlashInferDispatcher, FlashInferDispatcher.buffers),
            "cuda": device_provider(lambda config: DeviceFlashInfer),
        },
    )
)
