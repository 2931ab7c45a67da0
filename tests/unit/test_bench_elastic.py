"""What the benchmark of kills makes of the times at which tokens came."""

from __future__ import annotations

from bench.elastic_gpu import Load, rows, summary


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
    assert rows([kill]) == [["rank 2", "0.12 s", "0.50 s", "0.25 s", "6.00 s", "never", "1"]]
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
