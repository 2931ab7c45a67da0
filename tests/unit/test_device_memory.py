"""Computes without a GPU what fits on one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moesaic.comm.collectives.collective import ShapeOnlyCollective
from moesaic.comm.mesh import Mesh
from moesaic.config import ServerArgs
from moesaic.engine.setup.device_memory import (
    GIB,
    RESERVE_BYTES,
    SAFETY,
    CacheRequest,
    DeviceRoom,
    StepBytes,
    TooLittleMemory,
    cache_dtype,
    compute_device,
    default_share,
    gpu_cache_tokens,
    gpu_sharers,
    logit_bytes,
    planned_tokens,
    smaller_weights,
)
from moesaic.engine.setup.memory_plan import chunk_tokens, max_running
from moesaic.engine.setup.moe_setup import StepLimits
from moesaic.layers.context import CacheSpec
from moesaic.layers.parallel import Parallel
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.registry import build_model
from moesaic.models.shapes import shape_config
from moesaic.moe.context import MoeContext
from moesaic.moe.quant.weights import WEIGHT_FORMATS, WeightFormat
from moesaic.moe.registry import MoeProblem
from moesaic.moe.shape_only import ShapeOnlyGroup

H200 = DeviceRoom(total=140 * GIB, free=82 * GIB, held=57 * GIB)
SPEC = CacheSpec(num_layers=48, num_heads=4, key_dim=128, value_dim=128)
STEP = StepBytes(logits=GIB, experts=GIB // 2, dense=GIB // 4, attention=GIB // 4)
PER_TOKEN = 48 * 4 * 256 * 2
MANY = 10**9


def tokens(
    args: ServerArgs, room: DeviceRoom = H200, wanted: int = MANY, step: StepBytes = STEP
) -> int:
    return gpu_cache_tokens(args, CacheRequest(SPEC.bytes_per_token(2), wanted, 0, 0, step), room)


def test_the_share_counts_weights_and_cache():
    args = ServerArgs(mem_fraction_static=0.8, page_size=16)
    expected = int(0.8 * 140 * GIB - 57 * GIB) // PER_TOKEN // 16 * 16
    assert tokens(args) == expected
    assert tokens(args, wanted=1000) == 1008
    assert tokens(replace(args, max_total_tokens=5000)) == 4992


def test_the_default_share_leaves_room_for_a_step():
    assert default_share(140 * GIB, STEP) == 0.92
    assert default_share(40 * GIB, STEP) == 1 - (RESERVE_BYTES + SAFETY * 2 * GIB) / (40 * GIB)
    assert default_share(4 * GIB, STEP) == 0.5
    assert tokens(ServerArgs()) == int(0.92 * 140 * GIB - 57 * GIB) // PER_TOKEN // 16 * 16


def test_other_processes_are_respected():
    crowded = DeviceRoom(total=140 * GIB, free=10 * GIB, held=57 * GIB)
    assert crowded.others == 73 * GIB
    assert tokens(ServerArgs(), crowded) == 8 * GIB // PER_TOKEN // 16 * 16
    with pytest.raises(ValueError) as caught:
        tokens(ServerArgs(), DeviceRoom(total=140 * GIB, free=GIB, held=57 * GIB))
    assert "the GPU has 140.0 GiB, of which 57.0 GiB are held here, 82.0 GiB by others" in str(
        caught.value
    )
    assert "the largest step takes about 2.00 GiB" in str(caught.value)


def test_what_does_not_fit_is_refused_with_numbers():
    with pytest.raises(ValueError, match=r"--mem-fraction-static 0.4 allows 0.00 GiB"):
        tokens(ServerArgs(mem_fraction_static=0.4))
    most = 80 * GIB // PER_TOKEN
    with pytest.raises(ValueError, match=f"give at most {most}"):
        tokens(ServerArgs(max_total_tokens=most + 1))
    assert tokens(ServerArgs(max_total_tokens=most)) == most // 16 * 16
    with pytest.raises(ValueError, match="is less than one page of 16 tokens"):
        tokens(ServerArgs(max_total_tokens=15))
    assert H200.after(2 * GIB) == DeviceRoom(140 * GIB, 80 * GIB, 59 * GIB)


def test_weights_are_planned_beside_a_page():
    empty = DeviceRoom(total=140 * GIB, free=140 * GIB, held=0)

    def planned(args: ServerArgs, fixed: int) -> int:
        cache = CacheRequest(SPEC.bytes_per_token(2), MANY, fixed, fixed, STEP)
        return planned_tokens(args, cache, empty, "a smaller model")

    assert (
        planned(ServerArgs(), 57 * GIB) == int(0.92 * 140 * GIB - 57 * GIB) // PER_TOKEN // 16 * 16
    )
    with pytest.raises(
        TooLittleMemory, match=r"take 141.0 GiB; the GPU has .*: use a smaller model"
    ):
        planned(ServerArgs(), 141 * GIB)
    args = ServerArgs(mem_fraction_static=0.5)
    assert planned(args, 70 * GIB - 16 * PER_TOKEN) == 16
    with pytest.raises(TooLittleMemory, match="nothing is left for a KV cache"):
        planned(args, 70 * GIB - 16 * PER_TOKEN + 1)


def test_ranks_on_one_gpu_have_equal_parts():
    """4 ranks have loaded 10 GiB each; CUDA takes 4 GiB more."""
    room = DeviceRoom(total=140 * GIB, free=96 * GIB, held=10 * GIB).part(4)
    assert (room.total, room.free, room.held, room.others) == (
        35 * GIB,
        24 * GIB,
        10 * GIB,
        GIB,
    )
    args = ServerArgs(mem_fraction_static=0.8)
    assert tokens(args, room) == (28 - 10) * GIB // PER_TOKEN // 16 * 16
    assert tokens(replace(args, mem_fraction_static=0.99), room) == 22 * GIB // PER_TOKEN // 16 * 16
    assert tokens(args, room.holding(GIB)) == (28 - 11) * GIB // PER_TOKEN // 16 * 16, "windows"
    assert str(room.after(GIB)).startswith("a rank's part of the GPU (1/4) has 35.0 GiB, of which")


def test_the_gpu_of_a_rank(monkeypatch: pytest.MonkeyPatch):
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    args = ServerArgs(device="cuda", base_gpu_id=1, tp_size=5)
    assert [compute_device(args, rank).index for rank in range(5)] == [1, 1, 1, 2, 2]
    assert chosen[3] == torch.device("cuda", 2)
    assert [gpu_sharers(args, rank) for rank in range(5)] == [3, 3, 3, 2, 2]
    assert gpu_sharers(replace(args, device="cpu"), 1) == 1


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("qwen3-30b-a3b", 8448 * (8 * (768 + 2048) + 2 * 2048) * 2),
        ("mixtral-8x7b", 8448 * (2 * (14336 + 4096) + 2 * 4096) * 2),
    ],
)
def test_a_step_is_estimated_from_its_shapes(name: str, experts: int):
    raw = RawConfig(shape_config(name), name)
    with torch.device("meta"):
        model = build_model(raw, BuildContext.single(torch.bfloat16, 1))
    step = StepBytes.of(model, StepLimits(8448, 256), 32768)
    assert step.experts == experts
    assert step.logits == logit_bytes(256, raw.integer("vocab_size"), "cpu")
    assert step.counters == 256 * raw.integer("vocab_size") * 4
    assert step.attention == 256 * 32 * 130 * 4 * 32
    assert GIB < step.total < 4 * GIB
    captured = StepBytes.of(model, StepLimits(8448, 256, graph_tokens=4224), 32768)
    assert captured.graphs == step.experts / 2 + step.dense / 2 + step.attention
    assert captured.total == step.total + captured.graphs


@pytest.mark.parametrize(
    ("a2a", "dp", "rows"), [("none", 1, 8447), ("deepep", 1, 8448), ("deepep", 2, 4 * 4224)]
)
def test_experts_are_estimated_for_the_parts_that_ranks_bring(a2a: str, dp: int, rows: int):
    """Without attention groups the ranks' parts add up to the step's tokens, rounded up."""
    raw = RawConfig(shape_config("qwen3-30b-a3b"), "q")
    problem = MoeProblem(
        a2a=a2a, weights=WEIGHT_FORMATS["bf16"], dtype="bf16", ep=4, tp=4, device="cuda"
    )
    replicated = a2a == "none"
    moe = MoeContext.make(problem, torch.bfloat16, ShapeOnlyGroup(0, 4), replicated=replicated)
    parallel = Parallel(ShapeOnlyCollective(0, 4 // dp), ShapeOnlyCollective(0, 4), dp)
    with torch.device("meta"):
        model = build_model(raw, BuildContext(1, moe, parallel))
    step = StepBytes.of(model, StepLimits(8447, 256), 32768)
    assert step.experts == rows * (8 * (768 + 2048) + 2 * 2048) * 2


@pytest.mark.parametrize(
    ("dp", "dense_tp", "gathered"),
    [
        (1, 4, 0),
        (4, 1, 0),
        (4, 4, 4 * 8447 * (3 * 2048 + 2 * 2 * 10944 // 4)),
        (2, 4, 4 * 4224 * (3 * 2048 + 2 * 2 * 10944 // 4)),
    ],
)
def test_dense_layers_are_estimated_for_the_rows_of_all_groups(
    dp: int, dense_tp: int, gathered: int
):
    raw = RawConfig(shape_config("deepseek-v2-lite"), "d")
    single = BuildContext.single(torch.bfloat16, 1)
    parallel = Parallel(ShapeOnlyCollective(0, 4 // dp), ShapeOnlyCollective(0, 4), dp, dense_tp)
    with torch.device("meta"):
        model = build_model(raw, replace(single, parallel=parallel))
    step = StepBytes.of(model, StepLimits(8447, 256), 32768)
    matrices = (p for layer in model.model.layers for p in layer.parameters() if p.dim() == 2)
    widest = max(len(matrix) for matrix in matrices)
    assert step.dense == 8447 * 2 * (4 * 2048 + 2 * widest) + 2 * gathered


def test_latents_are_expanded_in_the_estimate():
    raw = RawConfig(shape_config("deepseek-v2-lite"), "d")
    with torch.device("meta"):
        model = build_model(raw, BuildContext.single(torch.bfloat16, 1))
    step = StepBytes.of(model, StepLimits(8448, 256), 32768)
    assert step.attention == 256 * 16 * 514 * 4 * 32 + 32768 * 16 * 320 * 2
    context = replace(BuildContext.single(torch.bfloat16, 1), parallel=Parallel(deterministic=True))
    with torch.device("meta"):
        model = build_model(raw, context)
    step = StepBytes.of(model, StepLimits(8448, 256), 32768)
    assert step.attention == 8448 * 16 * (2 * 512 + 128) * 2


def test_defaults_follow_the_device():
    mesh = Mesh()
    cpu, cuda = ServerArgs(), ServerArgs(device="cuda")
    assert (max_running(cpu, mesh), max_running(cuda, mesh)) == (64, 256)
    assert (chunk_tokens(cpu, mesh, 4096), chunk_tokens(cuda, mesh, 10**6)) == (2048, 8192)
    assert chunk_tokens(replace(cuda, chunked_prefill_size=-1), mesh, 999) == 999
    assert cache_dtype(cuda, torch.bfloat16) == torch.bfloat16
    fp8 = replace(cuda, kv_cache_dtype="fp8_e4m3")
    assert cache_dtype(fp8, torch.bfloat16) == torch.float8_e4m3fn
    assert compute_device(cpu) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match=r"torch .* finds no GPU that it can use"):
        compute_device(ServerArgs(device="cuda"))


@pytest.mark.parametrize(
    ("dtype", "weights", "flags"),
    [
        (torch.float32, None, " or fewer bits (--dtype bfloat16, --quantization fp8)"),
        (torch.bfloat16, None, " or fewer bits (--quantization fp8)"),
        (torch.float32, WEIGHT_FORMATS["fp8_block"], " or fewer bits (--dtype bfloat16)"),
        (torch.bfloat16, WEIGHT_FORMATS["fp8_block"], ""),
    ],
)
def test_flags_that_are_given_are_no_advice(
    dtype: torch.dtype, weights: WeightFormat | None, flags: str
):
    moe = MoeContext.single(dtype, weights)
    assert smaller_weights(moe) == f"a smaller model{flags}"
