"""Errors between ranks; each names the rank at fault where it is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class PeerTimeout(RuntimeError):
    """Some ranks did not take part in an operation. `missing` is empty if every rank took part and
    the connection broke anyway; the cause then says more."""

    def __init__(
        self,
        missing: tuple[int, ...],
        operation: str,
        seconds: float,
        last_seen: Mapping[int, str] | None = None,
    ) -> None:
        # All of them in args, so that the error can be pickled.
        super().__init__(missing, operation, seconds, last_seen)
        self.missing = missing
        self.operation = operation
        self.seconds = seconds
        self.last_seen = dict(last_seen or {})

    def among(self, members: Sequence[int]) -> PeerTimeout:
        """The same error of a group with these ranks of the service."""
        seen = {members[rank]: text for rank, text in self.last_seen.items()}
        missing = tuple(members[rank] for rank in self.missing)
        return type(self)(missing, self.operation, self.seconds, seen)

    def __str__(self) -> str:
        if not self.missing:
            return (
                f"{self.operation!r} failed after {self.seconds:.1f} s although every rank reached "
                "it: a peer gave up earlier, or a connection broke"
            )
        return "; ".join(self._describe(rank) for rank in self.missing)

    def _describe(self, rank: int) -> str:
        seen = self.last_seen.get(rank)
        where = f"last seen: {seen!r}" if seen else "not seen before"
        return f"rank {rank} did not reach {self.operation!r} within {self.seconds:.1f} s ({where})"


class PeerLost(PeerTimeout):
    """Ranks of other nodes cannot be reached any more; `last_seen` says why."""

    def _describe(self, rank: int) -> str:
        return f"rank {rank} is lost in {self.operation!r}: {self.last_seen.get(rank)}"


class OutOfStep(RuntimeError):
    """Ranks are not in the same operation, or some went on without this one."""


class WindowAborted(RuntimeError):
    """A window or a collective was aborted: the step in progress is abandoned."""


class ConnectionLost(RuntimeError):
    """A connection between ranks is lost although they live: the step fails, and is tried again."""


class StateLost(BaseException):
    """A rank was interrupted where it changes what it knows of its requests: another process
    continues them, so that nothing in this one but its end may catch it. `request_no`: the request
    that may be the cause; -1: none."""

    def __init__(self, message: str, request_no: int = -1) -> None:
        super().__init__(message, request_no)
        self.request_no = request_no

    def __str__(self) -> str:
        return str(self.args[0])


class RankFailed(RuntimeError):
    """A function raised, died or timed out on some local ranks. `failures`: the reasons in
    the order of detection, the likely cause first. `results`: what the other ranks returned."""

    def __init__(self, failures: Mapping[int, str], results: Mapping[int, Any]) -> None:
        super().__init__("\n".join(f"rank {rank}: {why}" for rank, why in failures.items()))
        self.failures = dict(failures)
        self.results = dict(results)
