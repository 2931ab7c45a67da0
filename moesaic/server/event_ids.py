"""The ids of a stream's events. Such an id says what a client has of an answer, so that any router
can continue it: routers keep nothing that would be lost with them."""

from __future__ import annotations

import base64
from hashlib import blake2b
from typing import Any, Final

import msgspec

DIGEST_BYTES: Final = 8
NOTHING: Final = ("", "0")
"""What a client that has nothing yet sends as Last-Event-ID, to get ids."""


class ChoiceMark(msgspec.Struct, array_like=True):
    index: int
    texts: dict[str, tuple[int, bytes]]
    """Lengths and digests; token ids, too, are texts, of a character each."""
    counts: dict[str, int]
    """Of what comes in lists that are not compared: logprobs."""
    is_finished: bool


class StreamMark(msgspec.Struct, array_like=True):
    head: dict[str, Any]
    """The fields that all chunks have in common."""
    choices: list[ChoiceMark]
    has_usage: bool = False

    def encode(self) -> str:
        return base64.urlsafe_b64encode(_encoder.encode(self)).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> StreamMark:
        """ValueError if it is none."""
        try:
            return _decoder.decode(base64.b64decode(text + "=" * (-len(text) % 4), b"-_", True))
        except (ValueError, msgspec.MsgspecError) as error:
            text = f"Last-Event-ID is not the id of an event of a stream: {error}"
            raise ValueError(text) from None


class RunningDigest:
    """Of a text that grows."""

    def __init__(self) -> None:
        self._hash, self._length = blake2b(digest_size=DIGEST_BYTES), 0

    def of(self, text: str) -> bytes:
        self._hash.update(_bytes(text[self._length :]))
        self._length = len(text)
        return self._hash.digest()


def digest_of(text: str) -> bytes:
    return blake2b(_bytes(text), digest_size=DIGEST_BYTES).digest()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(StreamMark)
