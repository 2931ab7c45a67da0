"""bench.serving drives a server of its own and one that runs; bench.mixed_profile an engine."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from bench import mixed_profile, serving
from bench.http_server import started
from bench.serving_load import LONG_OUTPUT, LoadDriver, Sizes
from moesaic.engine.engine import Engine
from tests.server.serving import served

SMALL = "--input-len 16 --output-len 8 --rounds 2 --seconds 1 --chats 2 --chat-len 8 --alone 3"
FIELDS = """ranks dtype concurrency requests_s output_tok_s ttft_p50_ms ttft_p99_ms itl_p50_ms
itl_p99_ms tpot_p50_ms load""".split()


def drawn(number: int, seed: int) -> tuple[int, int]:
    """Tokens in and out of a closed loop, whose prompts are drawn after those that warm up."""
    sizes = Sizes(input_len=16, output_len=8)
    prompts = LoadDriver(None, sizes, 256, seed).draw(number, 16)  # type: ignore[arg-type]
    return sum(p.tokens for p in prompts), sum(p.output_len for p in prompts)


@pytest.mark.slow  # one that runs is always driven
def test_a_server_is_started_and_driven(tmp_path, capsys):
    out = tmp_path / "rows.json"
    words = ["--model-path", "tiny:qwen3_moe", "--dtype", "fp32", "--concurrency", "2", "3"]
    words += [*SMALL.split(), "--long-len", "64", "--vocab-size", "256", "--out", str(out)]
    assert serving.main([*words, "--num-threads", "1", "--log", str(tmp_path / "log")]) == 0
    rows = {(row["load"], row["concurrency"]): row for row in json.loads(out.read_text())}
    closed = [rows["closed", 2], rows["closed", 3]]
    for number, row in zip((4, 6), closed, strict=True):
        assert (row["requests"], row["failed"], row["ranks"]) == (number, 0, 1)
        assert all(row[name] is not None for name in FIELDS)
        assert row["requests_s"] == pytest.approx(number / row["seconds"])
    # Seeds: 2 and 3 of the first closed loop, 4 and 5 of the second.
    assert (closed[0]["input_tokens"], closed[0]["output_tokens"]) == drawn(4, 2)
    assert (closed[1]["input_tokens"], closed[1]["output_tokens"]) == drawn(6, 4)
    alone = rows["alone", 1]
    assert (alone["requests"], alone["input_tokens"], alone["output_tokens"]) == (3, 48, 3)
    best = max(row["requests_s"] for row in closed)
    for share in (0.6, 0.9):
        row = rows[f"poisson {share:.0%}", None]
        assert row["rate"] == pytest.approx(share * best)
        assert row["requests"] == max(round(row["rate"]), 1)
    long, mixed = rows["long", None], rows["chats beside long", 2]
    assert (long["requests"], long["input_tokens"], long["output_tokens"]) == (1, 64, LONG_OUTPUT)
    assert mixed["itl_p99_ratio"] == pytest.approx(
        mixed["itl_p99_ms"] / rows["chats", 2]["itl_p99_ms"]
    )
    assert Counter(row["failed"] for row in rows.values()) == {0: 8}
    assert "chats beside long, 2 at once" in capsys.readouterr().out


def test_a_server_that_runs_is_driven(tmp_path, capsys):
    out = tmp_path / "rows.json"
    with Engine(model_path="tiny:qwen3_moe", num_threads=1) as engine, served(engine) as url:
        words = ["--attach", url, "--server-name", "other", "--dtype", "fp32", "--out", str(out)]
        words += [*SMALL.split(), "--concurrency", "2"]
        assert serving.main([*words, "--loads", "closed"]) == 0
        assert serving.main([*words, "--loads", "mixed", "--long-len", "9000"]) == 1
    (row,) = json.loads(out.read_text())
    assert (row["server"], row["start_s"], row["requests"]) == ("other", None, 4)
    assert "error: 1 ranks, fp32: --long-len 9000 is too long" in capsys.readouterr().out


def test_a_server_that_does_not_start_says_why(tmp_path):
    with (
        pytest.raises(RuntimeError, match=r"status 2 at start.*\n(.*\n)*.*--no-such-flag"),
        started("tiny:qwen3_moe", ["--no-such-flag"], tmp_path / "log"),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match="not ready after 1e-09 s"),
        started("tiny:qwen3_moe", [], tmp_path / "log", seconds=1e-9),
    ):
        pass


def test_mixed_steps_are_profiled(tmp_path, capsys):
    out = tmp_path / "mixed.json"
    words = "tiny:qwen3_moe --num-threads 1 --decoding 3 --context 24 --prompt 40 50 --repeats 2"
    assert (
        mixed_profile.main([*words.split(), "--chunked-prefill-size", "48", "--out", str(out)]) == 0
    )
    rows = json.loads(out.read_text())
    # The chunk has room for 45 tokens of a prompt beside three that decode.
    assert [(row["prompt"], row["steps"]) for row in rows] == [(40, 6), (40, 2), (50, 6), (50, 4)]
    assert [row["tokens"] for row in rows] == [0, 40, 0, 25]
    for row in rows:
        assert row["host_ms"] == row["plan_ms"] + row["launch_ms"] > 0
        assert row["gap_ms"] == pytest.approx(row["step_ms"] - row["busy_ms"])
        assert row["step_ms"] >= row["device_ms"] > 0 and row["kernels"]
    told = capsys.readouterr().out
    assert "3 decode, 40 tokens of prompts" in told and "gap ms" in told


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("tiny:qwen3_moe --tp 2", "error: this measures one rank"),
        ("tiny:qwen3_moe --context 2046 --prompt 8", "error: requests ended before all"),
    ],
)
def test_sizes_that_cannot_be_measured(words, complaint):
    with pytest.raises(SystemExit, match=complaint):
        mixed_profile.main([*words.split(), "--decoding", "1", "--num-threads", "1"])
