"""The search for configurations: every candidate runs, and the fastest is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moesaic.kernels import tuning
from moesaic.kernels.tune import (
    FINALISTS,
    FORMATS,
    TuneCase,
    candidates,
    compile_all,
    grouped,
    kernels,
    make_tensors,
    runs,
    search,
)
from tests.kernels.triton_cases import DEVICE

Work = Callable[[], object]
H200 = tuning.DeviceTuning("NVIDIA H200", 132, 224 * tuning.KIB)
HERE = torch.device(DEVICE)
CASE = TuneCase(tuning.ExpertsShape("fp16", 4, 64, 32), top_k=2, tokens=3)


def test_candidates_fit_the_number_of_rows():
    assert TuneCase(tuning.ExpertsShape("bf16", 128, 2048, 768), 8, 1).blocks("small") == [16]
    assert TuneCase(tuning.ExpertsShape("bf16", 128, 2048, 768), 8, 1).blocks("large") == []
    assert TuneCase(tuning.ExpertsShape("bf16", 128, 2048, 768), 8, 512).blocks("small") == [
        16,
        32,
        64,
    ]
    assert TuneCase(tuning.ExpertsShape("bf16", 128, 2048, 768), 8, 512).blocks("large") == [
        64,
        128,
    ]
    assert TuneCase(tuning.ExpertsShape("bf16", 128, 2048, 768), 8, 2048).blocks("small") == [64]
    assert TuneCase(tuning.ExpertsShape("bf16", 128, 2048, 768), 8, 8192).blocks("small") == []
    assert TuneCase(tuning.ExpertsShape("bf16", 128, 2048, 768), 8, 8192).blocks("large") == [128]
    many = list(candidates(CASE, tuning.device_facts(HERE)))
    assert {(one.implementation, one.product) for one in many} == {
        ("small", "gate_up"),
        ("small", "down"),
    }
    assert len(set(many)) == len(many) > 15


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sizes", [(128, 8, 2048, 768), (8, 2, 4096, 14336), (256, 8, 7168, 2048)])
def test_kernels_of_real_shapes(format: str, sizes: tuple[int, int, int, int]):
    """Each is compiled once for all sizes, and there are not too many to compile."""
    experts, top_k, hidden, inner = sizes
    shape = tuning.ExpertsShape(format, experts, hidden, inner)
    cases = [TuneCase(shape, top_k, tokens) for tokens in (1, 8, 32, 128, 512, 2048, 8192)]
    wanted = kernels(cases, H200)
    products = {(one.implementation, one.product, one.config.block_m) for _, one in wanted}
    assert {("large", "gate_up", 128), ("large", "down", 128), ("small", "down", 16)} <= products
    assert len(set(wanted)) == len(wanted) <= 220
    measured = {one for case in cases for one in candidates(case, H200)}
    assert measured < {one for _, one in wanted}
    assert all(one.config.block_m % 16 == 0 for one in measured)


@pytest.mark.parametrize("format", ["fp16", "fp8_block"])
def test_candidates_run(format: str):
    """Of many experts only some have weights, where kernels are compiled."""
    cases = [TuneCase(tuning.ExpertsShape(format, 20, 128, 128), 2, tokens) for tokens in (1, 3)]
    some = len(kernels(cases, tuning.device_facts(HERE))[::24])
    assert compile_all(cases, HERE, (0, 24)) == some > 1


def test_products_of_many_rows_run():
    case = TuneCase(tuning.ExpertsShape("fp16", 2, 128, 128), 1, 20)
    many = [one for _, one in kernels([case], tuning.device_facts(HERE))]
    tensors = make_tensors(case, HERE)
    gate_up, down = (
        next(one for one in many if (one.implementation, one.product) == ("large", which))
        for which in ("gate_up", "down")
    )
    groups = grouped(tensors, case, gate_up)
    assert groups.block == gate_up.config.block_m == down.config.block_m == 64
    tensors.y.fill_(torch.nan)
    runs(tensors, gate_up, groups)()
    runs(tensors, down, groups)()
    assert tensors.y.isfinite().all()


def test_the_fastest_is_found(tmp_path: Path):
    """By a glance that likes later candidates, a clock that likes the last but one of the finalists
    of each product, and layers that do not fetch ahead."""
    many = list(candidates(CASE, tuning.device_facts(HERE)))
    ticks: list[int] = []
    looks: list[Work] = []

    def glance(work: Work) -> float:
        work()
        return float(100 - len(ticks))

    def clock(work: Work) -> float:
        work()
        looks.append(work)
        place = len(looks)
        return 5.0 if place in (2, FINALISTS + 2, 2 * FINALISTS + 2) else 9.0

    plan, us = search(CASE, HERE, lambda: ticks.append(1), clock, glance)
    gates = [one.config for one in many if one.product == "gate_up"]
    downs = [one.config for one in many if one.product == "down"]
    assert len(ticks) == len(many) and us == 5.0
    assert plan.gate_up == gates[-2] and plan.down == replace(downs[-2], prefetch=0)
    # Finalists, one block with and without fetching ahead and fused, and what would be guessed.
    assert len(looks) == 2 * FINALISTS + 4
    tuning.save("Some GPU", CASE.shape, CASE.pairs, plan, us, tmp_path)
    assert tuning.load("Some GPU", "fp16", tmp_path) == {("E=4 H=64 I=32", 8): plan}


def test_what_cannot_run_is_passed_over():
    def glance(work: Work) -> float:
        raise RuntimeError("out of resource: shared memory")

    plan, us = search(CASE, HERE, lambda: None, lambda work: 7.0, glance)
    assert (plan, us) == (tuning.guess(tuning.device_facts(HERE), CASE.shape, CASE.pairs), 7.0)


def test_tensors_have_the_sizes_of_the_case():
    tensors = make_tensors(CASE, HERE)
    assert tensors.ids.shape == (3, 2) and tensors.out.shape == (3, 64)
    assert tensors.experts.w13.shape == (4, 64, 64) and tensors.experts.w2.shape == (4, 64, 32)
    assert tensors.quantised is None
    assert make_tensors(
        TuneCase(tuning.ExpertsShape("fp8_block", 4, 128, 128), 2, 3), HERE
    ).quantised
