"""bench.balance on a few layers: its targets that do not depend on the machine."""

import json
from pathlib import Path

import numpy as np
import pytest

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
