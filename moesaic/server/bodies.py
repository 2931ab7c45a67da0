"""What clients send: bodies of limited size, in strict JSON, of a declared shape."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

MAX_BODY: Final = 4 << 20

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
    # Existing clients send these empty.
    image_data: None = None
    lora_path: None = None

    def arguments(self) -> dict[str, Any]:
        """The keywords of Engine.async_generate."""
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give either text or input_ids, and not both")
        return {
            "prompt": self.text,
            "input_ids": self.input_ids,
            "sampling_params": self.sampling_params,
            "return_logprob": self.return_logprob,
            "logprob_start_len": self.logprob_start_len,
            "top_logprobs_num": self.top_logprobs_num,
            "return_text_in_logprobs": self.return_text_in_logprobs,
            "stream": self.stream,
            "rid": self.rid,
        }


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    rid: str


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body, or ValueError. msgspec knows no NaN, no Infinity, no lone surrogates, and its
    messages say where and what was expected without repeating what was sent."""
    data = await _read(request)
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    except UnicodeError:
        raise ValueError("the body is not UTF-8") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"the body does not fit: {error}") from None


async def _read(request: Request) -> bytes:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY:
            raise HTTPException(413, f"the body has more than {MAX_BODY} bytes: send less")
    return bytes(data)
