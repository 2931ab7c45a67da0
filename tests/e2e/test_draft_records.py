"""The recorder of experts writes files of a draft model's layers, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moesaic import Engine
from moesaic.cli.main import main
from moesaic.engine.frontend.expert_records import FOLDER_VARIABLE
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.worker.local_core import LocalCore
from moesaic.models.tiny import materialise
from tests.e2e.recorded import record
from tests.eagle_heads import Head
from tests.unit.test_draft_model import RANDOM, arguments, requests, serve
from tests.unit.test_eagle import QWEN, target

PROMPTS = [[7], [9, 8, 7, 6, 5], [11, *range(20, 43)]]
LAYER = {
    "model_path": "tiny:deepseek_v3,num_nextn_predict_layers=1",
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 1,
}
OTHER = "tiny:qwen3_moe,num_hidden_layers=2,num_experts=6,num_experts_per_tok=3"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "dumps"))
    return tmp_path / "dumps"


def dump(**flags: Any) -> list[Path]:
    given = {"dtype": "float32", "disable_speculative_adaptive": True} | flags
    given.setdefault("expert_distribution_recorder_mode", "stat")
    with Engine(**given) as engine:
        record(engine, PROMPTS, 6)
        return [Path(path) for path in engine.dump_expert_distribution_record()["files"]]


def counts(path: Path) -> torch.Tensor:
    found: torch.Tensor = torch.load(path, weights_only=True)["logical_count"]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_of_the_checkpoint(folder: Path, ranks: int) -> None:
    """It takes the rows of each pass, and what it computes counts to that pass."""
    own, drafts = dump(**LAYER, tp_size=ranks, ep_size=ranks)
    assert own.parent == folder and drafts.parent == folder / "draft"
    target_PLE, draft_PLE = counts(own), counts(drafts)
    assert draft_PLE.shape == (len(target_PLE), 1, target_PLE.shape[2])
    rows, drafted = target_PLE[:, -1].sum(1), draft_PLE[:, 0].sum(1)
    assert drafted.tolist() == rows.tolist()
    assert drafted.sum() >= 2 * sum(map(len, PROMPTS)), "two experts a row"
    assert main(["balance", str(drafts), "--ep", "2", "--algorithms", "auto"]) == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_pass_has_what_the_layer_computed_behind_it(asynchronous: bool) -> None:
    """Also where it is launched before the results are there, and where the host samples some."""
    given = arguments(RANDOM, 1, expert_distribution_recorder_mode="stat")
    core = LocalCore(given, ModelRunner(given, asynchronous=asynchronous))
    recorders = core.runner.recorder, core.runner.draft_recorder
    for recorder in recorders:
        assert recorder is not None
        recorder.start()
    serve(core, requests(RANDOM)[:4])
    target, draft = (recorder.sums(0) for recorder in recorders if recorder is not None)
    assert draft.numbers == target.numbers and len(draft.numbers) > 10
    rows_PL = np.frombuffer(target.sums, np.int64).reshape(len(target.numbers), -1)
    assert rows_PL[:, 0].min() > 0
    assert np.frombuffer(draft.sums, np.int64).tolist() == rows_PL[:, -1].tolist()


def test_another_model_with_other_experts(folder: Path) -> None:
    flags = {
        "model_path": "tiny:qwen3_moe",
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": materialise(OTHER),
        "expert_distribution_recorder_mode": "per_pass",
    }
    own, drafts = dump(**flags)
    found = torch.load(drafts, weights_only=True)
    assert own.parent == folder and drafts.parent == folder / "draft"
    assert found["last_physical_to_logical_map"].shape[0] == 2
    slots = [one["global_physical_count"] for one in found["records"]]
    assert {count.shape for count in slots} == {(2, 6)}
    total = sum(int(count.sum()) for count in slots)
    assert total > 0 and total % (2 * 3) == 0, "three experts a row in two layers"


def test_a_head_has_no_experts(folder: Path, tmp_path: Path) -> None:
    Head(target(QWEN)[1]).write(tmp_path / "head")
    flags = {
        "model_path": QWEN,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(tmp_path / "head"),
        "speculative_num_steps": 2,
    }
    (own,) = dump(**flags)
    assert own.parent == folder and not (folder / "draft").exists()
