"""Experts with many rows: the kernels against their torch twins."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moesaic.kernels.cpu.experts import SwigluSpec
from moesaic.kernels.experts import Groups, Matrices, Rows, blocks, down, gate_up, sort_pairs
from moesaic.kernels.triton.experts_large import down_large, gate_up_large, large_config
from moesaic.kernels.triton.experts_product import LargeConfig, product_of
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from tests.kernels.triton_cases import DEVICE, GPU, compile_apart, relative_error

FP8 = torch.float8_e4m3fn
# What a whole result may be off by, by its type; what fp8 products are rounded to.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
OUTPUT = {FP8: torch.bfloat16 if GPU else torch.float16}
SILU = SwigluSpec()
TINY = LargeConfig(block_m=16, block_n=16, block_k=32, warps=4, stages=2, group=2)
TINY_FP8 = replace(TINY, block_n=128, block_k=128)
hopper = pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU"
)


@dataclass(frozen=True)
class Case:
    """`skew`: how much likelier an expert is than the next one."""

    rows: int = 25
    top_k: int = 2
    experts: int = 3
    hidden: int = 64
    inner: int = 48
    dtype: torch.dtype = torch.float16
    format: str = "fp16"
    bias: bool = False
    activation: SwigluSpec = SILU
    skew: float = 0.5
    absent: float = 0.1


def random_ids(case: Case) -> Tensor:
    """Different experts for each row, a few pairs nobody's."""
    scores = torch.rand(case.rows, case.experts, device=DEVICE).log() / (
        case.skew ** torch.arange(case.experts, device=DEVICE)
    )
    ids = scores.argsort(1, descending=True)[:, : case.top_k].int()
    return ids.masked_fill(torch.rand(ids.shape, device=DEVICE) < case.absent, -1)


def random_matrices(case: Case, parts: int, rows: int, columns: int) -> Matrices:
    weight_format = WEIGHT_FORMATS[case.format]
    w = torch.randn(case.experts, parts, rows, columns, device=DEVICE) / columns**0.5
    planes = weight_format.encode(w)
    bias = torch.randn(case.experts, parts * rows, device=DEVICE) if case.bias else None
    return Matrices(case.format, planes, (case.experts, parts * rows, columns), parts, bias)


def random_rows(rows: int, columns: int, dtype: torch.dtype) -> Rows:
    """Quantised ones by groups of 128, with scales that differ much between groups."""
    values = torch.randn(rows, columns, device=DEVICE)
    if dtype != FP8:
        return Rows(values.to(dtype), scale=1.5)
    scales = torch.rand(rows, -(-columns // 128), device=DEVICE) * 2 + 0.01
    return Rows((values * 50).to(FP8), scales / 50)


def poisoned(rows: int, columns: int, dtype: torch.dtype, quantised: bool = False) -> Rows:
    values = torch.full((rows, columns), torch.nan, device=DEVICE).to(dtype)
    if not quantised:
        return Rows(values)
    return Rows(values, torch.full((rows, columns // 128), torch.nan, device=DEVICE))


def same(out: Tensor, expected: Tensor, bound: float) -> None:
    """Close where the twin wrote, untouched where it did not."""
    out, expected = out.float(), expected.float()
    written = ~expected.isnan()
    assert torch.equal(written, ~out.isnan())
    if written.any():
        assert relative_error(out[written], expected[written]) < bound


def dequantised(h: Rows) -> Tensor:
    assert h.scales is not None
    return h.values.float() * h.scales.repeat_interleave(128, 1)


def check_gate_up(case: Case, groups: Groups, rows: int, config: LargeConfig) -> None:
    quantised = case.dtype == FP8
    x = random_rows(rows, case.hidden, case.dtype)
    w13 = random_matrices(case, 2, case.inner, case.hidden)
    size = (groups.num_places, case.inner, case.dtype, quantised)
    expected = gate_up.twin(x, w13, groups, case.activation, poisoned(*size))
    out = gate_up_large(x, w13, groups, case.activation, poisoned(*size), config)
    if not quantised:
        same(out.values, expected.values, BOUNDS[case.dtype])
        return
    assert out.scales is not None and expected.scales is not None
    # The matrix units sum fp8 products in some 14 bits.
    same(out.scales, expected.scales, 5e-3 if GPU else 1e-5)
    # A sum next to the middle of two fp8 numbers may be rounded to either; the interpreter rounds
    # many to the wrong one.
    same(dequantised(out), dequantised(expected), 0.03 if GPU else 0.08)


def check_down(
    case: Case, groups: Groups, weights_RK: Tensor | None, config: LargeConfig, pairs: int
) -> None:
    h = random_rows(groups.num_places, case.inner, case.dtype)
    w2 = random_matrices(case, 1, case.hidden, case.inner)
    dtype = OUTPUT.get(case.dtype, case.dtype)
    size = (pairs, case.hidden, dtype)
    expected = down.twin(h, w2, groups, weights_RK, poisoned(*size).values)
    out = down_large(h, w2, groups, weights_RK, poisoned(*size).values, config)
    same(out, expected, BOUNDS[dtype])
    if GPU:  # a race would show
        again = down_large(h, w2, groups, weights_RK, poisoned(*size).values, config)
        assert torch.equal(out.nan_to_num(), again.nan_to_num())


def check(case: Case, config: LargeConfig) -> None:
    groups = sort_pairs.twin(random_ids(case), case.experts, config.block_m)
    weights_RK = torch.rand(case.rows, case.top_k, device=DEVICE)
    check_gate_up(case, groups, case.rows, config)
    check_down(case, groups, weights_RK, config, case.rows * case.top_k)


FP8_CASE = Case(rows=33, hidden=256, inner=128, dtype=FP8, format="fp8_block")
CASES = {
    "odd": Case(hidden=72, inner=40),
    "wide": Case(rows=40, top_k=1, hidden=96, inner=80, dtype=torch.float32, format="fp32"),
    "one expert": Case(rows=34, top_k=1, skew=1e-9, absent=0.0),
    "nobody": Case(rows=5, absent=1.0),
    "bias and limit": Case(bias=True, activation=SwigluSpec(1.702, 1.0)),
    "fp8 blocks": FP8_CASE,
    "fp8 channels": replace(FP8_CASE, format="fp8_channel", bias=True),
    "fp8 tensor": replace(FP8_CASE, format="fp8_tensor"),
    "fp8 weights alone": Case(rows=9, hidden=160, inner=128, format="fp8_block"),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_twin(name: str) -> None:
    torch.manual_seed(len(name))
    case = CASES[name]
    check(case, TINY_FP8 if case.format.startswith("fp8") else TINY)


def test_without_the_copy_engine_or_weights() -> None:
    case = Case(hidden=72, inner=40)
    config = replace(TINY, copies=False)
    groups = sort_pairs.twin(random_ids(case), case.experts, config.block_m)
    check_gate_up(case, groups, case.rows, config)
    check_down(case, groups, None, config, case.rows * case.top_k)


def test_blocks_of_rows() -> None:
    """The masked layout, with an expert that has nothing and one that is full."""
    case = Case()
    groups = blocks.twin(torch.tensor([0, 20, 7], device=DEVICE), 20, TINY.block_m)
    check_gate_up(case, groups, 60, TINY)
    check_down(case, groups, None, TINY, 60)


def test_no_rows() -> None:
    groups = sort_pairs.twin(torch.empty(0, 2, dtype=torch.int32, device=DEVICE), 3, 16)
    case = Case()
    check_gate_up(case, groups, 0, TINY)
    check_down(case, groups, None, TINY, 0)


def test_refuses_what_it_cannot_do() -> None:
    case = Case()
    groups = sort_pairs.twin(random_ids(case), 3, 32)
    x = random_rows(case.rows, case.hidden, case.dtype)
    w13 = random_matrices(case, 2, case.inner, case.hidden)
    h = poisoned(groups.num_places, case.inner, case.dtype)
    with pytest.raises(ValueError, match="tiles of 32 places, but the kernel takes 16"):
        gate_up_large(x, w13, groups, case.activation, h, TINY)
    with pytest.raises(ValueError, match="weight format int4_w4a16"):
        gate_up_large(x, replace(w13, format="int4_w4a16"), groups, case.activation, h, TINY)


def test_what_is_taken_where_nothing_was_measured() -> None:
    """Strips of the docstring's shapes, and steps of 128 bytes."""
    case = Case(experts=2, hidden=256, inner=96)
    x = random_rows(1, case.hidden, torch.float16)
    config = large_config(x, random_matrices(case, 2, case.inner, case.hidden))
    assert (config.block_m, config.block_k) == (128, 64)
    quantised = random_rows(1, 256, FP8)
    w = random_matrices(replace(case, format="fp8_block"), 1, 300, 256)
    config = large_config(quantised, w)
    assert config.block_k == 128
    # Rows that are still to be quantised: steps are of what they become.
    for dtype in (torch.bfloat16, torch.float32):
        assert large_config(random_rows(1, 256, dtype), w, 128) == large_config(quantised, w, 128)
    assert product_of(quantised, w, False).num_strips(config) == 2
    w13 = replace(w, shape=(2, 2 * 768, 256), parts=2)
    assert product_of(quantised, w13, True).num_strips(config) == 6


@pytest.mark.timeout(600)
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compiles_for_hopper(quick: bool) -> None:
    """Without spills, with asynchronous products of whole warp groups."""
    compile_apart("aot_experts_large", "quick" if quick else "all")


BF16 = Case(
    rows=333, experts=5, hidden=512, inner=320, dtype=torch.bfloat16, format="bf16", skew=0.8
)
HOPPER_FP8 = replace(BF16, hidden=768, inner=640, dtype=FP8, format="fp8_block")
HOPPER_CASES = {
    "bf16": BF16,
    "fp16": replace(BF16, dtype=torch.float16, format="fp16"),
    "bias and limit": replace(BF16, bias=True, activation=SwigluSpec(1.702, 1.0)),
    "odd columns": replace(BF16, hidden=576, inner=448),
    "two experts": replace(BF16, skew=1e-9, absent=0.0),
    "one row": replace(BF16, rows=1, absent=0.0),
    "nobody": replace(BF16, absent=1.0),
    "many items": replace(BF16, rows=3000, hidden=1024, inner=1024, top_k=3),
    "fp8 blocks": HOPPER_FP8,
    "fp8 channels": replace(HOPPER_FP8, format="fp8_channel", bias=True),
    "fp8 tensor": replace(HOPPER_FP8, format="fp8_tensor", rows=3000),
    "qwen3": Case(2048, 8, 128, 2048, 768, torch.bfloat16, "bf16", skew=1.0),
    "qwen3 fp8": Case(2048, 8, 128, 2048, 768, FP8, "fp8_block", skew=0.98),
    "deepseek": Case(4096, 1, 8, 7168, 2048, torch.bfloat16, "bf16", skew=1.0),
}


def hopper_config(case: Case, specialised: bool) -> LargeConfig:
    from moesaic.kernels.triton.experts_hopper import can_run

    x = random_rows(1, case.hidden, case.dtype)
    w13 = random_matrices(case, 2, case.inner, case.hidden)
    config = replace(large_config(x, w13), specialised=specialised)
    assert can_run(x, w13, x.values, product_of(x, w13, True), config)
    return config


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    "name, specialised",
    [*((name, True) for name in HOPPER_CASES), ("bf16", False), ("qwen3 fp8", False)],
)
def test_on_hopper(name: str, specialised: bool) -> None:
    torch.manual_seed(7)
    check(HOPPER_CASES[name], hopper_config(HOPPER_CASES[name], specialised))


# Rows of experts around every number of blocks that their last two tiles can have.
LASTS = (0, 1, 64, 65, 128, 129, 130, 191, 192, 193, 256, 257, 320, 321, 384, 385, 449, 700)


def tall_groups(sorted_rows: bool, block: int) -> Groups:
    counts = torch.tensor(LASTS, device=DEVICE)
    if not sorted_rows:
        return blocks.twin(counts, max(LASTS), block)
    ids = torch.arange(len(LASTS), device=DEVICE).repeat_interleave(counts)
    ids = ids[torch.randperm(len(ids), device=DEVICE)]
    return sort_pairs.twin(ids.int()[:, None], len(LASTS), block)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("sorted_rows", [True, False], ids=["sorted", "masked"])
@pytest.mark.parametrize("name", ["fp16", "bias and limit", "odd columns"])
def test_tall_items_on_hopper(name: str, sorted_rows: bool) -> None:
    case = replace(HOPPER_CASES[name], experts=len(LASTS), top_k=1)
    config = hopper_config(case, True)
    groups = tall_groups(sorted_rows, config.block_m)
    check_gate_up(case, groups, groups.num_places, config)
    weights_RK = torch.rand(groups.num_places, 1, device=DEVICE) if sorted_rows else None
    check_down(case, groups, weights_RK, config, groups.num_places)


@pytest.mark.gpu
@hopper
def test_tall_items_give_the_same_bits() -> None:
    """A row's bits must not depend on how many rows come with it."""
    case = replace(BF16, experts=len(LASTS), top_k=1)
    config = replace(hopper_config(case, True), tall=False)
    groups = tall_groups(True, config.block_m)
    x = random_rows(groups.num_places, case.hidden, case.dtype)
    h = random_rows(groups.num_places, case.inner, case.dtype)
    w13 = random_matrices(case, 2, case.inner, case.hidden)
    w2 = random_matrices(case, 1, case.hidden, case.inner)

    def both(config: LargeConfig) -> tuple[Tensor, Tensor]:
        inner = poisoned(groups.num_places, case.inner, case.dtype)
        y = poisoned(groups.num_places, case.hidden, case.dtype).values
        gate_up_large(x, w13, groups, SILU, inner, config)
        return inner.values, down_large(h, w2, groups, None, y, config)

    for wide, other in zip(both(config), both(replace(config, tall=True)), strict=True):
        assert torch.equal(wide, other)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("name", ["bf16", "fp8 blocks"])
def test_rows_at_places_on_hopper(name: str) -> None:
    """The masked layout, whose rows the copy engine loads."""
    case = HOPPER_CASES[name]
    config = hopper_config(case, True)
    counts = torch.randint(0, 200, (case.experts,), device=DEVICE)
    masked = blocks.twin(counts, 200, config.block_m)
    check_gate_up(case, masked, case.experts * 200, config)
    check_down(case, masked, None, config, case.experts * 200)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("name", ["one row", "many items", "fp8 tensor"])
def test_claims_leave_zeros(name: str) -> None:
    """Programs claim items from the counters that sorting has cleared, for one product after the
    other."""
    case = HOPPER_CASES[name]
    config = hopper_config(case, True)
    ids = random_ids(case)
    groups = sort_pairs(ids, case.experts, config.block_m)
    torch.cuda.synchronize()
    for _ in range(2):
        check_gate_up(case, groups, case.rows, config)
        weights_RK = torch.rand(case.rows, case.top_k, device=DEVICE)
        check_down(case, groups, weights_RK, config, case.rows * case.top_k)
        assert groups.counters is not None and not groups.counters.any()


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    ("name", "ring"), [("many items", 2), ("fp8 tensor", 2), ("fp8 tensor", 3), ("fp8 blocks", 3)]
)
def test_rings_on_hopper(name: str, ring: int) -> None:
    case = HOPPER_CASES[name]
    check(case, replace(hopper_config(case, True), ring=ring, group=3))
