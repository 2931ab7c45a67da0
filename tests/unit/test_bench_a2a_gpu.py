"""The benchmark of dispatch and combine on a GPU, with the kernels' torch twins."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import a2a, a2a_gpu
from bench.a2a_gpu import Row, jobs_of, parse, summarise, write
from bench.a2a_peers import Key, Peer, peers_of
from bench.a2a_rank import Found, Job, dispatcher_of, error_of
from moesaic.comm.collectives.group import RankGroup

JOB = Job("deepep", "normal", 32, 16, 4, "bf16", (3,), (False,), 2)


def found(rank: int, **us: list[float]) -> Found:
    times = {
        (name.replace("_", " "), graph): value for name, value in us.items() for graph in (0, 1)
    }
    return Found(3, 0.001 * rank, {"dispatch": 100 + rank, "combine": 50}, times)  # type: ignore[arg-type]


RANKS = [
    found(0, pair=[30, 20, 26], dispatch=[20, 15, 11], combine=[15, 15, 15], meet=[5, 5, 5],
          dispatch_copy=[4, 4, 4], combine_copy=[2, 2, 2]),
    found(1, pair=[20, 22, 24], dispatch=[12, 16, 12], combine=[14, 15, 17], meet=[4, 5, 6],
          dispatch_copy=[3, 5, 4], combine_copy=[2, 1, 2]),
]  # fmt: skip


def test_the_slowest_rank_of_each_round_counts():
    row = summarise(JOB, RANKS, True, "NVIDIA H200")
    assert (row.pair_us, row.meet_us) == (26, 5)
    assert (row.dispatch_us, row.combine_us) == (16 - 5, 15 - 5)
    assert (row.bytes, row.error) == (151, 0.001)
    assert row.limit_us == 4 + 2 + 5 and row.of_limit == pytest.approx(11 / 26)
    assert row.dispatch_of_limit == pytest.approx(4 / 11)
    assert row.combine_of_limit == pytest.approx(2 / 10)


def test_what_others_take():
    key = Key(4, 2048, 128)
    assert peers_of("normal", key, "bf16", False) == [Peer("DeepEP", 76 + 55)]
    assert peers_of("normal", key, "bf16", True) == []
    for graph, peer in ((True, Peer("FlashInfer", 23.2)), (False, Peer("DeepEP", 65 + 59))):
        assert peers_of("low_latency", key, "bf16", graph) == [peer]
        assert peers_of("low_latency", key, "fp8", graph) == []
    assert peers_of("auto", key, "bf16", True) == [Peer("FlashInfer", 23.2)]
    assert peers_of("auto", key, "bf16", False) == []


def test_halves_are_shown_of_graphs_only(capsys: pytest.CaptureFixture[str]):
    row = replace(
        summarise(JOB, RANKS, True, "cpu"), pair_us=11.6, peers=[Peer("FlashInfer", 23.2)]
    )
    single = replace(row, graph=False, pair_us=32.75, peers=[Peer("DeepEP", 131)])
    a2a_gpu.show([row, single])
    graph, alone = ([*line.split()] for line in capsys.readouterr().out.splitlines()[-2:])
    assert graph[:5] == ["3", "graph", "11.0", "10.0", "11.6"]
    assert graph[-6:] == ["20%", "FlashInfer", "in", "a", "graph", "2.0x"]
    assert alone[:4] == ["3", "single", "32.8", "0.00"]
    assert alone[-6:] == ["42%", "DeepEP", "one", "by", "one", "4.0x"]


def test_rows_of_other_points_stay(tmp_path: Path):
    path = tmp_path / "rows.json"
    rows = [summarise(JOB, RANKS, graph, "NVIDIA H200") for graph in (False, True)]
    write(path, rows)
    write(path, [replace(rows[1], pair_us=1.23456), replace(rows[1], tokens=1)])
    read = json.loads(path.read_text())
    assert [(row["tokens"], row["graph"], row["pair_us"]) for row in read] == [
        (1, True, 26),
        (3, False, 26),
        (3, True, 1.235),
    ]
    assert Row(**read[0]).ranks == 2


def test_tables_of_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, row = tmp_path / "rows.json", summarise(JOB, RANKS, True, "NVIDIA H200")
    four = replace(row, ranks=4, peers=[Peer("FlashInfer", 13)])
    single = replace(four, graph=False, pair_us=520.0, peers=[Peer("DeepEP", 1040)])
    fp8 = replace(four, payload="fp8", pair_us=13.0, of_limit=0.5, peers=[])
    two = replace(single, ranks=2, tokens=7, pair_us=260.0)
    write(path, [four, single, fp8, row, two, replace(row, ranks=8, pair_us=200.0)])
    assert a2a.main(["--device", "cuda", "--markdown", "--out", str(path)]) == 0
    told = capsys.readouterr().out.splitlines()
    point = "| deepep normal | 32 | 3 |"
    titles = [line for line in told if line.startswith("NVIDIA H200: ")]
    assert [title[13] for title in titles] == ["4", "2", "8", "4"]
    assert [told[told.index(title) + 2].count("one by one") for title in titles] == [3, 3, 3, 0]
    cells = [[line for line in told if line.startswith(start)] for start in (point, "| deepep")]
    assert cells[0] == [
        f"{point} 11.0 | 10.0 | 26.0 | 42% | 13.0 (0.5×) | 520 | 1,040 (2.0×) |",
        f"{point} 11.0 | 10.0 | 26.0 | 42% |  |  |  |",
        f"{point} 11.0 | 10.0 | 200 | 42% |  |  |  |",
        f"{point} 26.0 (42%) | 13.0 (50%) |",
    ]
    assert [line for line in cells[1] if line not in cells[0]] == [
        "| deepep normal | 32 | 7 |  |  |  |  |  | 260 | 1,040 (4.0×) |"
    ]
    assert "| mode | hidden | tokens | bf16 | fp8 |" in told


def test_the_grid():
    def points(words: str) -> set[tuple[int, int, str, str, int]]:
        return {
            (ranks, job.hidden, job.payload, job.mode, tokens)
            for ranks, job in jobs_of(parse(words.split()))
            for tokens in job.tokens
        }

    whole = points("")
    assert len(whole) == (9 + 2 + 2) * (6 + 4)
    assert (8, 7168, "bf16", "normal", 4096) in whole
    assert (8, 4096, "bf16", "normal", 1) not in whole
    assert (4, 4096, "nvfp4", "low_latency", 128) in whole
    assert points("--ranks 8 --tokens 1 --payload fp8 --hidden 4096") == {
        (8, 4096, "fp8", "normal", 1),
        (8, 4096, "fp8", "low_latency", 1),
    }
    assert {point[:3] for point in points("--quick")} == {(4, 2048, "bf16")}
    experts = {job.hidden: job.experts for _, job in jobs_of(parse([]))}
    assert experts == {2048: 128, 4096: 128, 7168: 256}


def test_refusals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(a2a_gpu, "cuda_missing", lambda: "there is no NVIDIA GPU")
    missing = (
        "there is no NVIDIA GPU; the kernels' twins on a CPU: python -m bench.a2a_gpu --device"
    )
    with pytest.raises(SystemExit, match=f"needs a CUDA device: {missing} cpu"):
        a2a.main(["--device", "cuda", "--quick"])
    with pytest.raises(SystemExit, match="--tokens 512: low latency is for at most 256"):
        a2a_gpu.main("--device cpu --tokens 512 --backends deepep_low_latency".split())
    for words, told in {
        "--ranks 0": "'0' is no whole number above 0",
        "--seconds -1": "'-1' is no number above 0",
        "--mark": "unrecognized arguments: --mark",
    }.items():
        with pytest.raises(SystemExit):
            a2a.main(["--device", "cuda", *words.split()])
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit):
        a2a.main(["--round", "3"])
    assert "unrecognized arguments: --round 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        a2a.main(["--help"])
    assert "cuda has flags of its own: --device cuda --help" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--ranks 4 1", "--ranks 1: give 2 to 62; one sends nothing"),
        ("--ranks 64", "--ranks 64: give 2 to 62"),
        ("--ranks 3", "3 ranks, H 2048, bf16: 128 expert slots cannot be laid evenly over ep 3"),
        ("--hidden 24 --payload nvfp4", "hidden size 24 does not fit payload nvfp4"),
        ("--payload nvfp4 --backends mori", "mori does not take payload nvfp4"),
    ],
)
def test_what_an_engine_would_refuse_is_refused_before_ranks_start(words: str, reason: str):
    with pytest.raises(SystemExit, match=f"error: .*{reason}"):
        a2a_gpu.main(["--device", "cpu", *words.split()])


def test_what_a_cpu_measures(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="error: 3 ranks, H 2048: 128 expert slots"):
        a2a.main(["--ranks", "3"])
    with pytest.raises(SystemExit, match="hidden size 24 does not fit payload nvfp4"):
        a2a.main(["--hidden", "24", "--payload", "nvfp4"])
    with pytest.raises(SystemExit, match=r"^error: --top-k 9: give at most --experts 4$"):
        a2a.main(["--experts", "4", "--top-k", "9"])
    assert a2a.usable(a2a.Load(4, 64, 128, 8, "bf16"), 2) == list(a2a.BACKENDS)
    assert capsys.readouterr().out == ""
    nvfp4 = a2a.usable(a2a.Load(4, 64, 128, 8, "nvfp4"), 2)
    assert nvfp4 == [name for name in a2a.BACKENDS if name != "mori"]
    assert "mori is left out: mori does not take payload nvfp4" in capsys.readouterr().out


def test_payloads_that_nobody_asked_for_are_left_out():
    found = jobs_of(parse("--backends mori mooncake --tokens 1 512".split()))
    sent = {(job.backend, job.payload, job.tokens) for _, job in found}
    assert sent == {
        *(("mori", payload, (1, 512)) for payload in ("bf16", "fp8")),
        *(("mooncake", payload, (1,)) for payload in ("bf16", "fp8", "nvfp4")),
    }


def test_without_mps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """MPS may be missing, or its daemon may fail to start."""
    monkeypatch.setattr(a2a_gpu, "cuda_missing", lambda: "")
    monkeypatch.setattr(a2a_gpu, "num_gpus", lambda: 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^error: nvidia-cuda-mps-control is not on PATH"):
        a2a_gpu.main(["--quick"])
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with pytest.raises(SystemExit, match=r"^error: no MPS daemon: "):
        a2a_gpu.main(["--quick"])


def test_files_that_are_none_of_its_own(tmp_path: Path):
    path = tmp_path / "rows.json"
    for content in (None, "{", '{"rows": 1}', '[{"device": "cpu"}]', "3"):
        if content is not None:
            path.write_text(content)
        wrong = f"^{path} cannot be read: .*; measure first, or name --out$"
        with pytest.raises(SystemExit, match=wrong):
            a2a.main(["--device", "cuda", "--markdown", "--out", str(path)])
        if content is not None:  # before anything is measured
            with pytest.raises(SystemExit, match=wrong):
                a2a_gpu.main(["--device", "cpu", "--out", str(path)])


def test_where_nothing_can_be_written(tmp_path: Path):
    """The output file is checked before ranks start."""
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "rows.json"
    with pytest.raises(SystemExit, match=f"^error: --out {out}: {tmp_path}/file: "):
        a2a_gpu.main(["--device", "cpu", "--out", str(out)])


def test_each_point_once():
    args = parse("--ranks 2 4 2 --hidden 64 64 --tokens 1 1 --payload bf16 bf16".split())
    assert (args.ranks, args.hidden) == ([2, 4], [64])
    assert (args.tokens, args.payload) == ([1], ["bf16"])
    assert a2a.parse(["--tokens", "4", "1", "4"]).tokens == [4, 1]


def test_programs_are_named_as_they_are_called(capsys: pytest.CaptureFixture[str]):
    hint = "unrecognized arguments: --markdown (--device cuda has flags of its own"
    for main, words, told in (
        (a2a.main, ["--markdown"], f"python -m bench.a2a: error: {hint}"),
        (a2a.main, ["--device", "tpu"], "python -m bench.a2a: error: argument --device: "),
        (a2a.main, ["--device", "cuda", "--no"], "python -m bench.a2a --device cuda: error: "),
        (a2a_gpu.main, ["--no"], "python -m bench.a2a_gpu: error: "),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert told in capsys.readouterr().err


def test_a_wrong_row_is_found():
    wanted = torch.randn(5, 64)
    assert error_of(wanted, wanted) == 0
    other = wanted.clone()
    other[3, :32] = 0
    assert error_of(other, wanted) > 0.1
    other[3] = float("nan")
    assert error_of(other, wanted) == float("inf")


def test_one_rank_has_nothing_to_send():
    with pytest.raises(AssertionError, match="deepep has no rows that travel"):
        dispatcher_of(RankGroup.alone(), JOB)
