"""--init-expert-location: files and JSON that fit the model, and those that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.balance.files import write_dump
from moesaic.balance.problem import max_over_mean, rank_loads
from moesaic.config import ServerArgs
from moesaic.engine.setup.first_placement import first_placements

MOE_LAYERS, LAYERS, EXPERTS, SLOTS = [1, 2], 3, 4, 6
ROWS = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 0, 0]]


def placed(location: str, **flags: object) -> dict[int, tuple[int, ...]]:
    args = ServerArgs(model_path="tiny", ep_size=2, ep_num_redundant_experts=2, **flags)  # type: ignore[arg-type]
    args = type(args)(**{**vars(args), "init_expert_location": location})
    found = first_placements(args, MOE_LAYERS, LAYERS, EXPERTS, SLOTS)
    return {layer: placement.slots for layer, placement in found.items()}


def test_placements_as_they_are(tmp_path: Path) -> None:
    wanted = {1: tuple(ROWS[0]), 2: tuple(ROWS[1])}
    assert placed("trivial") == {}
    assert placed(json.dumps({"physical_to_logical_map": ROWS})) == wanted
    file = tmp_path / "placement.json"
    file.write_text(json.dumps({"physical_to_logical_map": [[9] * 6, *ROWS]}))
    assert placed(str(file)) == wanted, "the row of a layer without experts does not count"


def test_a_plan_from_recorded_loads(tmp_path: Path) -> None:
    """SGLang's recorder counts [steps, layers, experts]."""
    loads = np.array([[[0, 0, 0, 0], [90, 10, 10, 10], [1, 1, 1, 97]]] * 3)
    file = tmp_path / "dump.json"
    file.write_text(json.dumps({"logical_count": loads.tolist()}))
    found = placed(str(file), eplb_algorithm="deepseek")
    assert sorted(found) == MOE_LAYERS
    assert found[1].count(0) == 3 and found[2].count(3) == 3, "the hottest expert has all replicas"
    write_dump(tmp_path / "dump.pt", {"logical_count": loads})
    assert placed(str(tmp_path / "dump.pt"), eplb_algorithm="deepseek") == found
    for layer, slots in found.items():
        load_SLE = loads[:1, layer : layer + 1].astype(np.float32)
        assert float(max_over_mean(rank_loads(load_SLE, np.array([slots]), 2)).max()) < 1.35


def test_code_in_a_dump_is_not_run(tmp_path: Path) -> None:
    """Every rank opens the file, and it is a pickle: docs/security.md says how."""
    torch.save({"logical_count": Touch(tmp_path / "run")}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match=r"bad\.pt cannot be read: Weights only load failed"):
        placed(str(tmp_path / "bad.pt"))
    assert not (tmp_path / "run").exists()


class Touch:
    """A pickle of it makes a file where it is loaded without care."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("nowhere.json", "there is no file nowhere.json: give trivial, a file, or JSON"),
        ("{broken", "this is no JSON"),
        ('{"other": 1}', "or physical_to_logical_map"),
        (json.dumps({"physical_to_logical_map": [ROWS[0]] * 5}), "is of 5 layers.*another model"),
        (
            json.dumps({"physical_to_logical_map": [[0, 1, 2, 3]] * 2}),
            "4 slots.*there are 6: give .*experts 0",
        ),
        (json.dumps({"physical_to_logical_map": [[0] * 6] * 2}), "no slot for expert 1"),
        (json.dumps({"physical_to_logical_map": [[7] * 6] * 2}), "names expert 7"),
        (json.dumps({"logical_count": [[[1] * 5] * 2]}), "is of 5 experts.*the model has 4"),
        (json.dumps({"logical_count": [[[1] * 4] * 7]}), "is of 7 layers"),
        (json.dumps({"logical_count": [[[0] * 4] * 2]}), "has counted no tokens"),
        (json.dumps({"logical_count": [[[1] * 4, [0] * 4]]}), "has no tokens of layer"),
        ('{"physical_to_logical_map": "x"}', "--init-expert-location: the JSON: .*no array"),
    ],
)
def test_what_does_not_fit_is_named(location: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placed(location)
