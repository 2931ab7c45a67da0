"""What the benchmarks of kills make of the times at which tokens came."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from bench import elastic_gpu
from bench.elastic import Outcome, _share, added, doing_rows, kind_rows, markdown, rows
from bench.elastic_gpu import Load, summary


def load() -> Load:
    """Ten tokens a second for ten seconds, but for a pause of 0.75 s from 4.25 on."""
    times = [n / 10 for n in range(1, 101)]
    return Load(tokens=[when for when in times if not 4.25 < when <= 5.0], began=0.0)


def test_the_end_of_a_pause_and_the_rate_around_it():
    found = load()
    assert found.resumed(4.2, 9.0) == 5.1
    assert found.resumed(10.0, 12.0) == 12.0, "no token came"
    assert (found.rate(1.05), found.rate(4.25), found.usual_rate()) == (10, 2, 10)


def test_the_table():
    kill = {
        "rank": 2,
        "next_token": 0.1234,
        "stall": 0.5,
        "stall_median": 0.25,
        "returned": 6.0,
        "as_fast": None,
        "lost_ranks": 1,
    }
    assert elastic_gpu.rows([kill]) == [
        ["rank 2", "0.12 s", "0.50 s", "0.25 s", "6.00 s", "never", "1"]
    ]
    found = {
        "requests": 8,
        "batch": 4,
        "machine": {"device": "a GPU"},
        "lost": [],
        "wrong": [3],
        "tok_s": 100.4,
        "tok_s_with_kills": 90.0,
    }
    assert summary(found) == (
        "8 requests, 4 at a time, on a GPU: 0 lost, 1 with another answer; 100 tokens/s without "
        "faults, 90 with them"
    )


def outcome(layout: str, kills: list[float], **fields: Any) -> Outcome:
    made = Outcome(
        layout=layout,
        flags="",
        seconds=1.5,
        requests=10,
        wrong=0,
        lost=0,
        faults={"kill -9": len(kills)},
        doing={"decode": len(kills) - 1, "join": 1},
        epochs=2,
        stalls={"kill -9": sorted(kills)},
        gaps_before=[0.1, 0.2, 0.3],
        gaps=[0.2, 0.4, 0.6],
        left=[],
        shown=[],
    )
    return replace(made, **fields)


def test_percentiles_are_not_too_small() -> None:
    """At least 99 of 100 values do not exceed the 99th percentile, of 150 at least 149."""
    for count in (1, 2, 46, 100, 150, 151, 1000):
        values = [float(n) for n in range(count)]
        for part in (0.5, 0.99, 1.0):
            found = _share(values, part)
            below = sum(value <= found for value in values)
            assert below >= part * count > below - 1, (count, part)
    assert _share([], 0.5) == 0.0


def test_runs_are_added_to_those_of_the_same_layout() -> None:
    first = outcome("deepep", [0.3, 0.1], gaps=[0.3, 0.3, 0.3])
    other = outcome("mori", [9.0])
    again = outcome("deepep", [0.2], wrong=1, left=["a socket"], gaps_before=[0.05, 0.3, 0.2])
    both, kept = added([again], [asdict(first), asdict(other)])
    assert kept == other
    assert (both.requests, both.wrong, both.faults, both.seconds) == (20, 1, {"kill -9": 3}, 3.0)
    assert both.doing == {"decode": 1, "join": 2} and both.left == ["a socket"]
    assert both.stalls == {"kill -9": [0.1, 0.2, 0.3]}
    assert (both.gaps_before, both.gaps) == ([0.1, 0.3, 0.3], [0.3, 0.4, 0.6])
    assert kept.is_good and not both.is_good


def test_the_tables_of_faults() -> None:
    kills = [n / 100 for n in range(1, 151)]
    more = outcome("deepep, experts move", [1.0], stalls={"OOM kill": [2.5], "SIGSTOP": [0.75]})
    told = [asdict(outcome("mori", kills)), asdict(more)]
    first, _, whole = rows(told)
    assert first == [
        *("mori", "150", "1", "10", "0", "0", "0.75", "1.49", "1.50", "", "", "", "0.10", "0.20"),
        "nothing",
    ]
    assert whole[:6] == ["all", "151", "2", "20", "0", "0"]
    assert whole[6:12] == ["0.76", "1.50", "2.50", "0.75", "0.75", "0.75"]
    assert kind_rows(told) == [["kill -9", "151", "0.75", "1.49", "1.50"]]
    assert doing_rows(told) == [["decode", "149"], ["experts move", "1"], ["join", "2"]]
    lines = markdown({"machine": {"cores": 2, "cpu": "x", "torch": "y"}, "outcomes": told})
    assert "| decode | 149 |" in lines.splitlines()


def test_a_client_that_asks_again_is_a_fault_where_no_server_is_lost() -> None:
    assert outcome("deepep, head too", [0.1], reconnects=3).is_good
    assert not outcome("deepep", [0.1], reconnects=1).is_good
    assert not outcome("deepep, two nodes", [0.1], reconnects=1).is_good
