"""How a router chooses among instances that could serve a request."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import Final
from weakref import WeakKeyDictionary

from moesaic.router.workers import Worker

# Characters of a block of the prefix index, and the blocks that it remembers of an instance.
BLOCK: Final = 64
MOST_BLOCKS: Final = 1 << 16
# An instance with a cached prefix is not chosen if it has so many more open requests than another.
MOST_AHEAD: Final = 16


class Policy(ABC):
    """`choose` gets the healthy instances, at least one, and the beginning of the prompt."""

    @abstractmethod
    def choose(self, workers: Sequence[Worker], text: str) -> Worker: ...


class Random(Policy):
    def choose(self, workers: Sequence[Worker], text: str) -> Worker:
        return random.choice(workers)


class RoundRobin(Policy):
    def __init__(self) -> None:
        self._turns = count()

    def choose(self, workers: Sequence[Worker], text: str) -> Worker:
        return workers[next(self._turns) % len(workers)]


class PowerOfTwo(Policy):
    def choose(self, workers: Sequence[Worker], text: str) -> Worker:
        two = random.sample(workers, min(2, len(workers)))
        return min(two, key=lambda worker: worker.requests)


class LeastTokens(Policy):
    """In turn, where several have as little to do."""

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, workers: Sequence[Worker], text: str) -> Worker:
        first = next(self._turns) % len(workers)
        order = [*workers[first:], *workers[:first]]
        return min(order, key=lambda worker: (worker.size, worker.requests))


class CacheAware(Policy):
    """Remembers the beginnings of the prompts that each instance got."""

    def __init__(self) -> None:
        self._known = WeakKeyDictionary[Worker, OrderedDict[int, None]]()
        self._rest = LeastTokens()

    def choose(self, workers: Sequence[Worker], text: str) -> Worker:
        keys = _blocks(text)
        least = min(worker.requests for worker in workers)
        near = [worker for worker in workers if worker.requests <= least + MOST_AHEAD]
        cached = [self._cached(worker, keys) for worker in near]
        most = max(cached)
        best = [worker for worker, found in zip(near, cached, strict=True) if found == most]
        chosen = self._rest.choose(best, text)
        known = self._known.setdefault(chosen, OrderedDict())
        for key in reversed(keys):  # a block is not forgotten before the ones behind it
            known[key] = None
            known.move_to_end(key)
        while len(known) > MOST_BLOCKS:
            known.popitem(last=False)
        return chosen

    def _cached(self, worker: Worker, keys: Sequence[int]) -> int:
        known = self._known.get(worker, OrderedDict())
        return next((number for number, key in enumerate(keys) if key not in known), len(keys))


def _blocks(text: str) -> list[int]:
    """The hash of the text up to the end of each block."""
    keys, key = [], 0
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        key = hash((key, text[start : start + BLOCK]))
        keys.append(key)
    return keys


POLICIES: Final[dict[str, type[Policy]]] = {
    "random": Random,
    "round_robin": RoundRobin,
    "cache_aware": CacheAware,
    "power_of_two": PowerOfTwo,
    "least_tokens": LeastTokens,
}
