"""Two dispatchers over plain collectives: `gloo` in one all-to-all, `ring` from neighbour to
neighbour.

P ranks · T tokens of this rank · S rows that it sends · R rows that it receives · K chosen ·
G expert groups · H hidden.

Each token goes once to every rank that has one of its experts: first the ranks tell each other how
many rows will come, then the rows travel, plane by plane. Results go the same way back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.core.step import Step
from moesaic.moe.dispatch.base import BaseDispatcher
from moesaic.moe.formats import CombineInput, NormalDispatchOutput, RowsCombineInput, TopKOutput
from moesaic.moe.quant.payload import Payload
from moesaic.moe.registry import UNQUANTIZED, A2aBackend, register_a2a
from moesaic.moe.runner.host.layouts import weighted_sum


@dataclass(frozen=True, slots=True)
class Pending:
    """A dispatch that has begun. `pairs_PTK`: which pairs of token and k are computed on a rank."""

    x: Payload
    topk: TopKOutput
    pairs_PTK: Tensor


@dataclass(frozen=True, slots=True)
class Route:
    """The way back: how many rows of results go to each rank and come from it, and which of those
    that come are added up for a token (-1 for none), with which weights."""

    to_P: list[int]
    from_P: list[int]
    rows_TS: Tensor
    weights_TS: Tensor


class GlooDispatcher(BaseDispatcher):
    name = "gloo"

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> Pending:
        """The dispatcher keeps no state, so both lanes of a step may be in flight."""
        layout = self.config.layout
        group_P = torch.arange(layout.size) // layout.moe_tp_size
        pairs_PTK = layout.owner(topk.ids_TK) == group_P.view(-1, 1, 1)
        return Pending(self.config.encode(x_TH), topk, pairs_PTK)

    def _dispatch_b(self, pending: Pending) -> NormalDispatchOutput:
        wanted_PT = pending.pairs_PTK.any(2)
        sent_P = wanted_PT.sum(1)
        received_P = torch.empty_like(sent_P)
        ones = [1] * len(sent_P)
        self.comm.group.collectives().all_to_all(
            received_P, sent_P, ones, ones, self.operation("dispatch")
        )
        to_P, from_P = sent_P.tolist(), received_P.tolist()
        x, ids_RK, weights_RK = self._send(pending, wanted_PT.nonzero()[:, 1], to_P, from_P)
        ids_RK = self.config.layout.local(ids_RK)
        route = self._way_back(pending, wanted_PT, ids_RK, from_P)
        counts_e = ids_RK[ids_RK >= 0].bincount(minlength=self.config.layout.slots_per_rank)
        return NormalDispatchOutput(route, x, ids_RK, weights_RK, counts_e.tolist())

    def _send(
        self, pending: Pending, tokens_S: Tensor, to_P: list[int], from_P: list[int]
    ) -> tuple[Payload, Tensor, Tensor]:
        """Values and scales, ids and weights of the rows that this rank receives."""
        x, topk = pending.x.select(tokens_S), pending.topk
        planes = [x.values] if x.scales is None else [x.values, x.scales]
        planes += [topk.ids_TK[tokens_S], topk.weights_TK[tokens_S]]
        values, *scales, ids_RK, weights_RK = (
            self.exchange(plane, to_P, from_P, self.operation("dispatch")) for plane in planes
        )
        self.note_dispatch(sum(from_P) - from_P[self.config.layout.rank])
        came = Payload(values, scales[0] if scales else None, x.format, x.global_scale)
        return came, ids_RK, weights_RK

    def _way_back(
        self, pending: Pending, wanted_PT: Tensor, ids_RK: Tensor, from_P: list[int]
    ) -> Route:
        """A row comes back for each row sent, weighted already; in deterministic mode one for each
        pair, so that this rank can add them up in the order of k."""
        if not self.config.deterministic:
            rows_TP = numbered(wanted_PT).t()
            return Route(from_P, wanted_PT.sum(1).tolist(), rows_TP, torch.ones(rows_TP.shape))
        rows_TKP = numbered(pending.pairs_PTK).permute(1, 2, 0)
        to_P = [int((part >= 0).sum()) for part in ids_RK.split(from_P)]
        weights_TKP = pending.topk.weights_TK.unsqueeze(2).expand_as(rows_TKP)
        return Route(
            to_P,
            pending.pairs_PTK.sum((1, 2)).tolist(),
            rows_TKP.flatten(1),
            weights_TKP.flatten(1),
        )

    def _combine_a(self, results: CombineInput) -> RowsCombineInput:
        assert isinstance(results, RowsCombineInput)
        assert results.pairs == self.config.deterministic
        return results

    def _combine_b(self, pending: RowsCombineInput) -> Tensor:
        route: Route = pending.handle
        y_SH = self.exchange(pending.y_RH, route.to_P, route.from_P, self.operation("combine"))
        self.note_combine(sum(route.from_P) - route.from_P[self.config.layout.rank])
        valid_TS = route.rows_TS >= 0
        return weighted_sum(y_SH, route.rows_TS[valid_TS], route.weights_TS, valid_TS)

    def exchange(self, rows: Tensor, to_P: list[int], from_P: list[int], operation: str) -> Tensor:
        """`to_P[p]` rows go to rank p, `from_P[p]` come from it, in the order of ranks."""
        out = rows.new_empty(sum(from_P), *rows.shape[1:])
        self.comm.group.collectives().all_to_all(out, rows.contiguous(), from_P, to_P, operation)
        return out


class RingDispatcher(GlooDispatcher):
    """P rounds: in round d each rank sends to the rank d places further on. No rank receives from
    two at once."""

    name = "ring"

    def exchange(self, rows: Tensor, to_P: list[int], from_P: list[int], operation: str) -> Tensor:
        rank, size = self.config.layout.rank, self.config.layout.size
        out = rows.new_empty(sum(from_P), *rows.shape[1:])
        sent, received = rows.contiguous().split(to_P), out.split(from_P)
        received[rank].copy_(sent[rank])
        for turn in range(1, size):
            to, source = (rank + turn) % size, (rank - turn) % size
            self.comm.group.collectives().all_to_all(
                received[source],
                sent[to],
                [count if p == source else 0 for p, count in enumerate(from_P)],
                [count if p == to else 0 for p, count in enumerate(to_P)],
                f"{operation}, turn {turn}",
            )
        return out


def numbered(chosen: Tensor) -> Tensor:
    """Chosen places in order, -1 for the others; with x for chosen:
    [[x, ., x], [., x, .]] -> [[0, -1, 1], [-1, 2, -1]]."""
    numbers = chosen.flatten().cumsum(0).view_as(chosen) - 1
    return torch.where(chosen, numbers, -1)


for dispatcher, summary in (
    (GlooDispatcher, "a token once per rank, in one gloo all-to-all"),
    (RingDispatcher, "a token once per rank, from neighbour to neighbour"),
):
    register_a2a(
        A2aBackend(
            name=dispatcher.name,
            summary=summary,
            formats={"normal": "deepep_normal"},
            payloads=(*UNQUANTIZED, "fp8", "int8", "nvfp4", "mxfp4"),
            providers={"cpu": dispatcher},
        )
    )
