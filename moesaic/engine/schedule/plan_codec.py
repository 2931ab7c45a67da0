"""Encodes plans for other ranks, without what a receiver already knows of a request.

The sampling parameters of a request never change: in full they would be most of a plan. Every
receiver must decode all plans, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from msgspec import structs

from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.sampling.token_history import TokenHistory
from moesaic.engine.schedule.plan import DecodeRows, DraftGap, PlanItem, StepPlan
from moesaic.layers.paged_cache import PageUpdate


class WireItem(msgspec.Struct, array_like=True):
    """`item` has its `sample` only with the first sampled token. Later tokens have a `position`
    and, if they matter, the new `output_ids`."""

    item: PlanItem
    position: int | None = None
    output_ids: list[int] = []


class WirePlan(msgspec.Struct, array_like=True):
    """As StepPlan."""

    items: list[WireItem]
    clear: list[int]
    prefill: bool
    ended: list[int]
    is_routed: bool = False
    decodes: bytes = b""
    """The columns of DecodeRows."""
    pages: list[PageUpdate] = []
    draft_steps: int = 0
    draft_branches: int = 0
    moves: list[tuple[int, int]] = []
    gaps: list[DraftGap] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WirePlan)
NOTHING = _encoder.encode(WirePlan([], [], False, []))


@dataclass(slots=True)
class KnownRequest:
    sample: SampleRow
    num_output: int = 0
    """The tokens of its answer that were sent."""
    history: TokenHistory | None = None
    """The tokens that were received, if its sampling keeps state."""


class PlanSender:
    def __init__(self) -> None:
        self._known: dict[int, KnownRequest] = {}

    def encode(self, plan: StepPlan) -> bytes:
        """An empty plan is always NOTHING, which need not be sent."""
        if not plan.has_work:
            assert not plan.clear and not plan.ended
            return NOTHING
        ended = [key for key in plan.ended if self._known.pop(key, None) is not None]
        items = [self._item(item) for item in plan.items]
        columns, pages = plan.decodes.to_bytes(), plan.decodes.pages
        facts = (plan.clear, plan.prefill, ended, plan.is_routed)
        more = (plan.draft_steps, plan.draft_branches, plan.moves, plan.gaps)
        wire = WirePlan(items, *facts, columns, pages, *more)
        return _encoder.encode(wire)

    def _item(self, item: PlanItem) -> WireItem:
        sample = item.sample
        if sample is None:
            return WireItem(item)
        known = self._known.get(item.request_no)
        if known is None:
            params = sample.params
            if params.stop or params.stop_regex:  # the caller's process looks for them
                params = replace(params, stop=(), stop_regex=())
            sample = structs.replace(sample, params=params, output_ids=list(sample.output_ids))
            self._known[item.request_no] = KnownRequest(sample, len(sample.output_ids))
            return WireItem(structs.replace(item, sample=sample))
        wire = WireItem(structs.replace(item, sample=None), sample.position)
        if sample.output_ids:
            wire.output_ids = list(sample.output_ids[known.num_output :])
            known.num_output = len(sample.output_ids)
        return wire


class PlanReceiver:
    def __init__(self) -> None:
        self._known: dict[int, KnownRequest] = {}

    def decode(self, data: bytes) -> StepPlan:
        wire = _decoder.decode(data)
        for key in wire.ended:
            del self._known[key]
        items = [self._item(item) for item in wire.items]
        decodes = DecodeRows.from_bytes(wire.decodes, wire.pages)
        facts = (wire.clear, wire.prefill, wire.ended, wire.is_routed)
        more = (wire.draft_steps, wire.draft_branches, wire.moves, wire.gaps)
        return StepPlan(items, *facts, decodes, *more)

    def _item(self, wire: WireItem) -> PlanItem:
        item = wire.item
        if (sample := item.sample) is not None:
            known = self._known[item.request_no] = KnownRequest(sample)
            if sample.params.has_history:
                known.history = TokenHistory.of(sample)
                item.sample = structs.replace(sample, output_ids=known.history.outputs())
        elif wire.position is not None:
            known = self._known[item.request_no]
            outputs: Sequence[int] = ()
            if known.history is not None:
                known.history.ids += wire.output_ids
                outputs = known.history.outputs()
            item.sample = structs.replace(known.sample, position=wire.position, output_ids=outputs)
        return item
