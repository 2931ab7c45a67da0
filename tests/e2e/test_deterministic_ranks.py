"""--enable-deterministic-inference: every mesh gives the bits of one rank."""

import random
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest

from moesaic.engine.engine import Engine
from tests.e2e.grid import DPA, arguments, prompts

# Of the tests that are always run, and of the slow ones.
QUICK_TOKENS, NEW_TOKENS = 6, 12
Bits = list[tuple[list[int], list[float], list[float]]]


def serve(line: str, dtype: str, order: list[int], new_tokens: int, waves: int = 1) -> Bits:
    """Tokens, their logprobs and those of the prompt, in the order of the prompts; served in an
    order and a number of batches of its own, half of them sampled."""
    args = replace(arguments(line), dtype=dtype, enable_deterministic_inference=True)
    found: dict[int, Any] = {}
    with Engine(**asdict(args)) as engine:
        for wave in range(waves):
            chosen = order[wave::waves]
            outputs = engine.generate(
                input_ids=[prompts()[number] for number in chosen],
                sampling_params=[_sampling(number, new_tokens) for number in chosen],
                return_logprob=True,
                logprob_start_len=0,
            )
            assert isinstance(outputs, list)
            found |= dict(zip(chosen, outputs, strict=True))
    return [_bits(found[number]) for number in sorted(found)]


def _sampling(number: int, new_tokens: int) -> dict[str, Any]:
    common = {"max_new_tokens": new_tokens, "ignore_eos": True}
    warm = {"temperature": 0.9, "sampling_seed": number}
    return common | (warm if number % 2 else {"temperature": 0})


def _bits(output: dict[str, Any]) -> tuple[list[int], list[float], list[float]]:
    meta = output["meta_info"]
    assert meta["finish_reason"]["type"] == "length", meta
    given = [entry[0] for entry in meta["input_token_logprobs"][1:]]
    return output["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]], given


@cache
def expected(family: str, dtype: str, new_tokens: int) -> Bits:
    """What one rank has found."""
    return serve(family, dtype, list(range(len(prompts()))), new_tokens)


# All of it is compared with one rank: attention in 1 to 8 parts, heads that do not divide,
# ranks that share a key/value head, biases, windows and sinks, dense layers cut in each way.
LINES = {
    "deepseek_v3": (
        f"--tp 2 {DPA} 2 --moe-a2a-backend deepep",
        f"--tp 4 --ep 2 {DPA} 4 --moe-a2a-backend flashinfer --chunked-prefill-size 64",
        "--pp 2 --chunked-prefill-size 16",
        f"--tp 4 --ep 4 {DPA} 2 --moe-a2a-backend deepep",
        "--tp 2 --pp 2 --moe-a2a-backend deepep",
        "--tp 8 --ep 8 --moe-a2a-backend deepep",
        f"--tp 8 --ep 2 {DPA} 2",
        f"--tp 8 {DPA} 4 --moe-dense-tp-size 1 --enable-dp-lm-head --moe-a2a-backend mori",
    ),
    "qwen3_moe": (
        f"--tp 4 {DPA} 4 --ep-num-redundant-experts 4 --moe-a2a-backend mooncake "
        "--ep-dispatch-algorithm lp",
        "--dp 2 --disable-radix-cache --chunked-prefill-size 24",
        f"--tp 2 --pp 2 {DPA} 2 --page-size 4",
        "--tp 4 --ep 2",
        "--tp 8",
    ),
    "qwen2_moe": (
        "--tp 2 --ep 2 --moe-a2a-backend deepep --chunked-prefill-size 16",
        f"--tp 4 --ep 2 {DPA} 2 --moe-a2a-backend mori",
        "--tp 2 --pp 2",
        "--tp 8 --ep 4 --moe-a2a-backend mooncake",
    ),
    "gpt_oss": (
        f"--tp 2 {DPA} 2 --moe-a2a-backend ascend_fuseep",
        "--tp 4 --ep 4",
        f"--tp 8 --ep 2 {DPA} 2 --moe-a2a-backend flashinfer",
    ),
    "mixtral": ("--tp 2", f"--tp 4 {DPA} 2", "--tp 8 --ep 8"),
    "deepseek_v2": (
        f"--tp 4 {DPA} 2 --moe-a2a-backend deepep --deepep-mode low_latency",
        "--tp 3 --ep 3 --ep-num-redundant-experts 1",
        "--tp 7 --ep 7 --ep-num-redundant-experts 6 --moe-a2a-backend mori",
    ),
}
CASES = [(family, line) for family, lines in LINES.items() for line in lines]
# Of those that are always run, some in one type and some in the other.
ALWAYS = {
    ("deepseek_v3", LINES["deepseek_v3"][1], "bfloat16"),
    ("deepseek_v3", LINES["deepseek_v3"][2], "float32"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "line", "dtype"),
    [
        pytest.param(
            *case,
            dtype,
            id=f"{case[0]} {case[1]} {dtype}",
            marks=[] if (*case, dtype) in ALWAYS else pytest.mark.slow,
        )
        for case in CASES
        for dtype in ("float32", "bfloat16")
    ],
)
def test_bits_do_not_depend_on_the_mesh_or_the_batch(family: str, line: str, dtype: str) -> None:
    order = list(range(len(prompts())))
    random.Random(line).shuffle(order)
    new_tokens = QUICK_TOKENS if (family, line, dtype) in ALWAYS else NEW_TOKENS
    found = serve(f"{family} {line}", dtype, order, new_tokens, waves=3)
    assert found == expected(family, dtype, new_tokens)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bits_of_shared_experts_among_the_routed_ones() -> None:
    """Not those of one rank, where they are beside them, but of each other's mesh."""
    order = list(range(len(prompts())))
    found, other = (
        serve(f"qwen2_moe --enable-waterfill {line}", "bfloat16", numbers, NEW_TOKENS, waves)
        for line, numbers, waves in (
            (f"--tp 4 {DPA} 4 --moe-a2a-backend deepep --ep-num-redundant-experts 4", order, 3),
            ("--tp 4 --ep 2", order[::-1], 1),
        )
    )
    assert found == other


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_bits_do_not_depend_on_the_batch_on_one_rank(family: str) -> None:
    order = list(range(len(prompts())))
    random.Random(family).shuffle(order)
    line = f"{family} --chunked-prefill-size 20 --page-size 8 --max-total-tokens 600"
    found = serve(line, "bfloat16", order, QUICK_TOKENS, waves=5)
    assert found == expected(family, "bfloat16", QUICK_TOKENS)
