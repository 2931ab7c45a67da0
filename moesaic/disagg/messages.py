"""What instances and their ranks tell each other about transfers, and how it is sent: msgpack, some
of it with bytes behind it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from moesaic.comm.network.handshake import read_exactly
from moesaic.comm.network.tls import Connection
from moesaic.core.disagg import KVTarget, Ticket
from moesaic.core.request import FinishReason, TopLogprobs

HEAD: Final = struct.Struct("<4sIQ")
MARK: Final = b"MOEk"
MOST_HEAD: Final = 1 << 26  # logprobs of a long prompt, and a target with many ranks
MOST_BODY: Final = 1 << 30

NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Buffer = bytes | bytearray | memoryview


class Malformed(ConnectionError):
    """What came is no message of these."""


class TransferMessage(msgspec.Struct, tag=True, array_like=True):
    """The base of all types below."""


class Announce(TransferMessage):
    """To a prefill instance: a request waits for this room, though not for its pages yet. `model`,
    `prompt` and `draft` are digests (likeness.py)."""

    room: int
    model: bytes
    prompt: bytes
    draft: bytes = b""


class Offer(TransferMessage):
    """To a prefill instance: the pages of a request, which was announced, are reserved."""

    target: KVTarget


class Withdraw(TransferMessage):
    """Tells a prefill instance that the decode instance has given the room up."""

    room: int


class Refused(TransferMessage):
    """From a prefill instance: it sends nothing for this room."""

    room: int
    why: str


class Computed(TransferMessage):
    """From a prefill instance: everything for this room is on its way."""

    room: int


class Beat(TransferMessage):
    """From a prefill instance, several times a second."""


class Open(TransferMessage):
    """From a leader to the ranks of its group: a transfer of these tokens may come."""

    ticket: Ticket
    first: int
    stop: int


class Close(TransferMessage):
    """From a leader to the ranks of its group: drop what has come."""

    ticket: Ticket


class Arrived(TransferMessage):
    """From a rank to its leader: all of its part has come."""

    ticket: Ticket


class Broken(TransferMessage):
    """From a rank to its leader: the rest of its part will not come; or to a rank from one of the
    prefill instance, which has dropped something."""

    ticket: Ticket
    why: str


class Place(msgspec.Struct, array_like=True, frozen=True):
    """A region of a send buffer, with these bytes as long as its entry has this epoch."""

    offset: NotNegative
    nbytes: NotNegative
    entry: NotNegative
    epoch: int


class Exported(TransferMessage):
    """From a rank to a rank of the other instance: how its send buffer may be read."""

    transport: str
    handle: bytes


class Opened(TransferMessage):
    """The answer: it can be read, or `why` not."""

    why: str


class Taken(TransferMessage):
    """From a rank to one that has put something into its send buffer: nobody reads it any more."""

    entry: NotNegative


class Chunk(TransferMessage):
    """From a rank to a rank of the other instance: keys and then values, each [layers, tokens,
    heads, channels], of the tokens from `first` up to `stop`. They follow, or are at a `place`.
    `cache` is which of the ranks' caches they are of."""

    ticket: Ticket
    first: int
    stop: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    dtype: str
    place: Place | None = None
    cache: NotNegative = 0


class PromptResult(TransferMessage):
    """From a leader to a leader of the other instance: the first token of a request, with logprobs
    where they are asked for. Without a token, `finish` says why."""

    ticket: Ticket
    token_ids: list[int]
    logprobs: list[float] = []
    top_logprobs: list[TopLogprobs] = []
    input_logprobs: list[float] = []
    input_top_logprobs: list[TopLogprobs] = []
    routed: bytes = b""
    cached_tokens: int = 0
    finish: FinishReason | None = None


AnyTransferMessage = (
    Announce
    | Offer
    | Withdraw
    | Refused
    | Computed
    | Beat
    | Open
    | Close
    | Arrived
    | Broken
    | Exported
    | Opened
    | Taken
    | Chunk
    | PromptResult
)
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder[AnyTransferMessage](AnyTransferMessage)


def frame(message: TransferMessage, body: Sequence[Buffer] = ()) -> list[Buffer]:
    """The buffers to send, the body's without a copy."""
    head = _encoder.encode(message)
    assert len(head) <= MOST_HEAD, f"a message of {len(head)} bytes"
    size = sum(memoryview(part).nbytes for part in body)
    return [HEAD.pack(MARK, len(head), size) + head, *body]


def receive(connection: Connection) -> tuple[AnyTransferMessage, int]:
    """The next message, and how many bytes are behind it; ConnectionError at the end."""
    mark, length, size = HEAD.unpack(read_exactly(connection, HEAD.size))
    if mark != MARK or length > MOST_HEAD or size > MOST_BODY:
        raise Malformed(f"a frame that begins with {mark.hex()}")
    try:
        return _decoder.decode(read_exactly(connection, length)), size
    except msgspec.MsgspecError as error:
        raise Malformed(f"a message that cannot be read: {error}") from error


def send(connection: Any, message: TransferMessage) -> None:
    for buffer in frame(message):
        connection.sendall(buffer)
