"""The state of a step between its plan and its results."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from moesaic.core.draft_shape import NO_DRAFTS, DraftShape
from moesaic.core.draft_tree import Parents, is_chain, path_of
from moesaic.core.request import Request, RequestPhase
from moesaic.engine.schedule.kv_manager import KVManager
from moesaic.engine.schedule.plan import NO_DECODES, Ints, StepAgreement, StepHandle, StepPlan
from moesaic.engine.schedule.step_budget import StepWork


class PlannedItem(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A request's part of a step: its tokens from `first` up to `stop`, the last ones `drafts`, and
    whether the step samples after them. The rest restores the request in a rollback."""

    request: Request
    first: int
    stop: int
    samples: bool
    decodes: bool
    """The tokens are no part of a prompt."""
    drafts: Sequence[int]
    num_scored: int
    retractions: int
    parents: Parents = ()
    """Of the drafts, if they are a tree."""

    @classmethod
    def of(cls, request: Request, length: int) -> PlannedItem:
        """The next `length` tokens of a request."""
        first = request.num_computed
        stop = first + length
        samples = stop == request.num_tokens
        before = (request.num_scored, request.retractions)
        return cls(request, first, stop, samples, False, (), *before)

    @classmethod
    def decoding(cls, request: Request, first: int, num_drafts: int) -> PlannedItem:
        """The newest token of a request, which is at `first`, and `num_drafts` proposals."""
        drafts = request.drafts[:num_drafts] if num_drafts else ()
        parents: Parents = request.draft_parents[:num_drafts] if drafts else ()
        parents = () if is_chain(parents) else parents
        stop, scored, retractions = first + 1 + num_drafts, request.num_scored, request.retractions
        return cls(request, first, stop, True, True, drafts, scored, retractions, parents)

    @property
    def length(self) -> int:
        return self.stop - self.first

    @property
    def confirmed(self) -> int:
        """Tokens that are computed even if all drafts are rejected."""
        return self.stop - len(self.drafts)

    def accepted(self, num_tokens: int) -> int:
        """How many drafts a step accepts that yields `num_tokens` tokens."""
        return max(0, num_tokens - 1) if self.drafts else 0

    def accepted_rows(self, token_ids: Sequence[int]) -> list[int]:
        """The accepted drafts of a step that yields these tokens, numbered from 1."""
        return path_of(self.drafts, self.parents, token_ids) if self.drafts and token_ids else []

    def begin(self) -> None:
        """Counts the step's work as done: steps run in the order in which they are planned."""
        request, stop = self.request, self.stop
        if request.return_logprob:
            scored = min(stop, request.prompt_len - 1) - request.logprob_start
            request.num_scored = max(request.num_scored, scored)
        request.num_computed, request.pages_sent = stop, len(request.pages)
        request.kv_sent = stop
        request.pending += self.samples
        # A step continues from the tokens of one that verifies drafts only once the host has them.
        request.sampling_sent = (request.sampling_sent or self.samples) and not self.drafts
        if request.drafts:
            request.drafts, request.draft_parents = [], []
            request.verifying = bool(self.drafts)

    def end(self, num_tokens: int) -> None:
        """The step yields `num_tokens` tokens: all drafts but the first ones are rejected."""
        request = self.request
        request.pending -= self.samples
        if self.drafts and request.retractions == self.retractions:
            request.num_computed = self.confirmed + self.accepted(num_tokens)
        request.verifying = False

    def repeat_last(self) -> None:
        """The step could not sample yet: the next one computes the last token again."""
        request = self.request
        request.pending -= self.samples
        request.awaits_grammar, request.verifying = True, False
        if request.retractions == self.retractions:
            request.num_computed = self.confirmed - 1

    def undo(self, failed: bool = True) -> None:
        """Restores the request, after its later steps. It keeps pages that it has not lost.
        `failed`: its drafts may be why."""
        request = self.request
        request.pending -= self.samples
        request.num_scored, request.kv_sent = self.num_scored, 0
        request.verifying = False
        request.may_draft = request.may_draft and not (failed and self.drafts)
        if request.retractions == self.retractions:
            request.num_computed = self.first


def work_of(items: Collection[PlannedItem], first: Ints = NO_DECODES.first) -> StepWork:
    """`first`: the computed tokens of the requests that decode beside the items."""
    decodes = [item for item in items if item.decodes]
    held = sum(item.stop * item.length for item in decodes) + int(first.sum()) + len(first)
    work = StepWork(sum(item.length for item in decodes) + len(first), 0, held, 0)
    if len(decodes) < len(items):
        for item in items:
            if not item.decodes:
                work = work.with_prompt(item.first, item.length)
    return work


class MovedTokens(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Accepted drafts of a tree, whose cache entries are not at their positions: from `first` on,
    at the positions `sources`."""

    request: Request
    first: int
    sources: Sequence[int]
    retractions: int

    @classmethod
    def of(cls, item: PlannedItem, rows: Sequence[int]) -> MovedTokens | None:
        """`rows`: the accepted drafts of an item; None if all are where they belong."""
        kept = next((n for n, row in enumerate(rows) if row != n + 1), len(rows))
        if kept == len(rows):
            return None
        sources = [item.confirmed - 1 + row for row in rows[kept:]]
        return cls(item.request, item.confirmed + kept, sources, item.retractions)

    def slots(self, page_size: int) -> list[tuple[int, int]]:
        """Of each token: where its entries are, and where they belong."""

        def slot(position: int) -> int:
            page, offset = divmod(position, page_size)
            return self.request.pages[page] * page_size + offset

        return [(slot(n), slot(to)) for to, n in enumerate(self.sources, self.first)]

    @property
    def is_current(self) -> bool:
        """Whether the request has the pages still."""
        return self.request.retractions == self.retractions

    def lose(self, kv: KVManager) -> None:
        """The step that moves them was undone, when some ranks may have written behind them:
        they are computed anew."""
        if self.is_current:
            self.request.num_computed = min(self.request.num_computed, self.first)
            kv.draft_again(self.request, self.first)


@dataclass(slots=True)
class PlannedDecodes:
    """The requests of a plan's `decodes`, and their retractions when it was made."""

    requests: list[Request] = field(default_factory=list)
    retractions: list[int] = field(default_factory=list)


@dataclass(slots=True)
class InflightStep:
    """One step of this rank, from its plan to its results."""

    plan: StepPlan = field(default_factory=StepPlan)
    items: list[PlannedItem] = field(default_factory=list)
    """The requests that this rank planned, of the plan's items; empty on ranks that follow a
    leader."""
    decoding: PlannedDecodes = field(default_factory=PlannedDecodes)
    """And of its decodes."""
    moved: list[MovedTokens] = field(default_factory=list)
    """Tokens whose cache entries the plan moves."""
    drafting: DraftShape = NO_DRAFTS
    """What each request may have; if any, it was planned when all tokens were known."""
    draft_stops: dict[Request, int] = field(default_factory=dict)
    """Where a draft model that fills gaps is with each request, unless drafts are rejected."""
    is_overlapped: bool = True
    """It was planned while another step was in flight, or steps never are."""
    started_at: int = field(default_factory=time.monotonic_ns)
    begun_at: int = 0
    """When it was launched, if the device had nothing else to do; else 0."""
    is_watched: bool = False
    """The step loop has seen the device compute it, and looks again every millisecond."""
    ended_at: int = 0
    """When it saw that the device was done; 0 if it did not."""
    agreement: StepAgreement = field(default_factory=lambda: StepAgreement(0))
    handle: StepHandle | None = None
    """None until the runner has accepted the step."""

    @property
    def number(self) -> int:
        return self.agreement.number

    @property
    def has_requests(self) -> bool:
        return bool(self.items or self.decoding.requests)

    @property
    def has_ended_requests(self) -> bool:
        """Whether some have ended since it was planned: their part may be why it failed."""
        requests = chain(self.decoding.requests, (item.request for item in self.items))
        return any(request.phase is RequestPhase.FINISHED for request in requests)

    @property
    def work(self) -> StepWork:
        return work_of(self.items, self.plan.decodes.first)

    def undo(self, kv: KVManager, failed: bool) -> Iterator[Request]:
        """Restores the requests, after their later steps, and yields them. `failed`: as in
        PlannedItem.undo."""
        for item in self.items:
            item.undo(failed)
            yield item.request
        first = self.plan.decodes.first.tolist()
        planned = zip(self.decoding.requests, self.decoding.retractions, first, strict=True)
        for request, retractions, computed in planned:
            request.pending -= 1
            if request.retractions == retractions:
                request.num_computed = computed
            yield request
        for moved in self.moved:
            moved.lose(kv)

    @property
    def num_decoding(self) -> int:
        """The requests that decode."""
        return len(self.decoding.requests) + sum(item.decodes for item in self.items)

    @property
    def prompt_tokens(self) -> int:
        return sum(item.length for item in self.items if not item.decodes)
