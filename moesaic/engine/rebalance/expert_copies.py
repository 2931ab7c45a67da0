"""Copies experts of a few layers between ranks, a bounded number of bytes at a time.

Each rank has an outbox that the others read, and a staging area. The experts that a rank has to
send stand behind each other in its stream, each of them once; in every round the outbox holds the
next part of it. What arrives is staged, and only `adopt` changes weights.

All ranks derive the same streams from the same moves. The caller makes sure that nobody reads an
outbox before it is written, and that it is not written before all have read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moesaic.balance.moves import SlotMove
from moesaic.comm.collectives.group import Peers
from moesaic.comm.windows.factory import create_device_window, create_window
from moesaic.comm.windows.window import SharedWindow
from moesaic.engine.setup.expert_buffers import OUTBOX, SUMS, BufferSizes, ExpertImage
from moesaic.moe.layer import FusedMoE

WORD: Final = 8


class WrongExpert(RuntimeError):
    """An expert arrived with other bytes than were sent."""


def word_sum(parts: Sequence[Tensor]) -> Tensor:
    """A number that changes if bytes do: the sum of all words, tensor by tensor, each tensor by
    its own factor. It stays on the device."""
    total = torch.zeros((), dtype=torch.int64, device=parts[0].device)
    for factor, part in enumerate(parts, 1):
        words = part.view(torch.int64) if part.numel() % WORD == 0 else part
        total += factor * words.sum(dtype=torch.int64)
    return total


class CopyBuffers:
    """The outboxes of all ranks, and this rank's staging area."""

    def __init__(
        self, group: Peers, sizes: BufferSizes, timeout: float, device: torch.device
    ) -> None:
        self.sizes, self.rank = sizes, group.rank
        on_gpu = device.type == "cuda"
        self.window = (
            create_device_window(group, sizes.planes, timeout, 1, device)
            if on_gpu
            else create_window(group, sizes.planes, timeout, 1)
        )
        with torch.inference_mode(False):
            self.staging = torch.empty(sizes.staged, sizes.image, dtype=torch.uint8, device=device)
            self.num_wrong = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=on_gpu)
            """Where `ChunkCopy.compare` leaves its result."""
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._end: torch.cuda.Event | None = None

    def outbox(self, rank: int | None = None) -> Tensor:
        return self.window.plane(OUTBOX, rank)

    def sums(self, rank: int | None = None) -> Tensor:
        return self.window.plane(SUMS, rank)

    def start(self, work: Callable[[], None]) -> None:
        """Runs `work`; on a GPU beside the steps that follow, and after those that were begun."""
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
            self._end = torch.cuda.Event()
            self._end.record()

    @property
    def is_done(self) -> bool:
        """Whether all that was started has ended. Never waits."""
        return self._end is None or self._end.query()

    def publish(self, number: int, used: int) -> None:
        """Sends the first `used` bytes of the outbox, and the sums, to ranks on other nodes."""
        if isinstance(self.window, SharedWindow):
            self.window.touch(self.outbox()[:used])
            self.window.touch(self.sums())
            self.window.signal(0, number, "send experts")

    def await_published(self, number: int) -> None:
        """Waits for data on its way between nodes; on one node there is nothing to wait for."""
        if isinstance(self.window, SharedWindow):
            self.window.wait(0, number, "receive experts")


@dataclass(frozen=True, slots=True)
class SentExpert:
    """An expert in the stream of the rank that has it."""

    layer: int
    slot: int
    """Of that rank."""
    start: int
    """Its first byte in the stream."""
    place: int
    """Its number in the stream."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """An expert that a slot of this rank gets: from its own slot `sent.slot`, or from another rank
    of the group."""

    layer: int
    slot: int
    sent: SentExpert
    rank: int | None


class ChunkCopy:
    """The copies of some layers on this rank. Layers are numbered within the chunk."""

    def __init__(
        self, layers: Sequence[FusedMoE], moves: Sequence[Sequence[SlotMove]], buffers: CopyBuffers
    ) -> None:
        self._layers, self._buffers, self._layout = layers, buffers, layers[0].layout
        self._images = [ExpertImage.of(layer) for layer in layers]
        streams = self._streams(moves)
        self._own_stream = list(streams[self._layout.ep_rank].values())
        self._arrivals = list(self._find_arrivals(moves, streams))
        longest = max(
            (self._end(sent) for stream in streams for sent in stream.values()), default=0
        )
        self.rounds = -(-longest // buffers.sizes.outbox)

    @property
    def nbytes(self) -> int:
        """What this rank receives from others."""
        remote = (arrival for arrival in self._arrivals if arrival.rank is not None)
        return sum(self._images[arrival.layer].nbytes for arrival in remote)

    def _end(self, sent: SentExpert) -> int:
        return sent.start + self._images[sent.layer].nbytes

    def _streams(
        self, moves: Sequence[Sequence[SlotMove]]
    ) -> list[dict[tuple[int, int], SentExpert]]:
        """For each expert-parallel rank what it sends, by layer and slot."""
        per_rank = self._layout.slots_per_rank
        streams: list[dict[tuple[int, int], SentExpert]] = [{} for _ in range(self._layout.ep_size)]
        for layer, image in enumerate(self._images):
            for source in sorted({move.source for move in moves[layer] if self._is_remote(move)}):
                stream = streams[source // per_rank]
                start = self._end(next(reversed(stream.values()))) if stream else 0
                slot = source % per_rank
                stream[layer, slot] = SentExpert(layer, slot, start, len(stream))
                assert image.nbytes, "an expert has bytes"
        return streams

    def _is_remote(self, move: SlotMove) -> bool:
        per_rank = self._layout.slots_per_rank
        return move.slot // per_rank != move.source // per_rank

    def _find_arrivals(
        self,
        moves: Sequence[Sequence[SlotMove]],
        streams: Sequence[dict[tuple[int, int], SentExpert]],
    ) -> Iterator[Arrival]:
        layout, per_rank = self._layout, self._layout.slots_per_rank
        for layer, found in enumerate(moves):
            for move in found:
                if move.slot // per_rank != layout.ep_rank:
                    continue
                owner, slot = divmod(move.source, per_rank)
                own = move.slot % per_rank
                if owner == layout.ep_rank:
                    yield Arrival(layer, own, SentExpert(layer, slot, 0, 0), None)
                else:
                    rank = owner * layout.moe_tp_size + layout.moe_tp_rank
                    yield Arrival(layer, own, streams[owner][layer, slot], rank)

    def write(self, round: int) -> int:
        """Fills the outbox; returns the bytes of it that are used."""
        size, outbox, used = self._buffers.sizes.outbox, self._buffers.outbox(), 0
        first = round * size
        for sent in self._own_stream:
            image, parts = self._images[sent.layer], self._read(sent.layer, sent.slot)
            for start, part in zip(image.starts, parts, strict=False):
                begin = max(sent.start + start, first)
                end = min(sent.start + start + len(part), first + size)
                if begin < end:
                    skip = sent.start + start
                    outbox[begin - first : end - first].copy_(part[begin - skip : end - skip])
                    used = max(used, end - first)
            if first < self._end(sent) <= first + size:
                self._buffers.sums()[sent.place].copy_(word_sum(parts))
        return used

    def read(self, round: int) -> Iterator[int]:
        """Stages what other ranks have written, piece by piece; yields the bytes of each."""
        size, staging = self._buffers.sizes.outbox, self._buffers.staging
        first = round * size
        for row, arrival in zip(staging, self._arrivals, strict=False):
            if arrival.rank is None:
                if round == 0:
                    yield self._stage_own(arrival, row)
                continue
            begin, end = max(arrival.sent.start, first), min(self._end(arrival.sent), first + size)
            if begin < end:
                skip = arrival.sent.start
                source = self._buffers.outbox(arrival.rank)[begin - first : end - first]
                row[begin - skip : end - skip].copy_(source)
                yield end - begin

    def _stage_own(self, arrival: Arrival, row: Tensor) -> int:
        image = self._images[arrival.layer]
        for part, view in zip(
            self._read(arrival.layer, arrival.sent.slot), image.cut(row), strict=True
        ):
            view.copy_(part)
        return image.nbytes

    def _read(self, layer: int, slot: int) -> list[Tensor]:
        return self._layers[layer].store.read(slot)

    def compare(self) -> None:
        """Compares the sums of what arrived with those that were sent; `check` gives the result."""
        wrong = torch.zeros((), dtype=torch.int64, device=self._buffers.staging.device)
        for row, arrival in zip(self._buffers.staging, self._arrivals, strict=False):
            if arrival.rank is not None:
                sent = self._buffers.sums(arrival.rank)[arrival.sent.place]
                wrong += word_sum(self._images[arrival.layer].cut(row)) != sent
        self._buffers.num_wrong.copy_(wrong, non_blocking=True)

    def check(self) -> None:
        """Raises WrongExpert if bytes differ. Call it when the comparison has ended."""
        if count := int(self._buffers.num_wrong):
            raise WrongExpert(f"{count} of {len(self._arrivals)} experts arrived damaged")

    def adopt(self) -> None:
        """Copies what is staged into the slots."""
        for row, arrival in zip(self._buffers.staging, self._arrivals, strict=False):
            store = self._layers[arrival.layer].store
            store.write(arrival.slot, self._images[arrival.layer].cut(row))
