"""Drafts from the tokens of prompts and answers, without a model: text repeats itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple

from moesaic.config import ServerArgs
from moesaic.core.draft_shape import ANY_DRAFTS, DraftShape
from moesaic.core.request import Request, RequestPhase
from moesaic.core.speculation import Speculation
from moesaic.engine.speculate.drafters import register_drafter
from moesaic.engine.speculate.ngram_index import CONTEXT, NgramIndex, NgramMatch

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner

# Tokens of prompts that are indexed before one step: a long prompt takes several.
INDEXED_A_STEP: Final = 8192
# Steps between two looks for requests that have ended.
END_EVERY: Final = 16
# A match of the shortest length proposes this many tokens; each further token of it adds as many.
DRAFTS_A_TOKEN: Final = 2
# Of a tree: how much less likely each token is than the one before, the weight of a match beside
# one that is a token longer, and the least likely token that is proposed.
FADES: Final = 0.85
SHORTER: Final = 0.5
LEAST_LIKELY: Final = 0.1


class Breadth(NamedTuple):
    """The most drafts behind one token: behind the longest match that is looked for, and behind the
    shortest one. If both are 1, drafts are chains."""

    least: int = 1
    most: int = 1


CHAINS: Final = Breadth()


class Continuation(NamedTuple):
    """Up to `most` tokens behind a match; those of the request itself go on with what they
    propose."""

    match: NgramMatch
    most: int
    weight: float
    period: int
    """Tokens from the match to the request's end; 0: the match is elsewhere."""

    def token(self, number: int) -> int | None:
        if number >= self.most:
            return None
        tokens, position, _ = self.match
        place = position + (number % self.period if self.period else number)
        return tokens[place] if place < len(tokens) else None


class NgramDrafter:
    """Proposes what followed the longest earlier occurrence of a request's last tokens, in itself
    or in another request of its cache namespace. A longer match proposes more."""

    def __init__(
        self,
        index: NgramIndex,
        num_drafts: int,
        frequent: bool = False,
        breadth: Breadth = CHAINS,
    ) -> None:
        self.index, self.num_drafts, self._frequent = index, num_drafts, frequent
        self._breadth = breadth
        self._open: dict[Request, int] = {}
        """The number of each one's tokens in the index. A request that comes again, as its rank was
        lost, has the same number as before, and other tokens."""
        self._numbers = itertools.count()
        self._num_steps = 0

    def propose(self, requests: Sequence[Request], shape: DraftShape = ANY_DRAFTS) -> None:
        index, room = self.index, INDEXED_A_STEP
        self._num_steps += 1
        if self._num_steps % END_EVERY == 0:
            self._end_finished()
        for request in requests:
            number = self._open.get(request)
            if number is None:
                number = self._open[request] = next(self._numbers)
                index.begin(number, request.token_ids, request.cache_namespace)
            room -= index.extend(number, room)
            request.drafts, request.draft_parents = self._tree(request, shape)

    def _tree(self, request: Request, shape: DraftShape) -> tuple[list[int], list[int]]:
        """The most likely continuations, each token behind its parent; a chain has no parents."""
        tokens, namespace = request.token_ids, request.cache_namespace
        match = self.index.find(tokens, namespace, self._frequent)
        if match is None:
            return [], []
        breadth = min(shape.branches, self._breadth_behind(match))
        if breadth == 1:
            return self._chain(request, match), []
        drafts, parents = list[int](), list[int]()
        group = self._continuations(request, match.length)
        # Less likely, its parent, its depth, and what goes on with it.
        heap: list[tuple[float, int, int, int, list[Continuation]]] = []
        _push(heap, 1.0, 0, 0, group, breadth)
        while heap and len(drafts) < self.num_drafts:
            likely, parent, place, token, group = heappop(heap)
            drafts.append(token)
            parents.append(parent)
            _push(heap, -likely, len(drafts), place + 1, group, breadth)
        return drafts, parents

    def _breadth_behind(self, match: NgramMatch) -> int:
        least, most = self._breadth
        share = (match.length - CONTEXT) / max(1, self.index.depth - CONTEXT)
        return round(most - (most - least) * share)

    def _continuations(self, request: Request, longest: int) -> list[Continuation]:
        tokens, found = request.token_ids, list[Continuation]()
        for age, match in enumerate(self.index.matches(tokens, request.cache_namespace), 1):
            weight = SHORTER ** (longest - match.length) / (1 if self._frequent else age)
            count = min(self.num_drafts, DRAFTS_A_TOKEN * (match.length - CONTEXT + 1))
            period = len(tokens) - match.position if match.tokens is tokens else 0
            found.append(Continuation(match, count, weight, period))
        return found

    def _chain(self, request: Request, match: NgramMatch) -> list[int]:
        tokens = request.token_ids
        count = min(self.num_drafts, DRAFTS_A_TOKEN * (match.length - CONTEXT + 1))
        drafts = list(match.tokens[match.position : match.position + count])
        # A match near the end of the request's own tokens continues with what it proposes.
        if match.tokens is tokens:
            period = len(tokens) - match.position
            while len(drafts) < count:
                drafts.append(drafts[len(drafts) - period])
        return drafts

    def _end_finished(self) -> None:
        ended = [r for r in self._open if r.phase is RequestPhase.FINISHED]
        for request in ended:
            self.index.end(self._open.pop(request))


def _push(
    heap: list[tuple[float, int, int, int, list[Continuation]]],
    likely: float,
    parent: int,
    place: int,
    group: Sequence[Continuation],
    breadth: int,
) -> None:
    """Adds what may follow `parent`, which the continuations of `group` share."""
    groups: dict[int, list[Continuation]] = {}
    for one in group:
        token = one.token(place)
        if token is not None:
            groups.setdefault(token, []).append(one)
    weights = {token: sum(one.weight for one in some) for token, some in groups.items()}
    total = sum(weights.values())
    for token in sorted(weights, key=weights.__getitem__, reverse=True)[:breadth]:
        then = FADES * likely * weights[token] / total
        if then >= LEAST_LIKELY:
            heappush(heap, (-then, parent, place, token, groups[token]))


def _make(args: ServerArgs, speculation: Speculation, runner: ModelRunner) -> NgramDrafter:
    index = NgramIndex(args.speculative_ngram_capacity, args.speculative_ngram_max_trie_depth)
    frequent = args.speculative_ngram_match_type == "PROB"
    breadth = CHAINS
    if runner.verifies_trees:
        most = args.speculative_ngram_max_bfs_breadth
        assert most is not None, "the flags are not resolved"
        breadth = Breadth(args.speculative_ngram_min_bfs_breadth, most)
    return NgramDrafter(index, speculation.num_drafts, frequent, breadth)


register_drafter("NGRAM", _make)
