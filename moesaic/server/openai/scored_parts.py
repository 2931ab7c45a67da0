"""The parts of an answer with the logprobs of their tokens."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from moesaic.engine.frontend.outputs import RequestUpdate
from moesaic.engine.text.token_bytes import TokenBytes
from moesaic.server.openai.choices import ChatAnswer
from moesaic.server.openai.logprobs import Scored, VocabularyTexts, output_scores, token_logprob
from moesaic.server.openai.response_types import TokenLogprob
from moesaic.server.parsers.parts import Content, Part, Reasoning

ScoredPart = tuple[Part, Sequence[TokenLogprob]]
NO_SCORES: Final = ()


@dataclass(frozen=True, slots=True)
class SpannedToken:
    """A token and the characters of the answer that it completes: none if it ends within one."""

    score: Scored
    start: int
    end: int

    def overlaps(self, start: int, end: int) -> bool:
        return self.start < end and max(self.end, self.start + 1) > start


class ScoredParts:
    """Parses an answer token by token. So a text has the logprobs of the same tokens, however the
    answer is cut to updates: those that a part of the text comes from, and not markers or calls."""

    def __init__(self, answer: ChatAnswer, vocabulary: VocabularyTexts) -> None:
        self._answer, self._vocabulary = answer, vocabulary
        self._spans = _TokenSpans(vocabulary)
        self._unread = deque[SpannedToken]()
        self._read: list[SpannedToken] = []  # the parser has them, but no part came of them yet
        self._end = 0  # of the last part, in the answer's text

    def read(self, update: RequestUpdate) -> Iterator[ScoredPart]:
        """What is new since the last update."""
        self._unread += self._spans.new_tokens(update)
        length, finished = len(update.text), update.progress.finished
        while self._unread and (finished or self._unread[0].end <= length):
            token = self._unread.popleft()
            self._read.append(token)
            yield from self._parts(update, min(token.end, length))
        if finished:
            yield from self._parts(update, length, finished=True)

    def _parts(self, update: RequestUpdate, end: int, finished: bool = False) -> list[ScoredPart]:
        parts = self._answer.parts_until(update, end, finished)
        found = [(part, self._scores(part, update.text, end)) for part in parts]
        if parts and not isinstance(parts[-1], Content | Reasoning):
            self._end = end
            self._read.clear()
        return found

    def _scores(self, part: Part, text: str, end: int) -> Sequence[TokenLogprob]:
        if not isinstance(part, Content | Reasoning):
            return NO_SCORES
        tokens = self._take(part.text, text[self._end : end])
        if isinstance(part, Reasoning):
            return NO_SCORES
        return [token_logprob(self._vocabulary, *token.score) for token in tokens]

    def _take(self, part: str, window: str) -> list[SpannedToken]:
        """The tokens of a part, which follows the last one or a marker in the window. All tokens of
        the window if the parser changed the text."""
        at = 0 if window.startswith(part) else window.rfind(part)
        start = self._end + max(at, 0)
        end = start + (len(window) if at < 0 else len(part))
        found = [token for token in self._read if token.overlaps(start, end)]
        self._read = [token for token in self._read if token.start >= end]
        self._end = end
        return found


class _TokenSpans:
    """Finds the characters of each token; a token waits until they are known."""

    def __init__(self, vocabulary: VocabularyTexts) -> None:
        self._vocabulary = vocabulary
        self._bytes: TokenBytes | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = deque[Scored]()
        self._num_tokens = self._num_chars = 0

    def new_tokens(self, update: RequestUpdate) -> Iterator[SpannedToken]:
        """Without the tokens that have no text, such as special ones."""
        request = update.request
        if self._bytes is None:
            skips = request.params.skip_special_tokens
            self._bytes = TokenBytes(self._vocabulary.tokenizer, request.prompt_ids, skips)
        start, self._num_tokens = self._num_tokens, update.progress.num_output
        for score in output_scores(request, start, self._num_tokens):
            self._waiting.append(score)
            yield from self._placed(self._bytes.push(score[1]))
        if update.progress.finished:
            yield from self._placed(self._bytes.flush())

    def _placed(self, chunks: list[bytes]) -> Iterator[SpannedToken]:
        for chunk in chunks:
            score, start = self._waiting.popleft(), self._num_chars
            self._num_chars += len(self._decoder.decode(chunk))
            if chunk:
                yield SpannedToken(score, start, self._num_chars)
