"""How many programs kernels between ranks take."""

from __future__ import annotations

import pytest

from moesaic.kernels.a2a_plan import (
    GpuModel,
    LaunchPlan,
    best_programs,
    collect_plan,
    seconds,
    send_plan,
)

H200 = GpuModel(processors=132)


def test_a_row_of_few_tokens_is_one_program() -> None:
    assert send_plan(1, 2048, "bf16", 4, H200) == LaunchPlan(block=2048, warps=4, programs=1)
    assert send_plan(16, 7168, "bf16", 8, H200) == LaunchPlan(block=1024, warps=2, programs=112)
    assert send_plan(0, 2048, "fp8", 4, H200).programs == 1


def test_many_rows_are_taken_in_turns() -> None:
    plan = send_plan(4096, 2048, "bf16", 4, H200)
    assert plan == LaunchPlan(block=2048, warps=4, programs=528)
    assert send_plan(4096, 2048, "bf16", 4, GpuModel(132, limit=24)).programs == 24


@pytest.mark.parametrize("hidden, block", [(2048, 2048), (2880, 1024), (4096, 2048), (7168, 1024)])
def test_blocks_come_out_even(hidden: int, block: int) -> None:
    assert send_plan(64, hidden, "nvfp4", 4, H200).block == block


def test_small_rows_and_whole_ones() -> None:
    """A group is not cut, and int8 has one scale for all of a row."""
    assert send_plan(1, 96, "fp8", 2, H200).block == 128
    assert send_plan(1, 7, "bf16", 2, H200).block == 8
    assert send_plan(1, 7168, "int8", 2, H200) == LaunchPlan(block=8192, warps=8, programs=1)


def test_results_have_a_program_an_item() -> None:
    assert collect_plan(9, 7168, H200) == LaunchPlan(1024, warps=2, programs=63)
    assert collect_plan(64, 2048, H200) == LaunchPlan(2048, warps=4, programs=64)
    assert collect_plan(16, 2048, GpuModel(132, limit=8)).programs == 8


def test_the_model() -> None:
    """4096 items of 20 KB: bandwidth counts; 100 of them: rounds do."""
    assert seconds(528, 4096, 20480) == pytest.approx(4096 * 20480 / 4.3e12 + 528 * 3e-9)
    assert seconds(50, 100, 20480) == pytest.approx(2 * 2e-6 + 50 * 3e-9)
    assert best_programs(100, 20480, H200) == 100
