"""Plans between ranks: what a receiver knows of a request already is not told again.

A request's pages grow by one in many steps, and what it asked of the sampler never changes; told in
full every time, they would be most of a plan. Every receiver must hear all plans, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from msgspec import structs

from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.schedule.plan import PlanItem, PromptScore, StepPlan


class WireItem(msgspec.Struct, array_like=True):
    """The first `kept` pages are as they were; `pages` follow them. `sample`: told with the first
    token that is sampled, then only `position` and, if they matter, the tokens so far: the first
    `kept_ids` as they were, then `output_ids`."""

    request_no: int
    token_ids: list[int]
    first: int
    kept: int
    pages: list[int]
    score: PromptScore | None = None
    num_drafts: int = 0
    sample: SampleRow | None = None
    position: int | None = None
    kept_ids: int = 0
    output_ids: list[int] = []


class WirePlan(msgspec.Struct, array_like=True):
    """As StepPlan."""

    items: list[WireItem]
    clear: list[int]
    prefill: bool
    ended: list[int]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WirePlan)
NOTHING = _encoder.encode(WirePlan([], [], False, []))


@dataclass(slots=True)
class Known:
    """Of one request."""

    pages: list[int]
    sample: SampleRow | None = None
    output_ids: Sequence[int] = ()


class PlanSender:
    def __init__(self) -> None:
        self._known: dict[int, Known] = {}

    def encode(self, plan: StepPlan) -> bytes:
        """A plan of nothing is always the same, so that nobody has to be sent it."""
        if not plan.items:
            assert not plan.clear and not plan.ended
            return NOTHING
        ended = [key for key in plan.ended if self._known.pop(key, None) is not None]
        items = [self._item(item) for item in plan.items]
        return _encoder.encode(WirePlan(items, plan.clear, plan.prefill, ended))

    def _item(self, item: PlanItem) -> WireItem:
        known = self._known.setdefault(item.request_no, Known([]))
        kept = _kept(known.pages, item.pages)
        known.pages = item.pages
        told = WireItem(
            item.request_no,
            item.token_ids,
            item.first,
            kept,
            item.pages[kept:],
            item.score,
            item.num_drafts,
        )
        if item.sample is None:
            return told
        if known.sample is None:
            # The caller's process looks for stop strings.
            known.sample = told.sample = structs.replace(
                item.sample, params=replace(item.sample.params, stop=())
            )
        else:
            kept = _kept(known.output_ids, item.sample.output_ids)
            told.position, told.kept_ids = item.sample.position, kept
            told.output_ids = list(item.sample.output_ids[kept:])
        known.output_ids = item.sample.output_ids
        return told


class PlanReceiver:
    def __init__(self) -> None:
        self._known: dict[int, Known] = {}

    def decode(self, data: bytes) -> StepPlan:
        wire = _decoder.decode(data)
        for key in wire.ended:
            del self._known[key]
        items = [self._item(item) for item in wire.items]
        return StepPlan(items, wire.clear, wire.prefill, wire.ended)

    def _item(self, told: WireItem) -> PlanItem:
        known = self._known.setdefault(told.request_no, Known([]))
        known.pages = known.pages[: told.kept] + told.pages
        if told.sample is not None:
            known.sample, known.output_ids = told.sample, told.sample.output_ids
        sample = told.sample
        if told.position is not None:
            assert known.sample is not None
            known.output_ids = [*known.output_ids[: told.kept_ids], *told.output_ids]
            sample = structs.replace(
                known.sample, position=told.position, output_ids=known.output_ids
            )
        return PlanItem(
            told.request_no,
            told.token_ids,
            told.first,
            known.pages,
            told.score,
            sample,
            told.num_drafts,
        )


def _kept(known: Sequence[int], now: Sequence[int]) -> int:
    """How many of the known ones are still the first."""
    return len(known) if list(now[: len(known)]) == list(known) else 0
