"""The benchmarks of overlap and of the emulated link, without ranks."""

from pathlib import Path
from typing import Any

import pytest

from bench import link, overlap
from bench.a2a_rank import Found, Job
from bench.common import read_rows
from moesaic.core.link import EmulatedLink

PLACE = ("cpu", "some", 2, 4)


def facts(tokens: int, chosen: str, **measured: float) -> dict[str, Any]:
    return {
        "kind": "decode",
        "tokens": tokens,
        "chosen": chosen,
        "communication_ms": 1.0,
        "measured_ms": measured,
        "predicted_ms": measured,
        "hidden_ratio": dict.fromkeys(measured, 0.5),
    }


def test_auto_is_what_was_chosen_before_it_was_measured_again() -> None:
    def row(link: str, first: str, **second: float) -> overlap.Row:
        told = facts(2, first, off=4.0, tbo=3.0), facts(2, "off", **second)
        line = {"link": link, "first": told[0], "second": told[1]}
        return overlap.row_of(PLACE, line, 9.0)

    lucky = row("none", "tbo", off=4.0, tbo=4.5)
    assert (lucky.chosen, lucky.auto_ms, lucky.communication) == ("tbo", 4.5, 0.25)
    other = row("gbps=50,us=5", "off", off=5.0)
    assert other.auto_ms == 5.0 and other.link == "50 GB/s (400 Gbit/s), 5 us"
    assert lucky.key != other.key


def test_rows_are_kept_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    told = facts(2, "tbo", off=4.0, tbo=3.2)
    for name in ("none", "nodes", "none"):
        row = overlap.row_of(PLACE, {"link": name, "first": told, "second": told}, 9.0)
        overlap.keep(out, row)
    assert [row.link for row in read_rows(out, overlap.Row)] == ["nodes", "none"]
    assert "tokens 2, comm. 25%, off ms 4.000, tbo +25.0%, auto +25.0%" in capsys.readouterr().out


def test_lines_end_with_the_measurement_or_with_the_ranks(tmp_path: Path) -> None:
    found = tmp_path / "found.jsonl"
    found.write_text('{"link": "none"}\n{"end": true}\n{"link": "behind"}\n')
    assert list(overlap.lines(found, lambda: "")) == [{"link": "none"}]
    found.write_text('{"link": "none"}\n{"li')
    read = overlap.lines(found, lambda: "rank 1 died")
    assert next(read) == {"link": "none"}
    with pytest.raises(SystemExit, match="rank 1 died"):
        next(read)


def test_what_overlap_is_asked_for() -> None:
    args = overlap.parse(["--quick", "--links", "none", "gbps=50,us=5"])
    assert (args.layers, args.decode, args.prefill) == (4, [32, 128], [1024, 4096])
    made = overlap.engine_args(args, "shape:qwen3-30b-a3b", ["gbps=50,us=5"])
    assert made["model_path"] == "shape:qwen3-30b-a3b,num_hidden_layers=4"
    assert made["emulate_link"] == "gbps=50,us=5" and made["max_running_requests"] == 512
    assert made["cuda_graph_bs"] == (16, 32, 64, 128)
    assert overlap.engine_args(args, "tiny:mixtral", ["none"])["emulate_link"] is None
    assert overlap.engine_args(args, "tiny:mixtral", ["nodes"])["nnodes"] == 2
    assert overlap.parse(["--decode", "3", "--quick"]).decode == [3]
    assert overlap.with_halves([1, 2, 3]) == (1, 2, 3)
    with pytest.raises(ValueError, match="'fast' is no link"):
        overlap.parse(["--links", "fast"])
    with pytest.raises(SystemExit):
        overlap.parse(["--ranks", "3", "--links", "nodes"])


def test_emulated_links_share_an_engine() -> None:
    links = ["none", "gbps=50,us=5", "nodes", "gbps=450,us=1"]
    assert overlap.engines(links) == [["none"], ["gbps=50,us=5", "gbps=450,us=1"], ["nodes"]]


def test_a_link_asks_for_the_time_of_the_rank_that_sends_most() -> None:
    made = EmulatedLink(1.0, 2.0)
    job = Job("deepep", "normal", 64, 8, 2, "bf16", (4,), (False,), 3, made)
    found = [Found(4, 0.0, {}), Found(4, 0.0, {})]
    for rank, one in enumerate(found):
        one.link_bytes = {"dispatch": 1000 * rank, "combine": 500}
        one.us["pair", False] = [9.0 + rank, 8.0, 7.0]
    (row,) = link.rows_of(job, [[one] for one in found], [[one] for one in found], "cpu")
    assert row.asked_us == pytest.approx(1.5 + 4.0)
    assert row.with_us == row.without_us == 8.0 and row.kilobytes == 1.5
    assert row.link == "1 GB/s (8 Gbit/s), 2 us"
