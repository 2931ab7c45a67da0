"""Steps as data, from the rank that plans a step to the ranks that compute it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise, repeat
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from moesaic.core.disagg import KVSend, Ticket
from moesaic.core.draft_tree import Parents, depths, path_to, row_masks
from moesaic.core.overlap import Overlap
from moesaic.core.request import TopLogprobs
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.schedule.step_budget import StepWork
from moesaic.layers.paged_cache import PageUpdate

Ints = npt.NDArray[np.int64]
FUTURE_TOKEN: Final = -1
"""The token that an in-flight step samples for the request: only the device knows it yet."""
NOT_FINITE: Final = "the model gave numbers that are not finite for this request"


class PromptScore(msgspec.Struct, array_like=True):
    """Requested logprobs of prompt tokens: rows `row` onwards of the item predict `targets`."""

    row: int
    targets: list[int]
    top: int
    token_ids: tuple[int, ...] = ()
    """Further tokens to score, after the `top` most likely ones."""


class PlanItem(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one request, whose first `first` tokens are computed. A FUTURE_TOKEN is allowed
    where the runner overlaps steps, as the only one.

    The pages of all its tokens are in `row` of the page table, which no other running request has:
    `pages`, from entry `first_page` on, are those that no earlier plan has put there."""

    request_no: int
    token_ids: list[int]
    first: int
    row: int
    pages: Sequence[int] = ()
    first_page: int = 0
    score: PromptScore | None = None
    sample: SampleRow | None = None
    num_drafts: int = 0
    """The last tokens are a drafter's proposals. The step samples before each and after the last,
    and yields the sampled tokens up to and including the first that differs from its proposal."""
    num_routed: int = 0
    """How many of the last tokens the request asks the routed experts of."""
    next_id: int = 0
    """The prompt's token behind this chunk, which a draft model reads; 0 behind the prompt."""
    draft_until: int = 0
    """The last position at which the ranks' draft model may compute behind this item; 0: it
    proposes nothing there."""
    kv_from: Ticket | None = None
    """The transfer whose tokens the ranks move to the request's pages before the step."""
    kv_send: KVSend | None = None
    """The tokens that the ranks send to another instance behind the step."""
    parents: Parents = ()
    """Of the drafts, if they are a tree (core/draft_tree.py): its rows have the positions of their
    depths, and are in the pages in their order."""

    @property
    def drafts(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def num_sampled(self) -> int:
        """Rows whose logits are sampled: the last ones of the item."""
        return 0 if self.sample is None else 1 + self.num_drafts

    def drafts_before(self, row: int) -> Sequence[int]:
        """Those that sampled row `row` is behind."""
        drafts = self.drafts
        return [drafts[n - 1] for n in path_to(self.parents, row)] if self.parents else drafts[:row]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """Requests that compute their newest token and get the next one, as columns of one entry each.
    Ranks know how these are sampled, from an earlier item of the request in the same row."""

    request_nos: Ints
    rows: Ints
    first: Ints
    token_ids: Ints
    pages: list[PageUpdate] = field(default_factory=list)
    """The new pages of the rows that have some."""

    def __len__(self) -> int:
        return len(self.rows)

    def to_bytes(self) -> bytes:
        """The columns."""
        return np.stack((self.request_nos, self.rows, self.first, self.token_ids)).tobytes()

    @classmethod
    def from_bytes(cls, columns: bytes, pages: list[PageUpdate]) -> DecodeRows:
        request_nos, rows, first, token_ids = np.frombuffer(columns, np.int64).reshape(4, -1)
        return cls(request_nos, rows, first, token_ids, pages)


NO_DECODES: Final = DecodeRows.from_bytes(b"", [])


class DraftGap(msgspec.Struct, array_like=True, gc=False):
    """Tokens of a request, from position `first` on, that the target has computed and the ranks'
    draft model has not. `row`: the request's row of the page table."""

    row: int
    first: int
    token_ids: list[int]


class StepPlan(msgspec.Struct, dict=True):
    """The work of one serving group. All its ranks carry out all plans in order. `clear`: newly
    allocated pages, zeroed first. `ended`: requests that no later plan names. The sequences of the
    step are those of `decodes`, then those of `items`."""

    items: list[PlanItem] = []
    clear: list[int] = []
    prefill: bool = False
    ended: list[int] = []
    is_routed: bool = False
    """Whether an item has a `num_routed`."""
    decodes: DecodeRows = NO_DECODES
    draft_steps: int = 0
    """Tokens that the ranks' draft model proposes behind each item with a `draft_until`; 0: it does
    not run."""
    draft_branches: int = 0
    """Branches of the tree in which it does; 1: a chain."""
    moves: list[tuple[int, int]] = []
    """Slots of the cache from which entries are moved, and where to, before anything else."""
    gaps: list[DraftGap] = []
    """What it computes beside the step's tokens."""

    @property
    def num_drafting(self) -> int:
        """Sequences that get drafts."""
        return sum(item.draft_until > 0 for item in self.items) if self.draft_steps else 0

    @property
    def extending(self) -> int:
        """Rows by which the draft model extends its cache."""
        return self.num_tokens + sum(len(gap.token_ids) for gap in self.gaps)

    @property
    def has_work(self) -> bool:
        return bool(self.items) or len(self.decodes) > 0

    @property
    def num_sequences(self) -> int:
        return len(self.decodes) + len(self.items)

    @property
    def verifies(self) -> bool:
        """Whether some item has drafts."""
        return self.num_tokens > self.num_sequences

    @cached_property
    def has_trees(self) -> bool:
        return any(item.parents for item in self.items)

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each sequence."""
        ones = np.ones(len(self.decodes), np.int64)
        return _joined(ones, [len(item.token_ids) for item in self.items])

    @cached_property
    def request_nos(self) -> Ints:
        return _joined(self.decodes.request_nos, [item.request_no for item in self.items])

    @cached_property
    def rows(self) -> Ints:
        """The row of each sequence in the page table."""
        return _joined(self.decodes.rows, [item.row for item in self.items])

    @cached_property
    def first(self) -> Ints:
        """The computed tokens of each sequence."""
        return _joined(self.decodes.first, [item.first for item in self.items])

    @cached_property
    def token_ids(self) -> Ints:
        tokens = chain.from_iterable(item.token_ids for item in self.items)
        return _joined(self.decodes.token_ids, list(tokens))

    @cached_property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def sampled(self) -> Ints:
        """Sampled rows of each sequence."""
        ones = np.ones(len(self.decodes), np.int64)
        return _joined(ones, [item.num_sampled for item in self.items])

    @cached_property
    def num_sampled(self) -> int:
        return int(self.sampled.sum())

    @cached_property
    def positions(self) -> Ints:
        """Of all tokens in their sequences."""
        return self.places - self._skipped(self.lengths)

    @cached_property
    def places(self) -> Ints:
        """Where the tokens are stored in their sequences: at their positions, but for trees."""
        lengths = self.lengths
        shifts = self.first - (lengths.cumsum() - lengths)
        return np.arange(self.num_tokens) + np.repeat(shifts, lengths)

    def _skipped(self, counts: Ints) -> Ints | int:
        """How many of the rows before it each row of trees is not behind; `counts`: rows of each
        sequence, of which drafts are the last."""
        if not self.has_trees:
            return 0
        skipped, stops = np.zeros(counts.sum(), np.int64), np.cumsum(counts)
        for item, stop in zip(self.items, stops[len(self.decodes) :].tolist(), strict=True):
            if item.parents:
                rows = 1 + item.num_drafts
                skipped[stop - rows : stop] = np.arange(rows) - depths(item.parents)
        return skipped

    def row_masks(self) -> Ints | None:
        """What each token sees of those before it, as in core/draft_tree.py; None without trees."""
        if not self.has_trees:
            return None
        masks, stops = np.full(self.num_tokens, -1, np.int64), np.cumsum(self.lengths)
        for item, stop in zip(self.items, stops[len(self.decodes) :].tolist(), strict=True):
            if item.parents:
                masks[stop - item.num_drafts - 1 : stop] = row_masks(item.parents)
        return masks

    def page_updates(self) -> list[PageUpdate]:
        """New pages of all sequences."""
        items = (PageUpdate(i.row, i.first_page, i.pages) for i in self.items if i.pages)
        return [*self.decodes.pages, *items]

    def routed_rows(self) -> list[int]:
        """Rows of the step whose routed experts are requested."""
        rows, start = list[int](), len(self.decodes)
        for item in self.items:
            stop = start + len(item.token_ids)
            rows += range(stop - item.num_routed, stop)
            start = stop
        return rows

    def logit_rows(self) -> Ints:
        """Rows of the step whose logits are needed: those that sample, then those that score."""
        stops, counts = np.cumsum(self.lengths), self.sampled
        rows = np.repeat(stops - np.cumsum(counts), counts) + np.arange(self.num_sampled)
        starts = (stops - self.lengths)[len(self.decodes) :].tolist()
        scored = [
            start + item.score.row + np.arange(len(item.score.targets))
            for start, item in zip(starts, self.items, strict=True)
            if item.score is not None
        ]
        return np.concatenate((rows, *scored)) if scored else rows

    def sampled_positions(self) -> Ints:
        """The position of the token that each sampled row gives."""
        counts = self.sampled
        last = self.first + self.lengths + 1 - np.cumsum(counts)
        return np.repeat(last, counts) + np.arange(self.num_sampled) - self._skipped(counts)


def _joined(decodes: Ints, items: list[int]) -> Ints:
    """A column of all sequences."""
    if not items:
        return decodes
    own = np.array(items, np.int64)
    return np.concatenate((decodes, own)) if len(decodes) else own


class ItemResult(msgspec.Struct, array_like=True, gc=False):
    """The outcome of one plan item: its sampled tokens, one for a plain item, up to one more than
    its drafts for one that verifies. Logprobs are present where the request asks for them."""

    broken: str = ""
    """Why the item has no tokens."""
    ended: bool = False
    """The grammar is complete, and the model has no token to end the text with."""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[TopLogprobs] = ()
    input_logprobs: Sequence[float] = ()
    input_top_logprobs: Sequence[TopLogprobs] = ()
    unready: bool = False
    """Its grammar is still being compiled: the next step samples its token."""
    drafts: Sequence[int] = ()
    """What the ranks' draft model proposes behind the sampled tokens."""
    parents: Parents = ()
    """Of the drafts, if they are a tree."""


class StepResult(msgspec.Struct, array_like=True):
    """`routed`: experts of the plan's routed rows, [rows, layers, top-k] of uint16. A stage has
    those of its own layers; the last one gives those of all."""

    items: list[ItemResult]
    routed: bytes = b""
    token_ids: list[int] = []
    """The tokens of the plan's decodes."""
    broken: list[int] = []
    """Those of them, by their place, that have no token, as their logits are not finite."""

    def routed_of(self, items: Sequence[PlanItem]) -> Iterable[bytes]:
        """The routed experts of each item of the plan."""
        if not self.routed:
            return repeat(b"", len(items))
        row = len(self.routed) // sum(item.num_routed for item in items)
        stops = list(accumulate(row * item.num_routed for item in items))
        return (self.routed[start:stop] for start, stop in pairwise([0, *stops]))


class StepHandle(Protocol):
    """A step that was handed to a runner. Handles behind a failed step are never waited for."""

    @property
    def hidden_TH(self) -> Tensor | None:
        """What a pipeline stage hands to the next one; None after the last stage."""

    @property
    def is_done(self) -> bool:
        """Whether it is computed; False where that is not known."""

    def wait(self) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The handle of a synchronous step."""

    result: StepResult
    hidden_TH: Tensor | None = None
    is_done: bool = True

    def wait(self) -> StepResult:
        return self.result


class StepAgreement(msgspec.Struct, array_like=True):
    """What every rank must know of a step: tokens and requested rows of logits of each attention
    group, and whether any rank prefills. Without `counts` there is nothing to compute: ranks sleep
    until they are woken for step `number`. A single group's plan has the `logits`."""

    number: int
    counts: tuple[int, ...] = ()
    logits: tuple[int, ...] = ()
    prefill: bool = False
    work: StepWork = StepWork()
    """That of the group with the most."""
    overlap: Overlap = Overlap.OFF
    first_half: tuple[int, ...] = ()
    """With two micro-batches, the tokens of each group in the first one."""
    draft_steps: int = 0
    """The most of any group, as StepPlan.draft_steps."""
    draft_branches: int = 0
    """The same of StepPlan.draft_branches."""
    drafting: tuple[int, ...] = ()
    """Sequences of each group that get drafts."""
    extending: tuple[int, ...] = ()
    """Rows of each group by which the draft model extends its cache, as StepPlan.extending."""

    @classmethod
    def alone(cls, plan: StepPlan) -> StepAgreement:
        """Without other ranks."""
        made = cls(0, (plan.num_tokens,), prefill=plan.prefill)
        made.draft_steps, made.draft_branches = plan.draft_steps, plan.draft_branches
        made.drafting, made.extending = (plan.num_drafting,), (plan.extending,)
        return made

    @property
    def fills_gaps(self) -> bool:
        """Whether the draft model also computes tokens of earlier steps."""
        return bool(self.draft_steps) and self.extending != self.counts

    @property
    def halves(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens of each group in the two micro-batches."""
        pairs = zip(self.counts, self.first_half, strict=True)
        return self.first_half, tuple(count - half for count, half in pairs)

    @property
    def most_rows(self) -> int:
        """Rows of a step that holds the tokens of every group; of one in two micro-batches each
        half has half of them."""
        most = max(self.counts)
        return max(most, 2 * max(map(max, self.halves)) - 1) if self.first_half else most


class StageOrder(msgspec.Struct, array_like=True):
    """From a pipeline stage to the next one; `plan` is encoded by plan_codec."""

    agreement: StepAgreement
    plan: bytes
    routed: list[bytes] = []
    """Routed experts of the stages so far, as in StepResult."""
    finished: int = 0
    """Requests of all serving groups that have ended."""
    moves: bool | None = None
    """In a step without work that goes through all stages: whether one so far moves experts."""


encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(StageOrder).decode
decode_result = msgspec.msgpack.Decoder(StepResult).decode
