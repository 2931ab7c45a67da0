"""Rows that ranks publish to each other in shared memory.

A rank writes its tokens where all others can read them and signals; each rank copies the rows it
needs straight into its layout. Results return in the same manner: an expert's rank publishes them,
and the token's rank reads and sums them in one pass.

P ranks · C tokens of a rank at most · K chosen · N tokens of all ranks · H hidden · O result rows
of a rank at most · T tokens of this rank · S results of a token.

Why nothing is overwritten too early, without a barrier: a rank publishes new tokens in a lane only
after it has all results of the lane's last step, which their ranks published after reading its
tokens; and it publishes new results only after it has seen all ranks' new tokens, which they
published after reading its last results. In a step of several rounds TOKENS_READ signals it. This
also holds between nodes, where writes arrive later (comm/windows/node_window.py): a rank that has
answered has read its node's copy, and all ranks of a node answer before a copy is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from moesaic.comm.errors import OutOfStep
from moesaic.comm.lifecycle import Membership, Participant
from moesaic.comm.windows.factory import create_window
from moesaic.comm.windows.window import (
    MOST_GENERATIONS,
    PlaneSpec,
    SharedWindow,
    first_epoch,
    window_bytes,
)
from moesaic.kernels.cpu.rows import GatheredTokens, Terms, sum_rows
from moesaic.moe.dispatch.base import CommContext, RowSpec, wire_dtype
from moesaic.moe.formats import TopKOutput
from moesaic.moe.placement import EpLayout
from moesaic.moe.quant.payload import PAYLOAD_FORMATS, Payload

LANES = 2
NO_LAYER = (1 << 32) - 1


class ExchangeSignal(IntEnum):
    TOKENS_READY = 0
    TOKENS_READ = 1
    RESULTS_READY = 2
    RESULTS_READ = 3

    @property
    def phase(self) -> str:
        return "dispatch" if self <= ExchangeSignal.TOKENS_READ else "combine"


TAGS = PlaneSpec("tags", (LANES * len(ExchangeSignal),), torch.int64)


@dataclass(frozen=True, slots=True)
class ExchangeSpec(RowSpec):
    tokens: int
    result_rows: int
    bases: int = 1
    """Slots of a rank that publish where their results begin."""
    inbox_rows: int = 0
    """Rows of a rank's private receive buffer."""

    def planes(self) -> list[PlaneSpec]:
        return [
            *self.host_planes(LANES, self.tokens),
            PlaneSpec("counts", (LANES, 2), torch.int64),
            PlaneSpec("results", (LANES, self.result_rows, self.hidden_size), self.dtype),
            PlaneSpec("bases", (LANES, self.bases), torch.int64),
            TAGS,
        ]

    def nbytes(self, size: int) -> int:
        inbox = LANES * self.inbox_rows * PAYLOAD_FORMATS[self.payload].row_bytes(self.hidden_size)
        return window_bytes(self.planes(), size) // size + inbox


class InFlight(Participant):
    """Which lanes are in flight, and between which ranks."""

    def __init__(self, rank: int, size: int, lanes: int = LANES) -> None:
        self.rank, self.size = rank, size
        self.active = list(range(size))
        self.generation = 0
        self._busy: list[str] = [""] * lanes

    def acquire(self, lane: int, operation: str) -> None:
        if not 0 <= lane < len(self._busy):
            raise ValueError(f"lane {lane}: there are {len(self._busy)}, numbered from 0")
        if self._busy[lane]:
            raise RuntimeError(
                f"{operation}: lane {lane} is still in flight since {self._busy[lane]}: combine it "
                f"first, use the other lane, or restart all ranks after an error"
            )
        self._busy[lane] = operation

    def release(self, lane: int) -> None:
        self._busy[lane] = ""

    def restart(self, membership: Membership) -> None:
        membership.check(self.rank, self.size, self.generation, MOST_GENERATIONS)
        self.generation, self.active = membership.generation, sorted(membership.active)
        self._busy = [""] * len(self._busy)


class Lanes(InFlight):
    """The progress of in-flight steps: signals of a window by lane.

    A signal is a count; a tag beside it holds the generation and the layer. A waiting rank compares
    it with its own, and again after reading: a rank that the others have left behind must not
    mistake their next data for what it waited for.
    """

    def __init__(self, window: SharedWindow) -> None:
        super().__init__(window.rank, window.size)
        self.window = window
        self._epochs = [0] * (LANES * len(ExchangeSignal))
        self._tags = window.stacked("tags").numpy()
        self._own_tags = window.plane("tags").split(1)
        window.group.register(self)

    def restart(self, membership: Membership) -> None:
        super().restart(membership)
        self._epochs = [first_epoch(self.generation)] * (LANES * len(ExchangeSignal))
        self.window.forget()
        # Written before any new data, so it is visible before them.
        self._tags[self.rank] = self._tag(NO_LAYER)
        self.window.touch(self.window.plane("tags"))

    def signal(self, kind: ExchangeSignal, lane: int, layer: int, operation: str) -> None:
        channel = lane * len(ExchangeSignal) + kind
        self._epochs[channel] += 1
        self._tags[self.rank, channel] = self._tag(layer)
        self.window.touch(self._own_tags[channel])
        self.window.signal(channel, self._epochs[channel], operation)

    def wait(self, kind: ExchangeSignal, lane: int, layer: int, operation: str) -> None:
        """Waits until all active ranks have sent the same signal as often as this one."""
        channel = lane * len(ExchangeSignal) + kind
        self.window.wait(channel, self._epochs[channel], operation, ranks=self.active)
        self.verify(kind, lane, layer, operation)

    def verify(self, kind: ExchangeSignal, lane: int, layer: int, operation: str) -> None:
        """Raises if what was waited for has been overwritten."""
        tags = self._tags[:, lane * len(ExchangeSignal) + kind].tolist()
        mine = self._tag(layer)
        for rank in self.active:
            if tags[rank] != mine:
                raise OutOfStep(f"{operation}: {self._difference(rank, tags[rank], layer)}")

    def _tag(self, layer: int) -> int:
        return self.generation << 32 | layer

    def _difference(self, rank: int, tag: int, layer: int) -> str:
        generation, other = tag >> 32, tag & NO_LAYER
        if generation != self.generation:
            return (
                f"rank {rank} is in generation {generation}, this rank in {self.generation}: one "
                f"of them has been left behind"
            )
        return f"rank {rank} is in layer {other}, this rank in layer {layer}"

    def count(self, kind: ExchangeSignal, lane: int) -> int:
        """How often this rank has sent the signal."""
        return self._epochs[lane * len(ExchangeSignal) + kind]


class Exchange(Lanes):
    """A window that all layers with an equal spec share."""

    def __init__(self, spec: ExchangeSpec, comm: CommContext) -> None:
        channels = LANES * len(ExchangeSignal)
        super().__init__(
            create_window(comm.group, spec.planes(), comm.timeout, channels, comm.link)
        )
        self.spec = spec
        self.payload = PAYLOAD_FORMATS[spec.payload]
        self._inboxes: list[dict[str, Tensor]] = [{} for _ in range(LANES)]

    def publish(self, lane: int, x: Payload, topk: TopKOutput, tokens: slice) -> None:
        """Writes tokens where other ranks read them after the signal."""
        count = len(range(*tokens.indices(len(x))))
        for name, tensor in x.planes.items():
            self._write(name, lane, count, tensor[tokens].view(wire_dtype(tensor.dtype)))
        self._write("ids", lane, count, topk.ids_TK[tokens])
        self._write("weights", lane, count, topk.weights_TK[tokens])
        self._write("counts", lane, 2, torch.tensor((count, len(x))))

    def _write(self, name: str, lane: int, count: int, source: Tensor) -> None:
        """Writes the first `count` rows of a lane of this rank's plane."""
        place = self.window.plane(name)[lane, :count]
        place.copy_(source)
        self.window.touch(place)

    def published(self, lane: int, layout: EpLayout) -> GatheredTokens:
        """The tokens that all ranks have published in this lane; call it after the wait."""
        return GatheredTokens(
            ids_PCK=self.window.stacked("ids")[:, lane],
            weights_PCK=self.window.stacked("weights")[:, lane],
            counts=self.counts(lane),
            rank=self.rank,
            slots=layout.slots_per_rank,
            groups=layout.ep_size,
            group=layout.ep_rank,
        )

    def counts(self, lane: int, whole_step: bool = False) -> list[int]:
        """Tokens that each rank has published, or has in the whole step."""
        counts: list[int] = self.window.stacked("counts")[:, lane, int(whole_step)].tolist()
        active = set(self.active)
        return [count if rank in active else 0 for rank, count in enumerate(counts)]

    def copy_rows(self, lane: int, rows_R: Tensor, start: int, global_scale: float) -> Payload:
        """Appends published rows to the first `start` rows of the lane's inbox; returns all."""
        stop = start + len(rows_R)
        inbox = self.inbox(lane)
        for name, tensor in inbox.items():
            target = tensor[start:stop].view(wire_dtype(tensor.dtype))
            torch.index_select(self.flat(name, lane), 0, rows_R, out=target)
        return self.payload.wrap((tensor[:stop] for tensor in inbox.values()), global_scale)

    def copy_to_blocks(
        self, lane: int, rows_R: Tensor, counts: list[int], global_scale: float
    ) -> Payload:
        """Copies published rows to the front of each slot's block in the inbox, `counts` each."""
        inbox = self.inbox(lane)
        block = self.spec.inbox_rows // len(counts)
        if max(counts) > block:
            raise ValueError(
                f"{max(counts)} rows for one slot are more than {block}: a token names it twice"
            )
        for name, tensor in inbox.items():
            source = self.flat(name, lane)
            target = tensor.view(wire_dtype(tensor.dtype)).unflatten(0, (len(counts), -1))
            for slot, rows in enumerate(rows_R.split(counts)):
                if len(rows):
                    torch.index_select(source, 0, rows, out=target[slot, : len(rows)])
        blocks = (tensor.unflatten(0, (len(counts), -1)) for tensor in inbox.values())
        return self.payload.wrap(blocks, global_scale)

    def inbox(self, lane: int) -> dict[str, Tensor]:
        """This rank's private receive buffer, by plane; the first touch allocates its memory."""
        inbox, rows = self._inboxes[lane], self.spec.inbox_rows
        if not inbox:
            with torch.inference_mode(False):
                for plane in self.payload.codec.planes:
                    shape = (rows, plane.width(self.spec.hidden_size))
                    inbox[plane.name] = torch.empty(shape, dtype=plane.dtype)
        return inbox

    def flat(self, name: str, lane: int) -> Tensor:
        """[rows, width] of all ranks from this lane's first row on; the next rank's rows are
        LANES * rows of a lane further."""
        stacked = self.window.stacked(name)
        return stacked.flatten(0, 2)[lane * stacked.shape[2] :]

    def results(self, lane: int) -> Tensor:
        """The buffer for this rank's results."""
        return self.window.plane("results")[lane]

    def touch_results(self, lane: int, starts: Sequence[int], blocks: Sequence[Tensor]) -> None:
        """Between nodes: sends each result to the node of its token. Results from a start on belong
        to the published rows of its block, in order. An emulated link carries them."""
        if self.window.link is not None:
            self._carry_results(torch.cat(list(blocks)) if blocks else torch.empty(0))
        if not self.window.spans_nodes:
            return
        results = self.results(lane)
        for start, rows in zip(starts, blocks, strict=True):
            sources, counts = (rows // (LANES * self.spec.tokens)).unique_consecutive(
                return_counts=True
            )
            stop = start
            for source, count in zip(sources.tolist(), counts.tolist(), strict=True):
                start, stop = stop, stop + count
                self.window.touch(results[start:stop], (source,))

    def _carry_results(self, rows_R: Tensor) -> None:
        assert self.window.link is not None
        unit = self.spec.hidden_size * self.spec.dtype.itemsize
        sources, counts = (rows_R // (LANES * self.spec.tokens)).unique(return_counts=True)
        for source, count in zip(sources.tolist(), counts.tolist(), strict=True):
            self.window.link.carry(int(source), unit * count)

    def collect(self, lane: int, terms: Terms, width: int) -> tuple[Tensor, int]:
        """The sum of each token's results, and how many came from other ranks."""
        stride = LANES * self.spec.result_rows
        return sum_rows(self.flat("results", lane), terms, stride, width, self.rank)
