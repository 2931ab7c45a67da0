"""Experts of a draft model move while it makes drafts: ranks get equally much of its work, and no
answer changes."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic import Engine
from moesaic.engine.frontend.expert_records import FOLDER_VARIABLE
from moesaic.models.tiny import materialise
from moesaic.observe.expert_load import expert_loads
from tests.e2e.grid import prompts

TARGET = "tiny:qwen3_moe"
LAYERS, HOT = 2, 4
"""Layers of the target; experts of the draft model that get all of its tokens."""
OTHER = "tiny:qwen3_moe,num_hidden_layers=3,num_experts=12,num_experts_per_tok=2"
RANKS: dict[str, Any] = {
    "tp_size": 2,
    "dp_size": 2,
    "enable_dp_attention": True,
    "moe_a2a_backend": "deepep",
}
EPLB: dict[str, Any] = {
    "enable_eplb": True,
    # Only when it is asked for, and then every gain pays.
    "eplb_rebalance_num_iterations": 1_000_000,
    "eplb_max_bytes_per_step": 30_000,
}
CALLS = [
    {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
    {"temperature": 0.9, "sampling_seed": 3, "max_new_tokens": 24, "ignore_eos": True},
    {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True},
    {"temperature": 0.7, "sampling_seed": 5, "max_new_tokens": 28, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft model whose tokens all go to its first experts, those of rank 0: of a matrix row and
    its opposite one is above zero, which the other experts have."""
    folder = tmp_path_factory.mktemp("skewed") / "model"
    shutil.copytree(materialise(OTHER), folder)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    gates = [name for name in tensors if name.endswith("mlp.gate.weight")]
    assert len(gates) == 3
    for name in gates:
        gate_EH = tensors[name]
        gate_EH[1], gate_EH[3] = -gate_EH[0], -gate_EH[2]
        gate_EH[HOT:] = 0
    save_file(tensors, path, metadata={"format": "pt"})
    return str(folder)


def answers(engine: Engine) -> list[list[int]]:
    found = engine.generate(input_ids=prompts()[3 : 3 + len(CALLS)], sampling_params=CALLS)
    assert isinstance(found, list)
    return [one["output_ids"] for one in found]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with Engine(model_path=TARGET, dtype="float32", page_size=4) as engine:
        return answers(engine)


def draft_rows(engine: Engine) -> torch.Tensor:
    """[layers, ranks]: what each rank has computed of the draft model since the start."""
    loads = [load for load in expert_loads(engine.get_stats()) if load.layer >= LAYERS]
    return torch.tensor([[load.ranks[0], load.ranks[1]] for load in loads]).double()


def draft_slots(engine: Engine, slots: int) -> list[list[list[int]]]:
    """The expert in each slot, by rank and layer."""
    ranks = engine.get_stats().ranks
    by_layer = [dict(zip(rank.layers, rank.experts, strict=True)) for rank in ranks]
    return [
        [experts[:slots] for layer, experts in sorted(found.items()) if layer >= LAYERS]
        for found in by_layer
    ]


def balancedness(rows_LD: torch.Tensor) -> list[float]:
    found: list[float] = (rows_LD.mean(1) / rows_LD.max(1).values).tolist()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("redundant", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_get_equally_much_of_a_skewed_draft_model(
    redundant: int,
    skewed: str,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    flags = RANKS | EPLB | {"ep_num_redundant_experts": redundant}
    flags |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": skewed}
    flags |= {"speculative_num_steps": 2, "disable_speculative_adaptive": True}
    slots, is_busy = (12 + redundant) // 2, threading.Event()
    with Engine(
        model_path=TARGET,
        dtype="float32",
        page_size=4,
        expert_distribution_recorder_mode="stat",
        expert_distribution_recorder_buffer_size=5000,
        **flags,
    ) as engine:
        engine.start_expert_distribution_record()
        assert answers(engine) == expected
        first, placed = draft_rows(engine), draft_slots(engine, slots)
        assert first.shape == (3, 2) and placed[0] == [[*range(slots)]] * 3
        found = list[list[list[int]]]()

        def serve() -> None:
            while not is_busy.is_set() or len(found) < 2:
                found.append(answers(engine))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            (state,) = engine.rebalance()
        finally:
            is_busy.set()
            thread.join()
        assert found == [expected] * len(found)
        result = state["result"]
        assert result["outcome"] == "moved" and result["layers"] >= 3
        moved = draft_slots(engine, slots)
        hot = [[sum(e < HOT for e in experts) for experts in rank] for rank in moved]
        assert min(map(min, hot)) >= 2, "each rank has some of the experts that compute"
        for layer in range(3):
            assert {e for rank in moved for e in rank[layer]} == {*range(12)}
        middle = draft_rows(engine)
        assert answers(engine) == expected
        later = draft_rows(engine) - middle
        assert max(balancedness(first)) < 0.7, "rank 0 has computed all, or with replicas most"
        assert min(balancedness(later)) > 0.8
        # A recording loses none of what was computed while experts moved.
        files = engine.dump_expert_distribution_record()["files"]
        (path,) = (file for file in files if Path(file).parent.name == "draft")
        recorded = torch.load(path, weights_only=True)["logical_count"].sum(0)
        loads = [load.experts for load in expert_loads(engine.get_stats()) if load.layer >= LAYERS]
        assert recorded.tolist() == loads and recorded[:, HOT:].sum() == 0
