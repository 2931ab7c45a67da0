"""The benchmark of ranks that share a GPU: which steps count, what is compared and kept."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from bench import ep
from bench.ep import Recorded, Row, compare, engine_args, host_ms, joined, merge, parser, read_trace
from bench.ep_rank import FOLDER, TARGET, kernels_of, stage_of, stages_of
from bench.one_batch import timing
from moesaic.comm.arrange import mesh_of
from moesaic.config import ServerArgs, resolve
from moesaic.engine import remote
from moesaic.observe.spans import Kind, Span
from moesaic.observe.trace import Track, write_trace

MS = 1_000_000
ROW = Row("m", 2, "bf16", 1, 32, 64, 8, 10.0, 3200.0, 7, 1e4, 5.0, "NVIDIA H200")


def span(kind: Kind, step: int, tokens: int, begin: float, end: float) -> Span:
    return Span(kind, -1, step, tokens, int(begin * MS), int(end * MS), 0, 1)


def two_ranks() -> list[Recorded]:
    """Prompts of 8 tokens on either rank, then two requests each; rank 1 ends last."""
    first = [span(Kind.STEP, 1, 8, 0, 10)]
    first += [span(Kind.STEP, n, 2, 8 + n, 9 + n) for n in (2, 3, 4)]
    second = [span(Kind.STEP, 1, 8, 1, 12)]
    second += [span(Kind.STEP, n, 2, 10 * n, 10 * n + 5) for n in (2, 3, 4)]
    second += [span(Kind.WAIT, n, 0, 10 * n, 10 * n + 3) for n in (1, 2, 3, 4)]
    return [Recorded(0, first), Recorded(1, second)]


def test_a_step_has_the_tokens_of_all_ranks_and_ends_with_the_last():
    steps = joined(two_ranks())
    assert [one.tokens for one in steps] == [16, 4, 4, 4]
    assert [one.end / MS for one in steps] == [12, 25, 35, 45]
    found = timing(steps, 4)
    assert found.prefill == 12 and found.steps == [10, 10]
    # Three steps of decoding, two ranks, of which one waits 3 ms.
    assert host_ms(two_ranks(), 4) == {"wait": pytest.approx(1.5)}


def test_a_trace_is_read_as_it_was_recorded(tmp_path: Path):
    path, ranks = tmp_path / "a.trace.json.gz", two_ranks()
    tracks = [Track(0, "engine", [span(Kind.TOKENISE, 0, 0, 0, 1)])]
    tracks += [Track(one.rank + 1, "rank", one.spans) for one in ranks]
    write_trace(path, tracks, {})
    read = read_trace(path)
    assert [one.rank for one in read] == [0, 1]
    assert joined(read) == joined(ranks) and host_ms(read, 4) == host_ms(ranks, 4)


def test_kernels_by_stage():
    def event(name: str, us: float, device: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, device_type=device, time_range=SimpleNamespace(elapsed_us=lambda: us)
        )

    # The first wait was for a rank that was held up: the median counts.
    waits = [event("_wait_kernel", us) for us in (900.0, 4.0, 6.0)]
    events = [*waits, event("_send_kernel", 5.0), event("aten::mm", 7.0, DeviceType.CPU)]
    table = kernels_of(events, 2, True)
    assert table == {"_wait_kernel": 9.0, "_send_kernel": 2.5}
    stages = stages_of([table, {"_wait_kernel": 1.0, "copy": 3.0}])
    assert (stages["wait"], stages["dispatch"], stages["other"]) == (5.0, 1.25, 1.5)
    names = ["collect_pairs_kernel", "_gate_up_down_kernel", "decode_kernel", "_router_kernel"]
    names += ["nvjet_tst_64x8", "_norm_kernel", "_greedy_kernel"]
    assert [stage_of(name) for name in names] == [
        *("combine", "experts", "attention", "routing", "dense", "norms", "sampling")
    ]


def test_rows_are_compared_with_one_rank_and_kept(tmp_path: Path):
    rows = [ROW, replace(ROW, ep=4, decode_tok_s=2400.0), replace(ROW, ep=4, batch=128)]
    assert [row.of_single for row in compare(rows)] == [1.0, 0.75, None]
    path = tmp_path / "rows.json"
    merge(path, rows)
    merge(path, [replace(ROW, ep=4, decode_ms=1.0), replace(ROW, layers=48)])
    read = [Row(**one) for one in json.loads(path.read_text())]
    assert [(row.layers, row.ep, row.batch, row.decode_ms) for row in read] == [
        (2, 1, 32, 10.0),
        (2, 4, 32, 1.0),
        (2, 4, 128, 10.0),
        (48, 1, 32, 10.0),
    ]


def test_flags_of_the_engines():
    words = "--model-path tiny:qwen3_moe --device cpu --layers 3 --batch 8 16".split()
    options, rest = parser().parse_known_args(words)
    one, four = (engine_args(rest, options, number) for number in (1, 4))
    assert one["model_path"] == "tiny:qwen3_moe,num_hidden_layers=3"
    assert (one["tp_size"], one["enable_dp_attention"]) == (1, False)
    assert (four["tp_size"], four["ep_size"], four["dp_size"]) == (4, 4, 4)
    assert four["enable_dp_attention"] and four["moe_a2a_backend"] == "deepep"
    assert four["max_running_requests"] == 16


def test_an_engine_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "Timeouts", remote.Timeouts)
    part = tmp_path / "rows.json"
    words = "--model-path tiny:qwen3_moe --device cpu --ep 1 --batch 3 --input-len 24".split()
    assert ep.main([*words, "--output-len", "5", "--part", str(part)]) == 0
    (row,) = (Row(**one) for one in json.loads(part.read_text()))
    assert (row.model, row.layers, row.ep, row.batch) == ("tiny:qwen3_moe", 2, 1, 3)
    assert row.decode_steps >= 2
    assert row.decode_tok_s == pytest.approx(3e3 / row.decode_ms)
    assert row.host_ms["attention"] > 0 and row.start_s > 0


def test_ranks_may_be_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("TARGET", "Timeouts"):
        monkeypatch.setattr(remote, name, getattr(remote, name))
    monkeypatch.setenv(FOLDER, "")
    ep.prepare_ranks(tmp_path)
    args = resolve(ServerArgs.from_kwargs(model_path="tiny:qwen3_moe", device="cpu", tp_size=2))
    spec = remote.service_spec(args, mesh_of(args))
    assert (spec.target, spec.timeouts.beat, spec.timeouts.hang) == (TARGET, 60.0, 300.0)
    assert os.environ[FOLDER] == str(tmp_path)


@pytest.mark.slow
def test_engines_one_after_the_other(tmp_path: Path):
    out = tmp_path / "rows.json"
    words = "--model-path tiny:qwen3_moe --device cpu --ep 1 2 --batch 4 --input-len 24".split()
    assert ep.main([*words, "--output-len", "8", "--profile", "--out", str(out)]) == 0
    one, two = (Row(**row) for row in json.loads(out.read_text()))
    assert (one.ep, two.ep, one.of_single) == (1, 2, 1.0)
    assert two.of_single == pytest.approx(two.decode_tok_s / one.decode_tok_s)
    assert two.host_ms["wait"] > 0 and two.stages_us["dense"] > 0 and one.stages_us["dense"] > 0


def test_what_is_refused_is_refused_before_any_engine_starts():
    with pytest.raises(SystemExit, match="--model-path is missing"):
        ep.main([])
    wrong = "--model-path tiny:qwen3_moe --device cpu --ep 1 2 --ep-num-redundant-experts -1"
    with pytest.raises(SystemExit, match="--ep-num-redundant-experts"):
        ep.main(wrong.split())
