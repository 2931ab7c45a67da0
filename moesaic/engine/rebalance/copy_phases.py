"""The phases in which experts are copied. On a GPU the copies run beside steps: a phase is called
in every step until they have ended."""

from __future__ import annotations

from collections.abc import Iterator

from moesaic.engine.rebalance.expert_copies import ChunkCopy, CopyBuffers


class WritePhase:
    """Fills the outbox with the next part of this rank's stream."""

    def __init__(self, copy: ChunkCopy, buffers: CopyBuffers, round: int) -> None:
        self._copy, self._buffers, self._round = copy, buffers, round
        self._used = -1

    def __call__(self, number: int) -> bool:
        if self._used < 0:
            self._buffers.start(self._write)
            self._buffers.publish(number, self._used)
        return self._buffers.is_done

    def _write(self) -> None:
        self._used = self._copy.write(self._round)


class ReadPhase:
    """Stages what the outboxes of the other ranks hold, at most an outbox's bytes in a step."""

    def __init__(self, copy: ChunkCopy, buffers: CopyBuffers, round: int) -> None:
        self._copy, self._buffers, self._round = copy, buffers, round
        self._pieces: Iterator[int] | None = None
        self._has_more = True

    def __call__(self, number: int) -> bool:
        if self._pieces is None:
            self._buffers.await_published(number - 1)
            self._pieces = self._copy.read(self._round)
        if self._has_more and self._buffers.is_done:
            self._buffers.start(self._read)
        return not self._has_more and self._buffers.is_done

    def _read(self) -> None:
        assert self._pieces is not None
        room = self._buffers.sizes.outbox
        for nbytes in self._pieces:
            room -= nbytes
            if room <= 0:
                return
        self._has_more = False


class ComparePhase:
    """Compares what has arrived with what was sent."""

    def __init__(self, copy: ChunkCopy, buffers: CopyBuffers) -> None:
        self._copy, self._buffers = copy, buffers
        self._has_begun = False

    def __call__(self, number: int) -> bool:
        if not self._has_begun:
            self._has_begun = True
            self._buffers.start(self._copy.compare)
        if not self._buffers.is_done:
            return False
        self._copy.check()
        return True
