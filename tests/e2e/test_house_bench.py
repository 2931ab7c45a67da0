"""What the house model's measurements compute: by hand, and on a tiny model."""

import argparse
from pathlib import Path

import matplotlib.image
import pytest

from bench import house, house_grid, house_routing, house_twins
from bench.house import Case, Row
from moesaic.config.args import ServerArgs

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
    assert house.open_sheet(args.out, other).rows == []


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
