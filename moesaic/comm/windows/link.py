"""An emulated link between ranks of one host: a wait for a signal returns when a network of the
link's speed would have delivered what its rank carried before it. P ranks.

A rank's link is one queue for all channels of a window. With a signal it publishes when the
transfer left, when it is due, and how many bytes of it are for each rank. A rank that waits sleeps
until the latest due time, or until all bytes that are for it could have passed its own link, if
that is later (kernels/link.py does the same on a GPU). Processes of one host have one clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from moesaic.comm.supervise.control_page import RankStatus
from moesaic.comm.windows.signals import SLICE
from moesaic.core.link import EmulatedLink

START, DUE, BYTES = 0, 1, 2
PLANE: Final = "emulated link"


def words_shape(channels: int, size: int) -> tuple[int, ...]:
    """Of each rank: for each channel when the last transfer left, when it is due, and the bytes for
    each rank."""
    return channels, BYTES + size


class HostLink:
    """The link of one rank."""

    def __init__(
        self, link: EmulatedLink, words: Tensor, rank: int, status: RankStatus | None = None
    ) -> None:
        """`words`: [P, channels, 2 + P] int64, shared by all ranks."""
        self.link = link
        self._words = words.numpy()
        self._rank, self._status = rank, status
        self._carried = [0] * len(words)
        self._free = 0

    def carry(self, rank: int, nbytes: int) -> None:
        """Counts bytes that the next signal sends to a rank."""
        if rank != self._rank:
            self._carried[rank] += nbytes

    def forget(self) -> None:
        self._carried = [0] * len(self._carried)

    def book(self, channel: int) -> None:
        """Puts what was carried behind what is on the link. Call it before the signal is posted."""
        begin = max(time.monotonic_ns(), self._free)
        self._free = begin + self.link.ns(sum(self._carried))
        words = self._words[self._rank, channel]
        words[START], words[DUE] = begin, self._free + self.link.latency_ns
        words[BYTES:] = self._carried
        self.forget()

    def due_ns(self, channel: int, ranks: Sequence[int]) -> int:
        """When all that these ranks signalled has arrived; their signals have been seen."""
        others = [rank for rank in ranks if rank != self._rank]
        if not others:
            return 0
        words = self._words[others, channel]
        nbytes = int(words[:, BYTES + self._rank].sum())
        passed = int(words[:, START].min()) + self.link.ns(nbytes) + self.link.latency_ns
        return max(int(words[:, DUE].max()), passed)

    def sleep(self, channel: int, ranks: Sequence[int]) -> None:
        """Waits without a processor; a change of membership ends it with an error."""
        due = self.due_ns(channel, ranks)
        while (left := due - time.monotonic_ns()) > 0:
            time.sleep(min(left * 1e-9, SLICE))
            if self._status is not None and self._status.changed:
                self._status.check_epoch()
                self._status.check()
