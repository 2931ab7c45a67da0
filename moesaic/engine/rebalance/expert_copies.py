"""Copies experts of a few layers between ranks, a bounded number of bytes at a time.

Each rank has an outbox that the others read, and a staging area. The experts that a rank has to
send stand behind each other in its stream, each of them once; in every round the outbox holds the
next part of it. What arrives is staged and compared with sums, and only `adopt` changes weights.
Between nodes outboxes are in host memory, from where they are sent: GPUs copy to and from it.

All ranks derive the same streams from the same moves. The caller makes sure that ranks read an
outbox only after it is written, and that it is written again only after all have read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moesaic.balance.moves import SlotMove
from moesaic.comm.collectives.group import Peers
from moesaic.comm.windows.factory import create_device_window, create_window
from moesaic.comm.windows.page_lock import lock_pages
from moesaic.comm.windows.window import SharedWindow
from moesaic.core.background import in_background
from moesaic.engine.setup.expert_buffers import OUTBOX, SUMS, BufferSizes, ExpertImage
from moesaic.moe.layer import FusedMoE

WORDS_OF_ROW: Final = 512


class WrongExpert(RuntimeError):
    """An expert arrived with other bytes than were sent."""


def word_sum(data: Tensor) -> Tensor:
    """A sum over the words of some bytes, on their device: one that is changed or missing shows,
    and so do two that have changed places. The word with number n counts 2n + 1 times. Sums of rows
    and columns of a table give that with one product a row, not one a word.

    The words 5, 6, 7 have the sum 1 * 5 + 3 * 6 + 5 * 7 = 58."""
    words = data.view(torch.int64)
    rows = len(words) // WORDS_OF_ROW
    whole, rest = (
        words[: rows * WORDS_OF_ROW].view(rows, WORDS_OF_ROW),
        words[rows * WORDS_OF_ROW :],
    )
    number_C = torch.arange(WORDS_OF_ROW, device=words.device)
    number_R = WORDS_OF_ROW * torch.arange(rows + 1, device=words.device)
    in_row = (whole.sum(0) * (2 * number_C + 1)).sum()
    before_row = (whole.sum(1) * (2 * number_R[:rows])).sum()
    behind = (rest * (2 * (number_R[rows:] + number_C[: len(rest)]) + 1)).sum()
    return in_row + before_row + behind


class CopyBuffers:
    """The outboxes of all ranks, and this rank's staging area."""

    def __init__(
        self, group: Peers, sizes: BufferSizes, timeout: float, device: torch.device
    ) -> None:
        self.sizes, self.rank = sizes, group.rank
        on_gpu = device.type == "cuda"
        self.window = (
            create_device_window(group, sizes.planes, timeout, 1, device)
            if on_gpu and not sizes.through_host
            else create_window(group, sizes.planes, timeout, 1)
        )
        self._own: dict[str, Tensor] = {}
        """What this rank writes if others do not read it there: on its device."""
        with torch.inference_mode(False):
            if sizes.through_host:
                self._own = {
                    spec.name: torch.zeros(spec.shape, dtype=spec.dtype, device=device)
                    for spec in sizes.planes
                }
            self.staging = torch.empty(sizes.staged, sizes.image, dtype=torch.uint8, device=device)
            self._wrong = torch.zeros((), dtype=torch.int64, device=device)
            self._num_wrong = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._end: torch.cuda.Event | None = None
        self._begin: torch.cuda.Event | None = None
        self._sending: Future[float] | None = None
        """The seconds of what is being sent to other nodes."""
        self._seconds = 0.0
        self._bytes = 0
        self.received = 0
        """Bytes that were staged from other ranks."""
        if isinstance(self.window, SharedWindow):
            self._touch_pages(self.window)
            if self._stream is not None:
                planes = [self.window.stacked(spec.name) for spec in sizes.planes]
                lock_pages(planes, self, self._stream)

    def _touch_pages(self, window: SharedWindow) -> None:
        """Makes the system map all pages now: in the first step that moves experts that takes
        longer than to copy them."""
        self.staging.zero_()
        window.plane(OUTBOX).zero_()
        for rank in range(window.size):
            window.plane(OUTBOX, rank).max()

    def outbox(self, rank: int | None = None) -> Tensor:
        """What a rank has sent; None: what this rank is to send, on its device."""
        return self._plane(OUTBOX, rank)

    def sums(self, rank: int | None = None) -> Tensor:
        return self._plane(SUMS, rank)

    def _plane(self, name: str, rank: int | None) -> Tensor:
        if rank is None and name in self._own:
            return self._own[name]
        return self.window.plane(name, rank)

    def copy_to_host(self, used: int) -> None:
        """Copies what this rank has written, `used` bytes of experts, to where others read it."""
        for name, own in self._own.items():
            part = slice(used) if name == OUTBOX else slice(None)
            self.window.plane(name)[part].copy_(own[part], non_blocking=True)

    def start(self, work: Callable[[], None]) -> None:
        """Runs `work`; on a GPU beside the steps that follow, and after those that were begun."""
        if self._stream is None:
            begin = time.monotonic()
            work()
            self._seconds += time.monotonic() - begin
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record()
            work()
            self._end = torch.cuda.Event(enable_timing=True)
            self._end.record()

    def warm_up(self, work: Callable[[], None]) -> None:
        """Runs `work` and waits for it. Neither its time nor damage that it found counts."""
        self.start(work)
        if self._stream is not None:
            self._stream.synchronize()
        self._seconds, self._bytes, self._begin, self.received = 0.0, 0, None, 0
        self.forget()

    def count_bytes(self, nbytes: int) -> None:
        """Counts what `start` has copied."""
        self._bytes += nbytes

    @property
    def rate(self) -> float | None:
        """Bytes that were copied in a second, the time between nodes included; None before the
        first copy has ended."""
        return self._bytes / self._seconds if self._bytes and self._seconds else None

    def count_wrong(self, differs: Tensor) -> None:
        """Notes a piece that arrived with another sum than it was sent with; `check` tells."""
        self._wrong += differs
        self._num_wrong.copy_(self._wrong, non_blocking=True)

    def check(self) -> None:
        """Raises WrongExpert if a piece was damaged. Call it when all that was started is done."""
        if count := int(self._num_wrong):
            raise WrongExpert(f"{count} pieces of experts arrived damaged")

    def abandon(self) -> None:
        """Forgets what is being sent, too: its connections have ended."""
        self._sending = None
        self.forget()

    def forget(self) -> None:
        """Forgets damage, as what was staged is dropped."""
        self._wrong.zero_()
        self._num_wrong.zero_()

    @property
    def is_done(self) -> bool:
        """Whether all that was started has ended, and all that was published is on its way. Never
        waits. Raises the error of what was published."""
        if self._sending is not None:
            if not self._sending.done():
                return False
            sending, self._sending = self._sending, None
            self._seconds += sending.result()
        if self._end is None or not self._end.query():
            return self._end is None
        if self._begin is not None:
            self._seconds += self._begin.elapsed_time(self._end) / 1e3
            self._begin = None
        return True

    def publish(self, number: int, used: int) -> None:
        """Begins to send the first `used` bytes of the outbox, and the sums, to ranks on other
        nodes: call it when they are written."""
        assert self.is_done, "the outbox is still being written or sent"
        if not isinstance(window := self.window, SharedWindow):
            return
        if window.spans_nodes:  # beside the step, which would wait for the network
            self._sending = in_background(lambda: _send(window, number, used))
        else:
            _send(window, number, used)

    def await_published(self, number: int) -> None:
        """Waits for what all ranks have published. The report that a rank has ended its phase goes
        through the same connection after it, so that it is here when a step begins."""
        if isinstance(self.window, SharedWindow):
            self.window.wait(0, number, "receive experts")


def _send(window: SharedWindow, number: int, used: int) -> float:
    """Returns the seconds that it took."""
    begin = time.monotonic()
    window.touch(window.plane(OUTBOX)[:used])
    window.touch(window.plane(SUMS))
    window.signal(0, number, "send experts")
    return time.monotonic() - begin


@dataclass(frozen=True, slots=True)
class SentExpert:
    """An expert in the stream of the rank that has it."""

    layer: int
    slot: int
    """Its slot on that rank."""
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
    row: int
    """The row of the staging area that it goes to."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of an arrival that one round brings, as bytes of the sender's stream."""

    arrival: Arrival
    begin: int
    end: int


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
        self._by_slot = {(arrival.layer, arrival.slot): arrival for arrival in self._arrivals}
        ends = (self._end(sent) for stream in streams for sent in stream.values())
        # At least one round: experts that only change slots on their rank are staged in the first.
        self.rounds = max(1, -(-max(ends, default=0) // buffers.sizes.outbox))

    def _end(self, sent: SentExpert) -> int:
        return sent.start + self._images[sent.layer].nbytes

    def _streams(
        self, moves: Sequence[Sequence[SlotMove]]
    ) -> list[dict[tuple[int, int], SentExpert]]:
        """The stream of each expert-parallel rank, by layer and slot."""
        per_rank = self._layout.slots_per_rank
        streams: list[dict[tuple[int, int], SentExpert]] = [{} for _ in range(self._layout.ep_size)]
        for layer, found in enumerate(moves):
            for source in sorted({move.source for move in found if self._is_remote(move)}):
                stream = streams[source // per_rank]
                start = self._end(next(reversed(stream.values()))) if stream else 0
                slot = source % per_rank
                stream[layer, slot] = SentExpert(layer, slot, start, len(stream))
        return streams

    def _is_remote(self, move: SlotMove) -> bool:
        per_rank = self._layout.slots_per_rank
        return move.slot // per_rank != move.source // per_rank

    def _find_arrivals(
        self,
        moves: Sequence[Sequence[SlotMove]],
        streams: Sequence[dict[tuple[int, int], SentExpert]],
    ) -> Iterator[Arrival]:
        layout, per_rank, row = self._layout, self._layout.slots_per_rank, 0
        for layer, found in enumerate(moves):
            for move in found:
                if move.slot // per_rank != layout.ep_rank:
                    continue
                owner, slot = divmod(move.source, per_rank)
                rank, sent = None, SentExpert(layer, slot, 0, 0)
                if owner != layout.ep_rank:
                    rank = owner * layout.moe_tp_size + layout.moe_tp_rank
                    sent = streams[owner][layer, slot]
                yield Arrival(layer, move.slot % per_rank, sent, rank, row)
                row += 1

    def write(self, round: int) -> int:
        """Fills the outbox, with a sum for each expert in it; returns the bytes that are used."""
        size, outbox, sums = (
            self._buffers.sizes.outbox,
            self._buffers.outbox(),
            self._buffers.sums(),
        )
        first, used = round * size, 0
        for sent in self._own_stream:
            begin, end = max(sent.start, first), min(self._end(sent), first + size)
            if begin < end:
                piece = outbox[begin - first : end - first]
                self._write_piece(sent, begin, piece)
                sums[sent.place].copy_(word_sum(piece))
                used = end - first
        self._buffers.copy_to_host(used)
        self._buffers.count_bytes(used)
        return used

    def _write_piece(self, sent: SentExpert, begin: int, piece: Tensor) -> None:
        """Copies the bytes of an expert from `begin` of the stream on."""
        image, skipped = self._images[sent.layer], begin - sent.start
        parts = self._layers[sent.layer].store.read(sent.slot)
        for start, part in zip(image.starts, parts, strict=False):
            low, high = max(start, skipped), min(start + len(part), skipped + len(piece))
            if low < high:
                piece[low - skipped : high - skipped].copy_(part[low - start : high - start])

    def pieces(self, round: int) -> list[Piece]:
        """The pieces that this rank has to stage in a round."""
        first, found = round * self._buffers.sizes.outbox, []
        for arrival in self._arrivals:
            if arrival.rank is None:
                begin, end = 0, 0 if round else self._images[arrival.layer].nbytes
            else:
                begin = max(arrival.sent.start, first)
                end = min(self._end(arrival.sent), first + self._buffers.sizes.outbox)
            if begin < end:
                found.append(Piece(arrival, begin, end))
        return found

    def stage(self, piece: Piece, round: int) -> None:
        """Copies a piece to the staging area, and compares it with the sum that was sent."""
        arrival, first = piece.arrival, round * self._buffers.sizes.outbox
        self._buffers.count_bytes(piece.end - piece.begin)
        row = self._buffers.staging[arrival.row]
        if arrival.rank is None:
            parts = self._layers[arrival.layer].store.read(arrival.sent.slot)
            for view, part in zip(self._images[arrival.layer].cut(row), parts, strict=True):
                view.copy_(part)
            return
        staged = row[piece.begin - arrival.sent.start : piece.end - arrival.sent.start]
        sent = self._buffers.outbox(arrival.rank)[piece.begin - first : piece.end - first]
        staged.copy_(sent, non_blocking=True)
        self._buffers.received += len(staged)
        sent_sum = self._buffers.sums(arrival.rank)[arrival.sent.place]
        self._buffers.count_wrong(word_sum(staged) != sent_sum)

    def warm_up(self) -> None:
        """Writes and stages the first round of everything."""
        self.write(0)
        for piece in self.pieces(0):
            self.stage(piece, 0)

    def adopt(self, layer: int, slots: Sequence[int]) -> int:
        """Copies what is staged for some slots of a layer into those that are this rank's. Returns
        the bytes that came from other ranks."""
        image, store, received = self._images[layer], self._layers[layer].store, 0
        for slot in slots:
            arrival = self._by_slot.get((layer, slot - self._layout.first_slot))
            if arrival is not None:
                store.write(arrival.slot, image.cut(self._buffers.staging[arrival.row]))
                received += 0 if arrival.rank is None else image.nbytes
        return received
