"""The control page of a shared window: the signals, waits and operations of all ranks.

Words are aligned int64, which a memoryview loads and stores atomically. Every word has one writer,
except the wake lines and the first word; no two ranks' words share a cache line. For a rank of
another node a rank of this node writes (node_window.py).
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from moesaic.comm.errors import ConnectionLost, PeerLost, PeerTimeout
from moesaic.comm.supervise.control_page import RankStatus
from moesaic.comm.windows import futex
from moesaic.comm.windows.shared_memory import decode_text, encode_text, round_up
from moesaic.core.rank_state import RankState

WORD: Final = 8
LINE: Final = 8  # words of a cache line
TEXT_BYTES: Final = 128
# The ranks of a wait are a mask in one signed word.
MAX_RANKS: Final = 63

# A yield lets a peer run where ranks outnumber cores, and costs a microsecond elsewhere.
SPINS: Final = 12
# The longest sleep without a check: the cost of a lost wake, and the delay of a new epoch.
SLICE: Final = 0.02

# How long a rank whose connection to another is lost waits for its supervisor to say why, where the
# service goes on. A node that is silent is lost after 3 s.
PATIENCE: Final = 5.0

# The line of a sleeper. The ticket is 0 while it is awake, and is written last.
TICKET, CHANNEL, EPOCH, MASK = range(4)
# A wake line has the futex word, the last woken ticket, and whether the rank is lost.
WOKEN, LOST = 1, 2

# The first word: whether any rank is lost.
LOSSES: Final = 0

_lock = threading.Lock()


def fence() -> None:
    """Orders this rank's memory accesses before and after.

    Acquiring and releasing a free lock runs locked instructions, each a full fence on x86. On ARM
    they are an acquire and a release: that keeps data and signals in order, but a sleeper and its
    waker could miss each other, which costs one SLICE.
    """
    _lock.acquire()
    _lock.release()


def page_bytes(size: int, channels: int) -> int:
    return _base(size, size, channels) * WORD


class Signals:
    """Posts and waits over a control page that all ranks map; one thread of each uses it."""

    def __init__(
        self,
        page: memoryview,
        address: int,
        rank: int,
        size: int,
        channels: int,
        status: RankStatus | None = None,
    ) -> None:
        self._rank = rank
        self._status = status
        self.unreachable: dict[int, str] = {}
        """Ranks to which this one cannot send any more, and why: waits for them fail."""
        self.renews = False
        """Whether lost connections are made anew when a step is rolled back."""
        self._lost_since: float | None = None
        self._size = size
        self._bytes = page
        self._words = page.cast("q")
        self._words32 = page.cast("I")
        self._address = address
        posts = round_up(channels, LINE)
        self._posted = [_base(peer, size, channels) for peer in range(size)]
        self._sleeper = [base + posts for base in self._posted]
        self._wake_line = [base + LINE for base in self._sleeper]
        self._text = [(base + LINE) * WORD for base in self._wake_line]
        self._peers = [peer for peer in range(size) if peer != rank]
        self._operation = ""
        # A rank that is restarted goes on behind its predecessor, which may have slept.
        words, line = self._words, self._sleeper[rank]
        self._ticket = max(words[line + TICKET], words[self._wake_line[rank] + WOKEN])
        words[line + TICKET] = 0
        self._wakes = int.from_bytes(os.urandom(3), "little")

    def post(self, channel: int, epoch: int, operation: str) -> None:
        """Publishes `epoch` after all earlier writes, and wakes ranks whose wait is complete."""
        words = self._words
        mine = self._posted[self._rank] + channel
        assert epoch >= words[mine], f"epoch {epoch} after {words[mine]} in {operation!r}"
        self._note(operation)
        fence()
        words[mine] = epoch
        fence()
        for peer in self._peers:
            if words[self._sleeper[peer]]:
                self._wake_if_due(peer)

    def wait(
        self, channel: int, epoch: int, operation: str, ranks: Sequence[int], timeout: float
    ) -> None:
        self._note(operation)
        pending = [self._posted[rank] + channel for rank in ranks]
        if self._arrived(pending, epoch):
            return
        started = time.monotonic_ns()
        for _ in range(SPINS):
            os.sched_yield()
            if self._arrived(pending, epoch):
                if self._status is not None:
                    self._status.note_wait(time.monotonic_ns() - started)
                return
        if self._sleep(channel, epoch, ranks, pending, timeout):
            return
        missing = tuple(r for r in ranks if self._words[self._posted[r] + channel] < epoch)
        fence()
        # Empty if the last one has just arrived.
        if missing:
            seen = {rank: self._operation_of(rank) for rank in missing}
            raise PeerTimeout(missing, operation, timeout, seen)

    def posted(self, channel: int) -> int:
        """The last epoch that this rank has posted."""
        return self._words[self._posted[self._rank] + channel]

    def lose(self, reason: str) -> None:
        """Makes every wait for this rank raise PeerLost."""
        seen = self._operation_of(self._rank)
        self._note(f"{reason} (last seen: {seen!r})" if seen else reason)
        fence()
        self._words[self._wake_line[self._rank] + LOST] = 1
        self._words[LOSSES] = 1
        fence()
        for peer in self._peers:
            self._wake(peer)

    def find(self) -> None:
        """Undoes `lose`: another connection takes the place of the one that was lost."""
        self._words[self._wake_line[self._rank] + LOST] = 0

    def _arrived(self, pending: list[int], epoch: int) -> bool:
        """Removes the words that reached the epoch; returns whether none is left."""
        words = self._words
        while pending and words[pending[-1]] >= epoch:
            pending.pop()
        if self._status is not None and self._status.changed:
            self._status.check_epoch()
            # A complete wait returns: this rank's part of an abandoned step may be done.
            if pending:
                self._status.check()
        if pending:
            if words[LOSSES] or self.unreachable:
                self._check_lost(pending, epoch)
            return False
        fence()
        return True

    def _check_lost(self, pending: list[int], epoch: int) -> None:
        lost = {}
        for word in pending:
            rank = bisect_right(self._posted, word) - 1
            if self._words[self._wake_line[rank] + LOST]:
                fence()
                # Signals posted before the loss count.
                if self._words[word] < epoch:
                    lost[rank] = self._operation_of(rank)
            elif rank in self.unreachable:
                lost[rank] = self.unreachable[rank]
        if not lost:
            self._lost_since = None
            return
        error = PeerLost(tuple(sorted(lost)), self._operation, 0.0, lost)
        if not self.renews:
            raise error
        self._lost_since = self._lost_since or time.monotonic()
        if time.monotonic() - self._lost_since > PATIENCE:
            self._lost_since = None
            raise ConnectionLost(str(error))

    def _sleep(
        self, channel: int, epoch: int, ranks: Sequence[int], pending: list[int], timeout: float
    ) -> bool:
        """Sleeps until all have arrived; False after the timeout."""
        words, line, wake_line = self._words, self._sleeper[self._rank], self._wake_line[self._rank]
        words[line + CHANNEL] = channel
        words[line + EPOCH] = epoch
        words[line + MASK] = sum(1 << rank for rank in ranks)
        self._ticket += 1
        words[line + TICKET] = self._ticket
        deadline = time.monotonic() + timeout
        if self._status is not None:
            self._status.enter(RankState.WAITING, self._operation)
        try:
            while True:
                value = self._words32[2 * wake_line]
                # Between publishing the condition and the last check of it: a rank that posts after
                # the check sees the condition. A wake after `value` was read ends the sleep at
                # once.
                fence()
                if self._arrived(pending, epoch):
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                futex.wait(self._address + wake_line * WORD, value, min(left, SLICE))
        finally:
            words[line + TICKET] = 0
            if self._status is not None:
                self._status.enter(RankState.COMPUTING)

    def _wake_if_due(self, peer: int) -> None:
        """Wakes a sleeper whose whole condition holds, unless it has been woken already."""
        words, line = self._words, self._sleeper[peer]
        ticket, channel, epoch, mask = words[line : line + 4].tolist()
        if not ticket or words[self._wake_line[peer] + WOKEN] == ticket:
            return
        for rank, posted in enumerate(self._posted):
            if mask >> rank & 1 and words[posted + channel] < epoch:
                return
        # A hint only: a late writer of an old ticket causes one needless wake.
        words[self._wake_line[peer] + WOKEN] = ticket
        self._wake(peer)

    def _wake(self, peer: int) -> None:
        # No two wakes write the same value, so that every sleeper sees a change.
        self._wakes += 1
        value = (self._wakes * self._size + self._rank) & 0xFFFFFFFF
        self._words32[2 * self._wake_line[peer]] = value
        futex.wake(self._address + self._wake_line[peer] * WORD)

    def _note(self, operation: str) -> None:
        if operation != self._operation:
            start = self._text[self._rank]
            self._bytes[start : start + TEXT_BYTES] = encode_text(operation, TEXT_BYTES)
            self._operation = operation

    def _operation_of(self, rank: int) -> str:
        return decode_text(self._bytes, self._text[rank], TEXT_BYTES)


def _base(rank: int, size: int, channels: int) -> int:
    """The first word of a rank's block: its posts, sleeper line, wake line and text."""
    return LINE + rank * (round_up(channels, LINE) + 2 * LINE + TEXT_BYTES // WORD)
