"""One-sided memory: every rank owns arrays that its peers read, write and signal."""

from __future__ import annotations

import json
import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moesaic.comm.collectives.group import Peers
from moesaic.comm.windows.shared_memory import create_memory, map_memory
from moesaic.comm.windows.signals import Signals, page_bytes

MEMORY: Final = "moesaic-window"
PAGE: Final = 4096
CHANNELS: Final = 16
EPOCH_BITS: Final = 40
MOST_GENERATIONS: Final = 1 << 63 - EPOCH_BITS


def first_epoch(generation: int) -> int:
    """Above all epochs of earlier generations: even a year of thousands a second is below 2**40."""
    return generation << EPOCH_BITS


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """An array that every rank owns one of."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Window(ABC):
    """The planes of all ranks, and signals between them. One thread of a rank uses it at a time.

    A signal is a number that grows, one per rank and channel: data put before `signal(epoch)` is
    there for whoever's `wait(epoch)` on that channel has returned.
    """

    rank: int
    size: int
    timeout: float
    spans_nodes: bool = False
    """Whether some ranks are on other nodes, so that what is touched travels."""

    @abstractmethod
    def plane(self, name: str, rank: int | None = None) -> Tensor:
        """The array of a rank (None: of this one) itself, not a copy."""

    @abstractmethod
    def touch(self, view: Tensor, ranks: Sequence[int] | None = None) -> None:
        """To be called after writing: `view`, a contiguous part of a plane, goes to those of
        `ranks` (None: all) that are on other nodes, with the next signal at the latest."""

    @abstractmethod
    def forget(self) -> None:
        """What was touched and not signalled need not go anywhere: the step was abandoned."""

    @abstractmethod
    def signal(self, channel: int, epoch: int, operation: str) -> None:
        """Make earlier writes visible to those who wait for this epoch."""

    @abstractmethod
    def wait(
        self,
        channel: int,
        epoch: int,
        operation: str,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Until all of `ranks` (None: all) have signalled `epoch` or later; else PeerTimeout."""

    @abstractmethod
    def barrier(self, operation: str, timeout: float | None = None) -> None:
        """Until all ranks have come here; what they wrote before is then visible."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make every wait of every rank, now and later, raise WindowAborted."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back once the last tensor that views it is gone. May be repeated."""

    def put(
        self, name: str, peer: int, start: int, source: Tensor, index: Tensor | None = None
    ) -> int:
        """Rows of `source` (those of `index`) into rows start.. of a peer's plane; bytes sent."""
        target = self.plane(name, peer)
        if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
            raise ValueError(
                f"rows of {tuple(source.shape)} {source.dtype} do not fit plane {name!r} of "
                f"{tuple(target.shape)} {target.dtype}"
            )
        rows = source.shape[0] if index is None else index.shape[0]
        place = target.narrow(0, start, rows)
        if index is None:
            place.copy_(source)
        else:
            torch.index_select(source, 0, index, out=place)
        if self.spans_nodes:
            self.touch(place, (peer,))
        return place.nbytes

    def get(self, name: str, peer: int, index: Tensor | slice) -> Tensor:
        """A copy of rows of a peer's plane."""
        source = self.plane(name, peer)
        if isinstance(index, slice):
            return source[index].clone()
        return source.index_select(0, index)


class SharedWindow(Window):
    """A window between processes of one machine: a mapping without a name, gone with the last rank.

    The mapping is the control page and then, for each plane, the arrays of all ranks in a row.
    Memory is taken when it is first touched.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        specs: Sequence[PlaneSpec],
        group: Peers,
        timeout: float,
        channels: int,
    ) -> None:
        self.group = group
        self.rank, self.size, self.timeout = group.rank, group.size, timeout
        self._everyone = range(self.size)
        self._channels = channels
        self._barriers = 0
        # Tensors made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            data = torch.frombuffer(memory, dtype=torch.uint8)
            self._stacked = _planes(data, specs, self.size, channels)
            self._own = {name: list(stack.unbind(0)) for name, stack in self._stacked.items()}
        page = memoryview(memory)[: page_bytes(self.size, channels + 1)]
        self._signals = self._signals_over(page, data.data_ptr(), group)

    def stacked(self, name: str) -> Tensor:
        """[size, *shape]: the planes of all ranks in one tensor."""
        return self._stacked[self._known(name)]

    def plane(self, name: str, rank: int | None = None) -> Tensor:
        return self._own[self._known(name)][self.rank if rank is None else rank]

    def touch(self, view: Tensor, ranks: Sequence[int] | None = None) -> None:
        """Nothing to do: all ranks see the same memory."""

    def forget(self) -> None:
        """Nothing waits to be sent."""

    def signal(self, channel: int, epoch: int, operation: str) -> None:
        assert 0 <= channel < self._channels, f"channel {channel} of {self._channels}"
        self._signals.post(channel, epoch, operation)

    def wait(
        self,
        channel: int,
        epoch: int,
        operation: str,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> None:
        assert 0 <= channel < self._channels, f"channel {channel} of {self._channels}"
        seconds = self.timeout if timeout is None else timeout
        chosen = self._everyone if ranks is None else ranks
        self._signals.wait(channel, epoch, operation, chosen, seconds)

    def barrier(self, operation: str, timeout: float | None = None) -> None:
        self._barriers += 1
        seconds = self.timeout if timeout is None else timeout
        self._signals.post(self._channels, self._barriers, operation)
        self._signals.wait(self._channels, self._barriers, operation, self._everyone, seconds)

    def abort(self, reason: str) -> None:
        self._signals.abort(reason)

    def close(self) -> None:
        # Unmapping here would pull the memory from under tensors that somebody still holds.
        self._stacked.clear()
        self._own.clear()
        self._signals.release()

    def _signals_over(self, page: memoryview, address: int, group: Peers) -> Signals:
        return Signals(page, address, self.rank, self.size, self._channels + 1, group.status)

    def _known(self, name: str) -> str:
        if name not in self._own:
            raise ValueError(f"no plane {name!r}: this window has {sorted(self._own) or 'closed'}")
        return name


def window_bytes(specs: Sequence[PlaneSpec], size: int, channels: int = CHANNELS) -> int:
    """Bytes of the whole mapping."""
    return control_bytes(size, channels) + sum(_page_up(size * spec.nbytes) for spec in specs)


def control_bytes(size: int, channels: int) -> int:
    """Bytes before the first plane."""
    return _page_up(page_bytes(size, channels + 1))


def layout_of(specs: Sequence[PlaneSpec], channels: int) -> str:
    return repr((tuple(specs), channels))


def _planes(
    data: Tensor, specs: Sequence[PlaneSpec], size: int, channels: int
) -> dict[str, Tensor]:
    planes = {}
    start = control_bytes(size, channels)
    for spec in specs:
        end = start + size * spec.nbytes
        planes[spec.name] = data[start:end].view(spec.dtype).view(size, *spec.shape)
        start = _page_up(end)
    return planes


def _page_up(count: int) -> int:
    return -(-count // PAGE) * PAGE


def share_memory(
    group: Peers,
    length: int,
    layout: str,
    note: str = "",
    join: Callable[[mmap.mmap, list[str]], str] | None = None,
) -> mmap.mmap:
    """A mapping that all ranks of a node see, one in each node, or the same refusal on all ranks.

    `note` is told to all ranks; `join` gets the mapping and everybody's notes before anybody uses
    the mapping, and says what is in the way, if anything.
    """
    nodes = group.nodes or (0,) * group.size
    first = nodes.index(nodes[group.rank])
    own, trouble = _new_file(length) if group.rank == first else (-1, "")
    try:
        path = f"/proc/{os.getpid()}/fd/{own}"
        offer = {"path": path, "layout": layout, "note": note, "trouble": trouble}
        offers = _exchange(group, offer)
        _refuse_if("; ".join(other["trouble"] for other in offers if other["trouble"]))
        strange = [r for r, other in enumerate(offers) if other["layout"] != offers[0]["layout"]]
        _refuse_if(f"ranks {strange} ask for other planes than rank 0" if strange else "")
        memory, trouble = _map(offers[first]["path"], length)
        if memory is not None and join is not None:
            trouble = join(memory, [other["note"] for other in offers])
        troubles = [answer["trouble"] for answer in _exchange(group, {"trouble": trouble})]
    finally:
        if own >= 0:
            os.close(own)
    _refuse_if("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(troubles) if text))
    assert memory is not None
    return memory


def _exchange(group: Peers, message: dict[str, str]) -> list[dict[str, str]]:
    parts = group.all_gather_bytes(json.dumps(message).encode(), "create a shared window")
    return [json.loads(part) for part in parts]


def _refuse_if(trouble: str) -> None:
    if trouble:
        raise RuntimeError(f"no shared window: {trouble}")


def _new_file(length: int) -> tuple[int, str]:
    """(descriptor, "") of memory without a name, or (-1, why there is none)."""
    if not hasattr(os, "memfd_create"):
        return -1, "memory shared between processes needs Linux (memfd_create)"
    try:
        return create_memory(MEMORY, length), ""
    except OSError as error:
        return -1, f"{length} bytes of shared memory: {error}"


def _map(path: str, length: int) -> tuple[mmap.mmap | None, str]:
    """The mapping, or why it cannot be had."""
    try:
        return map_memory(path, MEMORY, length), ""
    except ValueError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{error}; /proc must be mounted, and all ranks see each other's processes"
