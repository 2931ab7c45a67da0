"""--enable-deterministic-inference: bits depend on the size of the attention group alone."""

import random
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest

from moesaic.engine.engine import Engine
from tests.e2e.grid import DPA, arguments, prompts

NEW_TOKENS = 12
Bits = list[tuple[list[int], list[float], list[float]]]


def serve(line: str, dtype: str, order: list[int], waves: int = 1) -> Bits:
    """Tokens, their logprobs and those of the prompt, in the order of the prompts; served in an
    order and a number of batches of its own, half of them sampled."""
    args = replace(arguments(line), dtype=dtype, enable_deterministic_inference=True)
    found: dict[int, Any] = {}
    with Engine(**asdict(args)) as engine:
        for wave in range(waves):
            chosen = order[wave::waves]
            outputs = engine.generate(
                input_ids=[prompts()[number] for number in chosen],
                sampling_params=[_sampling(number) for number in chosen],
                return_logprob=True,
                logprob_start_len=0,
            )
            assert isinstance(outputs, list)
            found |= dict(zip(chosen, outputs, strict=True))
    return [_bits(found[number]) for number in sorted(found)]


def _sampling(number: int) -> dict[str, Any]:
    common = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    warm = {"temperature": 0.9, "sampling_seed": number}
    return common | (warm if number % 2 else {"temperature": 0})


def _bits(output: dict[str, Any]) -> tuple[list[int], list[float], list[float]]:
    meta = output["meta_info"]
    assert meta["finish_reason"]["type"] == "length", meta
    given = [entry[0] for entry in meta["input_token_logprobs"][1:]]
    return output["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]], given


@cache
def expected(line: str, dtype: str) -> Bits:
    return serve(line, dtype, list(range(len(prompts()))))


# What is compared with what: meshes whose attention groups have the same size.
ALONE = {
    "deepseek_v3": (
        f"--tp 2 {DPA} 2 --moe-a2a-backend deepep",
        f"--tp 4 --ep 2 {DPA} 4 --moe-a2a-backend flashinfer --chunked-prefill-size 64",
        "--pp 2 --chunked-prefill-size 16",
    ),
    "qwen3_moe": (
        f"--tp 4 {DPA} 4 --ep-num-redundant-experts 4 --moe-a2a-backend mooncake",
        "--dp 2 --disable-radix-cache --chunked-prefill-size 24",
        f"--tp 2 --pp 2 {DPA} 2 --page-size 4",
    ),
}
IN_PAIRS = (
    "--tp 2 --ep 2 --moe-a2a-backend deepep --chunked-prefill-size 16",
    f"--tp 4 --ep 2 {DPA} 2 --moe-a2a-backend mori",
    "--tp 2 --pp 2",
)
CASES = [
    *((family, "", line) for family, lines in ALONE.items() for line in lines),
    *(("qwen2_moe", "--tp 2", line) for line in IN_PAIRS),
    ("gpt_oss", "", f"--tp 2 {DPA} 2 --moe-a2a-backend ascend_fuseep"),
    ("mixtral", "--tp 2", f"--tp 4 {DPA} 2"),
    ("deepseek_v2", "--tp 2", f"--tp 4 {DPA} 2 --moe-a2a-backend deepep --deepep-mode low_latency"),
]
# Of those that are always run, some in one type and some in the other.
ALWAYS = {(1, "bfloat16"), (2, "float32"), (3, "bfloat16"), (7, "float32")}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "base", "line", "dtype"),
    [
        pytest.param(
            *case,
            dtype,
            id=f"{case[0]} {case[1]} = {case[2]} {dtype}",
            marks=[] if (number, dtype) in ALWAYS else pytest.mark.slow,
        )
        for number, case in enumerate(CASES)
        for dtype in ("float32", "bfloat16")
    ],
)
def test_bits_do_not_depend_on_the_mesh_or_the_batch(
    family: str, base: str, line: str, dtype: str
) -> None:
    order = list(range(len(prompts())))
    random.Random(line).shuffle(order)
    found = serve(f"{family} {line}", dtype, order, waves=3)
    assert found == expected(f"{family} {base}", dtype)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_bits_do_not_depend_on_the_batch_on_one_rank(family: str) -> None:
    order = list(range(len(prompts())))
    random.Random(family).shuffle(order)
    line = f"{family} --chunked-prefill-size 20 --page-size 8 --max-total-tokens 600"
    assert serve(line, "bfloat16", order, waves=5) == expected(f"{family} ", "bfloat16")
