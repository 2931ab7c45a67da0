"""Passes hidden states and messages from stage to stage, and replies from the last to the first.

T tokens · H hidden.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import torch
from torch import Tensor

from moesaic.comm.collectives.group import Peers
from moesaic.comm.errors import PeerLost, PeerTimeout
from moesaic.comm.lifecycle import Membership, Participant
from moesaic.comm.windows.factory import create_window
from moesaic.comm.windows.shared_memory import round_up
from moesaic.comm.windows.window import PlaneSpec, first_epoch, window_bytes

# The header of a message in its slot, in words of PipeWord.
HEAD_BYTES: Final = 64
NO_TENSOR: Final = -1
# How long the first stage waits for a free slot before it looks for replies.
FIRST_REPLY_CHECK: Final = 0.002
LAST_REPLY_CHECK: Final = 0.25


class PipeWord(IntEnum):
    """LEFT: bytes of the message from this slot on. TOKENS: rows of its tensor."""

    LEFT = 0
    TOKENS = 1


class PipeSignal(IntEnum):
    """SENT: slots that a stage has filled. TAKEN: slots of the previous stage that it emptied."""

    SENT = 0
    TAKEN = 1


@dataclass(frozen=True, slots=True)
class PipeSpec:
    """`depth`: slots that a stage may fill ahead; a message may take several of them."""

    max_tokens: int
    hidden_size: int
    dtype: torch.dtype
    message_bytes: int
    depth: int

    def __post_init__(self) -> None:
        sizes = (self.max_tokens, self.hidden_size, self.message_bytes, self.depth)
        if min(sizes) < 1:
            raise ValueError(f"{self}: give sizes of 1 or more")

    def planes(self) -> list[PlaneSpec]:
        rows = (self.depth, self.max_tokens, self.hidden_size)
        length = round_up(self.message_bytes, HEAD_BYTES)
        return [
            PlaneSpec("texts", (self.depth, HEAD_BYTES + length), torch.uint8),
            PlaneSpec("tensors", rows, self.dtype),
        ]

    def window_bytes(self, size: int) -> int:
        """Shared memory of a pipe of `size` stages, all of them together."""
        return window_bytes(self.planes(), size, len(PipeSignal))


class Pipe(Participant):
    """The ranks of a group are the stages in order. Each fills its own slots in turn, which the
    next one empties; those of the last stage hold replies to the first.

    A stage that has filled `depth` slots waits for the next one. While the first stage waits, it
    empties those of the last: else all stages could wait for each other.
    """

    def __init__(self, group: Peers, spec: PipeSpec, timeout: float) -> None:
        """All stages call it with the same spec."""
        if group.size < 2:
            raise ValueError(f"a pipe of {group.size} stage: nothing travels, so make none")
        self.spec, self.rank, self.size = spec, group.rank, group.size
        self.is_first, self.is_last = self.rank == 0, self.rank == self.size - 1
        self._next, self._previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self._window = create_window(group, spec.planes(), timeout, len(PipeSignal))
        self._texts = self._window.plane("texts")
        self._tensors = self._window.plane("tensors")
        self._outbox = self._texts.numpy()
        self._inbox = self._window.plane("texts", self._previous).numpy()
        self._inbox_tensors = self._window.plane("tensors", self._previous)
        self._room = self._outbox.shape[1] - HEAD_BYTES
        self._start = self._sent = self._taken = 0
        self._pieces: list[bytes] = []
        self._arrived: deque[tuple[bytes, Tensor | None]] = deque()
        group.register(self)

    def send(self, message: bytes, x_TH: Tensor | None = None) -> None:
        """Sends to the next stage; waits for a free slot."""
        assert not self.is_last, "the last stage has no next stage: use reply"
        if x_TH is not None:
            self._check(x_TH)
        self._put(message, x_TH, "step")

    def receive(self, timeout: float | None = None) -> tuple[bytes, Tensor | None]:
        """The next message of the previous stage. `timeout`: the pipe's own if None."""
        assert not self.is_first, "the first stage has no previous stage: use take_reply"
        return self._take("step", timeout)

    def reply(self, message: bytes) -> None:
        assert self.is_last, f"stage {self.rank} of {self.size}: only the last one replies"
        self._put(message, None, "reply")

    def take_reply(self, timeout: float | None = None) -> bytes:
        assert self.is_first, f"stage {self.rank} of {self.size}: replies go to the first"
        return self._take("reply", timeout)[0]

    def restart(self, membership: Membership) -> None:
        self._window.forget()
        self._start = self._sent = self._taken = first_epoch(membership.generation)
        self._pieces = []
        self._arrived.clear()

    def _put(self, message: bytes, x_TH: Tensor | None, what: str) -> None:
        """Writes a message to as many slots as it takes; the tensor goes with the last."""
        route = f"{what} from stage {self.rank} to stage {self._next}"
        starts = range(0, max(1, len(message)), self._room)
        for start in starts:
            if self._sent - self._start >= self.spec.depth:
                self._await_free(self._sent + 1 - self.spec.depth, f"take {route}")
            self._fill(message, start, x_TH if start == starts[-1] else None, f"send {route}")

    def _await_free(self, taken: int, operation: str) -> None:
        if not self.is_first:
            self._window.wait(PipeSignal.TAKEN, taken, operation, (self._next,))
            return
        seconds, pause = self._window.timeout, FIRST_REPLY_CHECK
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._window.wait(PipeSignal.TAKEN, taken, operation, (self._next,), pause)
                return
            except PeerLost:
                raise
            except PeerTimeout as late:
                if time.monotonic() >= deadline:
                    raise PeerTimeout(late.missing, operation, seconds, late.last_seen) from None
            pause = FIRST_REPLY_CHECK if self._empty_all() else min(2 * pause, LAST_REPLY_CHECK)

    def _empty_all(self) -> bool:
        """On the first stage: takes all replies so far, and returns whether there were any."""
        before = self._taken
        try:
            while True:
                self._empty("reply", timeout=0.0)
        except PeerLost:
            raise
        except PeerTimeout:
            return self._taken > before

    def _fill(self, message: bytes, start: int, x_TH: Tensor | None, operation: str) -> None:
        slot = self._sent % self.spec.depth
        piece = message[start : start + self._room]
        line = self._outbox[slot]
        words = line[:HEAD_BYTES].view(np.int64)
        words[PipeWord.LEFT] = len(message) - start
        words[PipeWord.TOKENS] = NO_TENSOR if x_TH is None else len(x_TH)
        line[HEAD_BYTES : HEAD_BYTES + len(piece)] = np.frombuffer(piece, np.uint8)
        self._window.touch(self._texts[slot, : HEAD_BYTES + len(piece)], (self._next,))
        if x_TH is not None and len(x_TH):
            place = self._tensors[slot, : len(x_TH)].copy_(x_TH.detach())
            self._window.touch(place, (self._next,))
        self._sent += 1
        self._window.signal(PipeSignal.SENT, self._sent, operation)

    def _take(self, what: str, timeout: float | None) -> tuple[bytes, Tensor | None]:
        while not self._arrived:
            self._empty(what, timeout)
        return self._arrived.popleft()

    def _empty(self, what: str, timeout: float | None) -> None:
        """Takes the next slot; its last piece completes a message."""
        route = f"{what} from stage {self._previous} to stage {self.rank}"
        self._window.wait(
            PipeSignal.SENT, self._taken + 1, f"send {route}", (self._previous,), timeout
        )
        slot = self._taken % self.spec.depth
        line = self._inbox[slot]
        words = line[:HEAD_BYTES].view(np.int64)
        left, tokens = int(words[PipeWord.LEFT]), int(words[PipeWord.TOKENS])
        self._pieces.append(line[HEAD_BYTES : HEAD_BYTES + min(left, self._room)].tobytes())
        x_TH = None if tokens == NO_TENSOR else self._inbox_tensors[slot, :tokens].clone()
        self._taken += 1
        self._window.signal(PipeSignal.TAKEN, self._taken, f"take {route}")
        if left <= self._room:
            self._arrived.append((b"".join(self._pieces), x_TH))
            self._pieces = []

    def _check(self, x_TH: Tensor) -> None:
        spec = self.spec
        fits = x_TH.ndim == 2 and x_TH.shape[1] == spec.hidden_size and x_TH.dtype == spec.dtype
        if not fits or len(x_TH) > spec.max_tokens:
            raise ValueError(
                f"hidden states {list(x_TH.shape)} {x_TH.dtype}: this pipe carries up to "
                f"[{spec.max_tokens}, {spec.hidden_size}] {spec.dtype}"
            )
