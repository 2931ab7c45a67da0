"""--enable-deterministic-inference on a GPU: every batch, mesh and backend gives the bits of one
rank there. Without a GPU the same runner on CPU tensors, whose twins of kernels promise no bits."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from moesaic.engine.runner import model_runner
from moesaic.engine.runner.model_runner import ModelRunner
from tests.e2e.grid import DPA, prompts
from tests.e2e.test_deterministic_ranks import NEW_TOKENS, Bits, serve
from tests.e2e.test_gpu_runner import ahead, arguments, plainly, steps_of

pytestmark = pytest.mark.timeout(600)
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
ON_GPU = "--device cuda --max-total-tokens 2048 --max-running-requests 8"
# Each is compared with one rank that prefills 64 tokens at a time.
LINES = {
    "qwen3_moe": (
        "--disable-cuda-graph --chunked-prefill-size 16",
        "--chunked-prefill-size 20 --page-size 8 --disable-radix-cache --max-running-requests 3",
        "--moe-runner-backend cutlass",
        f"--tp 2 --ep 2 {DPA} 2 --moe-a2a-backend deepep",
        f"--tp 4 --ep 4 {DPA} 4 --moe-a2a-backend deepep --deepep-mode low_latency",
        f"--tp 4 --ep 4 {DPA} 4 --moe-a2a-backend mooncake --ep-num-redundant-experts 4",
        f"--tp 2 --ep 2 {DPA} 2 --moe-a2a-backend flashinfer --chunked-prefill-size 24",
        f"--tp 2 --ep 2 {DPA} 2",
        f"--tp 4 --ep 2 {DPA} 4 --moe-a2a-backend mori",
        "--tp 2 --ep 2",
        "--tp 4",
        f"--tp 4 --ep 4 {DPA} 2 --moe-a2a-backend deepep",
    ),
    "deepseek_v3": (
        "--disable-cuda-graph --chunked-prefill-size 16 --page-size 8",
        f"--tp 2 --ep 2 {DPA} 2 --moe-a2a-backend deepep",
        "--tp 2 --ep 2",
        "--tp 4 --ep 4 --moe-a2a-backend deepep",
    ),
    "gpt_oss": (f"--tp 2 --ep 2 {DPA} 2 --moe-a2a-backend ascend_fuseep", "--tp 4 --ep 4"),
    "qwen2_moe": (f"--tp 4 --ep 4 {DPA} 4 --moe-a2a-backend deepep", "--tp 2"),
}
FLOAT32 = {("qwen3_moe", LINES["qwen3_moe"][3]), ("deepseek_v3", LINES["deepseek_v3"][1])}
CASES = [
    pytest.param(family, line, dtype, marks=GPU, id=f"{family} {line} {dtype}")
    for family, lines in LINES.items()
    for line in lines
    for dtype in ("bfloat16", *(("float32",) if (family, line) in FLOAT32 else ()))
]


def on_gpu(family: str, line: str, dtype: str, waves: int) -> Bits:
    order = list(range(len(prompts())))
    if waves > 1:
        random.Random(line).shuffle(order)
    flags = ON_GPU if "--chunked-prefill-size" in line else f"{ON_GPU} --chunked-prefill-size 64"
    return serve(f"{family} {flags} {line}", dtype, order, NEW_TOKENS, waves)


@cache
def expected(family: str, dtype: str, line: str = "") -> Bits:
    return on_gpu(family, line, dtype, waves=1)


@pytest.mark.parametrize(("family", "line", "dtype"), CASES)
def test_bits_do_not_depend_on_the_mesh_or_the_batch(family: str, line: str, dtype: str) -> None:
    assert on_gpu(family, line, dtype, waves=3) == expected(family, dtype)


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=GPU)])
def test_a_cache_in_float8(family: str) -> None:
    line = "--kv-cache-dtype fp8_e4m3"
    found = on_gpu(family, f"{line} --chunked-prefill-size 16", "bfloat16", waves=4)
    assert found == expected(family, "bfloat16", line) != expected(family, "bfloat16")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_twins_give_the_tokens_of_a_cpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By graphs' buffers and without."""
    args = arguments(family, enable_deterministic_inference=True, device="cpu")
    want = plainly(ModelRunner(args), 5)
    monkeypatch.setattr(model_runner, "compute_device", lambda *_: torch.device("cpu"))
    changes: list[dict[str, Any]] = [{}, {"disable_cuda_graph": True}]
    for change in changes:
        runner = ModelRunner(replace(args, device="cuda", **change))
        assert all(
            one.attention.deterministic and one.attention.decode is None
            for parts in steps_of(runner).graph_batch.attention.values()
            for one in parts
        )
        assert ahead(runner, 5) == want
