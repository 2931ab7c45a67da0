"""The control page of a node: membership, and the status of each rank.

The node's supervisor creates it; ranks map it. Only the supervisor writes the header: the epoch,
the mask of live ranks, and the reason of the last change. Each rank writes its own status, except
for the generation, by which the supervisor rolls it back. Words are aligned int64, which a
memoryview loads and stores atomically. No torch here.
"""

from __future__ import annotations

import mmap
import time
from typing import Final

from moesaic.comm.windows.shared_memory import create_memory, decode_text, encode_text, map_memory
from moesaic.core.rank_state import RankSnapshot, RankState
from moesaic.observe.spans import SpanKind, Spans

MEMORY: Final = "moesaic-control"
WORD: Final = 8
TEXT_BYTES: Final = 256
LINE_BYTES: Final = 64
HEAD_BYTES: Final = LINE_BYTES + TEXT_BYTES
STATUS_BYTES: Final = LINE_BYTES + TEXT_BYTES
MAGIC: Final = 0x4D4F455341494331

# Words of the header.
MAGIC_WORD, EPOCH, LIVE = range(3)
# Words of a status.
BEAT, STEP, STATE, SINCE, PROGRESS, COMPUTED, WAITED, GENERATION = range(8)
# The words that sum up the time in a state.
TOTALS: Final[dict[int, int]] = {RankState.COMPUTING: COMPUTED, RankState.WAITING: WAITED}


class EpochChanged(RuntimeError):
    """The supervisor changed the membership: the step in progress is abandoned."""

    def __init__(self, epoch: int, reason: str) -> None:
        super().__init__(epoch, reason)  # all arguments, so that it can be pickled
        self.epoch, self.reason = epoch, reason

    def __str__(self) -> str:
        return self.reason


class StepRolledBack(RuntimeError):
    """A rank could not finish a step: its replica abandons it and enters the next generation."""

    def __init__(self, generation: int) -> None:
        super().__init__(generation)
        self.generation = generation

    def __str__(self) -> str:
        return f"rolled back to generation {self.generation}"


class ControlPage:
    """`first_rank` is the first rank of the node."""

    def __init__(self, memory: mmap.mmap, first_rank: int) -> None:
        self._memory = memory
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("q")
        self.first_rank = first_rank
        self.num_ranks = (len(memory) - HEAD_BYTES) // STATUS_BYTES

    @classmethod
    def create(cls, num_ranks: int, first_rank: int = 0) -> tuple[ControlPage, int]:
        """The page, and the descriptor by which other processes open it: /proc/PID/fd/N."""
        length = HEAD_BYTES + num_ranks * STATUS_BYTES
        descriptor = create_memory(MEMORY, length)
        page = cls(mmap.mmap(descriptor, length), first_rank)
        page._words[EPOCH] = 1
        page._words[LIVE] = (1 << num_ranks) - 1
        page._words[MAGIC_WORD] = MAGIC
        return page, descriptor

    @classmethod
    def open(cls, path: str, num_ranks: int, first_rank: int = 0) -> ControlPage:
        page = cls(map_memory(path, MEMORY, HEAD_BYTES + num_ranks * STATUS_BYTES), first_rank)
        if page._words[MAGIC_WORD] != MAGIC:
            raise ValueError(f"{path} is not a control page")
        return page

    @property
    def epoch(self) -> int:
        return self._words[EPOCH]

    @property
    def live(self) -> int:
        """The mask of this node's live ranks, the first one in bit 0."""
        return self._words[LIVE]

    @property
    def reason(self) -> str:
        return decode_text(self._bytes, LINE_BYTES, TEXT_BYTES)

    def change(self, live: int, reason: str) -> int:
        """Declares a new epoch: every wait of every rank raises EpochChanged. Supervisor only."""
        self._write(LINE_BYTES, reason)
        self._words[LIVE] = live
        self._words[EPOCH] += 1
        return self._words[EPOCH]

    def note_live(self, live: int) -> None:
        """Changes the mask, without an epoch that ends all waits. Supervisor only."""
        self._words[LIVE] = live

    def clear(self, rank: int) -> None:
        """Forgets a rank whose process is gone. Supervisor only."""
        base = self._base(rank - self.first_rank)
        self._bytes[base : base + STATUS_BYTES] = bytes(STATUS_BYTES)

    def roll_back(self, rank: int, generation: int) -> None:
        """Pending waits of this rank raise StepRolledBack until it adopts it. Supervisor only."""
        self._words[self._base(rank - self.first_rank) // WORD + GENERATION] = generation

    def status(self, rank: int) -> RankStatus:
        return RankStatus(self, rank - self.first_rank)

    def snapshot(self, rank: int) -> RankSnapshot:
        base = self._base(rank - self.first_rank)
        words = self._words[base // WORD : base // WORD + 7].tolist()
        now = time.monotonic_ns()
        return RankSnapshot(
            state=RankState(words[STATE]),
            step=words[STEP],
            operation=decode_text(self._bytes, base + LINE_BYTES, TEXT_BYTES),
            beat_age=(now - words[BEAT]) / 1e9,
            state_age=(now - words[SINCE]) / 1e9,
            progress=words[PROGRESS],
            computed=words[COMPUTED] / 1e9,
            waited=words[WAITED] / 1e9,
        )

    def _base(self, number: int) -> int:
        assert 0 <= number < self.num_ranks, f"rank {number} of {self.num_ranks} on this node"
        return HEAD_BYTES + number * STATUS_BYTES

    def _write(self, start: int, text: str) -> None:
        self._bytes[start : start + TEXT_BYTES] = encode_text(text, TEXT_BYTES)


class RankStatus:
    """A rank's own line. A heartbeat thread calls `beat`, the main thread everything else."""

    def __init__(self, page: ControlPage, number: int) -> None:
        self._page, self._start = page, page._base(number)
        self._first = self._start // WORD
        self._words = page._words
        self.epoch = page.epoch
        """The epoch that this rank has adopted."""
        self.generation = self._words[self._first + GENERATION]
        """The generation of steps that this rank has adopted."""
        self.spans = Spans()
        """Where waits are recorded."""

    def beat(self) -> None:
        self._words[self._first + BEAT] = time.monotonic_ns()

    def begin_step(self, step: int) -> None:
        self._words[self._first + STEP] = step
        self.enter(RankState.COMPUTING, "begin a step")

    def enter(self, state: RankState, operation: str | None = None) -> None:
        words, first = self._words, self._first
        if operation is not None:
            self._page._write(self._start + LINE_BYTES, operation)
        now = time.monotonic_ns()
        before = TOTALS.get(words[first + STATE])
        if before is not None:
            words[first + before] += now - words[first + SINCE]
            if before == WAITED and self.spans.on:
                self.spans.add(SpanKind.WAIT, words[first + SINCE], end=now)
        words[first + STATE] = state
        words[first + SINCE] = now
        words[first + PROGRESS] += 1

    def note_wait(self, nanoseconds: int) -> None:
        """Counts a wait that was too short to enter a state for it."""
        self._words[self._first + WAITED] += nanoseconds
        self._words[self._first + COMPUTED] -= nanoseconds
        if self.spans.on:
            now = time.monotonic_ns()
            self.spans.add(SpanKind.WAIT, now - nanoseconds, end=now)

    @property
    def totals(self) -> tuple[float, float]:
        """Seconds that this rank has computed and waited."""
        words, first = self._words, self._first
        seconds = {COMPUTED: words[first + COMPUTED], WAITED: words[first + WAITED]}
        doing = TOTALS.get(words[first + STATE])
        if doing is not None:
            seconds[doing] += time.monotonic_ns() - words[first + SINCE]
        return seconds[COMPUTED] / 1e9, seconds[WAITED] / 1e9

    @property
    def changed(self) -> bool:
        """Whether this rank has yet to adopt an epoch or a generation."""
        words = self._words
        return words[EPOCH] != self.epoch or words[self._first + GENERATION] != self.generation

    def check(self) -> None:
        self.check_epoch()
        if self.changed:
            raise StepRolledBack(self._words[self._first + GENERATION])

    def check_epoch(self) -> None:
        """For operations that must complete in an abandoned step, too."""
        if self._words[EPOCH] != self.epoch:
            raise EpochChanged(self._page.epoch, self._page.reason)
