"""Rows that kernels write into each other's memory, and results that they read there.

P ranks · C rows of a rank in a step · K chosen · H hidden · T tokens of this rank.

A lane has planes for rows that arrive (values, scales, ids, weights) and one for the results of
this rank's experts. kernels/a2a.py describes their layout and the flags, host/exchange.py why
nothing is overwritten too early. Planes fit the largest step; a smaller one uses the front of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, cast

import torch
from torch import Tensor

from moesaic.comm.lifecycle import Membership
from moesaic.comm.windows.factory import create_device_window, device_window_bytes
from moesaic.comm.windows.window import PlaneSpec
from moesaic.kernels.a2a import ChannelCall, RowPlanes
from moesaic.moe.dispatch.base import CommContext, RowSpec
from moesaic.moe.dispatch.device.side_streams import SideStreams
from moesaic.moe.dispatch.host.exchange import InFlight
from moesaic.moe.quant.payload import PAYLOAD_FORMATS, Payload

# The channels of a lane: rows, results, and the second half of results where there are two.
ROWS, RESULTS, SECOND_RESULTS = 0, 1, 2
CHANNELS = 3
NOT_SENT = -1
# Views by lane, number of rows and scale.
MOST_VIEWS: Final = 4096
# Rows with their ids and, if they travel, their weights.
Arrived = tuple[Payload, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class DeviceExchangeSpec(RowSpec):
    rows: int
    """That may arrive from all ranks; 0 if all ranks have the same."""
    result_rows: int
    weights: bool
    """Whether weights travel with the rows."""
    lanes: int
    home_rows: int = 0
    """This rank's rows that others read in place; then only ids arrive."""

    @property
    def channels(self) -> int:
        return self.lanes * CHANNELS

    def planes(self) -> list[PlaneSpec]:
        return [plane for lane in range(self.lanes) for plane in self._lane(lane)]

    def _lane(self, lane: int) -> Iterator[PlaneSpec]:
        if self.rows:
            for plane in PAYLOAD_FORMATS[self.payload].codec.planes:
                shape = (self.home_rows or self.rows, plane.width(self.hidden_size))
                yield PlaneSpec(f"{plane.name} {lane}", shape, plane.dtype)
            yield PlaneSpec(f"ids {lane}", (self.rows, self.top_k), torch.int32)
        if self.rows and self.weights:
            yield PlaneSpec(f"weights {lane}", (self.rows, self.top_k), torch.float32)
        yield PlaneSpec(f"results {lane}", (self.result_rows, self.hidden_size), self.dtype)

    def nbytes(self, size: int) -> int:
        """The bytes of one of `size` ranks, on a GPU."""
        return device_window_bytes(self.planes(), size, self.channels, torch.device("cuda"))


class DeviceExchange(InFlight):
    """A window that all layers with an equal spec share."""

    def __init__(self, spec: DeviceExchangeSpec, comm: CommContext) -> None:
        super().__init__(comm.group.rank, comm.group.size, spec.lanes)
        self.spec = spec
        self.payload = PAYLOAD_FORMATS[spec.payload]
        device = torch.get_default_device()
        self.window = create_device_window(
            comm.group, spec.planes(), comm.timeout, spec.channels, device, comm.link
        )
        self.sides = SideStreams.of(comm, spec.lanes)
        with torch.inference_mode(False):  # or it could not be written outside that mode
            self.active_P = torch.ones(self.size, dtype=torch.bool, device=device)
        """The active ranks, on the device."""
        self._views: dict[tuple[str, int, int, float], Any] = {}
        """Kept for all layers: making one takes longer than a kernel launch."""
        self._places = count()
        self._last: list[int | None] = [None] * spec.lanes
        comm.group.register(self)

    def restart(self, membership: Membership) -> None:
        super().restart(membership)
        self._last = [None] * self.spec.lanes
        self.window.restart(membership)
        self.active_P.copy_(torch.tensor([p in self.active for p in range(self.size)]))

    def abort(self, reason: str) -> None:
        self.window.abort(reason)

    def close(self) -> None:
        """Frees the memory; no kernel of this rank may use it any more."""
        self._views.clear()
        self.window.close()

    def check(self) -> None:
        """Raises the error of a kernel whose wait has failed."""
        self.window.check()

    def call(self, kind: int, lane: int, operation: str, layer: int) -> ChannelCall:
        return self.window.call(self.channel(kind, lane), operation, layer)

    def channel(self, kind: int, lane: int) -> int:
        return lane * CHANNELS + kind

    def inbox(self, lane: int, scale: float) -> RowPlanes:
        hidden, values, scales = self.spec.hidden_size, self.payload.values, self.payload.scales
        return RowPlanes(
            payload=self.spec.payload,
            values=self.window.offset(f"values {lane}"),
            scales=0 if scales is None else self.window.offset(f"scales {lane}"),
            ids=self.window.offset(f"ids {lane}"),
            weights=self.window.offset(f"weights {lane}") if self.spec.weights else NOT_SENT,
            value_bytes=values.width(hidden) * values.dtype.itemsize,
            scale_bytes=0 if scales is None else scales.width(hidden) * scales.dtype.itemsize,
            scale=scale,
            local_rows=self.spec.home_rows > 0,
        )

    def arrived(self, lane: int, rows: int, scale: float) -> Arrived:
        """The first rows of this rank's planes."""
        key = ("arrived", lane, rows, scale)
        if (found := self._views.get(key)) is None:
            found = self._keep(key, self._arrived(lane, rows, scale))
        return cast(Arrived, found)

    def results(self, lane: int, first: int, rows: int) -> Tensor:
        """The buffer for this many of this rank's results, which its peers read."""
        key = ("results", lane, first, rows)
        if (found := self._views.get(key)) is None:
            found = self._keep(key, self._results(lane, first, rows))
        return cast(Tensor, found)

    def _keep(self, key: tuple[str, int, int, float], view: Any) -> Any:
        if len(self._views) >= MOST_VIEWS:
            self._views.clear()
        self._views[key] = view
        return view

    @torch.inference_mode(False)
    def _arrived(self, lane: int, rows: int, scale: float) -> Arrived:
        scales = None
        if self.payload.scales is not None:
            scales = self.window.plane(f"scales {lane}")[:rows]
        values = self.window.plane(f"values {lane}")[:rows]
        weights = self.window.plane(f"weights {lane}")[:rows] if self.spec.weights else None
        payload = Payload(values, scales, self.payload, scale)
        return payload, self.window.plane(f"ids {lane}")[:rows], weights

    @torch.inference_mode(False)
    def _results(self, lane: int, first: int, rows: int) -> Tensor:
        return self.window.plane(f"results {lane}")[first : first + rows]

    def register_layer(self) -> int:
        """The next number of a layer among those that share the window."""
        return next(self._places)

    def follows(self, lane: int, place: int) -> bool:
        """Whether the layer with this number follows its predecessor, in this lane."""
        last, self._last[lane] = self._last[lane], place
        return last is not None and last + 1 == place
