"""The benchmark of one batch measures what the engine recorded."""

import json

import pytest

from bench import one_batch
from bench.one_batch import engine_args, main, merge_rows, parser, timing
from bench.one_batch_peer import run_apart
from moesaic.models.tiny import materialise
from moesaic.observe.spans import Span, SpanKind

MS = 1_000_000


def span(kind, step, tokens, begin, end):
    return Span(kind, -1, step, tokens, int(begin * MS), int(end * MS), 0, 0)


def test_only_steps_in_which_all_decode_count():
    """Two prompts in two steps, the second with a token of the first; then two tokens a step."""
    steps = [(1, 16, 0, 10), (2, 17, 10, 22), (3, 2, 22, 24), (4, 2, 24, 25), (5, 2, 25, 28)]
    steps += [(6, 1, 28, 29)]
    spans = [span(SpanKind.STEP, *step) for step in steps]
    spans += [span(SpanKind.PLAN, n, 2, 30 + n, 30.5 + n) for n in range(1, 7)]
    spans += [span(SpanKind.DETOKENISE, 4, 2, 24.9, 25), span(SpanKind.SAMPLE, 4, 2, 24, 25)]
    found = timing(spans, 2)
    assert found.prefill == 22 and found.total == 29
    assert found.steps == [1.0, 3.0]  # from the end of the one before
    assert found.plan == [0.5] * 3 and found.take_in == pytest.approx([0.1])
    with pytest.raises(SystemExit, match="never decoded together"):
        timing(spans[:3], 2)
    with pytest.raises(SystemExit, match="longer --input-len"):
        timing(spans, 99)


def test_rows_of_the_result(tmp_path, capsys):
    out = tmp_path / "found" / "one_batch.json"
    flags = ["--model-path", "tiny:qwen3_moe", "--input-len", "24", "--output-len", "6"]
    flags += ["--bandwidth", "0.1", "--rate", "1", "--out", str(out)]
    assert main([*flags, "--batch-size", "1", "3", "--profile"]) == 0
    rows = json.loads(out.read_text())
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert row["model"] == "tiny:qwen3_moe" and row["dtype"] == "fp32"
        assert row["decode_steps"] >= 2 and row["decode_ms"] > 0 and row["prefill_tok_s"] > 0
        assert row["decode_tok_s"] == pytest.approx(1e3 * row["batch"] / row["decode_ms"])
        assert row["of_limit"] == pytest.approx(row["limit_ms"] / row["decode_ms"])
        # Keys and values of 27 tokens in two layers, and all else a step reads.
        assert row["limit_ms"] > 1e3 * 2 * row["batch"] * 27 * 2 * 2 * 16 * 2 / 0.1e12
        assert not row["overlap"] and row["peers"] == {}
    profile = json.loads(out.with_name("one_batch_profile_fp32.json").read_text())
    decode = profile["3"]["decode"]
    assert profile["3"]["prefill"]["tokens"] == [72] and decode["tokens"] == [3] * 4
    assert decode["steps"] == 4 and any("mm" in row["kernel"] for row in decode["kernels"])
    total = sum(row["us"] for row in decode["kernels"])
    assert total == pytest.approx(decode["busy_us"]) and 0 < total <= decode["wall_us"]
    assert "of limit" in capsys.readouterr().out
    # Another run replaces its own rows and no others.
    out.write_text(json.dumps([*rows, rows[0] | {"dtype": "fp8"}]))
    merge_rows(out, [])
    assert main([*flags, "--batch-size", "3"]) == 0
    kinds = [(row["dtype"], row["batch"]) for row in json.loads(out.read_text())]
    assert kinds == [("fp32", 1), ("fp32", 3), ("fp8", 1)]


def test_a_batch_that_fails_ends_no_other(tmp_path, monkeypatch, capsys):
    out, measure = tmp_path / "one_batch.json", one_batch.measure

    def failing(engine, core, options, batch, limit):
        if batch == 1:
            raise SystemExit("a request ended early")
        return measure(engine, core, options, batch, limit)

    monkeypatch.setattr(one_batch, "measure", failing)
    flags = ["--model-path", "tiny:qwen3_moe", "--input-len", "16", "--output-len", "4"]
    assert main([*flags, "--batch-size", "2", "1", "3", "--out", str(out)]) == 1
    assert [row["batch"] for row in json.loads(out.read_text())] == [2, 3]
    told = capsys.readouterr()
    assert "batches of 1 failed: see above" in told.out and "ended early" in told.err


def test_nobody_is_looked_for_when_a_step_fails(monkeypatch, capsys):
    begun = []

    def fails(runner, plan, *rest):
        begun.append(plan.num_sequences)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("moesaic.engine.runner.model_runner.ModelRunner.begin", fails)
    flags = ["--model-path", "tiny:qwen3_moe", "--input-len", "16", "--output-len", "4"]
    assert main([*flags, "--batch-size", "3"]) == 1
    assert len(begun) == 1 and "no such kernel" in capsys.readouterr().err


def test_graphs_are_captured_for_the_batches_that_are_measured():
    options = parser().parse_args(["--batch-size", "8", "1"])
    flags = ["--model-path", "tiny:qwen3_moe"]
    assert engine_args(flags, options)["cuda_graph_bs"] == (1, 8)
    told = engine_args([*flags, "--cuda-graph-bs", "4"], options)
    assert told["cuda_graph_bs"] == (4,)
    assert engine_args([*flags, "--disable-cuda-graph"], options)["cuda_graph_bs"] is None


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "error: --model-path is missing"),
        (["tiny:qwen3_moe", "--tp", "2"], "error: this measures one rank"),
        (["tiny:qwen3_moe", "--bandwith", "3"], "error: unknown flag --bandwith"),
        (["shape:qwen"], "error: --model-path shape:qwen has no weights"),
        (["shape:qwen", "--load-format", "dummy"], "error: unknown shape 'qwen'"),
        (["/no/such/model"], "error: .*/no/such/model"),
        (["tiny:qwen3_moe", "--rate", "3"], "error: --bandwidth and --rate go together"),
        (["tiny:qwen3_moe", "--fp8-rate", "3"], "error: --fp8-rate 3 needs"),
        (
            ["tiny:qwen3_moe", "--peer", "transformers", "--batch-size", "2"],
            "error: --peer-batch 1 8 32 has none of --batch-size 2",
        ),
    ],
)
def test_wrong_flags_are_one_line(words, complaint):
    with pytest.raises(SystemExit, match=complaint):
        main(words)


@pytest.mark.parametrize(
    "flag", ["--batch-size", "--input-len", "--output-len", "--repeats", "--bandwidth", "--rate"]
)
def test_numbers_that_measure_nothing(flag, capsys):
    for word in ("0", "-1", "x"):
        with pytest.raises(SystemExit):
            main(["--model-path", "tiny:qwen3_moe", flag, word])
        assert f"argument {flag}" in capsys.readouterr().err


def test_what_does_not_fit_is_said(capsys):
    words = ["tiny:qwen3_moe", "--batch-size", "1", "--input-len", "8000", "--output-len", "4"]
    assert main(words) == 1
    assert "batch 1 does not fit: it needs 8,004 tokens" in capsys.readouterr().out


def test_the_environment_chooses_the_device(monkeypatch):
    """Limits and peers are of the device that the engine takes."""
    monkeypatch.setenv("MOESAIC_DEVICE", "cpu")
    assert engine_args(["tiny:qwen3_moe"], parser().parse_args([]))["device"] == "cpu"


@pytest.mark.slow
def test_transformers_beside_it():
    found = run_apart(materialise("tiny:qwen3_moe"), [2], 24, "cpu")
    assert [point.name for point in found] == ["transformers", "generate_batch"]
    for point in found:
        assert point.problem == "" and point.batch == 2
        assert point.decode_ms is not None and point.decode_ms > 0


def test_a_peer_that_takes_too_long_costs_nothing_else():
    found = run_apart(materialise("tiny:qwen3_moe"), [2], 24, "cpu", seconds=0.05)
    assert [point.name for point in found] == ["transformers", "generate_batch"]
    assert {point.problem for point in found} == {"not done within 0.05 s"}
