"""What clients send: bodies of limited size, in strict JSON, of a declared shape."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from moesaic.core.redact import shown
from moesaic.engine.engine import LONG_PROMPT
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.server.errors import Refusal

MAX_BODY: Final = 4 << 20
MAX_DEPTH: Final = 64
# Lists and objects, texts, and values in them: Python's lock is held while they are made.
MAX_CONTAINERS: Final = 1 << 14
MAX_STRINGS: Final = 1 << 16
MAX_VALUES: Final = 300_000
# Larger bodies are read in a thread.
LARGE_BODY: Final = 1 << 16
# Looked at together: what holds Python's lock is short then.
PIECE: Final = 1 << 16
MAX_DIGITS: Final = 20
# Where msgspec's messages name a field or a value that was sent.
QUOTED: Final = re.compile(r"(?<=field `|value ')(.*?)(?=[`'] - at `\$|[`']$)", re.DOTALL)

LONE: Final = "the body has a lone surrogate: \\ud800 to \\udfff come in pairs, or not at all"

# How msgspec names the field at fault.
_FIELD: Final = re.compile(r"`\$\.(\w+)|field `(\w+)`$")

Body = TypeVar("Body", bound=msgspec.Struct)
Result = TypeVar("Result")


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /generate, with the names and defaults of SGLang."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: int | list[int] | None = -1
    top_logprobs_num: int | list[int] | None = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    rid: str | list[str] | None = None
    data_parallel_rank: int | list[int] | None = None
    # Existing clients send these empty.
    image_data: None = None
    lora_path: None = None

    def call(self) -> GenerateInput:
        if (self.text is None) == (self.input_ids is None):
            raise Refusal(400, "give either text or input_ids, and not both")
        return GenerateInput(
            self.text,
            cast(Any, self.input_ids),
            self.sampling_params,
            self.return_logprob,
            self.logprob_start_len,
            self.top_logprobs_num,
            self.rid,
            self.data_parallel_rank,
        )

    @property
    def samples(self) -> Any:
        """`n`, as it was sent."""
        params = self.sampling_params
        return params.get("n") or 1 if isinstance(params, dict) else 1


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """As SGLang sends it: an id, or all."""

    rid: str = ""
    abort_all: bool = False


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body, or a Refusal. msgspec knows no NaN, no Infinity, no lone surrogates, and its
    messages say where and what was expected without repeating what was sent."""
    return (await read_sized(request, kind))[0]


async def read_sized(request: Request, kind: type[Body]) -> tuple[Body, int]:
    """The body and the number of its bytes, which says how long its handling may take."""
    data = await _read(request)
    if len(data) > LARGE_BODY:
        return await asyncio.to_thread(_decode, data, kind), len(data)
    return _decode(data, kind), len(data)


async def aside(size: int, make: Callable[[], Result]) -> Result:
    """In a thread where it is made of much: the event loop must not be held up."""
    return make() if size <= LONG_PROMPT else await asyncio.to_thread(make)


def is_moderate(text: str) -> bool:
    """Whether JSON that came as the arguments of a call may be decoded too. A Refusal where it is
    nested too deep: templates recurse into it."""
    found = outline_of(text.encode())
    if found.depth > MAX_DEPTH:
        what = f"the arguments of a call are nested more than {MAX_DEPTH} levels deep"
        raise Refusal(400, what, "messages")
    most = JsonExtent(MAX_DEPTH, MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES)
    return all(number <= limit for number, limit in zip(found, most, strict=True))


def _decode(data: bytes, kind: type[Body]) -> Body:
    if not data.strip():
        raise Refusal(400, "the body is empty: send JSON")
    outline = outline_of(data)
    if outline.depth > MAX_DEPTH:
        raise Refusal(400, f"the body is nested more than {MAX_DEPTH} levels deep")
    for number, most, what in (
        (outline.containers, MAX_CONTAINERS, "lists and objects"),
        (outline.strings, MAX_STRINGS, "texts"),
        (outline.values, MAX_VALUES, "values"),
    ):
        if number > most:
            raise Refusal(413, f"the body has {number} {what}: send at most {most} at once")
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None  # by its types
    except UnicodeError:
        raise Refusal(400, "the body is not UTF-8") from None
    except msgspec.DecodeError as error:
        if not isinstance(error, msgspec.ValidationError) and _has_lone_surrogate(data, str(error)):
            raise Refusal(400, LONE) from None
        message = QUOTED.sub(_shorten, str(error))
        field = _FIELD.search(message)
        where = field and (field[1] or field[2])
        raise Refusal(400, f"the body does not fit: {message}", where) from None


class JsonExtent(NamedTuple):
    """Of JSON, without what strings hold. `values`: no fewer than the commas."""

    depth: int
    containers: int
    strings: int
    values: int


def outline_of(data: bytes) -> JsonExtent:
    """What decoding would cost; where it is not JSON, of what comes before."""
    containers, strings = data.count(b"[") + data.count(b"{"), data.count(b'"') // 2
    values = data.count(b",") + 1
    if containers <= MAX_DEPTH and strings <= MAX_STRINGS and values <= MAX_VALUES:
        return JsonExtent(containers, containers, strings, values)
    level = depth = containers = quotes = 0
    values, rest = 1, b""
    for start in range(0, len(data), PIECE):
        piece, rest = _without_escapes(rest + data[start : start + PIECE])
        codes = np.frombuffer(piece, np.uint8)
        is_quote = codes == QUOTE
        inside = (np.cumsum(is_quote, dtype=np.uint8) + np.uint8(quotes % 2)) & 1
        outside = np.where(inside, 0, codes)
        steps = STEPS[outside]
        levels = level + np.cumsum(steps, dtype=np.int32)
        depth = max(depth, int(levels.max(initial=0)))
        containers += int(np.count_nonzero(steps > 0))
        values += int(np.count_nonzero(outside == COMMA))
        quotes += int(np.count_nonzero(is_quote))
        level += int(steps.sum())
    return JsonExtent(depth, containers, quotes // 2, values)


def _without_escapes(piece: bytes) -> tuple[bytes, bytes]:
    """And the backslash at its end, if it escapes what follows."""
    if b"\\" not in piece:
        return piece, b""
    piece = piece.replace(b"\\\\", b"")
    rest = piece[-1:] if piece.endswith(b"\\") else b""
    return piece[: len(piece) - len(rest)].replace(b'\\"', b""), rest


def _has_lone_surrogate(data: bytes, message: str) -> bool:
    """Of what is no JSON to msgspec, which takes half a pair near the end for a missing end."""
    if "truncated" not in message:
        return "surrogate" in message
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def _steps() -> npt.NDArray[np.int8]:
    """By byte: what it adds to the depth."""
    steps = np.zeros(256, np.int8)
    steps[list(b"[{")], steps[list(b"]}")] = 1, -1
    return steps


STEPS: Final = _steps()
QUOTE, COMMA = b'",'


def _shorten(found: re.Match[str]) -> str:
    """Names that were sent are repeated only if they are plain and short."""
    return found[1] if shown(found[1]) == repr(found[1]) else shown(found[1])


async def _read(request: Request) -> bytes:
    """Who says beforehand that it is too much is refused before it is sent."""
    length = request.headers.get("content-length", "")
    data = bytearray()
    if length.isdigit() and int(length[:MAX_DIGITS]) > MAX_BODY:
        raise _too_large()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY:
            raise _too_large()
    return bytes(data)


def _too_large() -> Refusal:
    return Refusal(413, f"the body has more than {MAX_BODY} bytes: send less")
