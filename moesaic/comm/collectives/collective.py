"""Collectives on the host.

T tokens · H channels · R rows · V vocabulary · N rows or elements of a sum · P ranks.
"""

from __future__ import annotations

import math
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from moesaic.comm.collectives.group import Peers
from moesaic.comm.lifecycle import Membership, Participant
from moesaic.comm.mesh import share
from moesaic.comm.windows.factory import create_window
from moesaic.comm.windows.shared_memory import round_up
from moesaic.comm.windows.window import PlaneSpec, first_epoch, window_bytes

HALVES: Final = 2
# The header of each part: how much of the sum its rank needs, and a description of the part.
WORD: Final = 8
HEAD_BYTES: Final = 128
# Elements that are summed at a time, so that the sum stays in a core's cache.
BLOCK: Final = 32768
# Elements that can be summed in the time of a second signal, for each rank that signals.
SIGNAL_WORTH: Final = 32768


class Collective(Participant, ABC):
    """All ranks call the same operations in the same order. Sums are in rank order, in float32,
    rounded once, so that no split of the rows changes a bit. Errors name `operation`."""

    rank: int
    size: int

    @abstractmethod
    def sum_rows(self, x_NH: Tensor, rows: slice, operation: str) -> Tensor:
        """Rows `rows` of the sum over ranks; every rank gives [N, H] and may ask for other rows."""

    @abstractmethod
    def gather_rows(self, x_TH: Tensor, counts: Sequence[int], operation: str) -> Tensor:
        """The rows of all ranks in rank order; rank r gives counts[r] rows."""

    @abstractmethod
    def gather_columns(
        self, x_RV: Tensor, widths: Sequence[int], rows: slice, operation: str
    ) -> Tensor:
        """Rows `rows` with the columns of all ranks side by side; rank r gives widths[r]."""

    def all_reduce(self, x_TH: Tensor, operation: str) -> Tensor:
        return self.sum_rows(x_TH, slice(0, len(x_TH)), operation)


class SingleRank(Collective):
    rank, size = 0, 1

    def sum_rows(self, x_NH: Tensor, rows: slice, operation: str) -> Tensor:
        return x_NH[rows]

    def gather_rows(self, x_TH: Tensor, counts: Sequence[int], operation: str) -> Tensor:
        return x_TH

    def gather_columns(
        self, x_RV: Tensor, widths: Sequence[int], rows: slice, operation: str
    ) -> Tensor:
        return x_RV[rows]


class ShapeOnlyCollective(Collective):
    """Counts what a rank would hold, without peers; computes nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def _refuse(self, *_: Any, **__: Any) -> Tensor:
        raise NotImplementedError("this collective has no peers")

    sum_rows = gather_rows = gather_columns = _refuse


class PartsDiffer(RuntimeError):
    """Ranks gave parts of different tensors: they are not in the same operation."""


class WindowCollective(Collective):
    """Ranks write their parts to shared memory, where the others read them.

    An operation is one or more rounds: write a part, signal, wait for all signals, read. The window
    has two halves, used in turn. Round k + 2 may overwrite the parts of round k, since a rank that
    signalled k + 1 has read k; so every rank waits for all ranks in every round, even if it reads
    nothing. A tensor whose parts exceed a half is exchanged in pieces.

    Results do not alias the window. After an error all ranks have to restart the collective: rounds
    of a generation are higher than those of the one before. Ranks that are not active then are not
    awaited: `gather_rows` has zeros for them, and other operations need all ranks.
    """

    def __init__(self, group: Peers, nbytes: int, timeout: float) -> None:
        """All ranks of the group call it. `nbytes`: the largest part that is sent in one piece."""
        if nbytes < 1:
            raise ValueError(f"{nbytes} bytes for a rank's part: give 1 or more")
        self.rank, self.size = group.rank, group.size
        self._capacity = round_up(nbytes, HEAD_BYTES)
        self._round = 0
        self._active: list[int] | None = None
        """Some of the ranks; None: all of them."""
        self._window = create_window(group, _planes(nbytes), timeout, channels=1)
        # Tensors created in inference mode cannot be written outside it.
        with torch.inference_mode(False):
            halves = self._window.stacked("halves").unbind(1)
            self._own = [half[self.rank] for half in halves]
            self._bodies = [{torch.uint8: half[:, HEAD_BYTES:]} for half in halves]
        self._heads = [half[:, :HEAD_BYTES].numpy() for half in halves]
        group.register(self)

    @classmethod
    def window_bytes(cls, size: int, nbytes: int) -> int:
        """Shared memory of a collective, of all ranks together."""
        return window_bytes(_planes(nbytes), size, channels=1) if size > 1 else 0

    def sum_rows(self, x_NH: Tensor, rows: slice, operation: str) -> Tensor:
        self._check_whole(x_NH, operation)
        chosen, width = chosen_rows(rows, len(x_NH)), math.prod(x_NH.shape[1:])
        x_N = x_NH.detach().reshape(-1)
        needed = range(chosen.start * width, chosen.stop * width)
        out = x_N.new_empty(len(needed))
        for piece in cut_into(len(x_N), self._capacity // x_N.itemsize):
            here = _common(needed, piece)
            asked = range(here.start - piece.start, here.stop - piece.start)
            self._sum(x_N[piece.start : piece.stop], asked, out[_within(needed, here)], operation)
        return out.view(len(chosen), *x_NH.shape[1:])

    def gather_rows(self, x_TH: Tensor, counts: Sequence[int], operation: str) -> Tensor:
        check_counts(self, counts, len(x_TH), "rows")
        width = math.prod(x_TH.shape[1:])
        x_N = x_TH.detach().reshape(-1)
        out = x_N.new_zeros(sum(counts) * width)
        spans = _spans([count * width for count in counts])
        head = _head("gather_rows", x_N.dtype, (*counts, width))
        for piece in cut_into(max(map(len, spans)), self._capacity // x_N.itemsize):
            parts_PN = self._exchange(x_N[piece.start : piece.stop], head, operation)
            for rank in range(self.size) if self._active is None else self._active:
                part_N, span = parts_PN[rank], spans[rank]
                here = span[piece.start : piece.stop]
                out[here.start : here.stop] = part_N[: len(here)]
        return out.view(sum(counts), *x_TH.shape[1:])

    def gather_columns(
        self, x_RV: Tensor, widths: Sequence[int], rows: slice, operation: str
    ) -> Tensor:
        check_counts(self, widths, x_RV.shape[1], "columns")
        self._check_whole(x_RV, operation)
        x_RV = x_RV.detach()
        needed, spans = chosen_rows(rows, len(x_RV)), _spans(widths)
        out = x_RV.new_empty(len(needed), sum(widths))
        head = _head("gather_columns", x_RV.dtype, (len(x_RV), *widths))
        for lines, columns in self._tiles(len(x_RV), max(widths), x_RV.dtype):
            tile = x_RV[lines.start : lines.stop, columns.start : columns.stop]
            parts_PN = self._exchange(tile, head, operation)
            both = _common(needed, lines)
            target = out[_within(needed, both)]
            for part_N, span in zip(parts_PN, spans, strict=True):
                here = span[columns.start : columns.stop]
                theirs = part_N[: len(lines) * len(here)].view(len(lines), len(here))
                target[:, here.start : here.stop] = theirs[_within(lines, both)]
        return out

    def exchange_rows(self, x_NH: Tensor, operation: str) -> Tensor:
        """Each rank gives as many rows for every rank, in rank order; returns those that all ranks
        gave for this one, in the same order."""
        self._check_whole(x_NH, operation)
        x_PN = x_NH.detach().reshape(self.size, -1)
        out_PN = torch.empty_like(x_PN)
        head = _head("exchange_rows", x_PN.dtype, tuple(x_NH.shape))
        most = self._capacity // self.size // x_PN.itemsize
        for piece in cut_into(x_PN.shape[1], most):
            mine = slice(self.rank * len(piece), (self.rank + 1) * len(piece))
            parts = self._exchange(x_PN[:, piece.start : piece.stop], head, operation, split=True)
            out_PN[:, piece.start : piece.stop] = parts[:, mine]
        return out_PN.view_as(x_NH)

    def restart(self, membership: Membership) -> None:
        self._window.forget()
        self._round = first_epoch(membership.generation)
        active = sorted(membership.active)
        self._active = None if len(active) == self.size else active

    def _check_whole(self, x: Tensor, operation: str) -> None:
        """A group that has lost a rank takes part in steps without tokens of its own."""
        assert self._active is None or not x.numel(), f"{operation}: ranks are lost"

    def _sum(self, x_N: Tensor, asked: range, out: Tensor, operation: str) -> None:
        """Writes elements `asked` of the sum to `out`."""
        head = _head("sum_rows", x_N.dtype, (len(x_N),))
        half = self._round % HALVES
        parts_PN = self._exchange(x_N, head, operation, len(asked))
        # All ranks know how much each needs, so that all decide alike. Copying an element takes
        # about half as long as adding it.
        most = int(self._heads[half][:, :WORD].view("q").max())
        if most * self.size <= len(x_N) + most // 2 + SIGNAL_WORTH * self.size:
            _add(parts_PN[:, asked.start : asked.stop], out)
            return
        # Each rank sums a share, and reads the shares of the others.
        spans = [share(len(x_N), rank, self.size) for rank in range(self.size)]
        mine = spans[self.rank]
        sums = self._body(self._round % HALVES, x_N.dtype)[self.rank, : len(mine)]
        _add(parts_PN[:, mine.start : mine.stop], sums)
        parts_PN = self._exchange(sums, head, operation)
        for part_N, span in zip(parts_PN, spans, strict=True):
            here = _common(asked, span)
            out[_within(asked, here)] = part_N[_within(span, here)]

    def _exchange(
        self, part: Tensor, head: bytes, operation: str, needed: int = 0, split: bool = False
    ) -> Tensor:
        """One round: the parts of all ranks [P, …], valid until the next round but one. `split`: a
        part is [P, …], of which rank r reads the r-th alone."""
        half = self._round % HALVES
        self._round += 1
        body = self._body(half, part.dtype)
        place = body[self.rank, : part.numel()].view(part.shape)
        # A share is summed in place.
        if place.data_ptr() != part.data_ptr():
            place.copy_(part)
        self._heads[half][self.rank].data[:] = needed.to_bytes(WORD, sys.byteorder) + head
        if split:
            self._window.touch(self._own[half][:HEAD_BYTES])
            for rank, some in enumerate(place):
                self._window.touch(some, (rank,))
        else:
            self._window.touch(self._own[half][: HEAD_BYTES + part.nbytes])
        self._window.signal(0, self._round, operation)
        self._window.wait(0, self._round, operation, self._active)
        heads = self._heads[half][:, WORD:]
        heads = heads if self._active is None else heads[self._active]
        if heads.tobytes() != head * len(heads):
            raise PartsDiffer(f"{operation}: {self._difference(half, head)}")
        return body

    def _difference(self, half: int, head: bytes) -> str:
        heads = [line.tobytes() for line in self._heads[half][:, WORD:]]
        ranks = range(self.size) if self._active is None else self._active
        first = next(rank for rank in ranks if heads[rank] != head)
        theirs, ours = (text.rstrip(b"\0").decode() for text in (heads[first], head))
        return f"rank {first} is in {theirs}, this rank ({self.rank}) in {ours}"

    def _body(self, half: int, dtype: torch.dtype) -> Tensor:
        """[P, …]: the parts in a half, viewed as `dtype`."""
        bodies = self._bodies[half]
        if dtype not in bodies:
            with torch.inference_mode(False):
                bodies[dtype] = bodies[torch.uint8].view(dtype)
        return bodies[dtype]

    def _tiles(self, rows: int, width: int, dtype: torch.dtype) -> Iterator[tuple[range, range]]:
        """As many whole rows as fit a half, or parts of one row."""
        most = self._capacity // dtype.itemsize
        for lines in cut_into(rows, max(1, most // max(1, width))):
            for columns in cut_into(width, most):
                yield lines, columns


def check_counts(comm: Collective, counts: Sequence[int], own: int, what: str) -> None:
    if len(counts) != comm.size or counts[comm.rank] != own:
        raise ValueError(
            f"{what} of ranks {list(counts)}: give one number for each of {comm.size} ranks, "
            f"{own} for this one ({comm.rank})"
        )


def _planes(nbytes: int) -> list[PlaneSpec]:
    return [PlaneSpec("halves", (HALVES, HEAD_BYTES + round_up(nbytes, HEAD_BYTES)), torch.uint8)]


@lru_cache(maxsize=1024)
def _head(kind: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    """A description of a part; parts that differ have different descriptions."""
    text = f"{kind} {str(dtype).removeprefix('torch.')} {' '.join(map(str, sizes))}".encode()
    most = HEAD_BYTES - WORD
    if len(text) > most:
        text = text[: most - 9] + b" %08x" % zlib.crc32(text)
    return text.ljust(most, b"\0")


def _add(parts_PN: Tensor, out: Tensor) -> None:
    """Sums in rank order: floats in float32 at least, rounded once; integers in their own type."""
    for block in cut_into(len(out), BLOCK):
        first, *others = parts_PN[:, block.start : block.stop].unbind(0)
        target = out[block.start : block.stop]
        if out.is_floating_point() and out.dtype.itemsize < 4:
            total = first.float()
        else:
            total = target.copy_(first)
        for other in others:
            total += other
        if total is not target:
            target.copy_(total)


def cut_into(count: int, most: int) -> Iterator[range]:
    """Elements 0..count in pieces of at most `most`."""
    for start in range(0, count, most):
        yield range(start, min(count, start + most))


def _spans(counts: Sequence[int]) -> list[range]:
    return [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


def chosen_rows(rows: slice, count: int) -> range:
    start, stop, step = rows.indices(count)
    assert step == 1, f"rows {rows}"
    return range(start, max(start, stop))


def _common(left: range, right: range) -> range:
    start = max(left.start, right.start)
    return range(start, max(start, min(left.stop, right.stop)))


def _within(whole: range, part: range) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)
