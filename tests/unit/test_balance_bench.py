"""bench.balance on a few layers: its targets that do not depend on the machine."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import replica_split
from bench.balance import main


def test_quick_run_writes_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "balance.json"
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(8)[:2] for _ in range(32)])
    np.savez(tmp_path / "trace.npz", data=ids)
    words = ["--quick", "--out", str(out), "--traces", str(tmp_path), "--ranks", "2"]
    main(words)
    text = capsys.readouterr().out
    found = json.loads(out.read_text())
    moved = {(row["case"], row["algorithm"]): row for row in found["moves"]}
    after = moved["drift 0.3, 256+32/16", "incremental"]
    assert after["worst_layer"] <= 1.0301 and after["fetched"] <= 0.10
    assert moved["drift 0.3, 256+32/16", "deepseek"]["fetched"] > 0.8
    assert ("trace, 8+0/2", "stale") in moved
    assert all(
        row["duplicates"] == 0 for row in moved.values() if row["algorithm"] == "incremental"
    )
    steps = {(row["case"], row["algorithm"]): row for row in found["steps"]}
    assert steps["published point, 256+32/32", "incremental"]["over_mean_split"] <= 0.08
    main(["--markdown", "--out", str(out)])
    assert "| drift 0.3, 256+32/16 | stale |" in capsys.readouterr().out
    assert f"wrote {out}" in text


def test_choices_among_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "replica_split.json"
    replica_split.main(["--quick", "--out", str(out)])
    found = json.loads(out.read_text())
    steps = {(row["case"], row["placement"]): row for row in found["single_steps"]}
    for case, target in (("noise 0.4, 256+32/32", 1.25), ("noise 0.4, 128+16/8", 1.08)):
        row = steps[case, "incremental"]
        assert row["fractions"] - 0.005 <= row["lp"] <= target < row["dynamic"]
    for row in found["shared_experts"]:
        assert 1 <= row["waterfill"] < row["own_lp"] <= row["own_dynamic"], row
    # Every fourth row, and the first row of every rank.
    rows = {(row["ranks"], row["rows"], row["period"]): row for row in found["rows"]}
    assert rows[1, 64, 4]["golden"] < 0.7 * rows[1, 64, 4]["turns"]
    assert rows[8, 1, 1]["golden_and_rank"] < 0.6 * rows[8, 1, 1]["turns"]
    replica_split.main(["--markdown", "--out", str(out)])
    assert "| noise 0.4, 128+16/8 | incremental |" in capsys.readouterr().out
