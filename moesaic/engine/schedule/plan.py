"""A step as the rank that plans it tells it to those that compute it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from moesaic.core.messages import TopLogprobs
from moesaic.engine.sampling.sampler import SampleRow

FUTURE_TOKEN: Final = -1
"""The token that the newest step before gives the request, which is under way still."""


class PromptScore(msgspec.Struct, array_like=True):
    """Logprobs wanted of prompt tokens: rows `row` onwards of the item predict `targets`."""

    row: int
    targets: list[int]
    top: int


class PlanItem(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one sequence, of which `first` are computed already; all live in `pages`. `key`
    is the request's number. A token may be FUTURE where the runner overlaps steps, and is then the
    only one."""

    key: int
    token_ids: list[int]
    first: int
    pages: list[int]
    score: PromptScore | None = None
    sample: SampleRow | None = None

    @property
    def stop(self) -> int:
        return self.first + len(self.token_ids)


class StepPlan(msgspec.Struct, array_like=True):
    """The work of one serving group; `clear`: pages that are handed out anew and must be zeroed
    first. `ended`: requests that no later plan will name. All ranks of the group carry out all
    plans, in the order in which they were made."""

    items: list[PlanItem]
    clear: list[int]
    prefill: bool = False
    ended: list[int] = []

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)

    def logit_rows(self) -> Iterator[int]:
        """Rows of the step whose logits are wanted: those that sample, then those that score."""
        starts = self.starts()
        for item, start in zip(self.items, starts, strict=True):
            if item.sample is not None:
                yield start + len(item.token_ids) - 1
        for item, start in zip(self.items, starts, strict=True):
            if item.score is not None:
                yield from range(
                    start + item.score.row, start + item.score.row + len(item.score.targets)
                )

    def starts(self) -> list[int]:
        starts, total = [], 0
        for item in self.items:
            starts.append(total)
            total += len(item.token_ids)
        return starts


class ItemResult(msgspec.Struct, array_like=True, gc=False):
    """What a step gave one item. `broken`: why it has nothing to give. `ended`: it is complete, as
    its grammar has it, and the model has no token that would say so."""

    broken: str = ""
    ended: bool = False
    token_id: int | None = None
    logprob: float | None = None
    top_logprobs: TopLogprobs | None = None
    input_logprobs: list[float] = []
    input_top_logprobs: list[TopLogprobs] = []


class StepResult(msgspec.Struct, array_like=True):
    items: list[ItemResult]


class StepHandle(Protocol):
    """A step that a runner was given. Those that come after a failed one are never waited for."""

    def wait(self) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was over when it had begun."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class StepAgreement(msgspec.Struct, array_like=True):
    """What every rank must know of a step before it computes: tokens and wanted logits of each
    attention group, and whether anybody prefills. `number` counts the steps; without `counts` there
    is nothing to compute: ranks go to sleep until they are woken for that number."""

    number: int
    counts: tuple[int, ...] = ()
    logits: tuple[int, ...] = ()
    prefill: bool = False


class StageOrder(msgspec.Struct, array_like=True):
    """From stage to stage of a pipeline; `plan` is as engine.wire has it."""

    turn: StepAgreement
    plan: bytes


_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(StageOrder)
_results = msgspec.msgpack.Decoder(StepResult)


def encode(value: StageOrder | StepResult) -> bytes:
    return _encoder.encode(value)


def decode_order(data: bytes) -> StageOrder:
    return _orders.decode(data)


def decode_result(data: bytes) -> StepResult:
    return _results.decode(data)
