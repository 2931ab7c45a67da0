"""Digests of prompts, models and draft models tell apart what instances must have alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moesaic.config import ServerArgs
from moesaic.disagg.likeness import SAMPLE_BYTES, SAMPLES, draft_digest, model_digest, prompt_digest


def test_digests_tell_prompts_and_models_apart(tmp_path: Path) -> None:
    calls = [([1, 2], ""), ([2, 1], ""), ([1, 2, 0], ""), ([1, 2], "key"), ([], "")]
    assert len({prompt_digest(*call) for call in calls}) == len(calls)
    folders = []
    for name, config, file, size in [
        ("one", "{}", "model.safetensors", 8),
        ("copy", "{}", "model.safetensors", 8),
        ("config", "{ }", "model.safetensors", 8),
        ("name", "{}", "part.safetensors", 8),
        ("size", "{}", "model.safetensors", 9),
        ("empty", "{}", "model.safetensors", 0),
    ]:
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        (folders[-1] / "config.json").write_text(config)
        (folders[-1] / file).write_bytes(b"x" * size)
    one, copy, *others = [model_digest(ServerArgs(model_path=str(path))) for path in folders]
    assert one == copy and len({one, *others}) == 5
    drawn = [
        ServerArgs(model_path=str(folders[0]), load_format="dummy", random_seed=seed)
        for seed in (None, 0, 1)
    ]
    unset, zero, other = map(model_digest, drawn)
    steady = ServerArgs(model_path=str(folders[0]), enable_deterministic_inference=True)
    assert unset == zero and len({one, zero, other, model_digest(steady)}) == 4


def test_digests_tell_draft_models_apart(tmp_path: Path) -> None:
    """Only of those whose cache is sent."""
    for name, data in (("one", b"x"), ("copy", b"x"), ("other", b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(data * 9)

    def digest(algorithm: str | None, name: str | None = None) -> bytes:
        path = None if name is None else str(tmp_path / name)
        flags = {"speculative_algorithm": algorithm, "speculative_draft_model_path": path}
        return draft_digest(ServerArgs(**flags))  # type: ignore[arg-type]

    assert digest(None) == digest("NGRAM") == digest("STANDALONE", "one") == b""
    assert digest("NEXTN") == digest("EAGLE") != digest("EAGLE", "one") == digest("EAGLE", "copy")
    assert len({digest("EAGLE3", "one"), digest("EAGLE3", "other"), digest("NEXTN")}) == 3


def test_weights_of_the_same_size_differ(tmp_path: Path) -> None:
    """All that is in the header counts, and of the rest what a training changes: a little of
    everything."""
    header, data = b'{"a":1}', np.zeros(10 * SAMPLES * SAMPLE_BYTES, np.uint8)
    (tmp_path / "config.json").write_text("{}")

    def digest() -> bytes:
        content = len(header).to_bytes(8, "little") + header + data.tobytes()
        (tmp_path / "model.safetensors").write_bytes(content)
        return model_digest(ServerArgs(model_path=str(tmp_path)))

    found = {digest()}
    header = b'{"b":1}'
    found.add(digest())
    data[:: 9 * SAMPLE_BYTES] = 1
    found.add(digest())
    data[0] = 2
    found.add(digest())
    assert len(found) == 4
