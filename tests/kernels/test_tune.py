"""The search for configurations: every candidate runs, and the fastest is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moesaic.kernels import tuning
from moesaic.kernels.tune import Case, candidates, compile_all, make_tensors, search
from tests.kernels.triton_cases import DEVICE

HERE = torch.device(DEVICE)
CASE = Case(tuning.Shape("fp16", 4, 64, 32), top_k=2, tokens=3)


def test_candidates_fit_the_number_of_rows():
    assert Case(tuning.Shape("bf16", 128, 2048, 768), 8, 1).blocks("small") == [16]
    assert Case(tuning.Shape("bf16", 128, 2048, 768), 8, 1).blocks("large") == []
    assert Case(tuning.Shape("bf16", 128, 2048, 768), 8, 512).blocks("small") == [16, 32, 64]
    assert Case(tuning.Shape("bf16", 128, 2048, 768), 8, 512).blocks("large") == [64, 128]
    assert Case(tuning.Shape("bf16", 128, 2048, 768), 8, 8192).blocks("small") == []
    many = list(candidates(CASE, tuning.device_facts(HERE)))
    assert {(one.implementation, one.product) for one in many} == {
        ("small", "gate_up"),
        ("small", "down"),
    }
    assert len(set(many)) == len(many) > 20


@pytest.mark.parametrize("format", ["fp16", "fp8_block"])
def test_candidates_run(format: str):
    case = Case(tuning.Shape(format, 4, 128, 128), 2, 3)
    some = len(list(candidates(case, tuning.device_facts(HERE)))[::12])
    assert compile_all(case, HERE, (0, 12)) == some > 1


def test_the_fastest_is_found(tmp_path: Path):
    """By a clock that likes one configuration of each product, and layers in one kernel."""
    facts = tuning.device_facts(HERE)
    few = list(candidates(CASE, facts))
    times = iter(float(100 + len(few) - number) for number in range(len(few)))
    ticks: list[int] = []

    def clock(work: Callable[[], object]) -> float:
        work()
        return next(times, 50.0 - len(ticks))

    plan, us = search(CASE, HERE, lambda: ticks.append(1), clock)
    gates = [one.config for one in few if one.product == "gate_up"]
    downs = [one.config for one in few if one.product == "down"]
    assert len(ticks) == len(few)
    assert (plan.gate_up, plan.down) == (gates[-1], downs[-1])
    tuning.save("Some GPU", CASE.shape, CASE.pairs, plan, us, tmp_path)
    assert tuning.load("Some GPU", "fp16", tmp_path) == {("E=4 H=64 I=32", 8): plan}


def test_tensors_have_the_sizes_of_the_case():
    tensors = make_tensors(CASE, HERE)
    assert tensors.ids.shape == (3, 2) and tensors.out.shape == (3, 64)
    assert tensors.experts.w13.shape == (4, 64, 64) and tensors.experts.w2.shape == (4, 64, 32)
    assert tensors.quantised is None
    assert make_tensors(Case(tuning.Shape("fp8_block", 4, 128, 128), 2, 3), HERE).quantised
