"""What bench/nodes_engine.py found: rows, the steps that count, and tables."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from bench.common import show_table
from bench.ep_trace import Recorded, joined
from bench.stages import ORDER, StepKernels, stages_of
from moesaic.observe.spans import Span, SpanKind

NCCL = "nccl"


@dataclass
class Row:
    """`ranks`: of all nodes. `host_ms`: of a rank's host in a step, by what it did, on average;
    `stages_us`: of its kernels, likewise; `least_stages_us`: of the rank that has the least."""

    device: str
    model: str
    layers: int
    dtype: str
    backend: str
    attention: str
    layout: str
    nodes: int
    ranks: int
    pp: int
    batch: int
    input_len: int
    output_len: int
    tokens: int
    start_s: float
    prefill_s: float
    step_ms: float
    steps: int
    decode_tok_s: float
    total_s: float
    total_tok_s: float
    of_first: float | None = None
    total_of_first: float | None = None
    same: float | None = None
    host_ms: dict[str, float] = field(default_factory=dict)
    stages_us: dict[str, float] = field(default_factory=dict)
    least_stages_us: dict[str, float] = field(default_factory=dict)

    @property
    def group(self) -> tuple[Any, ...]:
        made = (self.device, self.layers, self.model, self.dtype, self.backend, self.attention)
        return *made, self.input_len, self.output_len

    @property
    def key(self) -> tuple[Any, ...]:
        return *self.group, self.pp, self.nodes, self.ranks, self.batch


@dataclass(frozen=True)
class Timing:
    """Of one run of a batch; `steps_ms`: of those in which every request had a token."""

    prefill_s: float
    steps_ms: list[float]
    total_s: float
    host_ms: dict[str, float]


def timing(ranks: Sequence[Recorded], leaders: set[int], batch: int, pp: int) -> Timing:
    """Prompts are done with the last step of more tokens than a step that decodes has; what counts
    is the longest run of such steps after it. Only leaders of groups have all of a step's time."""
    size = batch // pp
    led = joined([one for one in ranks if one.rank in leaders])
    steps = sorted(led, key=lambda span: span.step)
    filling = [number for number, step in enumerate(steps) if step.tokens > size]
    if not filling:
        raise SystemExit(f"no step had more than {size} tokens: give a longer --input-len")
    last = filling[-1]
    runs = groupby(steps[last + 1 :], lambda step: step.tokens == size)
    run = max((list(same) for decodes, same in runs if decodes), key=len, default=[])
    if len(run) <= pp:
        raise SystemExit(
            f"the requests of a batch of {batch} never decoded together for two steps: give a "
            "longer --output-len or a larger --chunked-prefill-size"
        )
    return Timing(
        prefill_s=(steps[last].end - steps[0].begin) / 1e9,
        steps_ms=[(b.end - a.end) / 1e6 for a, b in zip(run, run[pp:], strict=False)],
        total_s=(max(step.end for step in steps) - steps[0].begin) / 1e9,
        host_ms=host_ms(ranks, run, pp),
    )


def host_ms(ranks: Sequence[Recorded], run: Sequence[Span], pp: int) -> dict[str, float]:
    """Of a rank while every request gets a token."""
    numbers, total = {span.step for span in run}, defaultdict[str, float](float)
    for span in (span for rank in ranks for span in rank.spans):
        if span.step in numbers and span.kind != SpanKind.STEP:
            total[SpanKind(span.kind).name.lower()] += (span.end - span.begin) / 1e6
    return {name: ms * pp / len(run) / len(ranks) for name, ms in total.items()}


def kernel_stages(found: Sequence[StepKernels], pp: int) -> tuple[dict[str, float], ...]:
    """Microseconds of a rank while every request gets a token: the mean of ranks, and the least."""
    stages = stages_of(found)
    crossing = [
        sum(us for name, us in rank.us.items() if NCCL in name.lower()) for rank in found
    ] or [0.0]
    mean = stages.mean | ({NCCL: statistics.fmean(crossing)} if any(crossing) else {})
    least = stages.least | ({NCCL: min(crossing)} if any(crossing) else {})
    return tuple({name: us * pp for name, us in one.items()} for one in (mean, least))


def mean_of(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: statistics.fmean(one.get(name, 0.0) for one in tables) for name in names}


def compare(rows: Iterable[Row], first: str) -> None:
    """Fills in how each compares with the `first` layout."""
    rows = list(rows)
    base = {row.batch: row for row in rows if row.layout == first}
    for row in rows:
        if one := base.get(row.batch):
            row.of_first = row.decode_tok_s / one.decode_tok_s
            row.total_of_first = row.total_tok_s / one.total_tok_s


def report(rows: Sequence[Row], markdown: bool = False) -> None:
    """A model after the other."""
    for group, same in groupby(rows, lambda row: row.group):
        device, layers, model, dtype, backend, attention, *lengths = group
        told = "--input-len {} --output-len {}".format(*lengths)
        what = f"{model}, {layers} layers, {dtype}, {backend}, attention {attention}"
        print(f"\n{what}, {device}, {told}")
        for title, header, cells in tables(list(same)):
            print(f"\n{title}\n")
            show_table(header, cells, markdown)


def tables(rows: Sequence[Row]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, header and cells of each."""
    header = ["layout", "batch", "prefill s", "step ms", "decode tok/s", "of first"]
    header += ["total tok/s", "of first", "same", "start s"]
    cells = [
        [row.layout, str(row.batch), f"{row.prefill_s:.2f}", f"{row.step_ms:.2f}"]
        + [f"{row.decode_tok_s:,.0f}", share(row.of_first), f"{row.total_tok_s:,.0f}"]
        + [share(row.total_of_first), share(row.same), f"{row.start_s:.1f}"]
        for row in rows
    ]
    yield "every request has a token in a step", header, cells
    host = [{name: f"{ms:.2f}" for name, ms in row.host_ms.items()} for row in rows]
    yield from breakdown("host of a rank, ms a step", rows, host)
    kernels = [
        {
            name: f"{us:,.0f} ({row.least_stages_us[name]:,.0f})"
            for name, us in row.stages_us.items()
        }
        for row in rows
    ]
    yield from breakdown("kernels of a rank, us a step: mean (least) of ranks", rows, kernels)


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def breakdown(
    title: str, rows: Sequence[Row], found: Sequence[dict[str, str]]
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """None where nothing was recorded."""
    names = {name for stages in found for name in stages}
    order = [*(name for name in ORDER if name in names), *sorted(names.difference(ORDER))]
    if names:
        cells = [
            [row.layout, str(row.batch), *(stages.get(name, "") for name in order)]
            for row, stages in zip(rows, found, strict=True)
            if stages
        ]
        yield title, ["layout", "batch", *order], cells
