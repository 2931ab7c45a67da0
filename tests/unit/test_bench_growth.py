"""The benchmark of growing costs: what it counts, how it fits, and that its loop does the work."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

from bench import growth
from bench.growth import Axis, Growth, Point, exponent, grow, merged, parse_args, run, table
from bench.growth_rank import Load, RankLoop

QUICK = ["--size", "quick", "--repeats", "1", "--axes"]


@pytest.fixture(autouse=True)
def _few_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all tests have imported takes a collection most of a second, and each point asks for
    some."""
    monkeypatch.setattr("gc.collect", lambda: 0)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_exponents(power: float) -> None:
    points = [Point(size, 3 * size**power, size) for size in (2, 8, 32)]
    assert exponent(points) == pytest.approx(power)


@pytest.mark.parametrize(
    ("slope", "max_ms", "max_unit_us", "met"),
    [
        (1.1, None, None, True),
        (1.11, None, None, False),
        (1.0, 8.0, None, True),
        (1.0, 7.9, None, False),
        (1.0, None, 80.0, True),
        (1.0, None, 79.0, False),
    ],
)
def test_targets(slope: float, max_ms: float | None, max_unit_us: float | None, met: bool) -> None:
    points = [Point(10, 1.0, 10), Point(100, 8.0, 100)]
    found = Growth("a", "b", "request", points, slope, 80.0, max_ms, max_unit_us)
    assert found.met == met
    assert table([found])[0][-1] == ("yes" if met else "no")


def test_each_size_keeps_its_fastest_pass() -> None:
    times = iter([2.0, 4.0, 1.0, 8.0])
    asked = []

    def measure(size: int, _: argparse.Namespace) -> Point:
        asked.append(size)
        return Point(size, next(times), size)

    axis = Axis("a", "b", "rank", {"quick": (1, 2)}, measure, passes=2)
    found = grow(axis, parse_args([*QUICK, "ranks"]))
    assert asked == [1, 2, 1, 2]
    assert [point.ms for point in found.points] == [1.0, 4.0] and found.exponent == 2.0


def test_all_axes_but_http() -> None:
    """The smallest sizes; the axes of streams start a server."""
    axes = [name for name in growth.make_axes() if name not in growth.STREAMS]
    found = run(parse_args([*QUICK, *axes]))
    assert [entry.axis for entry in found] == axes
    units = {entry.axis: [point.units for point in entry.points] for entry in found}
    sizes = {entry.axis: [point.size for point in entry.points] for entry in found}
    assert units["running"] == sizes["running"] == [4, 8] == units["admissions"]
    assert units["context"] == [4, 4] and sizes["context"] == [32, 64]
    assert units["penalties"] == [4 * 8, 4 * 16] and units["rows"] == [4 * 8, 8 * 8]
    # Three matrices an expert, 11 tensors a layer beside them, embedding, norm and head.
    assert units["experts"] == [3 * 16 + 4 * 9 + 3, 3 * 32 + 4 * 9 + 3]
    for entry in found:
        assert all(point.ms > 0 for point in entry.points) and math.isfinite(entry.exponent)
        last = entry.points[-1]
        assert entry.constant_us == pytest.approx(1000 * last.ms / last.units)
    assert json.loads(json.dumps([row[1] for row in table(found)]))[0] == "4 8"


@pytest.mark.parametrize("load", [Load(5, 40), Load(3, 20, emitted=12, penalised=True)])
def test_the_loop_decodes_a_token_of_every_request(load: Load) -> None:
    loop = RankLoop(load)
    assert loop.admit() > 0
    states = loop.planner.states.values()
    assert len(states) == load.running == len(loop.planner.scheduler.running)
    lengths = {len(state.request.token_ids) for state in states}
    assert min(lengths) > load.context + load.emitted
    costs = loop.decode(6)
    loop.close()
    assert len(costs) == 6 and all(cost.leader > 0 < cost.follower for cost in costs)
    request = next(iter(states)).request
    # What was emitted, the tokens of admission, warm-up and the six steps.
    assert request.num_output >= load.emitted + 1 + 6
    different = len(set(request.output_ids))
    assert different == (request.num_output if load.penalised else 1)


def test_axes_that_were_not_measured_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "growth.json"
    assert merged(path, [{"axis": "rows", "ms": 1}]) == [{"axis": "rows", "ms": 1}]
    path.write_text(json.dumps([{"axis": "rows", "ms": 1}, {"axis": "ranks", "ms": 2}]))
    found = merged(path, [{"axis": "rows", "ms": 3}, {"axis": "running", "ms": 4}])
    assert found == [{"axis": n, "ms": ms} for n, ms in (("running", 4), ("rows", 3), ("ranks", 2))]
