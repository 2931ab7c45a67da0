"""Dispatchers that send whole rows with their ids: each token once to a rank.

N tokens of all ranks · T of this one · K chosen · G expert groups · R rows of this rank · S results
of a token · H hidden.

A long sequence goes in rounds of a fixed number of tokens, which bounds the buffers: every rank
publishes its next tokens once all ranks have read the last ones. Results come back in the same
rounds, or at once if the buffer holds them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moesaic.core.step import Step
from moesaic.kernels.cpu.rows import GatheredTokens, RowPlan, Terms, plan_rows
from moesaic.moe.dispatch.base import CommContext, DispatchConfig
from moesaic.moe.dispatch.host.exchange import ExchangeSignal, ExchangeSpec
from moesaic.moe.dispatch.host.windowed import ExchangeDispatcher, PendingTokens
from moesaic.moe.formats import (
    CombineInput,
    DispatchOutput,
    RowsCombineInput,
    StandardDispatchOutput,
    TopKOutput,
)
from moesaic.moe.quant.payload import Payload


@dataclass(frozen=True, slots=True)
class Rounds:
    tokens: int
    """The most of a rank in one round."""
    most: int = 1
    """The most rounds of a step."""
    combine: bool = False
    """Whether results come back in rounds, too."""


@dataclass(frozen=True, slots=True)
class RowsRoute:
    """Where this rank's tokens are computed."""

    lane: int
    owners_TS: Tensor
    """The group of each result."""
    places_TS: Tensor
    """Its row there; -1 for none."""
    weights_TS: Tensor | None
    """None if the results are weighted already."""
    starts: list[list[int]]
    """For each round the first row in each group."""
    tokens: list[slice]
    """This rank's tokens of each round."""
    sources: list[Tensor]
    """For each round the published row of each result, if results go to other nodes or over an
    emulated link."""


class RowsDispatcher(ExchangeDispatcher):
    output: ClassVar[type[StandardDispatchOutput]] = StandardDispatchOutput
    """The backend's format."""

    def __init__(self, config: DispatchConfig, comm: CommContext) -> None:
        super().__init__(config, comm)
        self.rounds = self.rounds_for(config)

    @classmethod
    def rounds_for(cls, config: DispatchConfig) -> Rounds:
        return Rounds(config.max_tokens)

    @classmethod
    def buffer_spec(cls, config: DispatchConfig, rounds: Rounds | None = None) -> ExchangeSpec:
        """In deterministic mode a result travels for each pair, else for each token."""
        layout, rounds = config.layout, rounds or cls.rounds_for(config)
        each = min(config.top_k, layout.slots_per_rank) if config.deterministic else 1
        rows = layout.size * rounds.tokens
        return ExchangeSpec.of(
            config,
            tokens=rounds.tokens,
            result_rows=rows * each * (1 if rounds.combine else rounds.most),
            inbox_rows=rows * rounds.most,
        )

    def results(self, lane: int) -> Tensor | None:
        """The buffer for results, unless they go back in rounds."""
        return None if self.rounds.combine else self.exchange.results(lane)

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> PendingTokens:
        self.check_tokens(len(x_TH))
        pending = PendingTokens(step.lane, self.config.encode(x_TH), topk)
        self.exchange.acquire(step.lane, self.operation("dispatch"))
        self._publish(pending, 0)
        return pending

    def check_tokens(self, count: int) -> None:
        most = self.rounds.tokens * self.rounds.most
        if count > most:
            raise ValueError(
                f"{self.operation('dispatch')}: {count} tokens are more than the {most} that the "
                f"buffers were made for: raise the limit of tokens in a step, or the rounds "
                f"(DEEPEP_NORMAL_LONG_SEQ_ROUND)"
            )

    def _publish(self, pending: PendingTokens, number: int) -> None:
        tokens = self._tokens(number)
        self.exchange.publish(pending.lane, pending.x, pending.topk, tokens)
        self.carry_tokens(pending.topk.ids_TK[tokens])
        self.signal(ExchangeSignal.TOKENS_READY, pending.lane)

    def _tokens(self, number: int) -> slice:
        return slice(number * self.rounds.tokens, (number + 1) * self.rounds.tokens)

    def _dispatch_b(self, pending: PendingTokens) -> DispatchOutput:
        lane = pending.lane
        self.wait(ExchangeSignal.TOKENS_READY, lane)
        plan = RoundsResult(self, pending)
        for number in range(self._rounds(lane)):
            if number:
                self.signal(ExchangeSignal.TOKENS_READ, lane)
                self.wait(ExchangeSignal.TOKENS_READ, lane)
                self._publish(pending, number)
                self.wait(ExchangeSignal.TOKENS_READY, lane)
            plan.add(self.exchange.published(lane, self.layout), self._tokens(number))
            self.verify(ExchangeSignal.TOKENS_READY, lane)
        return plan.finish()

    def _rounds(self, lane: int) -> int:
        """Rounds of the step, those of the rank with the most tokens; at least one."""
        if self.rounds.most == 1:
            return 1
        most = max(self.exchange.counts(lane, whole_step=True))
        return max(1, -(-most // self.rounds.tokens))

    def _combine_a(self, results: CombineInput) -> RowsCombineInput:
        assert isinstance(results, RowsCombineInput)
        self.publish_results(results, 0)
        return results

    def _combine_b(self, results: RowsCombineInput) -> Tensor:
        route: RowsRoute = results.handle
        lane = route.lane
        parts = []
        for number in range(len(route.tokens) if self.rounds.combine else 1):
            if number:
                self.signal(ExchangeSignal.RESULTS_READ, lane)
                self.wait(ExchangeSignal.RESULTS_READ, lane)
                self.publish_results(results, number)
            self.wait(ExchangeSignal.RESULTS_READY, lane)
            parts.append(self.collect(route, number))
            self.verify(ExchangeSignal.RESULTS_READY, lane)
        self.lanes.release(lane)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def publish_results(self, results: RowsCombineInput, number: int) -> None:
        """Writes the results of a round where the tokens' ranks read them."""
        route: RowsRoute = results.handle
        group = self.layout.ep_rank
        start, stop = 0, len(results.y_RH)
        if self.rounds.combine:
            start, stop = route.starts[number][group], route.starts[number + 1][group]
        if stop - start > self.exchange.spec.result_rows:
            raise ValueError(
                f"{self.operation('combine')}: {stop - start} results are more than "
                f"{self.exchange.spec.result_rows}: a token names a slot twice"
            )
        target = self.exchange.results(route.lane)[: stop - start]
        if target.data_ptr() != results.y_RH[start:stop].data_ptr():
            target.copy_(results.y_RH[start:stop])
        if route.sources:
            rows = route.sources[number] if self.rounds.combine else joined(route.sources)
            self.exchange.touch_results(route.lane, [0], [rows])
        self.signal(ExchangeSignal.RESULTS_READY, route.lane)

    def collect(self, route: RowsRoute, number: int) -> Tensor:
        owners_TS, places_TS, weights_TS = route.owners_TS, route.places_TS, route.weights_TS
        if self.rounds.combine:
            tokens = route.tokens[number]
            starts_G = torch.tensor(route.starts[number])
            owners_TS, places_TS = owners_TS[tokens], places_TS[tokens]
            places_TS = torch.where(places_TS < 0, -1, places_TS - starts_G[owners_TS])
            weights_TS = None if weights_TS is None else weights_TS[tokens]
        return self.sum_results(route.lane, Terms(owners_TS, places_TS, weights_TS))


class RoundsResult:
    """Collects the rounds of one dispatch."""

    def __init__(self, dispatcher: RowsDispatcher, pending: PendingTokens) -> None:
        self.dispatcher, self.pending = dispatcher, pending
        self.starts = [[0] * dispatcher.layout.ep_size]
        self.tokens: list[slice] = []
        self.places: list[Tensor] = []
        self.parts: list[tuple[Tensor, Tensor]] = []
        self.sources: list[Tensor] = []
        self.x: Payload | None = None

    def add(self, tokens: GatheredTokens, own: slice) -> None:
        """Copies the rows of a round that go to this rank."""
        dispatcher, lane = self.dispatcher, self.pending.lane
        plan = self.route(tokens)
        self.tokens.append(own)
        scale = dispatcher.config.global_scale
        self.x = dispatcher.exchange.copy_rows(lane, plan.rows_R, len(self.x or ()), scale)
        self.parts.append((plan.ids_RK, plan.weights_RK))
        window = dispatcher.exchange.window
        if window.spans_nodes or window.link is not None:
            each_R = (plan.ids_RK >= 0).sum(1) if dispatcher.config.deterministic else None
            rows_R = plan.rows_R
            self.sources.append(rows_R if each_R is None else rows_R.repeat_interleave(each_R))
        dispatcher.note_dispatch(len(plan.rows_R) - plan.own)

    def route(self, tokens: GatheredTokens) -> RowPlan:
        """Records where this rank's tokens go. Rows of a group are in the order of ranks and tokens
        (and k, if pairs travel): every rank can compute the row of any token."""
        pairs, everywhere = self.dispatcher.config.deterministic, self.dispatcher.everywhere
        plan = plan_rows(tokens, self.starts[-1], pairs, everywhere)
        self.places.append(plan.places_TS)
        self.starts.append(plan.ends)
        return plan

    def finish(self) -> DispatchOutput:
        ids_RK, weights_RK = map(joined, zip(*self.parts, strict=True))
        assert self.x is not None
        lane, topk = self.pending.lane, self.pending.topk
        layout, pairs = self.dispatcher.layout, self.dispatcher.config.deterministic
        places_TS = joined(self.places)
        owners_TS = layout.owner(topk.ids_TK) if pairs else torch.arange(layout.ep_size)
        route = RowsRoute(
            lane=lane,
            owners_TS=owners_TS.expand_as(places_TS),
            places_TS=places_TS,
            weights_TS=topk.weights_TK if pairs else None,
            starts=self.starts,
            tokens=self.tokens,
            sources=self.sources,
        )
        y_OH = self.dispatcher.results(lane)
        return self.dispatcher.output(route, self.x, ids_RK, weights_RK, y_OH=y_OH)


def joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
