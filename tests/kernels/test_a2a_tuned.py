"""Plans of the kernels between ranks that were measured, and the command that measures them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.cli import tune_a2a
from moesaic.cli.main import main
from moesaic.cli.tune_a2a import A2aCase, TuneJob, list_cases, slowest
from moesaic.kernels import a2a_tuned, tuning
from moesaic.kernels.a2a_plan import GpuModel, LaunchPlan, collect_plan, send_plan
from moesaic.kernels.a2a_tuned import Kernel, blocks, candidates, override_plan, plan_of, planned
from moesaic.kernels.a2a_tuned import load as read_plans

H200 = GpuModel(132, name="NVIDIA H200 of a test")
SEND = Kernel("send", 4, 2048, "bf16")
PAIRS = Kernel("collect_pairs", 4, 2048)
GUESS = LaunchPlan(2048, 4, 100)
FOUND = LaunchPlan(1024, 2, 60)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path))
    a2a_tuned._measured.cache_clear()
    return tmp_path


def test_what_was_measured_is_taken(folder: Path):
    assert planned(SEND, 128, H200, GUESS) == GUESS
    a2a_tuned.save(H200.name, SEND, 128, FOUND, 6.123, folder)
    path = folder / "NVIDIA_H200_of_a_test-a2a.json"
    entry = json.loads(path.read_text())["send P=4 H=2048 bf16"]["128"]
    assert entry == {"block": 1024, "warps": 2, "programs": 60, "us": 6.12}
    for rows in (65, 128):
        assert planned(SEND, rows, H200, GUESS) == FOUND
    # Other sizes, ranks, payloads and GPUs.
    for rows in (64, 129):
        assert planned(SEND, rows, H200, GUESS) == GUESS
    assert planned(replace(SEND, ranks=8), 128, H200, GUESS) == GUESS
    assert planned(replace(SEND, payload="fp8"), 128, H200, GUESS) == GUESS
    assert planned(SEND, 128, replace(H200, name="other"), GUESS) == GUESS
    assert planned(SEND, 128, GpuModel(132), GUESS) == GUESS


def test_programs_have_limits(folder: Path):
    a2a_tuned.save(H200.name, SEND, 128, replace(FOUND, programs=500), 1.0, folder)
    assert planned(SEND, 70, H200, GUESS).programs == 140  # two items a row
    assert planned(SEND, 128, replace(H200, limit=20), GUESS).programs == 20


def test_entries_that_cannot_be(folder: Path):
    path = folder / "NVIDIA_H200_of_a_test-a2a.json"
    good = {"block": 1024, "warps": 2, "programs": 60}
    wrong = [{"block": 100}, {"warps": 3}, {"programs": 0}, {"threads": 4}]
    for change in wrong:
        path.write_text(json.dumps({str(SEND): {"128": good | change}}))
        with pytest.raises(ValueError, match="remove it, or replace it by `moesaic tune"):
            read_plans(H200.name, folder)
    # A scale is of all of a row, so an item is one.
    int8 = Kernel("send", 4, 7168, "int8")
    assert blocks(int8) == [8192]
    a2a_tuned.save(H200.name, int8, 1, FOUND, 1.0, path.parent / "a")
    (folder / "a" / path.name).replace(path)
    assert planned(int8, 1, H200, GUESS) == GUESS


def test_what_is_tried():
    guess = plan_of(SEND, 4096, GpuModel(132), 4)
    assert guess == send_plan(4096, 2048, "bf16", 4, GpuModel(132)) != FOUND
    with override_plan(SEND, FOUND):
        assert planned(SEND, 4096, H200, GUESS) == FOUND
        assert plan_of(SEND, 4096, GpuModel(132), 4) == FOUND
        assert planned(PAIRS, 64, H200, GUESS) == GUESS
    assert planned(SEND, 4096, GpuModel(132), GUESS) == GUESS
    assert plan_of(SEND, 4096, GpuModel(132), 4) == guess


@pytest.mark.parametrize("rows", [1, 128, 4096])
def test_candidates(rows: int):
    sends = candidates(SEND, rows, H200)
    assert sends[0] == send_plan(rows, 2048, "bf16", 4, H200)
    assert len(set(sends)) == len(sends) <= 25
    assert all(1 <= plan.programs <= rows * -(-2048 // plan.block) for plan in sends)
    pairs = candidates(PAIRS, rows, H200)
    assert pairs[0] == collect_plan(rows, 2048, H200)
    assert len(set(pairs)) == len(pairs) <= 25


def test_cases_and_times(tmp_path: Path):
    wanted = TuneJob((), (4,), ("bf16", "fp8"), (1, 4096), tmp_path)
    cases = list(list_cases(wanted, 4))
    # Two shapes: two payloads and rows for both numbers, pairs for the smaller one.
    assert len(cases) == 2 * (2 * 3 + 1)
    assert cases[0] == A2aCase(Kernel("send", 4, 2048, "bf16"), 128, 8, 1)
    assert slowest([[[1, 2, 3], [4, 4, 4]], [[2, 1, 9], [5, 3, 3]]]) == [2, 4]


def test_refusals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(tune_a2a, "tune", lambda wanted: pytest.fail("not measured"))
    for words, told in (
        ("tune", "no SHAPE: give E,K,H,I"),
        ("tune --a2a --ranks 1,2", "--ranks 1: give 2 to 62; one rank sends nothing"),
        ("tune --a2a --payload bf17", "--payload 'bf17': give some of"),
        ("tune --a2a --ranks x", "--ranks 'x': give whole numbers"),
    ):
        assert main(words.split()) == 2
        assert told in capsys.readouterr().err
