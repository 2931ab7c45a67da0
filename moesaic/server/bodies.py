"""What clients send: bodies of limited size, in strict JSON, of a declared shape."""

from __future__ import annotations

import json
import re
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from moesaic.core.words import shown
from moesaic.engine.inputs import GenerateInput
from moesaic.server.errors import Refusal

MAX_BODY: Final = 4 << 20
MAX_DEPTH: Final = 64
MAX_DIGITS: Final = 20
# Where msgspec's messages name a field or a value that was sent.
QUOTED: Final = re.compile(r"(?<=field `|value ')(.*?)(?=[`'] - at `\$|[`']$)", re.DOTALL)

LONE: Final = "the body has a lone surrogate: \\ud800 to \\udfff come in pairs, or not at all"

# How msgspec names the field at fault.
_FIELD: Final = re.compile(r"`\$\.(\w+)|field `(\w+)`$")

Body = TypeVar("Body", bound=msgspec.Struct)


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
    rid: str


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body, or a Refusal. msgspec knows no NaN, no Infinity, no lone surrogates, and its
    messages say where and what was expected without repeating what was sent."""
    data = await _read(request)
    if not data.strip():
        raise Refusal(400, "the body is empty: send JSON")
    if depth(data) > MAX_DEPTH:
        raise Refusal(400, f"the body is nested more than {MAX_DEPTH} levels deep")
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


def _has_lone_surrogate(data: bytes, message: str) -> bool:
    """Of what is no JSON to msgspec, which takes half a pair near the end for a missing end."""
    if "truncated" not in message:
        return "surrogate" in message
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def depth(data: bytes) -> int:
    """How deep brackets are nested in JSON, in one pass; no more than that where it is not JSON."""
    number = data.count(b"[") + data.count(b"{")
    if number <= MAX_DEPTH:
        return number
    steps = STEPS[np.frombuffer(STRING.sub(b"", data), np.uint8)]
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def _steps() -> npt.NDArray[np.int8]:
    """By byte: what it adds to the depth."""
    steps = np.zeros(256, np.int8)
    steps[list(b"[{")], steps[list(b"]}")] = 1, -1
    return steps


# A string that has no end goes to the end of the body, so that no byte is looked at twice.
STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+\\?+(?:"|\Z)', re.DOTALL)
STEPS: Final = _steps()


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
