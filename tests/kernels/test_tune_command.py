"""`moesaic tune` around the search: what it refuses, when it writes, and where it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moesaic.cli import tune as command
from moesaic.cli.main import main
from moesaic.kernels import tune, tuning
from moesaic.kernels.tuning import ExpertsPlan, TileConfig

H200 = tuning.DeviceTuning("NVIDIA H200", 132, 224 * tuning.KIB)
PLAN = ExpertsPlan("small", 16, TileConfig(16, 32, 64), TileConfig(16, 64, 64))
SHAPE = "4,2,64,32"


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU is there; a search only notes its tokens, and at 4 the user presses Ctrl-C once."""
    seen: list[int] = []

    def search(case: tune.TuneCase, device: object, tick: object) -> tuple[ExpertsPlan, float]:
        seen.append(case.tokens)
        if case.tokens == 4 and seen.count(4) == 1:
            raise KeyboardInterrupt
        return PLAN, 1.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tuning, "device_facts", lambda device: H200)
    monkeypatch.setattr(command, "_compile_in_processes", lambda argv, jobs: seen.append(-jobs))
    monkeypatch.setattr(tune, "search", search)
    return seen


def test_goes_on_where_it_was(
    searched: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", SHAPE, "--tokens", "1,2,4,8", "--jobs", "3", "--out", str(tmp_path / "a/b")]
    assert main(words) == 130
    assert searched == [-3, 1, 2, 4]
    assert len(tuning.load(H200.name, "bf16", tmp_path / "a/b")) == 2
    assert main(words) == 0
    assert searched[4:] == [-3, 4, 8]
    assert main(words) == 0
    assert searched[7:] == [] and "--again" in capsys.readouterr().out
    assert main([*words, "--again"]) == 0
    assert searched[7:] == [-3, 1, 2, 4, 8]


def test_a_folder_that_cannot_be_written(
    searched: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said before anything is compiled."""
    (tmp_path / "file").write_text("")
    assert main(["tune", SHAPE, "--out", str(tmp_path / "file" / "tuned")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: cannot write to ") and "another folder with --out" in said
    assert searched == []


def test_a_file_that_is_broken(
    searched: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found out before anything is measured, and nothing is lost; a wrong entry is replaced."""
    path, words = tmp_path / "NVIDIA_H200-bf16.json", ["tune", SHAPE, "--out", str(tmp_path)]
    path.write_text("{")
    assert main([*words, "--again"]) == 2
    assert searched == [] and f"error: {path} is not JSON" in capsys.readouterr().err
    path.write_text('{"E=4 H=64 I=32": {"2": {"implementation": "other"}}}')
    assert main(words) == 2 and searched == []
    assert main([*words, "--again", "--tokens", "1"]) == 0
    assert tuning.load(H200.name, "bf16", tmp_path) == {("E=4 H=64 I=32", 2): PLAN}


def test_home(searched: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells leave `--out=~/tuned` as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["tune", SHAPE, "--tokens", "1", "--out=~/tuned"]) == 0
    assert (tmp_path / "tuned" / "NVIDIA_H200-bf16.json").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([SHAPE, "--weights", "int4_w4a16"], "--weights int4_w4a16: only bf16, fp16, fp8_block"),
        ([SHAPE, "--tokens", "1,x"], "--tokens '1,x': give whole numbers above 0"),
        (["4,8,64,32"], "SHAPE '4,8,64,32': give E,K,H,I with K at most E"),
        (["4,2,64"], "SHAPE '4,2,64': give E,K,H,I"),
        ([SHAPE, "--share", "3/3"], "--share '3/3': I must be less than N"),
        ([SHAPE, "--jobs", "0"], "--jobs is 0: give at least 1"),
        ([SHAPE, "--ranks", "2"], "--ranks counts only with --a2a: leave it out"),
        ([SHAPE, "--payload", "bf16"], "--payload counts only with --a2a: leave it out"),
        (["--a2a", "--weights", "bf16"], "--weights counts only without --a2a: leave it out"),
        (["--a2a", "--share", "0/2"], "--share counts only without --a2a: leave it out"),
        (["--a2a", "--jobs", "2"], "--jobs counts only without --a2a: leave it out"),
        (["--a2a", "--payload", "bf16,"], "--payload 'bf16,': give some of "),
        (["--a2a", "--ranks", "1"], "--ranks 1: give 2 to 62; one rank sends nothing"),
        (["--a2a", "--ranks", "2,64"], "--ranks 64: give 2 to 62; one rank sends nothing"),
        (["--a2a", "--ranks", "3"], "--ranks 3 cannot share 128 experts evenly: give divisors"),
        ([SHAPE, "--a2a"], "--ranks 8 cannot share 4 experts evenly: give divisors of it"),
    ],
)
def test_wrong_words(
    searched: list[int], words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {complaint}")
    assert searched == []


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words in ([SHAPE], ["--a2a", "--payload", "bf16, fp8"]):
        assert main(["tune", *words]) == 2
        said = capsys.readouterr().err
        assert said.endswith(": run it where there is an NVIDIA GPU, with torch built for CUDA\n")
