"""Steps as data, from the rank that plans a step to the ranks that compute it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, repeat
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from moesaic.core.request import TopLogprobs
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.schedule.step_budget import StepWork

Ints = npt.NDArray[np.int64]
FUTURE_TOKEN: Final = -1
"""The token that an in-flight step samples for the request: only the device knows it yet."""


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

    @property
    def num_sampled(self) -> int:
        """Rows whose logits are sampled: the last ones of the item."""
        return 0 if self.sample is None else 1 + self.num_drafts


class StepPlan(msgspec.Struct, dict=True):
    """The work of one serving group. All its ranks carry out all plans in order. `clear`: newly
    allocated pages, zeroed first. `ended`: requests that no later plan names."""

    items: list[PlanItem] = []
    clear: list[int] = []
    prefill: bool = False
    ended: list[int] = []
    is_routed: bool = False
    """Whether an item has a `num_routed`."""

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each item."""
        return np.array([len(item.token_ids) for item in self.items], np.int64)

    @cached_property
    def rows(self) -> Ints:
        """The row of each item in the page table."""
        return np.array([item.row for item in self.items], np.int64)

    @cached_property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def sampled(self) -> Ints:
        """Sampled rows of each item."""
        counts = [0 if i.sample is None else 1 + i.num_drafts for i in self.items]
        return np.array(counts, np.int64)

    @cached_property
    def num_sampled(self) -> int:
        return int(self.sampled.sum())

    @cached_property
    def samples_all(self) -> bool:
        """Whether every item samples one token."""
        return bool((self.sampled == 1).all())

    def routed_rows(self) -> list[int]:
        """Rows of the step whose routed experts are requested."""
        rows, start = list[int](), 0
        for item in self.items:
            stop = start + len(item.token_ids)
            rows += range(stop - item.num_routed, stop)
            start = stop
        return rows

    def logit_rows(self) -> Ints:
        """Rows of the step whose logits are needed: those that sample, then those that score."""
        stops, counts = np.cumsum(self.lengths), self.sampled
        rows = np.repeat(stops - np.cumsum(counts), counts) + np.arange(self.num_sampled)
        scored = [
            start + item.score.row + np.arange(len(item.score.targets))
            for start, item in zip((stops - self.lengths).tolist(), self.items, strict=True)
            if item.score is not None
        ]
        return np.concatenate((rows, *scored)) if scored else rows


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


class StepResult(msgspec.Struct, array_like=True):
    """`routed`: experts of the plan's routed rows, [rows, layers, top-k] of uint16. A stage has
    those of its own layers; the last one gives those of all."""

    items: list[ItemResult]
    routed: bytes = b""

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

    def wait(self) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The handle of a synchronous step."""

    result: StepResult
    hidden_TH: Tensor | None = None

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


class StageOrder(msgspec.Struct, array_like=True):
    """From a pipeline stage to the next one; `plan` is encoded by plan_codec."""

    agreement: StepAgreement
    plan: bytes
    routed: list[bytes] = []
    """Routed experts of the stages so far, as in StepResult."""


encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(StageOrder).decode
decode_result = msgspec.msgpack.Decoder(StepResult).decode
