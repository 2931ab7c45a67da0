"""One-sided memory: every rank owns arrays that its peers read, write and signal."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moesaic.comm.collectives.group import Peers
from moesaic.comm.errors import PeerTimeout
from moesaic.comm.windows.link import PLANE, HostLink, words_shape
from moesaic.comm.windows.shared_memory import create_memory, map_memory, round_up
from moesaic.comm.windows.signals import Signals, page_bytes
from moesaic.core.link import EmulatedLink

MEMORY: Final = "moesaic-window"
PAGE: Final = 4096
CHANNELS: Final = 16
EPOCH_BITS: Final = 40
MOST_GENERATIONS: Final = 1 << 63 - EPOCH_BITS


def first_epoch(generation: int) -> int:
    """Above all epochs of earlier generations: a year of thousands per second stays below 2**40."""
    return generation << EPOCH_BITS


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """An array of which every rank owns one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SharedWindow:
    """The planes of all ranks, and signals between them. One thread of a rank uses it at a time.

    A signal is a growing number per rank and channel: data written before `signal(epoch)` is
    visible to a rank whose `wait(epoch)` on that channel has returned.

    The memory is an unnamed mapping that ends with the last rank: the control page and then, for
    each plane, the arrays of all ranks in order. The kernel allocates it at the first access and
    frees it with the last window and tensor that views it.
    """

    spans_nodes: bool = False
    """Whether some ranks are on other nodes, so that touched data is sent."""
    signals_type: type[Signals] = Signals

    def __init__(
        self,
        memory: mmap.mmap,
        specs: Sequence[PlaneSpec],
        group: Peers,
        timeout: float,
        channels: int,
        link: EmulatedLink | None = None,
    ) -> None:
        self.group = group
        self.rank, self.size, self.timeout = group.rank, group.size, timeout
        self._everyone = range(self.size)
        self._channels = channels
        self._barriers = 0
        # Tensors created in inference mode cannot be written outside it.
        with torch.inference_mode(False):
            data = torch.frombuffer(memory, dtype=torch.uint8)
            self._stacked = _planes(data, specs, self.size, channels)
            self._own = {name: list(stack.unbind(0)) for name, stack in self._stacked.items()}
        page = memoryview(memory)[: page_bytes(self.size, channels + 1)]
        self._signals = self.signals_type(
            page, data.data_ptr(), self.rank, self.size, channels + 1, group.status
        )
        self.link: HostLink | None = None
        """Delays what other ranks send, where one is emulated."""
        if link is not None:
            self.link = HostLink(link, self._stacked[PLANE], self.rank, group.status)

    def set_link(self, link: EmulatedLink) -> None:
        """Changes the speed of the link that the window was made with. Nothing may be in flight."""
        assert self.link is not None, "its planes have no words of a link"
        self.link.link = link

    def stacked(self, name: str) -> Tensor:
        """[size, *shape]: the planes of all ranks in one tensor."""
        return self._stacked[self._known(name)]

    def plane(self, name: str, rank: int | None = None) -> Tensor:
        """The array of a rank (None: this one), not a copy."""
        return self._own[self._known(name)][self.rank if rank is None else rank]

    def touch(self, view: Tensor, ranks: Sequence[int] | None = None) -> None:
        """Called after writing: `view`, a contiguous part of a plane, is sent to those of `ranks`
        (None: all) on other nodes, with the next signal at the latest."""

    def forget(self) -> None:
        """Drops what was touched and not signalled, after a step was abandoned."""
        if self.link is not None:
            self.link.forget()

    def signal(self, channel: int, epoch: int, operation: str) -> None:
        """Makes earlier writes visible to ranks that wait for this epoch."""
        assert 0 <= channel < self._channels, f"channel {channel} of {self._channels}"
        if self.link is not None:
            self.link.book(channel)
        self._signals.post(channel, epoch, operation)

    def posted(self, channel: int) -> int:
        """The last epoch that this rank, or its predecessor, has signalled."""
        return self._signals.posted(channel)

    def wait(
        self,
        channel: int,
        epoch: int,
        operation: str,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Waits until `ranks` (None: all) have signalled `epoch` or later; else PeerTimeout."""
        assert 0 <= channel < self._channels, f"channel {channel} of {self._channels}"
        seconds = self.timeout if timeout is None else timeout
        chosen = self._everyone if ranks is None else ranks
        self._wait(channel, epoch, operation, chosen, seconds)
        if self.link is not None:
            self.link.sleep(channel, chosen)

    def _wait(
        self, channel: int, epoch: int, operation: str, ranks: Sequence[int], seconds: float
    ) -> None:
        try:
            self._signals.wait(channel, epoch, operation, ranks, seconds)
        except PeerTimeout as late:
            raise late.among(self.group.members) from None

    def barrier(self, operation: str) -> None:
        """Waits until all ranks have called it; their earlier writes are then visible."""
        self._barriers += 1
        channel, number = self._channels, self._barriers
        self._signals.post(channel, number, operation)
        self._wait(channel, number, operation, self._everyone, self.timeout)

    def put(self, name: str, peer: int, start: int, source: Tensor, index: Tensor) -> None:
        """Copies rows `index` of `source` to a peer's plane, to `start` and the rows after it."""
        target = self.plane(name, peer)
        if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
            raise ValueError(
                f"rows of {tuple(source.shape)} {source.dtype} do not fit plane {name!r} of "
                f"{tuple(target.shape)} {target.dtype}"
            )
        place = target.narrow(0, start, len(index))
        torch.index_select(source, 0, index, out=place)
        if self.spans_nodes:
            self.touch(place, (peer,))

    def _known(self, name: str) -> str:
        if name not in self._own:
            raise ValueError(f"no plane {name!r}: this window has {sorted(self._own)}")
        return name


def window_bytes(specs: Sequence[PlaneSpec], size: int, channels: int = CHANNELS) -> int:
    planes = sum(round_up(size * spec.nbytes, PAGE) for spec in specs)
    return control_bytes(size, channels) + planes


def control_bytes(size: int, channels: int) -> int:
    """Bytes before the first plane."""
    return round_up(page_bytes(size, channels + 1), PAGE)


def with_link(
    specs: Sequence[PlaneSpec], link: EmulatedLink | None, channels: int, size: int
) -> list[PlaneSpec]:
    """The planes of a window, with that of its link where one is emulated."""
    own = [PlaneSpec(PLANE, words_shape(channels, size), torch.int64)]
    return [*specs, *(own if link is not None else ())]


def check_names(specs: Sequence[PlaneSpec]) -> None:
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise ValueError(f"planes {names}: give each a name of its own")


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
        start = round_up(end, PAGE)
    return planes


def share_memory(
    group: Peers,
    length: int,
    layout: str,
    note: str = "",
    join: Callable[[mmap.mmap, list[str]], str] | None = None,
) -> mmap.mmap:
    """A mapping that all ranks of a node share, one per node, or the same error on all ranks.
    `join` gets the mapping and the notes of all ranks before it is used, and returns an error."""
    nodes = group.nodes or (0,) * group.size
    first = nodes.index(nodes[group.rank])
    own, path, error = _new_memory(group, length, creates=group.rank == first)
    try:
        offer = {"path": path, "layout": layout, "note": note, "error": error}
        offers = _exchange(group, offer)
        _refuse_if("; ".join(other["error"] for other in offers if other["error"]))
        different = [r for r, other in enumerate(offers) if other["layout"] != offers[0]["layout"]]
        _refuse_if(f"ranks {different} ask for other planes than rank 0" if different else "")
        # What a former rank has offered may be of a supervisor that is gone.
        memory, error = _map(path or offers[first]["path"], length)
        if memory is not None and join is not None:
            error = join(memory, [other["note"] for other in offers])
        errors = [answer["error"] for answer in _exchange(group, {"error": error})]
    finally:
        if own >= 0:
            os.close(own)
    _refuse_if("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text))
    assert memory is not None
    return memory


def _exchange(group: Peers, message: dict[str, str]) -> list[dict[str, str]]:
    parts = group.all_gather_bytes(json.dumps(message).encode(), "create a shared window")
    return [json.loads(part) for part in parts]


def _refuse_if(error: str) -> None:
    if error:
        raise RuntimeError(f"no shared window: {error}")


def _new_memory(group: Peers, length: int, *, creates: bool) -> tuple[int, str, str]:
    """(descriptor, path, "") of unnamed memory, or (-1, "", error). The descriptor is -1 if another
    process holds the memory; the path is empty if another rank creates it."""
    if not hasattr(os, "memfd_create"):
        return -1, "", "memory shared between processes needs Linux (memfd_create)"
    try:
        lasting = group.lasting_memory(MEMORY, length)
        if lasting is not None:
            return -1, lasting, ""
        if not creates:
            return -1, "", ""
        own = create_memory(MEMORY, length)
        return own, f"/proc/{os.getpid()}/fd/{own}", ""
    except (OSError, RuntimeError) as error:
        return -1, "", f"{length} bytes of shared memory: {error}"


def _map(path: str, length: int) -> tuple[mmap.mmap | None, str]:
    """(mapping, ""), or (None, error)."""
    try:
        return map_memory(path, MEMORY, length), ""
    except ValueError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{error}; /proc must be mounted, and all ranks see each other's processes"
