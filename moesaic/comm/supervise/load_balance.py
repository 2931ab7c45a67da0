"""Assigns requests to serving groups by what the groups have to do, and by cached prefixes.

The supervisor knows the open requests of each group and the tokens they emitted, but neither what
the group's scheduler does nor what its cache holds. Which prefixes are cached is estimated from the
requests that the group got; a wrong estimate costs time and changes no answer.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moesaic.core.request import NewRequest

METHODS: Final = ("auto", "round_robin", "total_requests", "total_tokens")
# The pages that the index remembers, over all groups.
MAX_PAGES: Final = 1 << 18
# What a request costs its group besides computing its prompt, in prompt tokens that take as long:
# its decode steps, and the attention of these steps to the tokens that it holds.
DECODE_TOKENS: Final = 128
HELD_SHARE: Final = 0.125


class PrefixIndex:
    """The pages of tokens that each group has probably cached, the least recently used ones first.
    A page is known by the hash of the sequence that it ends."""

    def __init__(self, num_groups: int, page_size: int) -> None:
        self.page_size = page_size
        self.limit = MAX_PAGES // num_groups
        self._pages = [OrderedDict[int, None]() for _ in range(num_groups)]

    def extend(self, keys: list[int], token_ids: Sequence[int], namespace: str) -> None:
        """Appends the keys of the full pages of a sequence whose first pages have `keys`."""
        size = 8 * self.page_size
        data = array("q", token_ids[len(keys) * self.page_size :]).tobytes()
        key = keys[-1] if keys else hash(namespace)
        for start in range(0, len(data) - size + 1, size):
            key = hash((key, data[start : start + size]))
            keys.append(key)

    def cached(self, group: int, keys: Sequence[int]) -> int:
        """The tokens of the longest cached prefix."""
        pages = self._pages[group]
        known = next((number for number, key in enumerate(keys) if key not in pages), len(keys))
        return known * self.page_size

    def add(self, group: int, keys: Sequence[int]) -> None:
        """Later pages count as used earlier, so that a page is never dropped before them."""
        pages = self._pages[group]
        for key in reversed(keys):
            pages[key] = None
            pages.move_to_end(key)
        while len(pages) > self.limit:
            pages.popitem(last=False)

    def clear(self) -> None:
        for pages in self._pages:
            pages.clear()

    def clear_group(self, group: int) -> None:
        self._pages[group].clear()


@dataclass(slots=True)
class AssignedRequest:
    request: NewRequest
    group: int
    tokens: int
    """Its prompt and what it emitted."""
    uncomputed: int
    """The tokens to compute before the next one is emitted; 0 from then on."""
    keys: list[int]
    """Those of the prefix index."""


class LoadBalancer:
    """Ties are broken in turn, so equal arrivals are assigned alike. `page_size`: that of the
    groups' prefix caches, 0 if they have none."""

    def __init__(self, num_groups: int, method: str, page_size: int = 0) -> None:
        self.requests = [0] * num_groups
        """The open requests of each group."""
        self.tokens = [0] * num_groups
        """The tokens of each group's open requests, prompts included."""
        self.uncomputed = [0] * num_groups
        """Those of them that are computed before a request's next token."""
        self._method = method
        self._away: set[int] = set()
        """Groups that serve nothing now."""
        self._next_group = 0
        self._open: dict[int, AssignedRequest] = {}
        indexed = method == "auto" and page_size > 0 and num_groups > 1
        self._index = PrefixIndex(num_groups, page_size) if indexed else None

    def assign(self, requests: Sequence[NewRequest]) -> list[int]:
        """The group of each request. Those that name their group count first, then long ones, so
        that short ones even out the rest; methods that do not count tokens keep the order."""
        order = list(requests)
        if self._method in ("auto", "total_tokens"):
            order.sort(key=lambda request: (request.group is None, -_length(request)))
        for request in order:
            self._assign(request)
        return [self._open[request.request_no].group for request in requests]

    @property
    def has_groups(self) -> bool:
        return len(self._away) < len(self.requests)

    def set_away(self, group: int, is_away: bool) -> None:
        """A group that is away gets no requests. What it had cached is lost."""
        if is_away and group not in self._away and self._index is not None:
            self._index.clear_group(group)
        (self._away.add if is_away else self._away.discard)(group)

    def is_away(self, group: int) -> bool:
        return group in self._away

    def withdraw(self, request_no: int) -> None:
        """The request leaves its group, and is to be assigned anew."""
        entry = self._open.pop(request_no)
        self.requests[entry.group] -= 1
        self.tokens[entry.group] -= entry.tokens
        self.uncomputed[entry.group] -= entry.uncomputed

    def note_tokens(self, request_no: int, number: int) -> None:
        """The request emitted `number` tokens."""
        entry = self._open[request_no]
        entry.tokens += number
        self.tokens[entry.group] += number
        if entry.uncomputed and number:
            self.uncomputed[entry.group] -= entry.uncomputed
            entry.uncomputed = 0

    def finish(self, request_no: int, emitted: Sequence[int]) -> None:
        """`emitted`: all tokens of the request behind its prompt; the next turn of a chat repeats
        them."""
        entry = self._open[request_no]
        self.withdraw(request_no)
        if self._index is not None:
            request = entry.request
            sequence = [*request.prompt_ids, *emitted]
            self._index.extend(entry.keys, sequence, request.cache_namespace)
            self._index.add(entry.group, entry.keys)

    def limit_cache(self, num_tokens: int) -> None:
        """`num_tokens`: what the cache of one group has room for."""
        if self._index is not None:
            self._index.limit = min(self._index.limit, num_tokens // self._index.page_size)

    def flush_cache(self) -> None:
        """The groups have dropped their cached prefixes."""
        if self._index is not None:
            self._index.clear()

    def _assign(self, request: NewRequest) -> None:
        assert request.request_no not in self._open, request.request_no
        tokens = _length(request)
        keys, cached = self._cached(request)
        named = None if request.group in self._away else request.group
        group = self._choose(cached) if named is None else named
        entry = AssignedRequest(request, group, tokens, tokens - cached[group], keys)
        self._open[request.request_no] = entry
        self.requests[group] += 1
        self.tokens[group] += tokens
        self.uncomputed[group] += entry.uncomputed
        if self._index is not None:
            self._index.add(group, keys)

    def _cached(self, request: NewRequest) -> tuple[list[int], list[int]]:
        """The keys of the sequence, and the tokens that each group need not compute."""
        keys: list[int] = []
        if self._index is None:
            return keys, [0] * len(self.requests)
        sequence = [*request.prompt_ids, *request.emitted]
        self._index.extend(keys, sequence, request.cache_namespace)
        groups = range(len(self.requests))
        limit = _reusable(request)
        return keys, [min(limit, self._index.cached(group, keys)) for group in groups]

    def _choose(self, cached: Sequence[int]) -> int:
        """The least loaded group; equals take turns, or group 0 would get all single requests."""
        size = len(self.requests)
        turns = [(self._next_group + offset) % size for offset in range(size)]
        order = [group for group in turns if group not in self._away]
        group = min(order, key=lambda group: self._load(group, cached[group]))
        self._next_group = (group + 1) % size
        return group

    def _load(self, group: int, cached: int) -> tuple[float, ...]:
        requests, tokens = self.requests[group], self.tokens[group]
        match self._method:
            case "total_requests":
                return (requests,)
            case "total_tokens":
                return (tokens, requests)
            case "auto":
                held = DECODE_TOKENS * requests + HELD_SHARE * tokens
                return (self.uncomputed[group] + held - cached,)
        return ()


def _length(request: NewRequest) -> int:
    return len(request.prompt_ids) + len(request.emitted)


def _reusable(request: NewRequest) -> int:
    """The tokens that a group may take from its cache: neither the last one, nor those whose
    logprobs or routed experts it has to return."""
    limit = _length(request) - 1
    if request.return_logprob and not request.emitted:
        limit = min(limit, request.logprob_start)
    if request.routed_start is not None:
        limit = min(limit, request.routed_start)
    return limit
