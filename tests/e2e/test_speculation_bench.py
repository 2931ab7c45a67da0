"""bench.speculation: its texts follow their scripts, and its rows say what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import speculation
from bench.speculation import LOOP, LOOPS, Script, ScriptDrafter
from moesaic.core.draft_shape import ANY_DRAFTS
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams

SAMPLING = SamplingParams(temperature=0.0)


def test_scripts() -> None:
    script = Script(1000)
    script.choose("loops")
    assert script.follow(5, LOOP)[-1] == 5 and len(set(script.follow(999, 70)[-LOOP:])) == LOOP
    assert max(script.follow(999, 70)) < LOOP * LOOPS
    script.choose("free")
    assert len(set(script.follow(3, 512))) == 512, "one loop of all tokens below 512"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("only", ["simulated", "layer", "ngram"])
def test_rows_are_added_to_a_file(
    only: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends if a token is not the script's."""
    out = tmp_path / "rows.json"
    words = "--model-path tiny:qwen3_moe --device cpu --skip-tokenizer-init --quick --most 1"
    times = f"--only {only} --seconds 0.1 --settle 0.05 --context 32 --out"
    speculation.main([*words.split(), *times.split(), str(out)])
    rows = json.loads(out.read_text())
    found = {(row["text"], row["rate"], row["drafts"]) for row in rows}
    if only == "ngram":
        assert found == {("loops", 0.0, 11), ("free", 0.0, 11)}
    else:
        rates = (0.5, 0.7, 0.9) if only == "simulated" else (0.9,)
        assert found == {("free", rate, drafts) for rate in rates for drafts in (1, 2, 3, 4)}
    for row in rows:
        assert row["plain_tok_s"] > 0 and row["adaptive_tok_s"] > 0
        assert 1 <= row["accept_len"] <= 1 + row["drafts"]
        assert row["rate"] < 0.9 or row["accept_len"] > 1.3
    assert "accept len" in capsys.readouterr().out


def test_drafts_are_right_as_often_as_asked() -> None:
    """After a few hundred already."""
    script = Script(1 << 12)
    for rate, drafts in ((0.5, 1), (0.5, 3), (0.9, 4)):
        drafter, request = ScriptDrafter(script, rate, drafts), Request("0", [5], SAMPLING, 0, 9, 0)
        accepted = 0
        for _ in range(200):
            drafter.propose([request], ANY_DRAFTS)
            truth = script.follow(5, drafts)
            same = [a == b for a, b in zip(request.drafts, truth, strict=True)]
            assert sorted(same, reverse=True) == same
            accepted += sum(same)
        expected = sum(rate**n for n in range(1, drafts + 1))
        assert accepted / 200 == pytest.approx(expected, rel=0.02)
