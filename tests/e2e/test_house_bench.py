"""What the house model's measurements compute: by hand, and on a tiny model."""

import argparse
import re
from pathlib import Path

import matplotlib.image
import pytest

from bench import house, house_gpu, house_grid, house_routing, house_twins
from bench.house import Case, Row
from bench.house_gpu import Answers, GpuCase, GpuSheet
from moesaic.config.args import ServerArgs
from moesaic.config.devices import unsupported_on_cuda

TINY = "tiny:deepseek_v3"
TOPK, MOE_LAYERS = 2, [1]


def asked(folder: Path, *words: str) -> argparse.Namespace:
    parser = house.house_parser("", "unused", num=2)
    house.add_choice(parser)
    common = ["--model-path", TINY, "--tasks", "lists,chat", "--max-new-tokens", "16"]
    return parser.parse_args([*common, "--out", str(folder / "sheet.json"), *words])


def test_balance_by_hand():
    tokens = [4, 0, 2, 2, 8, 0, 0, 0]
    assert house_routing.balance(tokens, 2) == 1.0  # 8, 8
    assert house_routing.balance(tokens, 4) == 4 / 8  # 4, 4, 8, 0
    assert house_routing.balances({3: tokens}) == {
        "4 ranks": [0.5],
        "8 ranks": [0.25],
        "experts": [0.25],
    }
    with pytest.raises(ValueError, match="8 experts cannot be laid evenly on 3 ranks"):
        house_routing.balance(tokens, 3)
    with pytest.raises(ValueError, match="no tokens"):
        house_routing.balance([0, 0], 2)


def test_distance_by_hand():
    left, right = {1: [3, 3, 0, 0], 2: [1, 1, 1, 1]}, {1: [0, 0, 1, 1], 2: [2, 2, 2, 2]}
    assert house_routing.distance(left, left) == 0.0
    assert house_routing.distance(left, right) == 0.5  # 1 in one layer, 0 in the other
    even = {1: [5, 5, 5, 5], 2: [1, 1, 1, 1]}
    assert house_routing.distance(left, even) == house_routing.distance(even, left) == 0.25
    assert house_routing.added([left, right]) == {1: [3, 3, 1, 1], 2: [3, 3, 3, 3]}
    assert house_routing.minus({1: [5, 7]}, {1: [2, 7]}) == {1: [3, 0]}


def test_flips_and_scores_by_hand():
    first, this = Row("a", "", right="110100"), Row("b", "", right="101100")
    assert house.flips(first, this) == (1, 1)
    assert house.flips(first, Row("c", "", right="000000")) == (3, 0)
    assert house.flips(Row("d", "", right="000000"), first) == (0, 3)
    assert house.accuracies(first, {"x": 2, "y": 4}) == {"x": 1.0, "y": 0.25}
    assert first.accuracy == 0.5


def test_cases_are_lines_that_parse():
    names = [case.name for case in house_grid.CASES]
    assert len(set(names)) == len(names) == 40
    backends = set()
    for case in house_grid.CASES:
        args = house.arguments(TINY, case.flags)
        assert isinstance(args, ServerArgs)
        backends.add((args.moe_a2a_backend, args.deepep_mode, args.dp_size))
    for dp in (1, 2, 4):
        for name in ("none", "mooncake", "mori", "flashinfer", "ascend_fuseep"):
            assert (name, "auto", dp) in backends
        for mode in ("auto", "normal", "low_latency"):
            assert ("deepep", mode, dp) in backends
    cuts = {row.name: house_grid.attention_tp(row) for row in rows_of(house_grid.CASES)}
    assert cuts["ep 8 deepep, dp 4"] == 2 and cuts["ep 4 mori"] == 4 and cuts["2 replicas"] == 1
    for form in house_twins.FORMATS:
        assert [case.form for case in house_twins.WEIGHTS].count(form) == 2


def rows_of(cases: list[Case]) -> list[Row]:
    return [Row(case.name, case.flags) for case in cases]


@pytest.mark.slow  # test_twins always fills a sheet with rows of an engine
@pytest.mark.timeout(240)
def test_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    args = asked(tmp_path)
    by_name = {case.name: case for case in house_grid.CASES}
    good = [by_name["1 rank"], by_name["ep 2 deepep, dp 2"]]
    sheet = house_grid.run(args, good)
    assert [len(row.right) for row in sheet.rows] == [4, 4]
    assert len(sheet.replies) == 4 and all(sheet.replies)
    assert sheet.rows[1].differing == {} and house_grid.faults(sheet) == []
    # What is written is what is shown, and nothing is measured twice.
    seconds = [row.seconds for row in sheet.rows]
    assert [row.seconds for row in house_grid.run(args, good).rows] == seconds
    # It must be able to fail: another rounding is seen, a refusal is kept, and the rest goes on.
    bad = [good[0], Case("uneven", "--tp 2 --ep 3"), Case("coarse", "--dtype bfloat16")]
    sheet = house_grid.run(args, bad)
    refused, coarse = sheet.row("uneven"), sheet.row("coarse")
    assert refused is not None and "--ep-size is 3" in refused.error
    assert coarse is not None and 0 < len(coarse.differing) <= 4
    example = coarse.examples[0]
    assert example.first == sheet.replies[example.place] != example.this
    assert coarse.differing[example.place] == house.reply_digest(example.this)
    assert len(house_grid.faults(sheet)) == 2
    house_grid.report(house.read(args.out, house.Sheet), markdown=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| arrangement | attention TP | lists | chat | all | texts")
    assert lines[3].startswith("| ep 2 deepep, dp 2 | 1 |") and lines[3].split(" | ")[-2] == "0"
    # Another question: nothing of the old sheet is taken over.
    other = house.question_of(asked(tmp_path, "--seed", "5"), house.draw(args))
    assert house.open_sheet(args.out, other, house.Sheet).rows == []
    old = tmp_path / "sheet.json.old"
    assert f"has another seed: starting anew, that is {old} now" in capsys.readouterr().out
    assert old.read_bytes() == args.out.read_bytes()


def test_no_old_file_takes_the_place_of_another(tmp_path: Path):
    path = tmp_path / "sheet.json"
    for content in ("one", "two", "two", "one"):
        path.write_text(content)
        house.keep(path)
    assert {other.name: other.read_text() for other in tmp_path.iterdir() if other != path} == {
        "sheet.json.old": "one",
        "sheet.json.old1": "two",
    }


def test_rows_that_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    names = [case.name for case in house.chosen(house_grid.CASES, re.compile("^ep 8"))]
    assert names == ["1 rank", "ep 8 none", "ep 8 deepep, dp 8", "ep 8 deepep, dp 4"]
    assert house.chosen(house_grid.CASES, None) == house_grid.CASES
    out = ["--out", str(tmp_path / "sheet.json")]
    for words in ([], ["--device", "cuda"]):
        with pytest.raises(SystemExit):
            house_grid.main([*words, *out, "--only", "ep ("])
        assert "'ep (' is no regular expression: missing )" in capsys.readouterr().err
    with pytest.raises(
        SystemExit, match="--only 'ep 9': no row has such a name; there are '1 rank'"
    ):
        house_grid.main([*out, "--only", "ep 9"])
    with pytest.raises(SystemExit, match="--only 'ep 9': no row has such a name"):
        house_gpu.main(["--device", "cpu", *out, "--only", "ep 9"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--flags=--pagesize 1", "^error: unknown flag --pagesize; did you mean --page-size"),
        ("--flags=--page-size 0", "^error: --page-size is 0"),
        ("--tasks foo", "^error: --tasks: unknown task foo: choose of "),
        ("--model-path /nope", "^error: /nope/config.json does not exist"),
        ("--model-path tiny:nope", "^error: .*nope"),
        ("--num 0", "'0' is no whole number above 0"),
        ("--num -1", "'-1' is no whole number above 0"),
        ("--max-new-tokens 0", "'0' is no whole number above 0"),
        ("--out {folder}/sheet.json/a", "^error: --out .*/sheet.json/a: .*sheet.json: "),
        ("--markdown --only ep", "leave out --only and --again"),
    ],
)
def test_what_was_measured_stays_where_nothing_can_be(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Of flags that are wrong, no sheet is moved aside and no engine starts."""
    out = tmp_path / "sheet.json"
    words = words.format(folder=tmp_path)
    given = [words] if words.startswith("--flags=") else words.split()
    question = house.Question("", "", "", "", {"lists": 1}, 0, 8, "")
    common = ["--model-path", TINY, "--tasks", "lists", "--num", "1", "--out", str(out)]
    for main, more in ((house_grid.main, []), (house_gpu.main, ["--device", "cpu"])):
        house.write(out, house.Sheet(question, {}))
        before = out.read_bytes()
        with pytest.raises(SystemExit) as refusal:
            main([*common, *more, *given])
        said = refusal.value.code if isinstance(refusal.value.code, str) else ""
        assert re.search(told, said or capsys.readouterr().err)
        assert list(tmp_path.iterdir()) == [out] and out.read_bytes() == before


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (1, "--ranks 1: give 2 to 62"),
        (63, "--ranks 63: give 2 to 62"),
    ],
)
def test_ranks_that_cannot_be(ranks: int, told: str, tmp_path: Path):
    words = ["--device", "cpu", "--model-path", TINY, "--tasks", "lists", "--num", "1"]
    with pytest.raises(SystemExit, match=f"^error: .*{told}"):
        house_gpu.main([*words, "--ranks", str(ranks), "--out", str(tmp_path / "sheet.json")])
    assert list(tmp_path.iterdir()) == []


def test_programs_and_files_are_named_as_they_are_called(capsys: pytest.CaptureFixture[str]):
    hint = "unrecognized arguments: --jobs 2 (--device cuda has flags of its own"
    for main, words, told in (
        (house_grid.main, ["--jobs", "2"], f"python -m bench.house_grid: error: {hint}"),
        (house_grid.main, ["--device", "cuda", "--no"], "bench.house_grid --device cuda: error: "),
        (house_gpu.main, ["--no"], "python -m bench.house_gpu: error: "),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert told in capsys.readouterr().err
    assert house_gpu.parse([]).out == house.RESULTS / "h200_house.json"
    assert house_gpu.parse(["--device", "cpu"]).out == house.RESULTS / "cpu_house.json"
    assert house_gpu.parse(["--backends", "none", "mori", "none"]).backends == ["none", "mori"]


def test_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """What was measured stays as it is."""
    monkeypatch.setattr(house_gpu, "cuda_missing", lambda: "there is no NVIDIA GPU")
    out = tmp_path / "sheet.json"
    out.write_text("measured")
    missing = "needs a CUDA device: there is no NVIDIA GPU; .*: python -m bench.house_gpu --device"
    with pytest.raises(SystemExit, match=missing):
        house_grid.main(["--device", "cuda", "--out", str(out)])
    assert out.read_text() == "measured" and list(tmp_path.iterdir()) == [out]
    helps = {(): "cuda has flags of its own", ("--device", "cuda"): "that they are compared with"}
    for words, told in helps.items():
        with pytest.raises(SystemExit):
            house_grid.main([*words, "--help"])
        assert told in " ".join(capsys.readouterr().out.split())


def test_twins(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    args = asked(tmp_path)
    both = ("int8_w8a8, experts only", "--quantization w8a8_int8")
    names = ("bf16", *both, "mxfp4")
    sheet = house_twins.run(args, [case for case in house_twins.CASES if case.name in names])
    first, twin, online, refused = (sheet.row(name) for name in names)
    assert first is not None and twin is not None and online is not None and refused is not None
    # The same rounding, on disk or while loading.
    assert (online.right, online.differing) == (twin.right, twin.differing)
    assert online.figures["bytes"] == first.figures["bytes"]
    # 8 experts of three [32, 64] matrices, float32 on disk: three bytes less each, and scales.
    saved = first.figures["bytes"] - twin.figures["bytes"]
    matrices, scales = 8 * 3 * 32 * 64 * 3, 8 * (32 + 32 + 64) * 4
    assert 0 <= saved - (matrices - scales) < 20_000  # of the file's header
    assert "columns of 32; quantise the experts alone" in refused.error  # latents of 16
    house_twins.report(sheet, markdown=True)
    assert "- mxfp4: ValueError: model.layers.0" in capsys.readouterr().out


def test_a_smaller_run_keeps_the_routing_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file in the repository is of hundreds of problems; an own --out has an own picture."""
    usual = Path(house.RESULTS) / "house_routing.json"
    before = usual.read_bytes()
    monkeypatch.setattr("sys.argv", ["routing", "--tasks", "lists", "--num", "1"])
    with pytest.raises(SystemExit, match="problems and this run of 1: name another --out"):
        house_routing.main()
    assert usual.read_bytes() == before
    picture = house_routing.PICTURE.read_bytes()
    words = ["routing", "--model-path", TINY, "--tasks", "lists", "--num", "2"]
    words += ["--max-new-tokens", "4", "--out", str(tmp_path / "small.json")]
    monkeypatch.setattr("sys.argv", words)
    assert house_routing.main() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"small.json", "small.png"}
    assert house_routing.PICTURE.read_bytes() == picture


def test_routing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    routing = house_routing.measure(asked(tmp_path))
    assert list(routing.domains) == ["lists", "chat"]
    for domain in routing.domains.values():
        assert list(domain.counts) == MOE_LAYERS
        assert [sum(tokens) for tokens in domain.counts.values()] == [TOPK * domain.tokens]
        assert domain.tokens > 2 * 15
    house_routing.report(routing, markdown=True)
    assert capsys.readouterr().out.count("| 8 ranks |") == 3  # two tasks and the mix
    path = tmp_path / "routing.png"
    house_routing.paint(path, house_routing.with_mix(routing.domains), "a model")
    height, width, _ = matplotlib.image.imread(path).shape
    assert height > 300 and width > 1000


def test_cases_on_a_gpu():
    every = house_gpu.cases()
    by_name = {case.name: case for case in every}
    assert len(by_name) == len(every) == 78
    flags = {case.flags for case in every}
    for backend, words in house.BACKENDS.items():
        takes = 1 if backend == "ascend_fuseep" else 5 - (backend == "mori")
        assert sum(f" {words} " in f"{one} " for one in flags) == 2 * takes, backend
    for case in every:
        args = house.arguments(TINY, f"{house_gpu.ON_DEVICE['cuda']} {case.flags}")
        assert unsupported_on_cuda(args) == ""
        assert by_name[case.against].is_reference
        assert args.enable_deterministic_inference == case.against.endswith("deterministic")
    wanted = house_gpu.wanted_of(every, re.compile("mori, fp8, deterministic"))
    assert [case.name for case in wanted] == [
        "1 rank, fp8, deterministic",
        "ep 4 mori, fp8, deterministic",
    ]


def test_rows_of_a_gpu_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What must be the same and is not is told, row by row; what failed is tried again."""
    said = {
        "1 rank, bf16": ("abcdefghij", "1111111111"),
        "1 rank, bf16, deterministic": ("abcdefghij", "1111111111"),
        "ep 4 none, bf16, deterministic": ("abcdefghiX", "1111111111"),
        "ep 4 none, bf16": ("abcdefghXY", "1111111110"),
        "ep 4 mori, bf16": ("XXXXXXXXXj", "0000000001"),
        "ep 4 mori, bf16, deterministic": ("abcdefghij", "1111111111"),
    }
    every = house_gpu.cases()
    wanted = [case for case in every if case.name in {*said, "ep 4 mooncake, bf16"}]

    def serve(case: GpuCase) -> Answers:
        if case.name not in said:
            raise RuntimeError("it said much\nit died")
        replies, right = said[case.name]
        return Answers(list(replies), right, 1.0)

    question = house.Question("", "", "", "", {"lists": 10}, 0, 8, "")
    sheet, path = GpuSheet(question, {}), tmp_path / "sheet.json"
    house_gpu.measure(sheet, path, wanted, serve, jobs=3)
    assert sorted(house_gpu.faults(sheet)) == [
        "ep 4 mooncake, bf16 failed: it died",
        "ep 4 mori, bf16: scores otherwise than one rank, p = 0.0039",
        "ep 4 none, bf16, deterministic: 1 texts differ from those of one rank",
    ]
    written = house.read(path, GpuSheet)
    assert [case.name for case in house_gpu.left(written, wanted, False)] == ["ep 4 mooncake, bf16"]
    assert house_gpu.left(written, wanted, True) == wanted
    house_gpu.report(written, markdown=True)
    lines = capsys.readouterr().out.splitlines()
    assert "| ep 4 none, bf16 | 0.900 | 1 | 0 | 1 | 80.0% | 1.000 | 1 |" in lines
    assert lines[-1] == "- ep 4 mooncake, bf16: it died"
    house_gpu.report(written, markdown=False)
    assert "it died" not in capsys.readouterr().out  # it is one of the faults
    # Without one rank to compare with there is nothing to tell, nor of what was measured before.
    del said["1 rank, bf16"]
    some = house_gpu.wanted_of(every, re.compile("1 rank, bf16$|mori, bf16$"))
    house_gpu.measure(written, path, some, serve, jobs=3)
    assert list(written.replies) == ["1 rank, bf16, deterministic"]
    assert sorted(house_gpu.faults(written)) == [
        "1 rank, bf16 failed: it died",
        "ep 4 mooncake, bf16 failed: it died",
        "ep 4 mori, bf16 failed: there is nothing to compare with: 1 rank, bf16 failed",
        "ep 4 none, bf16, deterministic: 1 texts differ from those of one rank",
        "ep 4 none, bf16: 1 rank, bf16 has failed since",
    ]
    house_gpu.report(written, markdown=True)
    lines = capsys.readouterr().out.splitlines()
    assert "| ep 4 none, bf16 | – | – | – | – | – | 1.000 | 1 |" in lines


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_engines_in_processes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "sheet.json"
    words = ["--device", "cpu", "--model-path", TINY, "--tasks", "lists", "--num", "2", "--jobs"]
    words += ["2", "--max-new-tokens", "8", "--ranks", "2", "--backends", "none", "--out", str(out)]
    assert house_gpu.main([*words, "--only", "none, int8, deterministic"]) == 0
    names = [row.name for row in house.read(out, GpuSheet).rows]
    assert names == ["1 rank, int8, deterministic", "ep 2 none, int8, deterministic"]
    # Whatever --ranks says, all that there is.
    capsys.readouterr()
    assert house_gpu.main(["--markdown", "--ranks", "4", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 1 rank, int8", "| ep 2 none, int8"]
    # What an engine says last is kept.
    words += ["--flags=--max-total-tokens 1", "--only", "1 rank, int8"]
    assert house_gpu.main(words) == 1
    row = house.read(out, GpuSheet).rows[0]
    assert "--max-total-tokens 1" in row.error and "max-total-tokens" in capsys.readouterr().err
