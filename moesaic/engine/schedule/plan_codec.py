"""Encodes plans for other ranks, without what a receiver already knows of a request.

A request's pages grow by one in many steps, and its sampling parameters never change: in full they
would be most of a plan. Every receiver must decode all plans, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from msgspec import structs

from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.sampling.token_history import TokenHistory
from moesaic.engine.schedule.plan import PlanItem, StepPlan


class WireItem(msgspec.Struct, array_like=True):
    """`item` has the pages after the first `kept` known ones, and `sample` only with the first
    sampled token. Later tokens have a `position` and, if they matter, the new `output_ids`."""

    item: PlanItem
    kept: int
    position: int | None = None
    output_ids: list[int] = []


class WirePlan(msgspec.Struct, array_like=True):
    """As StepPlan."""

    items: list[WireItem]
    clear: list[int]
    prefill: bool
    ended: list[int]
    is_routed: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WirePlan)
NOTHING = _encoder.encode(WirePlan([], [], False, []))


@dataclass(slots=True)
class KnownRequest:
    pages: list[int]
    sample: SampleRow | None = None
    num_output: int = 0
    """The tokens of its answer that were sent."""
    history: TokenHistory | None = None
    """The tokens that were received, if its sampling keeps state."""


class PlanSender:
    def __init__(self) -> None:
        self._known: dict[int, KnownRequest] = {}

    def encode(self, plan: StepPlan) -> bytes:
        """An empty plan is always NOTHING, which need not be sent."""
        if not plan.items:
            assert not plan.clear and not plan.ended
            return NOTHING
        ended = [key for key in plan.ended if self._known.pop(key, None) is not None]
        items = [self._item(item) for item in plan.items]
        return _encoder.encode(WirePlan(items, plan.clear, plan.prefill, ended, plan.is_routed))

    def _item(self, item: PlanItem) -> WireItem:
        known = self._known.setdefault(item.request_no, KnownRequest([]))
        kept = _kept(known.pages, item.pages)
        known.pages = item.pages
        wire = WireItem(structs.replace(item, pages=item.pages[kept:], sample=None), kept)
        if item.sample is None:
            return wire
        if known.sample is None:
            # The caller's process looks for stop strings.
            known.sample = wire.item.sample = structs.replace(
                item.sample,
                params=replace(item.sample.params, stop=(), stop_regex=()),
                output_ids=list(item.sample.output_ids),
            )
        else:
            wire.position = item.sample.position
            wire.output_ids = list(item.sample.output_ids[known.num_output :])
        known.num_output = len(item.sample.output_ids)
        return wire


class PlanReceiver:
    def __init__(self) -> None:
        self._known: dict[int, KnownRequest] = {}

    def decode(self, data: bytes) -> StepPlan:
        wire = _decoder.decode(data)
        for key in wire.ended:
            del self._known[key]
        items = [self._item(item) for item in wire.items]
        return StepPlan(items, wire.clear, wire.prefill, wire.ended, wire.is_routed)

    def _item(self, wire: WireItem) -> PlanItem:
        known = self._known.setdefault(wire.item.request_no, KnownRequest([]))
        known.pages = known.pages[: wire.kept] + wire.item.pages
        sample = wire.item.sample
        if sample is not None:
            if sample.params.has_history:
                known.history = TokenHistory.of(sample)
                sample = structs.replace(sample, output_ids=known.history.outputs())
            known.sample = sample
        elif wire.position is not None:
            assert known.sample is not None
            sample = structs.replace(known.sample, position=wire.position)
            if known.history is not None:
                known.history.ids += wire.output_ids
                sample = structs.replace(sample, output_ids=known.history.outputs())
        return structs.replace(wire.item, pages=known.pages, sample=sample)


def _kept(known: Sequence[int], now: Sequence[int]) -> int:
    """How many of the known ones are still the first."""
    return len(known) if list(now[: len(known)]) == list(known) else 0
