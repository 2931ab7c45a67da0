"""The benchmarks of overlap and of the emulated link, without ranks."""

from typing import Any

import pytest

from bench import link, overlap
from bench.a2a_rank import Found, Job
from moesaic.core.link import EmulatedLink

PLACE = ("cpu", "some", 2, 4, "none")


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
    first = [facts(1, "off", off=4.0), facts(2, "tbo", off=4.0, tbo=3.0)]
    second = [facts(1, "off", off=5.0), facts(2, "off", off=4.0, tbo=4.5), facts(4, "tbo", off=2.0)]
    rows = overlap.rows_of(PLACE, first, second, 9.0)
    assert [(row.tokens, row.chosen, row.auto_ms) for row in rows] == [
        (1, "off", 5.0),
        (2, "tbo", 4.5),  # the first measurement had luck
        (4, "off", 2.0),  # one that was not measured before
    ]
    assert rows[1].communication == 0.25
    assert len({row.key for row in rows}) == 3


def test_what_overlap_is_asked_for() -> None:
    args = overlap.parse(["--quick", "--links", "none", "gbps=50,us=5"])
    assert (args.layers, args.prefill) == (4, 4096)
    made = overlap.engine_args(args, "shape:qwen3-30b-a3b", "gbps=50,us=5")
    assert made["model_path"] == "shape:qwen3-30b-a3b,num_hidden_layers=4"
    assert made["emulate_link"] == "gbps=50,us=5" and made["max_running_requests"] == 1024
    assert made["cuda_graph_bs"] == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert overlap.engine_args(args, "tiny:mixtral", "none")["emulate_link"] is None
    assert overlap.powers(16, 100) == (16, 32, 64, 100)
    with pytest.raises(ValueError, match="'fast' is no link"):
        overlap.parse(["--links", "fast"])


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
