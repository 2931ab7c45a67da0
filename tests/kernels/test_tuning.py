"""Configurations of the experts' kernels: files of what was measured, and guesses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moesaic.kernels import tuning
from moesaic.kernels.tuning import KIB, DeviceTuning, ExpertsPlan, ExpertsShape, TileConfig
from tests.kernels.triton_cases import compile_apart

H200 = DeviceTuning("NVIDIA H200", 132, 224 * KIB)
A100 = DeviceTuning("NVIDIA A100-SXM4-80GB", 108, 160 * KIB)
QWEN = ExpertsShape("bf16", 128, 2048, 768)
PLAN = ExpertsPlan(
    "small", 16, TileConfig(16, 32, 64, 4, 6), TileConfig(16, 64, 64, prefetch=4), fused=True
)


def test_buckets() -> None:
    sizes = (0, 1, 2, 3, 128, 129, 256)
    assert [tuning.bucket(pairs) for pairs in sizes] == [1, 1, 2, 4, 128, 256, 256]


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    tuning.save(H200.name, QWEN, 200, PLAN, 251.279, tmp_path)
    wider = replace(PLAN, fused=False, down=replace(PLAN.down, block_n=128))
    tuning.save(H200.name, QWEN, 8, wider, 20.0, tmp_path)
    other = ExpertsShape("bf16", 8, 4096, 14336)
    tuning.save(H200.name, other, 2, PLAN, 170.0, tmp_path)
    assert tuning.load(H200.name, "bf16", tmp_path) == {
        ("E=128 H=2048 I=768", 256): PLAN,
        ("E=128 H=2048 I=768", 8): wider,
        ("E=8 H=4096 I=14336", 2): PLAN,
    }
    assert tuning.load(H200.name, "fp8_block", tmp_path) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["NVIDIA_H200-bf16.json"]
    entry = json.loads((tmp_path / "NVIDIA_H200-bf16.json").read_text())[str(QWEN)]["256"]
    assert (entry["us"], entry["fused"], entry["gate_up"]["block_n"]) == (251.28, True, 32)


def test_an_entry_that_cannot_be_right(tmp_path: Path) -> None:
    path = tmp_path / tuning.file_name(H200.name, "bf16")
    tuning.save(H200.name, QWEN, 8, PLAN, 1.0, tmp_path)
    good = path.read_text()
    path.write_text(good.replace('"block_k"', '"block_x"', 1))
    with pytest.raises(ValueError, match=r"block_x.*remove it, or replace it"):
        tuning.load(H200.name, "bf16", tmp_path)
    path.write_text(good.replace('"small"', '"tiny"'))
    with pytest.raises(ValueError, match=r"json: .*'tiny' has no configurations.*--again"):
        tuning.load(H200.name, "bf16", tmp_path)
    path.write_text(good.replace('"block_m": 16', '"block_m": 32', 1))
    with pytest.raises(ValueError, match="different block_m"):
        tuning.load(H200.name, "bf16", tmp_path)
    for wrong in ("-4", "48", '"32"', "null", "true", "8", "[]", "32.0"):
        path.write_text(good.replace('"block_n": 32', f'"block_n": {wrong}'))
        with pytest.raises(ValueError, match=r"json: block_n is .*--again"):
            tuning.load(H200.name, "bf16", tmp_path)
    for field, wrong in (
        ('"num_warps": 4', "3"),
        ('"num_warps": 4', "0"),
        ('"num_stages": 6', "0"),
        ('"prefetch": 4', "-1"),
        ('"prefetch": 4', "true"),
        ('"fused": true', '"no"'),
    ):
        refuses(path, good, field, wrong)
    path.write_text(good.replace('"down"', '"up"'))
    with pytest.raises(ValueError, match="no 'down' in entry"):
        tuning.load(H200.name, "bf16", tmp_path)


def refuses(path: Path, good: str, field: str, wrong: str) -> None:
    """A file like a good one, but for the value of one field."""
    name = field.split('"')[1]
    path.write_text(good.replace(field, f'"{name}": {wrong}', 1))
    with pytest.raises(ValueError, match=rf"json: {name} is .*--again"):
        tuning.load(H200.name, "bf16", path.parent)


def test_an_entry_of_many_rows_that_cannot_be_right(tmp_path: Path) -> None:
    path = tmp_path / tuning.file_name(H200.name, "bf16")
    large = tuning.config_class("large")()
    tuning.save(H200.name, QWEN, 8, ExpertsPlan("large", 128, large, large), 1.0, tmp_path)
    good = path.read_text()
    assert tuning.load(H200.name, "bf16", tmp_path)[str(QWEN), 8].gate_up == large
    for field, wrong in (
        ('"warps": 8', "6"),
        ('"group": 8', "0"),
        ('"occupancy": 1', "0"),
        ('"ring": 4', "0"),
        ('"tall": true', "1"),
        ('"fused": false', "true"),
    ):
        refuses(path, good, field, wrong)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not JSON"),
        ('{"E=1', "is not JSON"),
        ("[]", "no entries by shape and pairs"),
        ('{"E=1 H=1 I=1": 3}', "no entries by shape and pairs"),
        ('{"E=1 H=1 I=1": {"x": {}}}', "'x' of E=1 H=1 I=1 is no number of pairs"),
        ('{"E=1 H=1 I=1": {"8": 3}}', "remove it, or replace it by"),
    ],
)
def test_a_file_that_cannot_be_right(tmp_path: Path, text: str, complaint: str) -> None:
    """Its reader says which file it is, and so does its writer, who keeps it."""
    path = tmp_path / tuning.file_name(H200.name, "bf16")
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as raised:
        tuning.load(H200.name, "bf16", tmp_path)
    assert str(path) in str(raised.value)
    if '"8"' not in text:
        with pytest.raises(ValueError, match=complaint):
            tuning.save(H200.name, QWEN, 8, PLAN, 1.0, tmp_path)
    assert path.read_text() == text


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_TUNED", str(tmp_path / "tunde"))
    with pytest.raises(ValueError, match=r"MOESAIC_TUNED is '.*tunde', which is no folder"):
        tuning.folders()
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tuned").mkdir()
    monkeypatch.setenv("MOESAIC_TUNED", "~/tuned")
    assert tuning.folders() == [tmp_path / "tuned", tuning.TUNED]
    monkeypatch.setenv("MOESAIC_TUNED", "")
    assert tuning.folders() == [tuning.TUNED]


def test_a_folder_for_another_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MOESAIC_TUNED", str(tmp_path))
    tuning.save(A100.name, QWEN, 8, PLAN, 1.0, tmp_path)
    here = torch.device("cpu")
    for pairs in (8, 16):
        assert tuning.plan_for(here, QWEN, pairs) != PLAN
    assert caplog.text.count(f"MOESAIC_TUNED has no {tmp_path / 'cpu-bf16.json'}") == 1
    caplog.clear()
    tuning.plan_for(here, replace(QWEN, format="int4_w4a16"), 8)
    tuning.save("cpu", replace(QWEN, format="fp16"), 8, PLAN, 1.0, tmp_path)
    assert tuning.plan_for(here, replace(QWEN, format="fp16"), 8) == PLAN
    assert not caplog.text
    tuning._plan.cache_clear()


def test_guesses_for_the_sizes_of_a_layer() -> None:
    pairs = (8, 64, 256, 1024, 4096, 16384, 65536)
    plans = [tuning.guess(H200, QWEN, count) for count in pairs]
    assert [plan.block for plan in plans] == [16, 16, 16, 16, 64, 128, 128]
    assert [plan.implementation for plan in plans] == ["small"] * 5 + ["large"] * 2
    assert tuning.guess(H200, replace(QWEN, format="int4_w4a16"), 8) == ExpertsPlan("formats", 16)
    # One row: 8 tiles of 768 columns on 132 processors.
    assert plans[0].gate_up.block_n == 32
    assert plans[2].gate_up.block_n == 64
    plans = [tuning.guess(H200, replace(QWEN, format="fp8_block"), count) for count in pairs]
    assert [plan.implementation for plan in plans] == ["small"] * 4 + ["large"] * 3
    assert [plan.gate_up.block_n for plan in plans[:4]] == [32, 64, 128, 128]


@pytest.mark.parametrize("device", [H200, A100])
@pytest.mark.parametrize("format", ["bf16", "fp32", "fp8_block"])
@pytest.mark.parametrize("pairs", [1, 8, 64, 300, 2900])
def test_stages_fit_into_shared_memory(device: DeviceTuning, format: str, pairs: int) -> None:
    plan = tuning.guess(device, replace(QWEN, format=format), pairs)
    item = tuning.ITEM_BYTES[format]
    for config, lines in (
        (plan.gate_up, 2 * plan.gate_up.block_n),
        (plan.down, plan.down.block_n),
    ):
        used = config.num_stages * (lines + config.block_m) * item * config.block_k
        assert 32 * KIB <= used <= device.shared
        assert config.num_stages >= 2
        assert config.block_k * item == 128


def test_candidates_hold_the_guess() -> None:
    gates, downs = tuning.candidates(H200, QWEN, 16)
    plan = tuning.guess(H200, QWEN, 256)
    assert plan.gate_up in gates and plan.down in downs
    assert len(set(gates)) == len(gates) < 40 and len(set(downs)) == len(downs) < 60


def test_who_quantises_between_the_products() -> None:
    cpu = torch.device("cpu")  # of 8 processors
    assert tuning.quantises_inner("fp8_block", 128, 2048, 768, 64, cpu)
    assert not tuning.quantises_inner("fp8_block", 128, 2048, 768, 1, cpu)
    assert not tuning.quantises_inner("bf16", 128, 2048, 768, 64, cpu)


def test_the_block_of_a_problem() -> None:
    assert tuning.block_for("bf16", 128, 2048, 768, 64, torch.device("cpu")) == 16
    assert tuning.block_for("bf16", 128, 2048, 768, 65536, torch.device("cpu")) == 128


@pytest.mark.parametrize("option", [(), pytest.param(("--all",), marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_kernels_compile_for_hopper(option: tuple[str, ...]) -> None:
    compile_apart("aot_experts", *option)
