"""Finds the request that breaks a step: requests of a failed step run again in smaller sets."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.core.request import Request


class Quarantine:
    """Sets of suspects, each of which runs in a step of its own. A set whose step fails is cut in
    two, until a set of one fails: that request is the culprit. n suspects cost at most 2 n - 1
    steps, and one culprit among them about 2 log2 n."""

    def __init__(self) -> None:
        self._sets: list[list[Request]] = []

    def __len__(self) -> int:
        """Sets that have not run yet."""
        return len(self._sets)

    def report_failure(self, suspects: Sequence[Request], *, alone: bool) -> Request | None:
        """The culprit, if known, of a failed step; `alone`: it had no other group's requests."""
        if alone and len(suspects) == 1:
            return suspects[0]
        if alone and suspects:
            self._sets += reversed(_cut(suspects))
        elif suspects:
            self._sets.append(list(suspects))
        return None

    def next_suspects(self) -> list[Request]:
        return self._sets.pop()

    def put_back(self, suspects: list[Request]) -> None:
        """The step had no room for these."""
        if suspects:
            self._sets.append(suspects)

    def clear(self) -> None:
        self._sets.clear()


def _cut(suspects: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Requests that already decode are less likely to be the culprit than new ones."""
    by_age = sorted(suspects, key=lambda request: request.request_no)
    decoding = [request for request in by_age if request.is_decoding]
    if 0 < len(decoding) < len(by_age):
        return decoding, [request for request in by_age if not request.is_decoding]
    half = len(by_age) // 2
    return by_age[:half], by_age[half:]
