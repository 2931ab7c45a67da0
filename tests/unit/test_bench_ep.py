"""The benchmark of ranks that share a GPU: which steps it counts, compares and keeps."""

import ast
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from bench import ep
from bench.common import RESULTS, merge, read_rows
from bench.ep import (
    Row,
    compare,
    engine_args,
    parser,
    read_flags,
    unfit,
)
from bench.ep_rank import FOLDER, TARGET, kernels_of
from bench.ep_trace import Recorded, host_ms, joined, read_trace
from bench.one_batch import timing
from bench.stages import KERNELS, STAGE_OF, StepKernels, stage_of, stages_of
from moesaic.comm.mesh import mesh_of
from moesaic.config import ServerArgs, resolve
from moesaic.engine.frontend import core_client as remote
from moesaic.observe.spans import Span, SpanKind
from moesaic.observe.trace import Track, write_trace

MS = 1_000_000
TRITON = Path(__file__).parents[2] / "moesaic" / "kernels" / "triton"
ROW = Row("m", 2, "bf16", 1, 32, 64, 8, 10.0, 3200.0, 7, 1e4, 5.0, "NVIDIA H200")


def span(kind: SpanKind, step: int, tokens: int, begin: float, end: float) -> Span:
    return Span(kind, -1, step, tokens, int(begin * MS), int(end * MS), 0, 1)


def two_ranks() -> list[Recorded]:
    """Each rank prefills 8 tokens, then decodes two requests; rank 1 ends last."""
    first = [span(SpanKind.STEP, 1, 8, 0, 10)]
    first += [span(SpanKind.STEP, n, 2, 8 + n, 9 + n) for n in (2, 3, 4)]
    second = [span(SpanKind.STEP, 1, 8, 1, 12)]
    second += [span(SpanKind.STEP, n, 2, 10 * n, 10 * n + 5) for n in (2, 3, 4)]
    second += [span(SpanKind.WAIT, n, 0, 10 * n, 10 * n + 3) for n in (1, 2, 3, 4)]
    return [Recorded(0, first), Recorded(1, second)]


def test_a_step_has_the_tokens_of_all_ranks_and_ends_with_the_last():
    steps = joined(two_ranks())
    assert [one.tokens for one in steps] == [16, 4, 4, 4]
    assert [one.end / MS for one in steps] == [12, 25, 35, 45]
    found = timing(steps, 4)
    assert found.prefill == 12 and found.steps == [10, 10]
    # The mean of three decode steps and two ranks, of which one waits 3 ms.
    assert host_ms(two_ranks(), 4) == {"wait": pytest.approx(1.5)}


def test_a_trace_is_read_as_it_was_recorded(tmp_path: Path):
    path, ranks = tmp_path / "a.trace.json.gz", two_ranks()
    tracks = [Track(0, "engine", [span(SpanKind.TOKENISE, 0, 0, 0, 1)])]
    tracks += [Track(one.rank + 1, "rank", one.spans) for one in ranks]
    write_trace(path, tracks, {})
    read = read_trace(path)
    assert [one.rank for one in read] == [0, 1]
    assert joined(read) == joined(ranks) and host_ms(read, 4) == host_ms(ranks, 4)


def event(name: str, begin: float, end: float, device: DeviceType = DeviceType.CUDA) -> Any:
    return SimpleNamespace(
        name=name, device_type=device, time_range=SimpleNamespace(start=begin, end=end)
    )


def test_the_step_of_median_length_counts():
    """Steps end at 10, 30, 1030 and 1085: the third one waits for a rank. In the last one a product
    begins while the wait before it still runs, and nothing runs for 55 - 28 us."""
    events = [event("_greedy_kernel", end - 1, end) for end in (10, 30, 1030, 1085)]
    events += [event("_wait_kernel", *when) for when in ((12, 20), (31, 1020), (1032, 1050))]
    events += [event("_few_rows", 1040, 1059), event("_few_rows", 5, 9)]
    events += [event("aten::mm", 0, 2000, DeviceType.CPU)]
    table = kernels_of(events, 4, True)
    assert table.us == {"_wait_kernel": 18, "_few_rows": 19, "_greedy_kernel": 1}
    assert (table.step_us, table.idle_us) == (55, 55 - 28)
    # CPU operators do not show where steps end, so the mean counts.
    assert kernels_of(events, 4, False) == StepKernels({"aten::mm": 500})


def test_kernels_by_stage():
    ranks = [StepKernels({"_wait_kernel": 9.0, "_send_kernel": 2.5}, 4.0, 20.0)]
    ranks.append(StepKernels({"_wait_kernel": 1.0, "vectorized_copy": 3.0}, 6.0, 20.0))
    found = stages_of(ranks)
    assert found.mean == {"dispatch": 1.25, "wait": 5.0, "other": 1.5, "idle": 5.0, "step": 20.0}
    assert found.least == {"dispatch": 0.0, "wait": 1.0, "other": 0.0, "idle": 4.0, "step": 20.0}
    assert list(found.mean) == list(found.least) == ["dispatch", "wait", "other", "idle", "step"]
    one = stages_of([StepKernels({"aten::mm": 7.0, "aten::linear": 2.0})])
    assert one.mean == one.least == {"dense": 9.0}
    foreign = ["nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "cutlass::GroupProblemShape", "aten::addmm"]
    foreign += ["ncclDevKernel_AllReduce", "at::native::vectorized_elementwise_kernel"]
    assert [stage_of(name) for name in foreign] == [
        *("dense", "experts", "dense", "collectives", "other")
    ]


def launched() -> set[str]:
    """Functions under `jit` that no other such function calls or passes on."""
    modules = {path.stem: ast.parse(path.read_text()) for path in TRITON.glob("*.py")}
    made, used = set(), set()
    for module, tree in modules.items():
        places = {
            name.asname or name.name: ((found.module or "").rpartition(".")[2], name.name)
            for found in ast.walk(tree)
            if isinstance(found, ast.ImportFrom)
            for name in found.names
        }
        inner = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and jitted(one)]
        places |= {one.name: (module, one.name) for one in inner}
        made |= {(module, one.name) for one in inner}
        used |= {
            places[word.id]
            for one in inner
            for word in ast.walk(one)
            if isinstance(word, ast.Name) and places.get(word.id, (module, one.name))[1] != one.name
        }
    return {name for _, name in made - used}


def jitted(function: ast.FunctionDef) -> bool:
    return any(re.search(r"\bjit\b", ast.unparse(one)) for one in function.decorator_list)


def test_every_kernel_has_one_stage():
    found = launched()
    assert len(found) > 40 and "_few_rows" in found and "add_splits" not in found
    assert found == set(STAGE_OF)
    assert len(STAGE_OF) == sum(map(len, KERNELS.values()))


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


def test_tables_of_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stages = {"step": 9876.4, "dense": 10.0, "idle": 3.0}
    one = replace(ROW, stages_us=stages, least_stages_us=stages, host_ms={"plan": 1})
    four = replace(ROW, ep=4, decode_tok_s=2400.0)
    more = {"stages_us": {"dense": 8.0, "wait": 1234.0}, "least_stages_us": {"dense": 7, "wait": 2}}
    path = tmp_path / "rows.json"
    merge(path, compare([one, four, replace(four, batch=128, **more)]))
    capsys.readouterr()
    assert ep.main(["--markdown", "--out", str(path)]) == 0
    told = capsys.readouterr().out.splitlines()
    lengths = "--input-len 64 --output-len 8"
    assert told[1] == f"m, 2 layers, bf16, deepep, NVIDIA H200, {lengths}"
    assert "| 1 | 32 | 10.00 | 3,200 | 1.00 | 10,000 | 5.0 |" in told
    assert "| 4 | 32 | 10.00 | 2,400 | 0.75 | 10,000 | 5.0 |" in told
    place = told.index("| ranks | batch | dense | wait | idle | step |")
    assert told[place + 2 :] == [
        "| 1 | 32 | 10 |  | 3 | 9,876 |",
        "| 4 | 128 | 8 (7) | 1,234 (2) |  |  |",
    ]
    assert "| 1 | 32 | 1.00 |" in told


def test_rows_of_other_backends_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "rows.json"
    old = [{k: v for k, v in vars(ROW).items() if k != "backend"}]  # the old format
    path.write_text(json.dumps(old))
    merge(path, [replace(ROW, backend="mori", decode_ms=3.0), replace(ROW, decode_ms=4.0)])
    read = [Row(**one) for one in json.loads(path.read_text())]
    assert [(row.backend, row.decode_ms) for row in read] == [("deepep", 4.0), ("mori", 3.0)]
    capsys.readouterr()
    assert ep.main(["--markdown", "--out", str(path)]) == 0
    told = capsys.readouterr().out
    assert "bf16, deepep, NVIDIA H200" in told and "bf16, mori, NVIDIA H200" in told


def test_rows_of_other_sizes_stay(tmp_path: Path):
    path = tmp_path / "rows.json"
    merge(path, [ROW])
    merge(path, [replace(ROW, input_len=32), replace(ROW, output_len=16)])
    merge(path, [replace(ROW, input_len=32, decode_ms=4.0)])
    read = [Row(**one) for one in json.loads(path.read_text())]
    assert [(row.input_len, row.output_len, row.decode_ms) for row in read] == [
        (32, 8, 4.0),
        (64, 8, 10.0),
        (64, 16, 10.0),
    ]
    assert {row.input_len for row in read_rows(RESULTS / "h200_ep.json", Row)} == {1024}


def args_of(words: str, number: int) -> dict[str, Any]:
    base = "--model-path tiny:qwen3_moe --device cpu --layers 3 --batch 8 16"
    options, rest = parser().parse_known_args(f"{base} {words}".split())
    return engine_args(read_flags(rest, options), options, number)


def test_flags_of_the_engines(tmp_path: Path):
    one, four = (args_of("", number) for number in (1, 4))
    assert one["model_path"] == "tiny:qwen3_moe,num_hidden_layers=3"
    assert (one["tp_size"], one["enable_dp_attention"]) == (1, False)
    assert (four["tp_size"], four["ep_size"], four["dp_size"]) == (4, 4, 4)
    assert four["enable_dp_attention"] and four["moe_a2a_backend"] == "deepep"
    assert four["max_running_requests"] == 16 and not four["skip_server_warmup"]
    assert args_of("--no-warm-up", 4)["skip_server_warmup"]
    assert one["moe_a2a_backend"] == "none"
    given = "--moe-a2a-backend deepep --deepep-mode low_latency"
    modes = [args_of(given, number)["deepep_mode"] for number in (1, 4)]
    assert modes == ["auto", "low_latency"]
    file = tmp_path / "flags.yaml"
    file.write_text("moe-a2a-backend: mori\nrandom-seed: 7\n")
    told = args_of(f"--config {file}", 4)
    assert (told["moe_a2a_backend"], told["random_seed"], told["watchdog_timeout"]) == (
        *("mori", 7, 300),
    )
    file.write_text("tp: 2\n")
    with pytest.raises(ValueError, match="--tp-size: ranks are laid out by --ep here"):
        args_of(f"--config {file}", 4)


@pytest.mark.parametrize(
    "flag",
    ["--tp-size 2", "--dp-size 1", "--pp-size 2", "--ep-size 4", "--enable-dp-attention"]
    + ["--nnodes 2"],
)
def test_ranks_are_laid_out_by_ep(flag: str):
    with pytest.raises(SystemExit, match=f"error: {flag.split()[0]}: ranks are laid out by --ep"):
        ep.main(f"--model-path tiny:qwen3_moe --device cpu {flag}".split())


def test_why_a_batch_is_left_out():
    assert unfit(8, 4, 8) == unfit(1, 4, 8) == ""
    assert unfit(6, 4, 8) == "batch 6 cannot be laid evenly over 4 ranks"
    assert unfit(8, 4, 4) == "batch 8 is more than the 4 of --max-running-requests"


def test_an_engine_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "Timeouts", remote.Timeouts)
    part = tmp_path / "rows.json"
    words = "--model-path tiny:qwen3_moe --device cpu --ep 1 --batch 3 --input-len 24".split()
    assert ep.main([*words, "--output-len", "5", "--part", str(part)]) == 0
    (row,) = (Row(**one) for one in json.loads(part.read_text()))
    assert (row.model, row.layers, row.ep, row.batch) == ("tiny:qwen3_moe", 2, 1, 3)
    assert row.backend == "deepep"
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
    assert ep.main([*words, "--output-len", "24", "--profile", "--out", str(out)]) == 0
    one, two = (Row(**row) for row in json.loads(out.read_text()))
    assert (one.ep, two.ep, one.of_single) == (1, 2, 1.0)
    assert two.of_single == pytest.approx(two.decode_tok_s / one.decode_tok_s)
    assert two.host_ms["wait"] > 0 and one.stages_us == one.least_stages_us
    assert two.stages_us["dense"] > two.least_stages_us["dense"] > 0 < one.stages_us["dense"]


def test_what_is_refused_is_refused_before_any_engine_starts():
    with pytest.raises(SystemExit, match="--model-path is missing"):
        ep.main([])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--ep 1 2 --ep-num-redundant-experts -1", "--ep-num-redundant-experts"),
        ("--ep 1 4 --batch 3", "nothing to measure: batch 3 cannot be laid evenly over 4 ranks"),
        ("--ep 2 --batch 4 --max-running-requests 2", "more than the 2 of --max-running-requests"),
        ("--input-len 2000", "--input-len 2000 and --output-len 128 are more than the 2048 tokens"),
        ("--moe-a2a-backend deeppe", "did you mean deepep"),
        ("--model-path nowhere", "nowhere/config.json does not exist"),
        ("--model-path nowhere --layers 3", "--layers 3 is for tiny: and shape: models"),
        ("--output-len 2", "--output-len 2: give at least 3"),
        ("--output-len 5 --profile", "--output-len 5 with --profile: give at least 6"),
        ("--skip-server-warmup", "--skip-server-warmup is a flag of the HTTP server"),
    ],
)
def test_mistakes_are_found_first(words: str, reason: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ep, "ENGINE_SECONDS", 0.0)
    base = ["--model-path", "tiny:qwen3_moe", "--device", "cpu", "--batch", "8"]
    with pytest.raises(SystemExit, match=f"^error: .*{reason}"):
        ep.main([*base, *words.split()])


def test_it_says_that_it_is_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("MOESAIC_DEVICE", raising=False)
    monkeypatch.setattr("moesaic.config.devices.cuda_missing", lambda: "there is no NVIDIA GPU")
    for words, told in ((["--device", "cpu"], ""), ([], "on the CPU: there is no NVIDIA GPU\n")):
        with pytest.raises(SystemExit, match="nothing to measure"):
            ep.main(["--model-path", "tiny:qwen3_moe", "--ep", "2", "--batch", "3", *words])
        assert capsys.readouterr().out == told


def test_files_that_are_none_of_its_own(tmp_path: Path):
    path = tmp_path / "rows.json"
    for content, why in {
        None: "No such file or directory",
        "[{": "Input data was truncated",
        '{"rows": 1}': "Expected `array`, got `object`",
        '[{"ep": 1}]': "Object missing required field `model`",
        '[{"wrong": 1}]': "unknown fields wrong",
        "3": "Expected `array`, got `int`",
    }.items():
        if content is not None:
            path.write_text(content)
        wrong = f"^{path} cannot be read: {why}.*; measure first, or name --out$"
        with pytest.raises(SystemExit, match=wrong):
            ep.main(["--markdown", "--out", str(path)])


def test_each_number_of_ranks_once():
    options = parser().parse_args("--ep 2 1 2 --batch 4 4".split())
    assert (options.ep, options.batch) == ([2, 1], [4])


def test_tables_take_no_other_flags(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        ep.main(["--markdown", "--dtype", "bfloat16"])
    told = capsys.readouterr().err
    assert "python -m bench.ep: error: --markdown measures nothing: leave out --dtype" in told


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ep, "ENGINE_SECONDS", 0.0)
    file = tmp_path / "file"
    file.touch()
    words = "--model-path tiny:qwen3_moe --device cpu --ep 1 --batch 4 --out".split()
    for out, why in {file / "rows.json": f": {file}: ", tmp_path: " is a folder: name"}.items():
        with pytest.raises(SystemExit, match=f"^error: --out {out}{why}"):
            ep.main([*words, str(out)])


def test_an_engine_that_does_not_start_says_why_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise RuntimeError("rank 1 failed: the weights take 60 GiB")

    monkeypatch.setattr(ep, "measure_engine", fail)
    words = "--model-path tiny:qwen3_moe --device cpu --ep 2 --batch 4 --part".split()
    with pytest.raises(SystemExit, match=r"^error: 2 ranks: rank 1 failed: the weights take"):
        ep.main([*words, str(tmp_path / "rows.json")])
