"""Asks the ranks to move experts, and waits until they have."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from moesaic.engine.frontend.queries import QueryTimeout, RankAnswers

POLL_SECONDS: Final = 0.05
REBALANCE_SECONDS: Final = 60.0


class NothingMoves(ValueError):
    """The engine was started without --enable-eplb."""


@dataclass(frozen=True)
class Rebalances:
    """`leaders`: the first rank of each stage of each copy of the model, which knows what the
    ranks of its stage move."""

    query: Callable[[str, Mapping[str, Any]], RankAnswers]
    leaders: Sequence[int]

    def states(self, dry_run: bool | None = None) -> list[dict[str, Any]]:
        """The state of each stage that has experts, of each copy of the model. With `dry_run` it
        asks for a rebalance."""
        options = {} if dry_run is None else {"dry_run": dry_run}
        replies = self.query("rebalance" if options else "rebalance_state", options).replies
        late = [rank for rank in self.leaders if rank not in replies]
        if late:
            raise QueryTimeout(f"ranks {late} did not tell in time what they move: try again")
        states = [dict(replies[rank].value) for rank in self.leaders if replies[rank].value]
        if not states:
            raise NothingMoves(
                "experts keep their places: start with --enable-eplb, on 2 expert-parallel ranks "
                "or more"
            )
        return states

    def run(self, dry_run: bool, seconds: float) -> list[dict[str, Any]]:
        """Returns the states when all have ended what was asked for, with its `result`. When the
        time is over first, the `result` of some is None."""
        if not isinstance(dry_run, bool):
            raise ValueError(f"dry_run is {dry_run!r}: give True or False")
        if not seconds >= 0:
            raise ValueError(f"timeout is {seconds!r}: give seconds, 0 or more")
        deadline = time.monotonic() + seconds
        states = self.states(dry_run)
        asked = [state.pop("asked") for state in states]
        while not all(map(_result, states, asked)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            states = self.states()
        return [
            state | {"asked": number, "result": _result(state, number)}
            for state, number in zip(states, asked, strict=True)
        ]


def _result(state: Mapping[str, Any], number: int) -> dict[str, Any] | None:
    """What the rebalance with this number did, if it has ended."""
    found: list[dict[str, Any]] = [one for one in state["results"] if one["number"] == number]
    return found[0] if found else None
