"""The drafters by algorithm. A module that core/speculation.py names registers one of two kinds:

- a `Drafter`, which the host of a serving group's planner asks before each plan;
- a `DraftModel`, which computes drafts on all ranks at the end of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, TypeVar

from moesaic.config import ServerArgs
from moesaic.config.speculation import speculation_of
from moesaic.core.request import Request
from moesaic.core.speculation import Speculation

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner


class Drafter(Protocol):
    """Proposes tokens. Steps verify the proposals, so that they change no answer."""

    def propose(self, requests: Sequence[Request]) -> None:
        """Sets `drafts` of requests that decode; the host knows all their tokens."""


MakeDrafter = Callable[[ServerArgs, Speculation, "ModelRunner"], Drafter]
DRAFTERS: dict[str, MakeDrafter] = {}
Made = TypeVar("Made")


def register_drafter(algorithm: str, make: MakeDrafter) -> None:
    """`make` gets the flags and the runner of the rank that plans."""
    _register(DRAFTERS, algorithm, make)


def make_drafter(args: ServerArgs, runner: ModelRunner) -> Drafter | None:
    """The drafter of a planner; None if there are no drafts, or the ranks make them."""
    speculation = speculation_of(args)
    if speculation is None or speculation.makes.on_ranks:
        return None
    return _registered(DRAFTERS, speculation)(args, speculation, runner)


def _register(known: dict[str, Made], algorithm: str, make: Made) -> None:
    if algorithm in known:
        raise ValueError(f"a drafter for {algorithm} is registered already")
    known[algorithm] = make


def _registered(known: dict[str, Made], speculation: Speculation) -> Made:
    import_module(speculation.makes.module)
    return known[speculation.algorithm]
