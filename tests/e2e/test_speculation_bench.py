"""bench.speculation: its texts follow their scripts, and its rows say what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import speculation
from bench.speculation import LOOP, LOOPS, Script


def test_scripts() -> None:
    script = Script(1000)
    script.choose("loops")
    assert script.follow(5, LOOP)[-1] == 5 and len(set(script.follow(999, 70)[-LOOP:])) == LOOP
    assert max(script.follow(999, 70)) < LOOP * LOOPS
    script.choose("free")
    assert len(set(script.follow(3, 512))) == 512, "one loop of all tokens below 512"


@pytest.mark.timeout(240)
def test_rows_are_added_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Right drafts, all of which are accepted; the run ends if a token is not the script's."""
    out = tmp_path / "rows.json"
    words = "--model-path tiny:qwen3_moe --device cpu --quick --most 1 --only simulated"
    times = "--seconds 0.1 --settle 0.05 --context 32 --out"
    speculation.main([*words.split(), *times.split(), str(out)])
    rows = json.loads(out.read_text())
    assert [(row["rate"], row["drafts"]) for row in rows] == [(0.5, 3), (0.9, 1), (0.9, 3)]
    for row in rows:
        assert row["plain_tok_s"] > 0 and row["adaptive_tok_s"] > 0
        assert 1 <= row["accept_len"] <= 1 + row["drafts"]
    assert "accept len" in capsys.readouterr().out
