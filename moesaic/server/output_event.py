"""The events of a /generate stream while an answer grows."""

from __future__ import annotations

from typing import Final

import msgspec

from moesaic.core.request import Request
from moesaic.engine.frontend.outputs import cached_tokens_details
from moesaic.engine.schedule.request_state import Progress
from moesaic.server.responses import one_line

_encode: Final = msgspec.json.Encoder().encode


class GrowingOutput:
    """Encodes an answer that repeats everything so far: only what is new is encoded each time. The
    result is that of `OutputFormat.answer` for an answer without logprobs that has not ended."""

    def __init__(self, request: Request, index: int | None) -> None:
        """`index`: None for the only answer of a call."""
        self._request = request
        self._text, self._num_chars = b"", 0
        self._ids, self._next_id = b"", request.prompt_len
        self._counts = -1, -1
        self._meta = b'"id":%b,"finish_reason":null,"prompt_tokens":%d,"completion_tokens":' % (
            one_line(_encode(request.rid)),
            request.prompt_len,
        )
        self._index = b"" if index is None else b',"index":%d' % index
        self._end = b""

    def event(self, progress: Progress) -> bytes:
        request = self._request
        self._extend(progress.text, request.prompt_len + progress.num_output)
        if (counts := (request.cached_tokens, request.retractions)) != self._counts:
            self._counts, self._end = counts, self._encoded_end(*counts)
        return b'data: {"text":"%b","output_ids":[%b],"meta_info":{%b%d%b' % (
            self._text,
            self._ids,
            self._meta,
            progress.num_output,
            self._end,
        )

    def _extend(self, text: str, num_tokens: int) -> None:
        """Adds what is new up to this text and this number of tokens."""
        if len(text) > self._num_chars:
            self._text += one_line(_encode(text[self._num_chars :])[1:-1])
            self._num_chars = len(text)
        if num_tokens > self._next_id:
            new = _encode(self._request.token_ids[self._next_id : num_tokens])[1:-1]
            self._ids = b"%b,%b" % (self._ids, new) if self._ids else new
            self._next_id = num_tokens

    def _encoded_end(self, cached: int, retractions: int) -> bytes:
        details = _encode(cached_tokens_details(self._request))
        return b',"cached_tokens":%d,"cached_tokens_details":%b,"total_retractions":%d}%b}\n\n' % (
            cached,
            details,
            retractions,
            self._index,
        )
