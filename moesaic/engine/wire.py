"""Plans between ranks: what a receiver knows of a request already is not told again.

A request's pages grow by one in many steps, and what it asked of the sampler never changes; told in
full every time, they would be most of a plan. Every receiver must hear all plans, in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from moesaic.engine.plan import PlanItem, Score, StepPlan
from moesaic.engine.sampler import SampleRow


class WireItem(msgspec.Struct, array_like=True):
    """The first `kept` pages are as they were; `pages` follow them. `sample`: told with the first
    token that is sampled, then only `position` and, if they matter, the tokens so far."""

    key: int
    token_ids: list[int]
    first: int
    kept: int
    pages: list[int]
    score: Score | None = None
    sample: SampleRow | None = None
    position: int | None = None
    output_ids: list[int] = []


class WirePlan(msgspec.Struct, array_like=True):
    """`ended`: requests that no later plan will name."""

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


class PlanSender:
    def __init__(self) -> None:
        self._known: dict[int, Known] = {}
        self._ended: list[int] = []

    def end(self, keys: Iterable[int]) -> None:
        """These requests are over."""
        self._ended += (key for key in keys if self._known.pop(key, None) is not None)

    def encode(self, plan: StepPlan) -> bytes:
        """A plan of nothing is always the same, so that nobody has to be sent it."""
        if not plan.items:
            assert not plan.clear
            return NOTHING
        items = [self._item(item) for item in plan.items]
        data = _encoder.encode(WirePlan(items, plan.clear, plan.prefill, self._ended))
        self._ended = []
        return data

    def _item(self, item: PlanItem) -> WireItem:
        known = self._known.setdefault(item.key, Known([]))
        kept = len(known.pages) if item.pages[: len(known.pages)] == known.pages else 0
        known.pages = item.pages
        told = WireItem(item.key, item.token_ids, item.first, kept, item.pages[kept:], item.score)
        if item.sample is None:
            return told
        if known.sample is None:
            # The caller's process looks for stop strings.
            known.sample = told.sample = replace(
                item.sample, params=replace(item.sample.params, stop=())
            )
        else:
            told.position, told.output_ids = item.sample.position, list(item.sample.output_ids)
        return told


class PlanReceiver:
    def __init__(self) -> None:
        self._known: dict[int, Known] = {}

    def decode(self, data: bytes) -> StepPlan:
        wire = _decoder.decode(data)
        for key in wire.ended:
            del self._known[key]
        return StepPlan([self._item(item) for item in wire.items], wire.clear, wire.prefill)

    def _item(self, told: WireItem) -> PlanItem:
        known = self._known.setdefault(told.key, Known([]))
        known.pages = known.pages[: told.kept] + told.pages
        if told.sample is not None:
            known.sample = told.sample
        sample = told.sample
        if told.position is not None:
            assert known.sample is not None
            sample = replace(known.sample, position=told.position, output_ids=told.output_ids)
        return PlanItem(told.key, told.token_ids, told.first, known.pages, told.score, sample)
