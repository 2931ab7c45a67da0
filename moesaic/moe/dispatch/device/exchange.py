"""Rows that kernels write into each other's memory, and results that they read there.

P ranks · C rows of a rank in a step · K chosen · H hidden · T tokens of this rank.

A lane has planes for rows that arrive (values, scales, ids, weights) and one for the results of
this rank's experts. What lies where, and the flags, is told in kernels/a2a.py; why nothing is
overwritten too early, in exchange.py. Planes are made for the largest step; a smaller one takes
the front of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from moesaic.comm.lifecycle import Membership
from moesaic.comm.windows.factory import create_device_window, device_window_bytes
from moesaic.comm.windows.window import PlaneSpec
from moesaic.kernels.a2a import ChannelCall, RowPlanes
from moesaic.moe.dispatch.base import CommContext
from moesaic.moe.dispatch.host.exchange import InFlight
from moesaic.moe.quant.payload import PAYLOAD_FORMATS, Payload

# Of a lane: rows are here, results are here; those of the second half, where there are two.
ROWS, RESULTS, SECOND_RESULTS = 0, 1, 2
CHANNELS = 3
NOT_SENT = -1
SAME_STREAM: Final = nullcontext()
# Of lanes, numbers of rows and, where layers have some of their own, scales.
MOST_VIEWS: Final = 4096
Kept = TypeVar("Kept")
# Rows with their ids and, where they travel, their weights.
Arrived = tuple[Payload, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class DeviceExchangeSpec:
    """`rows`: that may arrive, of all ranks; none where all have them. `weights`: travel with
    them. `home_rows`: of this rank, which the others read where they lie; only ids arrive then."""

    payload: str
    hidden_size: int
    dtype: torch.dtype
    top_k: int
    rows: int
    result_rows: int
    weights: bool
    lanes: int
    home_rows: int = 0

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
        """Of one rank of so many, on a GPU."""
        return device_window_bytes(self.planes(), size, self.channels, torch.device("cuda"))


class DeviceExchange(InFlight):
    """The window of one kind of payload, shared by all layers that send it."""

    def __init__(self, spec: DeviceExchangeSpec, comm: CommContext) -> None:
        super().__init__(comm.group.rank, comm.group.size, spec.lanes)
        self.spec = spec
        self.payload = PAYLOAD_FORMATS[spec.payload]
        device = torch.get_default_device()
        self.window = create_device_window(
            comm.group, spec.planes(), comm.timeout, spec.channels, device
        )
        self._side = SideStream(device) if spec.lanes > 1 and device.type == "cuda" else None
        with torch.inference_mode(False):  # or it could not be written outside that mode
            self.active_P = torch.ones(self.size, dtype=torch.bool, device=device)
        """Who takes part, where kernels are."""
        self._views: dict[str, dict[tuple[Any, ...], Any]] = {}
        self._places = count()
        self._last: list[int | None] = [None] * spec.lanes
        comm.group.register(self)

    @classmethod
    def shared(cls, spec: DeviceExchangeSpec, comm: CommContext) -> DeviceExchange:
        if spec not in comm.buffers:
            comm.buffers[spec] = cls(spec, comm)
        found = comm.buffers[spec]
        assert isinstance(found, DeviceExchange)
        return found

    def restart(self, membership: Membership) -> None:
        super().restart(membership)
        self._last = [None] * self.spec.lanes
        self.window.restart(membership)
        self.active_P.copy_(torch.tensor([p in self.active for p in range(self.size)]))

    def abort(self, reason: str) -> None:
        self.window.abort(reason)

    def close(self) -> None:
        """Gives the memory back; no kernel of this rank may use it any more."""
        self._views.clear()
        self.window.close()

    def check(self) -> None:
        """Raises what a wait of a kernel has come upon."""
        self.window.check()

    def call(self, kind: int, lane: int, operation: str, layer: int) -> ChannelCall:
        return self.window.call(lane * CHANNELS + kind, operation, layer)

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
        return self._kept((lane, rows, scale), self._arrived)

    def _arrived(self, lane: int, rows: int, scale: float) -> Arrived:
        scales = None
        if self.payload.scales is not None:
            scales = self.window.plane(f"scales {lane}")[:rows]
        values = self.window.plane(f"values {lane}")[:rows]
        weights = self.window.plane(f"weights {lane}")[:rows] if self.spec.weights else None
        payload = Payload(values, scales, self.payload, scale)
        return payload, self.window.plane(f"ids {lane}")[:rows], weights

    def results(self, lane: int, first: int, rows: int) -> Tensor:
        """Where this rank's results go, and its peers read them: so many rows."""
        return self._kept((lane, first, rows), self._results)

    def _results(self, lane: int, first: int, rows: int) -> Tensor:
        return self.window.plane(f"results {lane}")[first : first + rows]

    def _kept(self, key: tuple[Any, ...], make: Callable[..., Kept]) -> Kept:
        """Views, which take longer than to launch a kernel; all layers of a step want the same."""
        views = self._views.setdefault(make.__name__, {})
        if key not in views:
            if len(views) >= MOST_VIEWS:
                views.clear()
            with torch.inference_mode(False):
                views[key] = make(*key)
        found: Kept = views[key]
        return found

    def results_offset(self, lane: int) -> int:
        return self.window.offset(f"results {lane}")

    def side_stream(self) -> AbstractContextManager[None]:
        """What is begun inside need not be done before what comes next: where lanes overlap, it
        goes to a stream of its own."""
        return SAME_STREAM if self._side is None else self._side.running()

    def join(self) -> None:
        """What comes next comes after what was begun aside."""
        if self._side is not None:
            self._side.join()

    def register_layer(self) -> int:
        """The next one: of a layer among those that share the window."""
        return next(self._places)

    def follows(self, lane: int, place: int) -> bool:
        """Whether the layer at this place comes just after the one before it, in this lane."""
        last, self._last[lane] = self._last[lane], place
        return last is not None and last + 1 == place


class SideStream:
    """A stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """On it, after all that was begun before. Whoever gave tensors to it keeps them until it
        has joined: the allocator knows nothing of it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)
