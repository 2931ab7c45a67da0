"""What clients send: bodies of limited size, in strict JSON, of a declared shape."""

from __future__ import annotations

from typing import Any, Final, TypeVar, cast

import msgspec
from starlette.requests import Request

from moesaic.engine.inputs import GenerateInput
from moesaic.server.errors import Refusal

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
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    except UnicodeError:
        raise Refusal(400, "the body is not UTF-8") from None
    except msgspec.DecodeError as error:
        raise Refusal(400, f"the body does not fit: {error}") from None


async def _read(request: Request) -> bytes:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY:
            raise Refusal(413, f"the body has more than {MAX_BODY} bytes: send less")
    return bytes(data)
