"""The exchanges of ranks that create a window together: what fails on one is an error on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from moesaic.comm.collectives.group import Peers

OK, FAILED = b"+", b"-"
MIB: Final = 1 << 20

T = TypeVar("T")


class WindowAgreement:
    """Every message begins with a success mark. A rank that fails says so in its next exchange and
    leaves; the others see it in the same exchange and leave too."""

    def __init__(self, group: Peers, nbytes: int) -> None:
        """`nbytes`: what each rank allocates, for errors."""
        self._group, self._nbytes = group, nbytes
        self._refusal: Exception | None = None

    def exchange(self, data: bytes, mark: bytes = OK) -> list[bytes]:
        """The data of each rank; raises if any rank failed or is missing."""
        try:
            parts = self._group.all_gather_bytes(mark + data, "create a device window")
            failures = [(r, part[1:]) for r, part in enumerate(parts) if part[:1] == FAILED]
            if failures:
                text = "; ".join(f"rank {r}: {why.decode()}" for r, why in failures)
                size = f"{self._nbytes / MIB:.1f} MiB a rank"
                raise RuntimeError(f"no window of {size} on the GPU: {text}")
        except Exception as error:
            self._refusal = error
            raise
        return [part[1:] for part in parts]

    def agree(self, planes: str) -> None:
        """Checks that all ranks ask for the same planes."""
        parts = self.exchange(planes.encode())
        different = [rank for rank, part in enumerate(parts) if part != parts[0]]
        if different:
            raise RuntimeError(f"no window: ranks {different} ask for other planes than rank 0")

    def part(self, work: Callable[[], T]) -> T:
        """Runs this rank's own part; all ranks learn of its failure."""
        try:
            return work()
        except Exception as error:
            # An exchange inside of it raised: all ranks know it.
            if self._refusal is not None:
                raise self._refusal from error
            self.exchange(_reason(error).encode(), FAILED)
            raise


def _reason(error: BaseException) -> str:
    """The first line: torch appends a stack of C++ calls."""
    return (str(error) or type(error).__name__).splitlines()[0]
