"""`moesaic balance`: tables, files of loads and placements, refusals, and the registry below it."""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.balance import algorithms
from moesaic.balance.algorithms import ALGORITHMS, Algorithm, make_plan, register_algorithm
from moesaic.balance.compare import Comparison, StepModel, compare, in_windows, rank_reads
from moesaic.balance.files import read_loads, read_placement, write_dump, write_placement
from moesaic.balance.problem import BalanceProblem, MoveCost, trivial_placement
from moesaic.balance.routing import RoutingModel
from moesaic.cli.main import main
from moesaic.config.args_parallel import EPLB_ALGORITHMS

SMALL = (
    "--ep 4 --num-layers 2 --num-experts 16 --top-k 2 --tokens 256 --steps 4 --noise 0.1".split()
)


def test_generated_routing_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, table = tmp_path / "placement.json", tmp_path / "table.json"
    more = ["--redundant", "0", "4", "--out", str(out), "--json", str(table)]
    assert main(["balance", *SMALL, *more]) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0] == (
        "generated routing: 2 layers of 16 experts on 4 ranks; planned from 4 steps, judged by 4 "
        "steps"
    )
    assert text[1].split()[:4] == ["redundant", "placement", "balancedness", "max/mean"]
    assert "auto: incremental: it fetches the fewest experts from the current placement" in text
    rows = json.loads(table.read_text())
    assert [row["redundant"] for row in rows] == [0] * 4 + [4] * 4
    assert [row["algorithm"] for row in rows[:4]] == [
        "current", "auto: incremental", "deepseek", "deepseek_vec",
    ]  # fmt: skip
    current, planned = rows[4:6]
    assert planned["max_over_mean"] < current["max_over_mean"]
    assert current["fetched_slots"] == 0 < planned["fetched_slots"]
    size = 3 * 7168 * 2048
    assert planned["fetched_bytes"] == planned["fetched_slots"] * size
    assert planned["move_ms"] == pytest.approx(planned["fetched_slots"] * size / 4 / 50e9 * 1e3)
    slots = json.loads(out.read_text())
    assert list(slots) == ["physical_to_logical_map"]
    assert sorted(set(slots["physical_to_logical_map"][1])) == list(range(16))


def test_a_written_placement_is_the_next_current_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = str(tmp_path / "placement.json")
    alone = ["--algorithms", "deepseek", "--redundant", "4"]
    assert main(["balance", *SMALL, *alone, "--out", path]) == 0
    capsys.readouterr()
    assert main(["balance", *SMALL, *alone, "--current", path]) == 0
    again = capsys.readouterr().out.splitlines()[3].split()
    assert again[:2] == ["4", "deepseek"] and again[5] == "0.0%"


def test_a_trace_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(8)[:2] for _ in range(40)])
    np.savez(tmp_path / "trace.npz", data=ids)
    loads = read_loads(tmp_path / "trace.npz", 12, step_tokens=16)
    assert loads.shape == (3, 1, 12) and loads.sum((1, 2)).tolist() == [32, 32, 16]
    assert loads.sum((0, 1)).tolist() == np.bincount(ids.ravel(), minlength=12).tolist()
    assert main(["balance", str(tmp_path / "trace.npz"), "--ep", "2", "--num-experts", "12"]) == 0
    head = "1 layer of 12 experts on 2 ranks; planned from 1 step, judged by 2 steps"
    assert head in capsys.readouterr().out


def test_dumps_of_the_recorder_are_read(tmp_path: Path):
    """As torch has saved them, or as JSON."""
    stat = {"rank": 0, "logical_count": torch.arange(12).reshape(2, 2, 3)}
    dump = tmp_path / "stat.pt"
    torch.save(stat, dump)
    assert read_loads(dump).tolist() == stat["logical_count"].tolist()
    turned = dump.with_suffix(".json")
    turned.write_text(json.dumps({"logical_count": stat["logical_count"].tolist()}))
    assert read_loads(turned).tolist() == stat["logical_count"].tolist()
    slots = np.array([[0, 1, 2, 0], [2, 1, 0, 1]])
    records = [
        {"forward_pass_id": number, "rank": 0, "global_physical_count": (slots + number).tolist()}
        for number in (5, 6)
    ]
    passes = {"records": records, "last_physical_to_logical_map": slots.tolist()}
    turned.write_text(json.dumps(passes))
    assert read_loads(turned).tolist() == [
        [[10, 6, 7], [5, 12, 7]],
        [[12, 7, 8], [6, 14, 8]],
    ]


class Shell:
    """A pickle of it runs a command where it is loaded without care."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._path}",)


def test_code_in_a_dump_is_not_run(tmp_path: Path):
    torch.save({"logical_count": Shell(tmp_path / "run")}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match=r"bad\.pt cannot be read: Weights only load failed"):
        read_loads(tmp_path / "bad.pt")
    assert not (tmp_path / "run").exists()
    (tmp_path / "text.pt").write_text("no dump")
    with pytest.raises(ValueError, match=r"text\.pt cannot be read: "):
        read_loads(tmp_path / "text.pt")


def test_a_dump_is_written_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "dump.pt"
    write_dump(path, {"counts": np.arange(3), "records": [{"ids": np.ones((2, 1), np.int16)}]})
    found = torch.load(path, weights_only=True)
    assert found["counts"].tolist() == [0, 1, 2] and found["records"][0]["ids"].shape == (2, 1)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(TypeError, match="cannot pickle"):
        write_dump(tmp_path / "other.pt", {"lock": threading.Lock()})
    assert list(tmp_path.iterdir()) == [path]


def test_layers_without_experts_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """They are in the placement, so that its rows are the model's layers."""
    counts = np.zeros((4, 3, 8), int)
    counts[:, 1:] = np.arange(8) ** 2
    dump, out = tmp_path / "stat.pt", tmp_path / "placement.json"
    write_dump(dump, {"logical_count": counts})
    words = ["balance", str(dump), "--ep", "2", "--redundant", "2", "--algorithms", "deepseek"]
    assert main([*words, "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "2 layers of 8 experts on 2 ranks" in told
    slots = read_placement(out)
    assert slots.shape == (3, 10) and slots[0].tolist() == [*range(8), 0, 1]
    assert slots[1].tolist() == slots[2].tolist() != slots[0].tolist()
    assert main([*words, "--current", str(out)]) == 0
    assert "0.0%" in capsys.readouterr().out.splitlines()[3]
    write_dump(dump, {"logical_count": 0 * counts})
    assert main(words) == 2
    assert "has no rows of any expert: record while" in capsys.readouterr().err


def test_records_of_ranks_are_summed(tmp_path: Path):
    """Also where experts moved between two passes."""
    slots, other = np.array([[0, 1, 2, 0]]), np.array([[2, 1, 0, 0]])
    for rank, counts in enumerate(([5, 1, 0, 0], [0, 0, 7, 2])):
        records = [
            {"forward_pass_id": 4, "global_physical_count": np.array([counts])},
            {
                "forward_pass_id": 3,
                "global_physical_count": np.array([counts]),
                "physical_to_logical_map": other,
            },
        ]
        content = {"records": records, "last_physical_to_logical_map": slots}
        write_dump(tmp_path / f"{rank}.pt", {**content, "rank": rank, "ranks": [0, 1]})
    assert read_loads(tmp_path).tolist() == [[[9, 1, 5]], [[7, 1, 7]]]
    (tmp_path / "1.pt").unlink()
    with pytest.raises(ValueError, match="lacks the passes of ranks 1: give the folder"):
        read_loads(tmp_path)
    write_dump(tmp_path / "stat.pt", {"logical_count": np.ones((1, 1, 1))})
    with pytest.raises(ValueError, match=r"has 2 \.pt files, 1 without records"):
        read_loads(tmp_path)


def test_a_pass_that_a_rank_has_recorded_twice_is_refused(tmp_path: Path):
    """Micro-batches of a pass are not the same record."""
    record = {"forward_pass_id": 7, "rank": 1, "global_physical_count": np.ones((1, 2))}
    parts = [{**record, "gatherer_key": key} for key in ("child_a", "child_b")]
    content = {"records": parts, "last_physical_to_logical_map": np.array([[0, 1]])}
    write_dump(tmp_path / "a.pt", content)
    assert read_loads(tmp_path).tolist() == [[[2, 2]]]
    write_dump(tmp_path / "b.pt", content)
    with pytest.raises(ValueError, match=r"b\.pt has pass 7 of rank 1, which .*a\.pt has too"):
        read_loads(tmp_path)


def test_every_file_is_read_with_its_own_placement(tmp_path: Path):
    """Each replica of the model moves its experts by itself, and they may move between dumps."""
    for number, slots in enumerate(([0, 1, 2, 0], [2, 1, 0, 0], [1, 2, 2, 0])):
        record = {"forward_pass_id": number, "global_physical_count": np.array([[100, 1, 2, 3]])}
        content = {"records": [record], "last_physical_to_logical_map": np.array([slots])}
        write_dump(tmp_path / f"{number}.pt", content)
    write_dump(tmp_path / "idle.pt", {**content, "records": []})
    assert read_loads(tmp_path).tolist() == [[[103, 1, 2]], [[5, 1, 100]], [[3, 100, 3]]]
    content["last_physical_to_logical_map"] = np.array([slots, slots])
    record["global_physical_count"] = np.ones((2, 4))
    write_dump(tmp_path / "other.pt", content)
    with pytest.raises(ValueError, match=r"other\.pt is of 2 layers, .*0\.pt of 1: they belong to"):
        read_loads(tmp_path)


def test_placements_keep_their_form(tmp_path: Path):
    slots = trivial_placement(2, 3, 4)
    write_placement(tmp_path / "placement.json", slots)
    assert read_placement(tmp_path / "placement.json").tolist() == slots.tolist()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ep 7", "256 slots cannot be laid evenly over 7 ranks: add 3 redundant slots"),
        ("--out x.txt", "--out x.txt: give a file that ends in .json"),
        ("--algorithms deepsek", "algorithm 'deepsek' is not known: choose one of auto, incremen"),
        ("none.npz", "there is no file none.npz"),
        ("none.csv", "there is no file none.csv"),
        ("pyproject.toml", "pyproject.toml: give a file that ends in .json, .npz, .pt"),
        ("--plot x.txt", "--plot x.txt: give a file that ends in .png, .svg, .pdf"),
        ("none.npz --zipf 1 --seed 2", "--zipf, --seed: for generated routing, and LOADS is given"),
        ("--zipf -1", "--zipf is -1.0: give at least 0 and at most 10"),
        ("--num-experts 4 --top-k 8", "top-k 8 of 4 experts: give at most as many"),
        ("--nnodes 3", "8 ranks cannot be laid evenly over 3 nodes"),
        ("--num-groups 3", "256 experts do not form 3 groups of equal size"),
        ("--redundant -8", "--redundant is "),
        ("--ep 2 --redundant 9000 --num-layers 1", "--redundant 9000: with 256 each of 2 ranks"),
    ],
)
def test_refusals(words: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["balance", *words.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"error: {message}"), captured.err
    assert captured.err.count("\n") == 1


def test_wrong_files_are_named(tmp_path: Path):
    def written(content: object) -> Path:
        (tmp_path / "file.json").write_text(json.dumps(content))
        return tmp_path / "file.json"

    for content, message in (
        ([1], "holds a list: it must hold values by name"),
        ({"counts": 1}, "has counts: it needs logical_count"),
        ({"logical_count": ["x"]}, "logical_count is no array of numbers"),
        ({"logical_count": [1, 2]}, r"logical_count of shape \[2\]: give steps × layers"),
        ({"records": []}, "has records and no last_physical_to_logical_map: record again"),
        ({"records": [], "last_physical_to_logical_map": [[0]]}, "has no passes: record again"),
    ):
        with pytest.raises(ValueError, match=message):
            read_loads(written(content))
    with pytest.raises(ValueError, match="is of 2 experts, --num-experts of 4"):
        read_loads(written({"logical_count": [[1, 2]]}), 4)
    with pytest.raises(ValueError, match="has no physical_to_logical_map"):
        read_placement(written({"logical_count": [[1, 2]]}))
    with pytest.raises(ValueError, match="must be whole numbers, layers × slots"):
        read_placement(written({"physical_to_logical_map": [1.5]}))


COUNTS = {"forward_pass_id": 0, "rank": 0, "global_physical_count": [[1, 2]]}
PASSES = {"records": [COUNTS], "last_physical_to_logical_map": [[0, 1]]}


def changed_record(**fields: object) -> dict[str, object]:
    return {"records": [{**COUNTS, **fields}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"records": 5}, "records is 5: it must be a list of passes"),
        ({"records": [5]}, r"records is \[5\]: it must be"),
        ({"records": [{}]}, "forward_pass_id is None: it must be a whole number"),
        (changed_record(forward_pass_id=1.5), "forward_pass_id is 1.5"),
        (changed_record(forward_pass_id=[1, 2]), r"forward_pass_id is \[1, 2\]"),
        (changed_record(rank="x"), "rank is 'x': it must be a whole number"),
        (changed_record(global_physical_count=None), "global_physical_count is no array of num"),
        (changed_record(global_physical_count=[[1]]), r"counts of \[1, 1\], .* of \[1, 2\]"),
        (changed_record(global_physical_count=[[-1, 2]]), "global_physical_count has -1"),
        (changed_record(global_physical_count=[[1, float("nan")]]), "count has nan"),
        (changed_record(physical_to_logical_map=[[0, 7]]), "has expert 7 in 2 slots: experts are"),
        (changed_record(physical_to_logical_map=None), "physical_to_logical_map is no array"),
        ({"last_physical_to_logical_map": [[0, 10**10]]}, "has expert 10000000000 in 2 slots"),
        ({"last_physical_to_logical_map": [[-5, 0]]}, "has expert -5 in 2 slots"),
        ({"last_physical_to_logical_map": [[0, 1.5]]}, "type float64: it must be whole numbers"),
        ({"last_physical_to_logical_map": []}, r"of shape \[0\]"),
        ({"ranks": 5}, "ranks is 5: it must be a list of ranks"),
        ({"ranks": [[]]}, r"ranks is \[\]: it must be a whole number"),
    ],
)
def test_malformed_records_are_named(fields: dict[str, object], message: str, tmp_path: Path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps({**PASSES, **fields}))
    with pytest.raises(ValueError, match=rf"file\.json: .*{message}"):
        read_loads(path)


def test_one_wrong_id_of_a_trace_does_not_take_all_memory(tmp_path: Path):
    np.savez(tmp_path / "trace.npz", data=np.array([[0, 10**10]]))
    with pytest.raises(ValueError, match="a trace has expert 10000000000: no model has over 65536"):
        read_loads(tmp_path / "trace.npz")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_slots": 7}, "7 slots for 8 experts: give at least 8"),
        ({"num_ranks": 0}, "give at least 1 of each"),
        ({"current_LP": np.zeros((1, 12), int)}, "a placement of 1 × 12 .* does not fit 1 × 8"),
        ({"current_LP": np.zeros((1, 8), int)}, "has no slot for expert 1 in layer 0"),
        ({"current_LP": np.arange(1, 9)[None]}, "names expert 8: there are 0..7"),
        ({"active_D": np.array([True, False])}, "1 live ranks have 4 slots for 8 experts: at lea"),
        ({"active_D": np.array([True])}, "1 values for 2 ranks"),
        ({"objective": "rows"}, "'rows' is not known: choose one of tokens, experts"),
        (
            {"loads_SLE": -np.ones((1, 1, 8), np.float32)},
            "expert 0 in layer 0 of step 0 is -1.0: give numbers",
        ),
        ({"loads_SLE": np.ones((1, 8), np.float32)}, "give steps × layers × experts"),
    ],
)
def test_problems_that_make_no_sense(changed: dict[str, object], message: str):
    fields = {"loads_SLE": np.ones((1, 1, 8), np.float32), "num_slots": 8, "num_ranks": 2}
    with pytest.raises(ValueError, match=message):
        BalanceProblem(**{**fields, **changed})  # type: ignore[arg-type]


def test_heat_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    path = tmp_path / "heat.png"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["balance", *SMALL, "--plot", str(path)]) == 2
    assert "pip install 'moesaic[bench]'" in capsys.readouterr().err
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert main(["balance", *SMALL, "--redundant", "4", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_every_name_of_the_flag_is_registered():
    assert set(EPLB_ALGORITHMS) - {"auto"} <= set(ALGORITHMS)


def test_registration(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(algorithms, "ALGORITHMS", dict(ALGORITHMS))
    mine = Algorithm("mine", "slot i holds expert i", lambda p: trivial_placement(1, 4, 4))
    register_algorithm(mine)
    problem = BalanceProblem(np.ones((1, 1, 4), np.float32), 4, 2)
    assert make_plan("mine", problem).slots_LP.tolist() == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match="'mine' is registered twice"):
        register_algorithm(mine)
    with pytest.raises(ValueError, match="'auto': give a name like my_algorithm"):
        register_algorithm(Algorithm("auto", "", mine.plan))
    broken = Algorithm("broken", "", lambda p: np.zeros((1, 4), np.int64))
    register_algorithm(broken)
    with pytest.raises(ValueError, match="no slot for expert 1"):
        make_plan("broken", problem)


def test_auto_says_why():
    load = np.ones((1, 1, 8), np.float32)
    active = np.array([True, True, True, False])
    current = trivial_placement(1, 8, 12)
    for problem, name, reason in (
        (BalanceProblem(load, 8, 4), "incremental", "nothing is placed yet"),
        (BalanceProblem(load, 8, 4, 4, 2), "deepseek_hierarchical", "whole on nodes"),
        (BalanceProblem(load, 8, 4, 3 - 2, 2), "incremental", "nothing is placed yet"),
        (BalanceProblem(load, 12, 4, active_D=active), "elasticity_aware", "nothing is placed"),
        (BalanceProblem(load, 12, 4, current_LP=current), "incremental", "fewest"),
    ):
        plan = make_plan("auto", problem)
        assert plan.algorithm == name and reason in plan.reason
    with pytest.raises(ValueError, match="dead ranks: choose one of incremental, elasticity_aware"):
        make_plan("deepseek", BalanceProblem(load, 12, 4, active_D=active))


def test_predicted_times():
    model = StepModel(expert_bytes=1e6, row_flops=1e6, flops=1e12, memory_bytes_s=1e12)
    rows = np.array([[[10, 30]], [[20, 20]]], np.float32)
    assert model.seconds(rows, np.zeros_like(rows)) == pytest.approx((30 + 20) / 2 * 1e-6)
    reads = np.array([[[40, 1]], [[1, 1]]], np.float32)
    assert model.seconds(rows, reads) == pytest.approx((40 + 20) / 2 * 1e-6)
    steps = np.array([[[4, 0, 1]]], np.float32)
    found = rank_reads(steps, np.array([[0, 1, 0, 2]]), 2)
    assert found.tolist() == [[[0.9375, 1.9375]]]
    cost = MoveCost(slot_seconds=1e-3, layer_seconds=1e-4, horizon_steps=100)
    assert cost.price(4) == pytest.approx(1e-3 / (1e-4 * 100 * 4))
    assert in_windows(np.arange(6, dtype=np.float32).reshape(6, 1, 1), 2).ravel().tolist() == [1, 4]


def test_the_generator_is_seeded_and_skewed():
    model = RoutingModel(2, 64, tokens=512, domain_switch=0.5)
    one, two = model.phases(2), model.phases(2)
    assert all((a == b).all() for a, b in zip(one, two, strict=True))
    assert one[0].sum(1) == pytest.approx([512 * 8] * 2, rel=1e-5)
    expected = np.arange(1, 65) ** -0.7
    assert np.sort(one[0][0])[::-1] == pytest.approx(expected / expected.sum() * 4096, rel=1e-4)
    steps = model.steps(one[0], 3)
    assert steps.shape == (3, 2, 64) and (steps.sum(2) == 512 * 8).all()
    quiet = RoutingModel(2, 64, drift=0, domain_switch=0.5)
    moved = (quiet.phases(2)[0] != quiet.phases(2)[1]).mean()
    assert 0.3 < moved < 0.51


def test_groups_and_nodes_reach_the_algorithms():
    loads = RoutingModel(2, 16, tokens=256).phases(1)[0][None]
    comparison = Comparison(loads, loads, ranks=4, groups=4, nodes=2)
    rows = compare(comparison, [4], ["auto", "deepseek_vec_hierarchical"])
    assert rows[1].algorithm == "auto: deepseek_hierarchical"
    for row in rows[1:]:
        halves = [set((half // 4).tolist()) for half in row.slots_LP[0].reshape(2, 10)]
        assert not halves[0] & halves[1]


def test_algorithms_by_steps_see_every_step():
    """Experts 0 and 1 are the hottest in turn, but expert 2 has the largest sum."""
    turns_SLE = np.array([[[9, 0, 6, 1]], [[0, 9, 6, 1]]] * 4, np.float32)
    rows = compare(Comparison(turns_SLE, turns_SLE, ranks=2), [2], ["deepseek", "deepseek_vec"])
    counts = {row.algorithm: np.bincount(row.slots_LP[0], minlength=4).tolist() for row in rows}
    assert counts["deepseek"] == [2, 1, 2, 1]
    assert counts["deepseek_vec"] == [2, 2, 1, 1]
