"""What bench/a2a_gpu.py measured, as tables for the docs.

    python -m bench.a2a --device cuda --markdown

The main table is of 4 ranks and bf16: dispatch, combine and both inside of a CUDA graph, and both
launched one by one. Of other ranks and payloads there are pairs only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import show_table

MAIN_RANKS, MAIN_PAYLOAD = 4, "bf16"
PEERS = {
    "DeepEP": "DeepEP one by one (× ours, × ours one by one)",
    "FlashInfer": "FlashInfer in a graph (× ours)",
}
TIMES = ("dispatch_us", "combine_us", "pair_us")
Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    cells: list[list[str]]


def report(path: Path) -> None:
    rows = json.loads(path.read_text(encoding="utf-8"))
    for device in dict.fromkeys(row["device"] for row in rows):
        for table in tables([row for row in rows if row["device"] == device]):
            print(f"\n{device}: {table.title}\n")
            show_table(table.header, table.cells, markdown=True)


def tables(rows: Rows) -> Iterator[Table]:
    """Those that there are rows for."""
    plain = [row for row in rows if row["payload"] == MAIN_PAYLOAD]
    four = [row for row in rows if row["ranks"] == MAIN_RANKS]
    main = [row for row in plain if row["ranks"] == MAIN_RANKS]
    if main:
        title = f"{MAIN_RANKS} ranks, {MAIN_PAYLOAD}, µs"
        header = ["mode", "hidden", "tokens", "dispatch", "combine", "pair", "of the limit"]
        yield Table(title, [*header, "one by one", *PEERS.values()], main_cells(main))
    yield from across(f"{MAIN_PAYLOAD}, a pair in µs (of the limit)", plain, "ranks", MAIN_RANKS)
    title = f"{MAIN_RANKS} ranks, a pair in µs (of the limit) by payload"
    yield from across(title, four, "payload", None)


def main_cells(rows: Rows) -> list[list[str]]:
    cells = []
    for point, by_graph in _by_point(rows, lambda row: row["graph"]).items():
        graph, single = by_graph.get(True), by_graph.get(False)
        told = [""] * 4 if graph is None else [_us(graph[name]) for name in TIMES]
        if graph is not None:
            told.append(f"{graph['of_limit']:.0%}")
        alone = "" if single is None else _us(single["pair_us"])
        peers = [_peer(name, [graph, single]) for name in PEERS]
        cells.append([*point, *told, alone, *peers])
    return cells


def across(title: str, rows: Rows, field: str, without: Any) -> Iterator[Table]:
    """A column for each value of `field` but one, of graphs where there are any."""
    graphs = [row for row in rows if row["graph"]] or list(rows)
    values = list(dict.fromkeys(row[field] for row in graphs if row[field] != without))
    if len(values) < (2 if without is None else 1):
        return
    columns = sorted(values, key=lambda value: (value != MAIN_PAYLOAD, value))
    found = _by_point([row for row in graphs if row[field] in values], lambda row: row[field])
    cells = [[*point, *(_pair(by.get(value)) for value in columns)] for point, by in found.items()]
    names = [f"{value} {field}" if field == "ranks" else str(value) for value in columns]
    yield Table(title, ["mode", "hidden", "tokens", *names], cells)


def _by_point(
    rows: Rows, key: Callable[[dict[str, Any]], Any]
) -> dict[tuple[str, str, str], dict[Any, dict[str, Any]]]:
    """Rows of a mode, hidden size and number of tokens, by `key`."""
    found: dict[tuple[str, str, str], dict[Any, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["backend"], row["mode"], *_sizes(row))):
        point = (f"{row['backend']} {row['mode']}", *map(str, _sizes(row)))
        found.setdefault(point, {})[key(row)] = row
    return found


def _sizes(row: dict[str, Any]) -> tuple[int, int]:
    return row["hidden"], row["tokens"]


def _us(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def _pair(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    told = f"{_us(row['pair_us'])} ({row['of_limit']:.0%})"
    peers = [f"{peer['name']} {peer['pair_us'] / row['pair_us']:.1f}×" for peer in row["peers"]]
    return ", ".join([told, *peers])


def _peer(name: str, rows: Sequence[dict[str, Any] | None]) -> str:
    """What it takes for a pair, and how many times that is of each row of ours."""
    found = [
        (peer["pair_us"], row["pair_us"])
        for row in rows
        for peer in (row["peers"] if row is not None else ())
        if peer["name"] == name
    ]
    if not found:
        return ""
    times = ", ".join(f"{them / us:.1f}×" for them, us in found)
    return f"{_us(found[0][0])} ({times})"
