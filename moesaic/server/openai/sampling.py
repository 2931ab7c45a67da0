"""Converts the fields of a body to the engine's sampling parameters."""

from __future__ import annotations

from typing import Any, Final

from moesaic.core.sampling import BadParameter, SamplingParams
from moesaic.server.errors import Refusal
from moesaic.server.openai.request_types import CommonBody
from moesaic.server.openai.setup import OpenAISetup

MAX_N: Final = 128
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_IDS: Final = 256
MAX_BIASES: Final = 300
MAX_TOP_LOGPROBS: Final = 20
SEEDS: Final = 2**63
# Fields that have the same name in the engine, and those that have another.
SAME: Final = (
    *("temperature", "top_p", "top_k", "min_p", "logit_bias", "n"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "no_stop_trim", "ignore_eos", "skip_special_tokens"),
    *("stop_regex", "include_stop_str_in_output"),
)
# Fields that are arguments of the engine.
OPTIONS: Final = (
    *("extra_key", "cache_salt", "data_parallel_rank", "routed_dp_rank"),
    *("return_routed_experts", "routed_experts_start_len"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
)
RENAMED: Final = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}

# What the engine advises about max_new_tokens; here the routes differ in what null means.
NO_LIMIT: Final = ", or null (in Python None) for no limit"


def sampling_params(
    body: CommonBody, setup: OpenAISetup, max_tokens: int | None, extra: dict[str, Any]
) -> SamplingParams:
    """`max_tokens`: None for the rest of the context. `extra`: parameters of the route."""
    params = dict(setup.defaults)
    params |= {name: value for name in SAME if (value := getattr(body, name)) is not None}
    if params.get("top_p") == 0:  # keeps only the most likely token
        params |= {"top_p": 1.0, "temperature": 0.0}
    if params.get("top_k") == 0:
        params["top_k"] = -1
    params |= {"max_new_tokens": max_tokens, "min_new_tokens": body.min_tokens, **extra}
    if body.seed is not None:
        params["sampling_seed"] = body.seed % SEEDS
    try:
        return SamplingParams.from_dict(params)
    except BadParameter as error:
        text = str(error).replace(NO_LIMIT, "")
        for old, new in RENAMED.items():
            text = text.replace(old, new)
        raise Refusal(400, text, RENAMED.get(error.name, error.name)) from None
    except (ValueError, OverflowError) as error:
        raise Refusal(400, str(error)) from None


def engine_options(body: CommonBody) -> dict[str, Any]:
    return {name: getattr(body, name) for name in OPTIONS}


def check_limits(body: CommonBody) -> None:
    if body.n is not None:
        check_range("n", body.n, 1, MAX_N)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        text = f"give at most {MAX_STOPS} stop texts of at most {MAX_STOP_CHARS} characters"
        raise Refusal(400, text, "stop")
    if len(body.stop_token_ids or ()) > MAX_STOP_IDS:
        raise Refusal(400, f"give at most {MAX_STOP_IDS} stop token ids", "stop_token_ids")
    if len(body.logit_bias or ()) > MAX_BIASES:
        raise Refusal(400, f"give a bias for at most {MAX_BIASES} tokens", "logit_bias")
    options = body.stream_options
    asks = options and (options.include_usage or options.continuous_usage_stats)
    if asks and not body.stream:
        raise Refusal(400, "stream_options needs stream: set it", "stream_options")


def check_best_of(value: int, n: int) -> None:
    if not 1 <= value <= n:
        text = f"best_of must not exceed n, which is {n}: no answers are discarded"
        raise Refusal(400, text if value > n else "best_of must be 1 or more", "best_of")


def check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise Refusal(400, f"{name} must be between {least} and {most}", name)
