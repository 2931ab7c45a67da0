"""Token ids to text while they arrive, and the search for stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.core.sampling import SamplingParams
from moesaic.engine.tokenizer import BROKEN, Tokenizer

# An unfinished UTF-8 character is at most three bytes, hence at most three broken marks.
MAX_BROKEN = 3
MAX_PENDING = 8
LEFT_CONTEXT = 4


class IncrementalDetokenizer:
    """Feed tokens with `push`, read `text` at any time, call `finish` once at the end.

    The stop string that ends first wins, and among those that end together the one that starts
    first; so the outcome does not depend on how the text is cut into tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._stream = _TextStream(tokenizer, prompt_ids, params.skip_special_tokens)
        self._stops = _StopSearch(params.stop, params.no_stop_trim)
        self._finished = False

    @property
    def text(self) -> str:
        """What may be shown: whole characters that are not the start of a stop string."""
        return self._stops.text

    @property
    def matched(self) -> str | None:
        return self._stops.matched

    def push(self, token_ids: Sequence[int]) -> str | None:
        """The stop string that was found, if any; tokens after it are ignored."""
        assert not self._finished, "push after finish"
        for token_id in token_ids:
            if self._stops.matched is not None:
                break
            if piece := self._stream.push(token_id):
                self._stops.feed(piece)
        return self._stops.matched

    def finish(self) -> str:
        """Release what was held back and return the whole text."""
        if not self._finished:
            self._finished = True
            if self._stops.matched is None:
                self._stops.feed(self._stream.flush())
            self._stops.release()
        return self._stops.text


class _TextStream:
    """Decodes a short window: tokens already shown as left context, then the pending ones."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._context = self._left_context(prompt_ids)
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []
        self._shown = 0

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before."""
        self._pending.append(token_id)
        text = self._pending_text()
        broken = len(text) - len(text.rstrip(BROKEN))
        if broken == 0:
            return self._settle(text)
        piece = self._show(text, len(text) - min(broken, MAX_BROKEN))
        if len(self._pending) > MAX_PENDING:
            piece += self._cut(text)
        return piece

    def flush(self) -> str:
        return self._show(text := self._pending_text(), len(text))

    def _show(self, text: str, end: int) -> str:
        piece = text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _settle(self, text: str) -> str:
        piece = text[self._shown :]
        if text:
            self._context, self._context_text = self._pending, self._decode(self._pending)
        # Tokens without text, such as skipped special ones, are useless as context.
        self._pending, self._shown = [], 0
        return piece

    def _cut(self, text: str) -> str:
        """Bound the window when nothing but broken bytes arrives: let go of its front at a border
        between characters, which is one where both sides decode alone as they do together."""
        for size in range(MAX_BROKEN + 1, len(self._pending)):
            head, tail = self._pending[:-size], self._pending[-size:]
            tail_text = self._decode(tail)
            if self._after_context(head) + tail_text == text:
                break
        shown = max(0, len(text) - len(tail_text))
        piece = self._show(text, shown)
        self._context, self._context_text = head, self._decode(head)
        self._pending, self._shown = tail, self._shown - shown
        return piece

    def _pending_text(self) -> str:
        return self._after_context(self._pending)

    def _after_context(self, ids: list[int]) -> str:
        both = self._decode(self._context + ids)
        if both.startswith(self._context_text):
            return both[len(self._context_text) :]
        # Byte tokens spoil the valid ones before them until their character is complete.
        return self._decode(ids)

    def _left_context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt that have a text, from the start of a character on."""
        recent = [i for i in prompt_ids[-8 * LEFT_CONTEXT :] if self._decode([i])]
        for size in range(LEFT_CONTEXT, 3 * LEFT_CONTEXT):
            context = recent[-size:]
            if not self._decode(context).startswith(BROKEN):
                return context
        return []

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)


class _StopSearch:
    """Text with the tail held back that may become a stop string."""

    def __init__(self, stops: tuple[str, ...], keep_stop: bool) -> None:
        self._stops = stops
        self._keep_stop = keep_stop
        self._pieces: list[str] = []
        self._held = ""
        self.matched: str | None = None

    @property
    def text(self) -> str:
        # Joined only when somebody looks, so that a token costs the same however long the text is.
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def feed(self, piece: str) -> None:
        text = self._held + piece
        found = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text
        ]
        if found:
            end, minus_length, self.matched = min(found)
            self._pieces.append(text[: end if self._keep_stop else end + minus_length])
            self._held = ""
            return
        safe = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._pieces.append(text[:safe])
        self._held = text[safe:]

    def release(self) -> None:
        self._pieces.append(self._held)
        self._held = ""


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a start, not all, of the stop string."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
