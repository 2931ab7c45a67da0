"""The benchmark of the engine on several nodes: its layouts, what it counts, and a run of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import nodes_engine
from bench.common import merge, read_rows
from bench.ep import read_flags
from bench.ep_rank import FOLDER, kernels_of
from bench.ep_trace import Recorded
from bench.nodes_engine import Layout, check, engine_args, flag_words, parser
from bench.nodes_tables import NCCL, Row, compare, kernel_stages, mean_of, timing
from bench.stages import StepKernels
from moesaic.cli.common import add_model, read_args
from moesaic.config.args import ServerArgs
from moesaic.config.parser import FlagParser
from moesaic.config.resolve import resolve
from moesaic.core.process import NODE_SECRET
from moesaic.engine.frontend import core_client
from moesaic.observe.spans import Span, SpanKind
from tests.unit.test_bench_ep import event, span

BASE = "--model-path tiny:qwen3_moe --device cpu --batch 8 16 --input-len 24 --output-len 16"
ROW = Row(
    *("NVIDIA H200", "m", 2, "bf16", "deepep", "dp", "1x4", 1, 4, 1, 32, 64, 8),
    *(256, 9.0, 0.5, 10.0, 7, 3200.0, 0.6, 8000.0),
)


def args_of(words: str, layout: str) -> dict[str, Any]:
    options, rest = parser().parse_known_args(f"{BASE} {words}".split())
    read = read_flags(rest, options, "nodes_engine", "--layouts")
    return engine_args(read, options, Layout.parse(layout))


def test_layouts():
    assert Layout.parse("2x2") == Layout(2, 2) and Layout.parse("2x2pp2") == Layout(2, 2, 2)
    for name in nodes_engine.LAYOUTS:
        assert Layout.parse(name).name == name and Layout.parse(name).world == 4
    assert [Layout.parse(name).tp for name in nodes_engine.LAYOUTS] == [4, 4, 2, 2]


@pytest.mark.parametrize(
    ("word", "reason"),
    [("4", "no layout"), ("2x", "no layout"), ("1x1", "no peers"), ("1x4pp3", "as many ranks")],
)
def test_no_layouts(word: str, reason: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        nodes_engine.main(["--layouts", word])
    assert reason in capsys.readouterr().err


def test_flags_of_the_engines():
    one, two = args_of("", "1x4"), args_of("", "2x2pp2")
    names = ("tp_size", "ep_size", "dp_size", "pp_size", "nnodes", "enable_dp_attention")
    assert [one[name] for name in names] == [4, 4, 4, 1, 1, True]
    assert [two[name] for name in names] == [2, 2, 2, 2, 2, True]
    # A request has three pages of 16 tokens, and one more in case.
    assert (one["max_total_tokens"], two["max_total_tokens"]) == (4 * 64, 8 * 64)
    assert args_of("--max-total-tokens 4096", "2x2")["max_total_tokens"] == 4096
    shared = args_of("--attention tp", "2x2")
    assert (shared["dp_size"], shared["enable_dp_attention"], shared["ep_size"]) == (1, False, 4)


@pytest.mark.parametrize("words", ["", "--cuda-graph-bs 1 2 --no-warm-up --attention tp"])
def test_a_node_reads_the_arguments_of_node_0(words: str):
    made = args_of(words, "2x2")
    flags = FlagParser("moesaic serve", "", "")
    add_model(flags)
    flags.add_flags(ServerArgs)
    read = read_args(flags.parse([*flag_words(made), "--node-rank=1"]))
    assert resolve(read) == resolve(ServerArgs(**made | {"node_rank": 1}))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--layouts 1x4 --batch 6", "--batch 6 cannot be laid evenly over 4 groups and 1 stages"),
        ("--layouts 1x4pp2 --batch 6", "over 2 groups and 2 stages of 1x4pp2"),
        ("--layouts 2x1 --nnodes 2", "--nnodes: ranks are laid out by --layouts here"),
        ("--layouts 2x1 --max-running-requests 8", "--batch 16: --max-running-requests is less"),
        ("--layouts 2x1 --input-len 2040", "more than the 2048 tokens of the context"),
    ],
)
def test_mistakes_are_found_first(words: str, reason: str):
    with pytest.raises(SystemExit, match=f"^error: .*{reason}"):
        nodes_engine.main([*BASE.split(), *words.split()])


def test_lengths_that_fit():
    options, rest = parser().parse_known_args(f"{BASE} --layouts 1x4 2x2pp2".split())
    for layout in options.layouts:
        check(read_flags(rest, options, "nodes_engine", "--layouts"), options, layout)


def pipeline() -> list[Recorded]:
    """Two stages: 12 tokens of prompts; one request alone, as the others' step is in flight; then
    two of four in each step. The first request ends before the others do."""
    sizes = [12, 1, 2, 2, 2, 2, 1, 2]
    ends = [10, 12, 14, 17, 19, 24, 25, 26]
    begins = [0, *ends]
    both = [list[Span](), list[Span]()]
    for number, (tokens, end) in enumerate(zip(sizes, ends, strict=True)):
        for stage, spans in enumerate(both):
            step = (number + 1, tokens, begins[number] - stage, end - stage)
            spans.append(span(SpanKind.STEP, *step))
            spans.append(span(SpanKind.WAIT, number + 1, 0, 0, 1 + stage))
    return [Recorded(0, both[0]), Recorded(1, both[1])]


def test_a_step_of_stages_gives_every_request_a_token():
    found = timing(pipeline(), {0}, 4, pp=2)
    assert (found.prefill_s, found.total_s) == (0.01, 0.026)
    assert found.steps_ms == [19 - 14, 24 - 17]
    # Each rank waits in two steps of the engine: rank 0 for 1 ms each, rank 1 for 2.
    assert found.host_ms == {"wait": pytest.approx(2 * 1.5)}
    with pytest.raises(SystemExit, match="never decoded together"):
        timing([Recorded(0, pipeline()[0].spans[:8])], {0}, 4, pp=2)
    with pytest.raises(SystemExit, match="longer --input-len"):
        timing(pipeline(), {0}, 99, pp=1)


def test_kernels_between_nodes_are_told_apart():
    ranks = [StepKernels({"ncclDevKernel_AllGather": 9.0, "_push_kernel": 1.0}, 4.0, 20.0)]
    ranks.append(StepKernels({"ncclDevKernel_SendRecv": 3.0, "_few_rows": 5.0}, 6.0, 20.0))
    mean, least = kernel_stages(ranks, pp=2)
    assert mean[NCCL] == 2 * 6 and least[NCCL] == 2 * 3
    assert mean["collectives"] == 2 * 6.5 and mean["step"] == 40
    assert kernel_stages([StepKernels({"_few_rows": 5.0})], pp=1) == ({"dense": 5.0},) * 2
    assert kernel_stages([], pp=1) == ({}, {})


def test_steps_of_a_stage_without_sampling():
    """Every step sends once; the second of three waits."""
    events = [event("ncclDevKernel_SendRecv", end - 2, end) for end in (10, 1010, 1030, 1052)]
    events += [event("_few_rows", *when) for when in ((1012, 1020), (1021, 1024), (1032, 1040))]
    table = kernels_of(events, 4, True)
    assert table.us == {"ncclDevKernel_SendRecv": 2, "_few_rows": 8} and table.step_us == 22


def test_rows_are_compared_with_the_first_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    two = replace(ROW, layout="2x2", nodes=2, decode_tok_s=1600.0, total_tok_s=6000.0)
    two = replace(two, stages_us={NCCL: 5.0}, least_stages_us={NCCL: 4.0}, host_ms={"plan": 1.0})
    rows = [ROW, two, replace(two, batch=128)]
    compare(rows, "1x4")
    assert [row.of_first for row in rows] == [1.0, 0.5, None]
    assert [row.total_of_first for row in rows] == [1.0, 0.75, None]
    path = tmp_path / "rows.json"
    merge(path, rows)
    merge(path, [replace(ROW, attention="tp")])
    assert len(read_rows(path, Row)) == 4
    capsys.readouterr()
    assert nodes_engine.main(["--markdown", "--out", str(path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "| 2x2 | 32 | 0.50 | 10.00 | 1,600 | 0.50 | 6,000 | 0.75 |  | 9.0 |" in told
    assert "| 2x2 | 32 | 5 (4) |" in told and "| 2x2 | 128 | 1.00 |" in told
    assert mean_of([{"plan": 1.0}, {"plan": 2.0, "wait": 1.0}]) == {"plan": 1.5, "wait": 0.5}


@pytest.fixture
def own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TARGET", "Timeouts"):
        monkeypatch.setattr(core_client, name, getattr(core_client, name))
    monkeypatch.setenv(NODE_SECRET, "a secret of some length")
    monkeypatch.setenv(FOLDER, "")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("own_ranks")
def test_nodes_and_stages_give_the_same_tokens(tmp_path: Path):
    out = tmp_path / "rows.json"
    words = "--model-path tiny:qwen3_moe --device cpu --layouts 1x2 2x1 2x1pp2 --batch 4"
    words += " --input-len 24 --output-len 16 --repeats 1 --no-warm-up --profile"
    words += " --enable-deterministic-inference"
    assert nodes_engine.main([*words.split(), "--out", str(out)]) == 0
    rows = {row["layout"]: Row(**row) for row in json.loads(out.read_text())}
    assert list(rows) == ["1x2", "2x1", "2x1pp2"]
    assert [(row.nodes, row.ranks, row.pp) for row in rows.values()] == [
        *((1, 2, 1), (2, 2, 1), (2, 2, 2)),
    ]
    first = rows["1x2"]
    for row in rows.values():
        assert (row.batch, row.tokens, row.same) == (4, 4 * 16, 1.0)
        assert row.steps >= 2 and row.prefill_s > 0 and row.start_s > 0
        assert row.decode_tok_s == pytest.approx(4e3 / row.step_ms)
        assert row.of_first == pytest.approx(row.decode_tok_s / first.decode_tok_s)
        assert row.total_tok_s == pytest.approx(4 * 40 / row.total_s)
        assert row.host_ms["experts"] > 0 and row.stages_us["attention"] > 0
