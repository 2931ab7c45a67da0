"""Drafts from the tokens of prompts and answers, without a model: text repeats itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from moesaic.config import ServerArgs
from moesaic.core.request import Request, RequestPhase
from moesaic.core.speculation import Speculation
from moesaic.engine.speculate.drafters import register_drafter
from moesaic.engine.speculate.ngram_index import CONTEXT, NgramIndex

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner

# Tokens of prompts that are indexed before one step: a long prompt takes several.
INDEXED_A_STEP: Final = 8192
# Steps between two looks for requests that have ended.
END_EVERY: Final = 16
# A match of the shortest length proposes this many tokens; each further token of it adds as many.
DRAFTS_A_TOKEN: Final = 2


class NgramDrafter:
    """Proposes what followed the longest earlier occurrence of a request's last tokens, in itself
    or in another request of its cache namespace. A longer match proposes more."""

    def __init__(self, index: NgramIndex, num_drafts: int, frequent: bool = False) -> None:
        self.index, self.num_drafts, self._frequent = index, num_drafts, frequent
        self._open: dict[int, Request] = {}
        self._num_steps = 0

    def propose(self, requests: Sequence[Request]) -> None:
        index, room = self.index, INDEXED_A_STEP
        self._num_steps += 1
        if self._num_steps % END_EVERY == 0:
            self._end_finished()
        for request in requests:
            number = request.request_no
            if number not in index:
                index.begin(number, request.token_ids, request.cache_namespace)
                self._open[number] = request
            room -= index.extend(number, room)
            request.drafts = self._drafts(request)

    def _drafts(self, request: Request) -> list[int]:
        tokens = request.token_ids
        match = self.index.find(tokens, request.cache_namespace, self._frequent)
        if match is None:
            return []
        count = min(self.num_drafts, DRAFTS_A_TOKEN * (match.length - CONTEXT + 1))
        drafts = list(match.tokens[match.position : match.position + count])
        # A match near the end of the request's own tokens continues with what it proposes.
        if match.tokens is tokens:
            period = len(tokens) - match.position
            while len(drafts) < count:
                drafts.append(drafts[len(drafts) - period])
        return drafts

    def _end_finished(self) -> None:
        ended = [n for n, r in self._open.items() if r.phase is RequestPhase.FINISHED]
        for number in ended:
            del self._open[number]
            self.index.end(number)


def _make(args: ServerArgs, speculation: Speculation, runner: ModelRunner) -> NgramDrafter:
    index = NgramIndex(args.speculative_ngram_capacity, args.speculative_ngram_max_trie_depth)
    frequent = args.speculative_ngram_match_type == "PROB"
    return NgramDrafter(index, speculation.num_drafts, frequent)


register_drafter("NGRAM", _make)
