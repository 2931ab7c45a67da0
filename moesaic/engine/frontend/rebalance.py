"""Asks the ranks to move experts, and waits until they have."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from moesaic.engine.frontend.queries import RankAnswers

POLL_SECONDS: Final = 0.05
REBALANCE_SECONDS: Final = 60.0

Query = Callable[[str, Mapping[str, Any]], RankAnswers]


class NothingMoves(ValueError):
    """The engine was started without --enable-eplb."""


def rebalance_states(query: Query, **options: bool) -> list[dict[str, Any]]:
    """Of each copy of the model, as its first rank knows it."""
    answers = query("rebalance" if options else "rebalance_state", options)
    states = [answers.replies[rank].value for rank in sorted(answers.replies)]
    if not any(states):
        raise NothingMoves(
            "experts keep their places: start with --enable-eplb, on 2 expert-parallel ranks or "
            "more"
        )
    return [
        {key: value for key, value in state.items() if key != "is_leader"}
        for state in states
        if state and state["is_leader"]
    ]


def rebalance(query: Query, dry_run: bool, seconds: float) -> list[dict[str, Any]]:
    """Returns the states when all copies of the model have ended what was asked for, or when the
    time is over: then some still have it `running`."""
    deadline = time.monotonic() + seconds
    states = rebalance_states(query, dry_run=dry_run)
    wanted = [state["asked"] for state in states]
    while not all(map(_has_ended, states, wanted)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        states = rebalance_states(query)
    for state, number in zip(states, wanted, strict=True):
        state["asked"] = number
    return states


def _has_ended(state: Mapping[str, Any], number: int) -> bool:
    return state["last"] is not None and state["last"]["number"] >= number
