"""From the fields of a body to sampling parameters of the engine."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from moesaic.core.sampling import MAX_GRAMMAR_BYTES, BadParameter, SamplingParams
from moesaic.server.errors import Refusal
from moesaic.server.openai.bodies import CommonBody
from moesaic.server.openai.setup import Setup

MAX_N: Final = 128
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_IDS: Final = 256
MAX_BIASES: Final = 300
MAX_TOP_LOGPROBS: Final = 20
SEEDS: Final = 2**63
# Fields that the engine knows by the same name, and those that it knows by another.
SAME: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
    "logit_bias",
    "n",
)
RENAMED: Final = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
STRUCTURED: Final = ("response_format", "json_schema", "regex", "ebnf")


def sampling_params(
    body: CommonBody, setup: Setup, max_tokens: int | None, extra: dict[str, Any]
) -> SamplingParams:
    """`max_tokens`: None for the rest of the context. `extra`: what the kind of answer demands."""
    params = dict(setup.defaults)
    params |= {name: value for name in SAME if (value := getattr(body, name)) is not None}
    if params.get("top_p") == 0:  # of the most likely tokens so few that one is left
        params |= {"top_p": 1.0, "temperature": 0.0}
    if params.get("top_k") == 0:
        params["top_k"] = -1
    params |= {"max_new_tokens": max_tokens, "min_new_tokens": body.min_tokens, **extra}
    if body.seed is not None:
        params["sampling_seed"] = body.seed % SEEDS
    try:
        return SamplingParams.from_dict(params)
    except BadParameter as error:
        name = RENAMED.get(error.name, error.name)
        raise Refusal(400, str(error).replace(error.name, name, 1), name) from None
    except (ValueError, OverflowError) as error:
        raise Refusal(400, str(error)) from None


def structured_output(body: CommonBody) -> dict[str, str] | None:
    """The form that the answer must have, as a sampling parameter."""
    wanted = {name: getattr(body, name) for name in STRUCTURED}
    chosen = {name: value for name, value in wanted.items() if value is not None}
    if (form := body.response_format) is not None:
        del chosen["response_format"]
        if form.type == "json_object":
            chosen["response_format"] = {"type": "object"}
        elif form.type == "json_schema":
            if form.json_schema is None:
                text = "response_format of type json_schema needs json_schema with a schema"
                raise Refusal(400, text, "response_format")
            schema = form.json_schema.schema
            chosen["response_format"] = {"type": "object"} if schema is None else schema
    if len(chosen) > 1:
        raise Refusal(400, f"{' and '.join(chosen)} exclude each other: give one", [*chosen][1])
    for name, value in chosen.items():
        kind = "json_schema" if name == "response_format" else name
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
            fix = f"it has {size} bytes, give at most {MAX_GRAMMAR_BYTES}"
            raise Refusal(400, f"{kind} is not possible: {fix}", name)
        return {kind: text}
    return None


def check_limits(body: CommonBody) -> None:
    if body.n is not None:
        check_range("n", body.n, 1, MAX_N)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        text = f"at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters can stop"
        raise Refusal(400, text, "stop")
    if len(body.stop_token_ids or ()) > MAX_STOP_IDS:
        raise Refusal(400, f"at most {MAX_STOP_IDS} token ids can stop", "stop_token_ids")
    if len(body.logit_bias or ()) > MAX_BIASES:
        raise Refusal(400, f"at most {MAX_BIASES} tokens can have a bias", "logit_bias")
    if body.stream_options is not None and not body.stream:
        raise Refusal(400, "stream_options are for streams: set stream", "stream_options")


def check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise Refusal(400, f"{name} must be between {least} and {most}", name)
