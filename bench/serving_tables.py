"""Rows of bench/serving.py, what they are compared with, and their table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from bench.common import read_rows, show_table
from moesaic.loadgen.metrics import RunMetrics

CLOSED, ALONE, CHATS, MIXED, LONG = "closed", "alone", "chats", "chats beside long", "long"
MODEL: Final = "qwen3-30b-a3b"
OURS: Final = "moesaic"
# Of ranks that share a GPU: of one rank's requests a second, at these numbers of requests.
LEAST_OF_SINGLE: Final = 0.80
RANK_CONCURRENCY: Final = (64, 256)
HEADER: Final = (
    *("load", "at once", "requests/s", "output tok/s", "TTFT p50 ms", "p99"),
    *("ITL p50 ms", "p99", "TPOT p50 ms", "client us/tok", "targets"),
)


@dataclass(frozen=True)
class SglangFigures:
    """SGLang 0.5.15 on the same H200, one rank, bf16, the same load by its own bench_serving."""

    requests_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float


SGLANG: Final = {
    16: SglangFigures(10.10, 49, 198, 12.7, 58),
    64: SglangFigures(21.5, 67, 710, 18.7, 109),
    256: SglangFigures(42.9, 142, 2868, 24.2, 408),
}


@dataclass(frozen=True)
class Target:
    """A bound on a field of a row; `most` or else at least."""

    field: str
    bound: float
    most: bool = True

    def shown(self, row: ServingRow) -> str:
        value = getattr(row, self.field)
        met = value is not None and (value <= self.bound if self.most else value >= self.bound)
        name = self.field.removesuffix("_ms").replace("_", " ")
        return f"{name} {'<=' if self.most else '>='} {self.bound:g}: {'met' if met else 'MISSED'}"


def closed_targets(requests_s: float, ttft_ms: float, itl_ms: float) -> tuple[Target, ...]:
    at_least = Target("requests_s", requests_s, most=False)
    return at_least, Target("ttft_p50_ms", ttft_ms), Target("itl_p99_ms", itl_ms)


# Of one rank on an H200 in bf16, by load and requests at once.
TARGETS: Final[dict[tuple[str, int | None], tuple[Target, ...]]] = {
    (CLOSED, 16): closed_targets(13, 42, 55),
    (CLOSED, 64): closed_targets(27, 55, 75),
    (CLOSED, 256): closed_targets(58, 120, 110),
    (ALONE, 1): (Target("ttft_p50_ms", 25),),
}
MIXED_TARGET: Final = Target("itl_p99_ratio", 2.0)


@dataclass(frozen=True)
class ServingRow:
    """One load on one server. `concurrency`: requests that are open at once in a closed loop, None
    where they come at a `rate`; `requests`: those that ended well."""

    ranks: int
    dtype: str
    load: str
    concurrency: int | None
    rate: float | None
    requests: int
    failed: int
    input_tokens: int
    output_tokens: int
    seconds: float
    requests_s: float
    output_tok_s: float
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p90_ms: float | None
    itl_p99_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    e2e_p50_ms: float | None
    e2e_p99_ms: float | None
    client_cpu: float
    client_us_per_token: float | None
    model: str
    server: str
    device: str
    start_s: float | None
    flags: str
    itl_p99_ratio: float | None = None

    @property
    def group(self) -> tuple[Any, ...]:
        return self.device, self.model, self.server, self.dtype, self.ranks

    @property
    def key(self) -> tuple[Any, ...]:
        return *self.group, self.load, self.concurrency


@dataclass(frozen=True)
class ServerFacts:
    """What all rows of a server have in common."""

    model: str
    server: str
    device: str
    ranks: int
    dtype: str
    flags: str
    start_s: float | None


def make_row(
    facts: ServerFacts, load: str, at: tuple[int | None, float | None], figures: RunMetrics
) -> ServingRow:
    """`at`: requests at once, and requests a second."""
    tokens, f = figures.total_output, figures
    return ServingRow(
        **asdict(facts),
        load=load,
        concurrency=at[0],
        rate=at[1],
        requests=f.completed,
        failed=f.failed,
        input_tokens=f.total_input,
        output_tokens=tokens,
        seconds=f.duration,
        requests_s=f.request_throughput,
        output_tok_s=f.output_throughput,
        ttft_p50_ms=f.ttft.median,
        ttft_p90_ms=f.ttft.p90,
        ttft_p99_ms=f.ttft.p99,
        itl_p50_ms=f.itl.median,
        itl_p90_ms=f.itl.p90,
        itl_p99_ms=f.itl.p99,
        tpot_p50_ms=f.tpot.median,
        tpot_p99_ms=f.tpot.p99,
        e2e_p50_ms=f.e2e.median,
        e2e_p99_ms=f.e2e.p99,
        client_cpu=f.client_cpu,
        client_us_per_token=1e6 * f.client_cpu * f.duration / tokens if tokens else None,
    )


def merge(path: Path, rows: Sequence[ServingRow]) -> list[ServingRow]:
    """Writes rows to a JSON list, where those of the same server and load are replaced, and returns
    all of it."""
    new = {row.key for row in rows}
    kept = [r for r in read_rows(path, ServingRow) if r.key not in new] if path.exists() else []
    made = sorted([*kept, *rows], key=lambda row: (*row.group, row.load, row.concurrency or 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in made], indent=1) + "\n", encoding="utf-8")
    return made


def report(rows: Sequence[ServingRow], markdown: bool = False) -> None:
    """Prints a table for each server, whose rows follow each other."""
    singles = {_beside(row): row for row in rows if row.ranks == 1}
    for group, same in groupby(rows, lambda row: row.group):
        device, model, server, dtype, ranks = group
        title = f"{model}, {dtype}, {ranks} rank{'s' * (ranks > 1)}, {server}, {device}"
        print(f"\n{title}; (x): times the figure of SGLang 0.5.15 where it is measured\n")
        _show([_cells(row, singles.get(_beside(row))) for row in same], markdown)


def _beside(row: ServingRow) -> tuple[Any, ...]:
    """Rows that differ by the number of ranks alone have this in common."""
    return *row.group[:-1], row.load, row.concurrency


def _show(cells: Sequence[Sequence[str]], markdown: bool) -> None:
    """Prints a table by rich where that is installed."""
    if markdown or find_spec("rich") is None:
        show_table(HEADER, cells, markdown)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in HEADER:
        table.add_column(name, justify="left" if name in ("load", "targets") else "right")
    for row in cells:
        table.add_row(*row)
    Console().print(table)


def _cells(row: ServingRow, single: ServingRow | None) -> list[str]:
    peer = peer_of(row)
    latencies = [
        _cell(getattr(row, name), peer and getattr(peer, name))
        for name in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
    ]
    return [
        row.load,
        str(row.concurrency) if row.concurrency is not None else f"{row.rate:.1f}/s",
        _cell(row.requests_s, peer and peer.requests_s),
        f"{row.output_tok_s:,.0f}",
        *latencies,
        _cell(row.tpot_p50_ms),
        _cell(row.client_us_per_token),
        "; ".join(target.shown(row) for target in targets_of(row, single)),
    ]


def _cell(value: float | None, peer: float | None = None) -> str:
    """A value, and how often the peer's it is."""
    if value is None:
        return ""
    return f"{value:.1f}" if peer is None else f"{value:.1f} ({value / peer:.2f}x)"


def _is_measured_setting(row: ServingRow) -> bool:
    """Whether peers and targets are of this model on this GPU."""
    return "H200" in row.device and row.model.startswith(MODEL) and row.dtype == "bf16"


def peer_of(row: ServingRow) -> SglangFigures | None:
    if not _is_measured_setting(row) or row.load != CLOSED or row.ranks > 1:
        return None
    return SGLANG.get(row.concurrency or 0)


def targets_of(row: ServingRow, single: ServingRow | None) -> tuple[Target, ...]:
    """`single`: the same load on one rank."""
    if not _is_measured_setting(row) or row.server != OURS:
        return ()
    if row.load == MIXED:
        return (MIXED_TARGET,)
    if row.ranks == 1:
        return TARGETS.get((row.load, row.concurrency), ())
    if single is None or row.load != CLOSED or row.concurrency not in RANK_CONCURRENCY:
        return ()
    share = Target("requests_s", LEAST_OF_SINGLE * single.requests_s, most=False)
    if single.ttft_p99_ms is None:
        return (share,)
    return share, Target("ttft_p99_ms", single.ttft_p99_ms)
