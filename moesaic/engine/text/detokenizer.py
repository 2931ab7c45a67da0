"""Incremental detokenisation with stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moesaic.core.sampling import SamplingParams
from moesaic.engine.text.stop_regex import StopPatterns
from moesaic.engine.text.token_bytes import UTF8_DECODER, TokenBytes
from moesaic.engine.text.tokenizer import Tokenizer

# Characters of a held-back run of byte tokens up to which patterns are tried on it early.
MAX_PREVIEW: Final = 64
# Characters that are held back for a pattern; a longer match leaves only these out of the text.
MAX_HELD: Final = 4096


class IncrementalDetokenizer:
    """Feed tokens with `push`, read `text` at any time, call `finish` once at the end. The stop
    string or match of a pattern that ends first wins, and of those that end together the longest,
    in any tokenisation."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._bytes = TokenBytes(tokenizer, prompt_ids, params.skip_special_tokens)
        self._decoder = UTF8_DECODER("replace")
        self._stops = _StopSearch(params.stop, params.stop_regex, params.no_stop_trim)
        self._plain_texts = tokenizer.plain_texts
        self._has_held = False
        """Whether a text that nothing stops holds bytes back for the next token."""
        self._finished = False

    @property
    def text(self) -> str:
        """Whole characters that cannot belong to a stop string or a match of a pattern."""
        # Joined only when read, so the cost of a token does not depend on the length of the text.
        pieces = self._stops.pieces
        if len(pieces) > 1:
            pieces[:] = ["".join(pieces)]
        return pieces[0] if pieces else ""

    def push(self, token_ids: Sequence[int]) -> str | None:
        """The stop string or pattern that matched, if any; tokens after it are ignored."""
        for token_id in token_ids:
            self.push_one(token_id)
        return self._stops.matched

    def push_one(self, token_id: int) -> str | None:
        """Like `push`."""
        assert not self._finished, "push after finish"
        stops = self._stops
        if not stops.has_any:
            if self._has_held or (piece := self._plain_texts.get(token_id)) is None:
                piece = self._decoded(token_id)
            stops.pieces.append(piece)
        elif stops.matched is None:
            piece = self._decoder.decode(b"".join(self._bytes.push(token_id)))
            if not piece and stops.would_match(self._bytes.held):
                # The output ends here: no further token can change the held-back bytes.
                piece = self._flush()
            if piece:
                stops.feed(piece)
        return stops.matched

    def finish(self) -> str:
        """Releases held-back text and returns the whole text."""
        if not self._finished:
            self._finished = True
            if self._stops.matched is None:
                self._stops.feed(self._flush())
            self._stops.release()
        return self.text

    def _decoded(self, token_id: int) -> str:
        piece = self._decoder.decode(b"".join(self._bytes.push(token_id)))
        self._has_held = self._bytes.has_held or bool(self._decoder.getstate()[0])
        return piece

    def _flush(self) -> str:
        return self._decoder.decode(b"".join(self._bytes.flush()), final=True)


class _StopSearch:
    """Holds back the end of a text while it may become a stop string or a pattern's match."""

    def __init__(self, stops: tuple[str, ...], patterns: tuple[str, ...], keep_stop: bool) -> None:
        self._stops = stops
        self._patterns = StopPatterns(patterns) if patterns else None
        self.has_any = bool(stops or patterns)
        self._longest = max(map(len, stops), default=0)
        self._keep_stop = keep_stop
        self.pieces: list[str] = []
        """The text; a text that nothing stops is added without `feed`."""
        self._num_shown = 0
        self._held = ""
        self.matched: str | None = None

    def would_match(self, following: str) -> bool:
        """Whether the answer would end with this text, which is not certain yet."""
        if not following:
            return False
        preview = self._patterns if len(following) <= MAX_PREVIEW else None
        if preview is not None and preview.copy().feed(following) is not None:
            return True
        if not self._stops:
            return False
        return (self._held + following[-self._longest :]).endswith(self._stops)

    def feed(self, piece: str) -> None:
        text = self._held + piece
        if found := self._found(text, piece):
            end, minus_length, self.matched = min(found)
            self.pieces.append(text[: end if self._keep_stop else end + minus_length])
            self._held = ""
            return
        safe = len(text) - self._num_held(text)
        self.pieces.append(text[:safe])
        self._num_shown += safe
        self._held = text[safe:]

    def _found(self, text: str, piece: str) -> list[tuple[int, int, str]]:
        """The end of each match in the text, minus its length, and what matched."""
        # A stop string that ended before this piece would have been found.
        first = max(0, len(text) - len(piece) - self._longest + 1)
        ends = ((text.find(stop, first) + len(stop), stop) for stop in self._stops)
        found = [(end, -len(stop), stop) for end, stop in ends if end >= len(stop)]
        if self._patterns is not None and (match := self._patterns.feed(piece)) is not None:
            length = min(match.end - match.start, MAX_HELD)
            found.append((match.end - self._num_shown, -length, match.pattern))
        return found

    def _num_held(self, text: str) -> int:
        """Characters at the end of the text that may belong to a match."""
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        if self._patterns is None or self._keep_stop:
            return held
        return max(held, min(self._patterns.length - self._patterns.earliest, MAX_HELD))

    def release(self) -> None:
        self.pieces.append(self._held)
        self._held = ""


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of the text that is a proper prefix of the stop string."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
