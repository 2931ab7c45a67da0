"""Tiny checkpoints by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.models.tiny import FAMILIES, make_tiny_checkpoint, materialise


def test_a_tiny_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = Path(materialise("tiny:qwen3_moe"))
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert Path(materialise("tiny:qwen3_moe")) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in (tmp_path / "moesaic").iterdir()] == [first.name]
    assert materialise("plain/path") == "plain/path"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tiny:../up", "is not tiny:FAMILY"),
        ("tiny:", "is not tiny:FAMILY"),
        ("tiny:nonesuch", "known are mixtral, qwen2_moe"),
    ],
)
def test_wrong_names(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=message):
        materialise(path)
    assert list(tmp_path.glob("moesaic/*")) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_bytes(family: str, tmp_path: Path) -> None:
    one, two, other = (
        make_tiny_checkpoint(family, tmp_path / str(number), seed) / "model.safetensors"
        for number, seed in enumerate([0, 0, 1])
    )
    assert one.read_bytes() == two.read_bytes() != other.read_bytes()
