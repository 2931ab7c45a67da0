"""Latency and throughput over load, as a PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from moesaic.loadgen.args import Load
from moesaic.loadgen.metrics import LatencySummary, RunMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEDIAN, TAIL, OUTPUT, TOTAL = "#2a78b8", "#d1603d", "#3c8d5a", "#8a8a8a"
INK: Final = "#333333"
STYLE: Final[dict[Any, Any]] = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#bbbbbb",
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e6e6",
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "legend.frameon": False,
}
Point = tuple[Load, RunMetrics]


def draw(path: str, points: Sequence[Point], title: str) -> None:
    """Plot TTFT and TPOT (median and P99) and throughput over the varied load."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ValueError("--plot needs matplotlib: pip install 'moesaic[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    label, at = _axis([load for load, _ in points], [figures for _, figures in points])
    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
        _latency(axes[0], "Time to first token (ms)", at, [f.ttft for _, f in points])
        _latency(axes[1], "Time per output token (ms)", at, [f.tpot for _, f in points])
        _throughput(axes[2], at, [figures for _, figures in points])
        for axis in axes:
            _scale(axis, at, label)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def _axis(loads: Sequence[Load], figures: Sequence[RunMetrics]) -> tuple[str, list[float]]:
    """The varied load; for a single run or an infinite rate, the measured concurrency."""
    if len({load.limit for load in loads}) > 1:
        return "most requests at once", [float(load.limit or 0) for load in loads]
    if len(loads) > 1 and all(math.isfinite(load.rate) for load in loads):
        return "requests per second sent", [load.rate for load in loads]
    return "requests at once, on average", [figure.concurrency for figure in figures]


def _latency(axis: Axes, title: str, at: list[float], spreads: Sequence[LatencySummary]) -> None:
    axis.set_title(title)
    for name, part, colour in (("P99", "p99", TAIL), ("median", "median", MEDIAN)):
        values = [getattr(spread, part) for spread in spreads]
        known = [(x, y) for x, y in zip(at, values, strict=True) if y is not None]
        axis.plot([x for x, _ in known], [y for _, y in known], "o-", color=colour, label=name)
    axis.legend(loc="upper left")


def _throughput(axis: Axes, at: list[float], figures: Sequence[RunMetrics]) -> None:
    axis.set_title("Throughput (tokens/s)")
    total = [figure.total_throughput for figure in figures]
    axis.plot(at, total, "o--", color=TOTAL, label="input and output")
    axis.plot(at, [f.output_throughput for f in figures], "o-", color=OUTPUT, label="output")
    axis.legend(loc="upper left")


def _scale(axis: Axes, at: list[float], label: str) -> None:
    """Logarithmic for loads that double from one to the next."""
    if len(at) > 2 and min(at) > 0 and max(at) / min(at) >= 8:
        axis.set_xscale("log", base=2)
    axis.set_xticks(at, [f"{x:g}" if x == round(x) else f"{x:.1f}" for x in at], minor=False)
    axis.minorticks_off()
    axis.set_xlabel(label)
    low, high = axis.get_ylim()
    axis.set_ylim(0, high + 0.18 * (high - min(low, 0)))
