"""Request bodies: limited in size, strict JSON, of a declared type."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request

from moesaic.core.foreign_fields import Unsupported, drop_foreign
from moesaic.core.redact import LONGEST_WORD, shown
from moesaic.engine.engine import LONG_PROMPT
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.server.allowed_values import allowed_values
from moesaic.server.errors import Refusal

MAX_BODY: Final = 4 << 20
MAX_DEPTH: Final = 64
# Limits on what decoding creates: it holds Python's lock.
MAX_CONTAINERS: Final = 1 << 14
MAX_STRINGS: Final = 1 << 16
MAX_VALUES: Final = 300_000
# Larger bodies are decoded in a thread.
LARGE_BODY: Final = 1 << 16
# Bytes that one numpy call scans, so that Python's lock is held only briefly.
SCAN_BYTES: Final = 1 << 16
MAX_DIGITS: Final = 20
# Fields and values of the client that msgspec's messages quote.
QUOTED: Final = re.compile(r"(?<=field `|value ')(.*?)(?=[`'] - at `\$|[`']$)", re.DOTALL)

# The change of depth at each byte.
DEPTH_STEPS: Final = np.zeros(256, np.int8)
DEPTH_STEPS[list(b"[{")], DEPTH_STEPS[list(b"]}")] = 1, -1
QUOTE, COMMA = b'",'

LONE_SURROGATE: Final = "the body has a lone surrogate: \\ud800 to \\udfff must come in pairs"

ONLY_NULLS: Final = re.compile(rb"\[[\s\[\],]*null[\s\[\],nul]*\]")
# The field at fault in msgspec's messages.
_FIELD: Final = re.compile(r"`\$\.(\w+)|field `(\w+)`$")
_UNKNOWN: Final = re.compile(r"unknown field `(\w+|' *\w+ *')`$")

Body = TypeVar("Body", bound=msgspec.Struct)
Result = TypeVar("Result")


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /generate, with SGLang's names and defaults."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    return_logprob: bool | list[bool | None] | None = False
    logprob_start_len: int | list[int | None] | None = -1
    top_logprobs_num: int | list[int | None] | None = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    rid: str | list[str | None] | None = None
    data_parallel_rank: int | list[int | None] | None = None
    return_routed_experts: bool | None = False
    routed_experts_start_len: int | None = 0
    routed_dp_rank: int | list[int | None] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None
    return_prompt_token_ids: bool = False
    return_cached_tokens_details: bool = False
    """Without effect: `meta_info` always has them."""
    model: str | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None

    def to_input(self) -> GenerateInput:
        if (self.text is None) == (self.input_ids is None):
            raise Refusal(400, "give exactly one of text and input_ids")
        values = {name: getattr(self, name) for name in SAME_FIELDS}
        return GenerateInput(self.text, cast(Any, self.input_ids), **values)

    @property
    def samples(self) -> Any:
        """`n` as the client sent it."""
        params = self.sampling_params
        return params.get("n") or 1 if isinstance(params, dict) else 1


SAME_FIELDS: Final = tuple(
    field.name
    for field in fields(GenerateInput)
    if field.name in GenerateBody.__struct_fields__ and field.name != "input_ids"
)
"""Fields of the body that have the same name in the engine."""


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's body: an id, or all."""

    rid: str = ""
    abort_all: bool = False


def has_body(request: Request) -> bool:
    headers = request.headers
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body, or a Refusal; msgspec's messages say what was expected and do not quote it."""
    return (await read_sized(request, kind))[0]


async def read_optional_body(request: Request, kind: type[Body]) -> Body:
    """The same; without one its fields have their defaults."""
    data = await read_bytes(request)
    return _decode(data, kind) if data else kind()


async def read_sized(request: Request, kind: type[Body]) -> tuple[Body, int]:
    """The body and the number of its bytes, an estimate of the time that it takes."""
    data = await read_bytes(request)
    if len(data) > LARGE_BODY:
        return await asyncio.to_thread(_decode, data, kind), len(data)
    return _decode(data, kind), len(data)


async def in_thread_if_large(size: int, make: Callable[[], Result]) -> Result:
    """Large inputs are handled in a thread, so that they do not block the event loop."""
    return make() if size <= LONG_PROMPT else await asyncio.to_thread(make)


def is_decodable(text: str) -> bool:
    """Whether a call's JSON arguments are small enough to decode; Refusal if nested too deeply."""
    found = json_extent(text.encode())
    if found.depth > MAX_DEPTH:
        what = f"the arguments of a call are nested more than {MAX_DEPTH} levels deep"
        raise Refusal(400, what, "messages")
    most = JsonExtent(MAX_DEPTH, MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES)
    return all(number <= limit for number, limit in zip(found, most, strict=True))


def _decode(data: bytes, kind: type[Body]) -> Body:
    """Fields of other APIs, and null, are looked at only if the plain way fails."""
    _check_extent(data)
    with _refused_errors(data, kind):
        decoder = _decoder(kind)
        try:
            return decoder.decode(data)
        except msgspec.ValidationError:
            if (rest := _without_off_fields(data, kind)) is None:
                raise
        return decoder.decode(rest)


@cache
def _decoder(kind: type[Body]) -> msgspec.json.Decoder[Body]:
    return msgspec.json.Decoder(kind)


def _without_off_fields(data: bytes, kind: type[Body]) -> bytes | None:
    """The body without its fields that are as good as left out; None if it has none of them."""
    try:
        given = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return None
    known = {field.name: field.required for field in msgspec.structs.fields(kind)}
    kept = {name: raw for name, raw in given.items() if not _is_left_out(name, raw, known)}
    return None if len(kept) == len(given) else msgspec.json.encode(kept)


def _is_left_out(name: str, raw: msgspec.Raw, known: Mapping[str, bool]) -> bool:
    """`known`: whether each field of the body is required."""
    if name in known:
        data = bytes(raw)
        return data == b"null" or (not known[name] and ONLY_NULLS.fullmatch(data) is not None)
    return is_foreign(name, msgspec.json.decode(raw))


def is_foreign(name: str, value: Any) -> bool:
    """Whether another API's field is off and without effect; Refusal if it asks for something."""
    try:
        return drop_foreign(name, value)
    except Unsupported as error:
        raise Refusal(400, str(error), name, "unsupported_parameter") from None


def _check_extent(data: bytes) -> None:
    if not data.strip():
        raise Refusal(400, "the body is empty: send JSON")
    extent = json_extent(data)
    if extent.depth > MAX_DEPTH:
        raise Refusal(400, f"the body is nested more than {MAX_DEPTH} levels deep")
    for number, most, what in (
        (extent.containers, MAX_CONTAINERS, "lists and objects"),
        (extent.strings, MAX_STRINGS, "texts"),
        (extent.values, MAX_VALUES, "values"),
    ):
        if number > most:
            raise Refusal(413, f"the body has {number} {what}: send at most {most} at once")


@contextmanager
def _refused_errors(data: bytes, kind: type[Body]) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    except UnicodeError:
        raise Refusal(400, "the body is not UTF-8") from None
    except msgspec.DecodeError as error:
        if not isinstance(error, msgspec.ValidationError) and _has_lone_surrogate(data, str(error)):
            raise Refusal(400, LONE_SURROGATE) from None
        message = QUOTED.sub(_shorten, str(error))
        field = _FIELD.search(message)
        where = field and (field[1] or field[2])
        what = "request body" if isinstance(error, msgspec.ValidationError) else "JSON"
        raise Refusal(400, f"invalid {what}: {message}{_hint(message, kind)}", where) from None


def _hint(message: str, kind: type[Body]) -> str:
    """The field that a client may have meant by an unknown one, or the values that one allows."""
    if not (unknown := _UNKNOWN.search(message)):
        return allowed_values(message, kind)
    near = get_close_matches(unknown[1].strip("' ")[:LONGEST_WORD], kind.__struct_fields__, n=1)
    return f": did you mean {near[0]!r}?" if near else ""


class JsonExtent(NamedTuple):
    """The size of JSON, not counting the contents of strings."""

    depth: int
    containers: int
    strings: int
    values: int
    """Commas and one, an upper bound."""


def json_extent(data: bytes) -> JsonExtent:
    """What decoding would create. Invalid JSON is counted as if it were valid."""
    containers, strings = data.count(b"[") + data.count(b"{"), data.count(b'"') // 2
    values = data.count(b",") + 1
    if containers <= MAX_DEPTH and strings <= MAX_STRINGS and values <= MAX_VALUES:
        return JsonExtent(containers, containers, strings, values)
    level = depth = containers = quotes = 0
    values, rest = 1, b""
    for start in range(0, len(data), SCAN_BYTES):
        plain, rest = _without_escapes(rest + data[start : start + SCAN_BYTES])
        codes = np.frombuffer(plain, np.uint8)
        is_quote = codes == QUOTE
        inside = (np.cumsum(is_quote, dtype=np.uint8) + np.uint8(quotes % 2)) & 1
        outside = np.where(inside, 0, codes)
        steps = DEPTH_STEPS[outside]
        levels = level + np.cumsum(steps, dtype=np.int32)
        depth = max(depth, int(levels.max(initial=0)))
        containers += int(np.count_nonzero(steps > 0))
        values += int(np.count_nonzero(outside == COMMA))
        quotes += int(np.count_nonzero(is_quote))
        level += int(steps.sum())
    return JsonExtent(depth, containers, quotes // 2, values)


def _without_escapes(data: bytes) -> tuple[bytes, bytes]:
    """The data without escaped quotes, and a final backslash that escapes what follows."""
    if b"\\" not in data:
        return data, b""
    data = data.replace(b"\\\\", b"")
    rest = data[-1:] if data.endswith(b"\\") else b""
    return data[: len(data) - len(rest)].replace(b'\\"', b""), rest


def _has_lone_surrogate(data: bytes, message: str) -> bool:
    """Whether msgspec rejects a lone surrogate; near the end it reports truncation instead."""
    if "truncated" not in message:
        return "surrogate" in message
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def _shorten(found: re.Match[str]) -> str:
    """Quotes a client's name only if it is plain and short; blanks around it are shown."""
    if (
        shown(name := found[1].strip(" ")) == repr(name) != repr(found[1])
        and len(found[1]) <= LONGEST_WORD
    ):
        return repr(found[1])
    return found[1] if shown(found[1]) == repr(found[1]) else shown(found[1])


async def read_bytes(request: Request) -> bytes:
    """At most MAX_BODY, or a Refusal: by the content-length, before the body is sent."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:MAX_DIGITS]) > MAX_BODY:
        raise _too_large()
    data = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        data += message.get("body", b"")
        if len(data) > MAX_BODY:
            raise _too_large()
        if not message.get("more_body", False):
            return bytes(data)


def _too_large() -> Refusal:
    return Refusal(413, f"the body has more than {MAX_BODY} bytes: send less")
