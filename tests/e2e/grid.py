"""Command lines over ranks, and what all of them must answer."""

import base64
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from moesaic.config.args import ServerArgs
from moesaic.config.parser import FlagParser, merge
from moesaic.engine.engine import Engine

# Large enough to be cut in 8 ways and laid over 4 stages.
MODELS = {
    "mixtral": "num_attention_heads=8,num_key_value_heads=8",
    "qwen2_moe": "num_attention_heads=8,num_key_value_heads=4",
    "qwen3_moe": "num_attention_heads=8,num_key_value_heads=2",
    "deepseek_v2": "num_attention_heads=8,num_key_value_heads=8",
    "deepseek_v3": "num_attention_heads=8,num_key_value_heads=8",
    "gpt_oss": "num_attention_heads=8,num_key_value_heads=2",
}
DPA = "--enable-dp-attention --dp"
# The ones that are always run cover every axis: families, tp 1 to 4, ep < tp, dp, pp, all backends.
ALWAYS = (
    "mixtral --tp 4 --ep 2 --ep-num-redundant-experts 3 --ep-dispatch-algorithm lp",
    f"deepseek_v3 --tp 4 {DPA} 4 --moe-a2a-backend deepep --ep-num-redundant-experts 4 "
    "--ep-dispatch-algorithm static",
    "qwen2_moe --tp 2 --pp 2 --moe-a2a-backend mori --enable-waterfill",
    "qwen3_moe --tp 4 --moe-a2a-backend mooncake",
    "gpt_oss --tp 2 --moe-a2a-backend ascend_fuseep",
    "deepseek_v2 --tp 3 --moe-a2a-backend flashinfer",
)
SLOW = (
    "gpt_oss --pp 4 --chunked-prefill-size 16",
    f"deepseek_v3 --tp 8 {DPA} 8 --moe-a2a-backend flashinfer --ep-num-redundant-experts 5 "
    "--ep-dispatch-algorithm lp",
    "qwen3_moe --tp 2",
    f"deepseek_v2 --tp 4 {DPA} 2 --moe-a2a-backend deepep --deepep-mode low_latency",
    f"qwen2_moe --tp 2 --pp 2 {DPA} 2 --moe-a2a-backend deepep",
    "mixtral --tp 2 --dp 2",
    "qwen3_moe --tp 1 --pp 2",
    "qwen3_moe --tp 4 --ep 4",
    "qwen3_moe --tp 8 --ep 4",
    "qwen3_moe --tp 8 --ep 8 --moe-a2a-backend deepep",
    f"qwen3_moe --tp 8 {DPA} 4 --moe-a2a-backend flashinfer",
    f"qwen3_moe --tp 4 --pp 2 {DPA} 2 --moe-a2a-backend mooncake",
    "qwen3_moe --tp 4 --ep 2 --moe-a2a-backend deepep",
    "mixtral --tp 8",
    "mixtral --tp 4 --ep 4 --moe-a2a-backend deepep --deepep-mode normal",
    f"mixtral --tp 4 {DPA} 4",
    f"mixtral --tp 8 --ep 2 {DPA} 2",
    "mixtral --pp 3 --moe-a2a-backend none",
    "mixtral --tp 2 --pp 4 --moe-a2a-backend flashinfer",
    "mixtral --tp 8 --moe-a2a-backend ascend_fuseep",
    "qwen2_moe --tp 4",
    "qwen2_moe --tp 2 --pp 2 --moe-a2a-backend mori",
    "qwen2_moe --tp 4 --ep 2 --enable-waterfill --enable-deterministic-inference",
    f"deepseek_v3 --tp 4 {DPA} 4 --moe-a2a-backend deepep --ep-num-redundant-experts 4 "
    "--enable-waterfill",
    f"deepseek_v2 --tp 4 {DPA} 2 --moe-a2a-backend mooncake --enable-waterfill",
    "qwen2_moe --tp 4 --ep 4 --moe-a2a-backend flashinfer",
    f"qwen2_moe --tp 4 {DPA} 4 --enable-dp-lm-head --moe-a2a-backend deepep",
    f"qwen2_moe --tp 4 {DPA} 2 --moe-dense-tp-size 1",
    "qwen2_moe --tp 2 --pp 3 --chunked-prefill-size 16",
    "qwen2_moe --dp 3",
    "deepseek_v2 --tp 2",
    "deepseek_v2 --tp 5 --ep 5 --ep-num-redundant-experts 3",
    "deepseek_v2 --tp 7 --ep 7 --ep-num-redundant-experts 6 --moe-a2a-backend mori",
    f"deepseek_v2 --tp 8 {DPA} 4 --moe-a2a-backend deepep --deepep-mode auto",
    f"deepseek_v2 --tp 6 --ep 3 --ep-num-redundant-experts 1 {DPA} 3 --moe-a2a-backend flashinfer",
    f"deepseek_v2 --tp 4 {DPA} 4 --moe-dense-tp-size 1 --enable-dp-lm-head",
    "deepseek_v2 --pp 4 --moe-a2a-backend none",
    "deepseek_v3 --tp 8 --ep 8 --moe-a2a-backend deepep",
    "deepseek_v3 --tp 8 --ep 4",
    f"deepseek_v3 --tp 8 {DPA} 8 --moe-a2a-backend deepep",
    f"deepseek_v3 --tp 8 {DPA} 2 --moe-a2a-backend mooncake",
    f"deepseek_v3 --tp 2 --pp 4 {DPA} 2 --moe-a2a-backend deepep --chunked-prefill-size 32",
    f"deepseek_v3 --tp 4 {DPA} 4 --moe-a2a-backend ascend_fuseep",
    f"deepseek_v3 --tp 4 {DPA} 4 --moe-a2a-backend mori --load-balance-method total_tokens",
    f"deepseek_v3 --tp 4 {DPA} 4 --load-balance-method total_requests",
    "deepseek_v3 --tp 2 --dp 2 --pp 2 --moe-a2a-backend deepep",
    "gpt_oss --tp 4 --ep 4 --moe-a2a-backend deepep",
    "gpt_oss --tp 8 --ep 2",
    f"gpt_oss --tp 4 {DPA} 2 --moe-a2a-backend mooncake",
    f"gpt_oss --tp 4 {DPA} 4 --moe-a2a-backend mori",
    "gpt_oss --tp 2 --pp 4 --moe-a2a-backend ascend_fuseep",
    "gpt_oss --tp 1 --pp 3 --max-total-tokens 512",
)


@dataclass(frozen=True)
class Answer:
    output_ids: list[int]
    logprobs: list[float]
    routed: bytes
    """The experts of all tokens in all layers, sorted: two may be so close that rounding decides
    which is first."""


def model_path(family: str) -> str:
    return f"tiny:{family},num_hidden_layers=4,{MODELS[family]}"


def arguments(line: str) -> ServerArgs:
    """Of "FAMILY --flags ..."."""
    family, *words = line.split()
    parser = FlagParser("test", "test", "")
    parser.add_flags(ServerArgs)
    given = parser.parse(words)
    return merge(ServerArgs, {**given, "model_path": model_path(family)}, {})


def prompts() -> list[list[int]]:
    """16 of mixed lengths, some with a common beginning, from one token to several chunks.

    With this seed no two best tokens of any family are nearer than 5e-4 in their logprobs, some
    fifty times what another order of sums changes: a token that differs is a fault.
    """
    chooser = random.Random(9)
    stem = [chooser.randrange(256) for _ in range(40)]
    lengths = [1, 2, 3, 5, 8, 13, 21, 34, 55, 70, 17, 16]
    alone = [[chooser.randrange(256) for _ in range(length)] for length in lengths]
    return [*alone, *(stem + [number] * number for number in range(1, 5))]


def answers(
    args: dict[str, Any], new_tokens: int = 16, logprobs: bool = False, seeds: Sequence[int] = ()
) -> list[Answer]:
    """All prompts, served together."""
    sampling: dict[str, Any] = {"max_new_tokens": new_tokens, "ignore_eos": True}
    sampling |= {"temperature": 0.8, "sampling_seed": seeds[0]} if seeds else {"temperature": 0}
    with Engine(**args) as engine:
        outputs = engine.generate(
            input_ids=prompts(),
            sampling_params=sampling,
            return_logprob=logprobs,
            return_routed_experts=True,
        )
        top_k = engine.routing_info()["top_k"]
    assert isinstance(outputs, list)
    return [_answer(output, top_k) for output in outputs]


def _answer(output: dict[str, Any], top_k: int) -> Answer:
    meta = output["meta_info"]
    assert meta["finish_reason"]["type"] == "length", meta
    told = meta.get("output_token_logprobs", [])
    routed = sorted_experts(output, top_k)
    return Answer(output["output_ids"], [entry[0] for entry in told], routed.tobytes())


def sorted_experts(output: dict[str, Any], top_k: int) -> Any:
    """The experts [tokens * layers, K] of an output."""
    data = base64.b64decode(output["meta_info"]["routed_experts"])
    return np.sort(np.frombuffer(data, np.int32).reshape(-1, top_k))


@cache
def on_one_rank(family: str, new_tokens: int) -> list[Answer]:
    return answers({"model_path": model_path(family)}, new_tokens)
