"""What bench/a2a_gpu.py measured, as tables for the docs.

    python -m bench.a2a --device cuda --markdown

A table for each number of ranks in bf16: dispatch, combine and both inside of a CUDA graph, and
both launched one by one. Others are compared with what was launched as they were: FlashInfer with
our graphs, DeepEP with ours one by one. Of other payloads there are pairs only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.common import show_table

MAIN_RANKS, MAIN_PAYLOAD = 4, "bf16"
HEADER = ["mode", "hidden", "tokens", "dispatch", "combine", "pair", "of the limit"]
HEADER += ["FlashInfer in a graph (× our pair)", "pair one by one"]
HEADER += ["DeepEP one by one (× ours one by one)"]
TIMES = ("dispatch_us", "combine_us", "pair_us")
Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    cells: list[list[str]]


def report(rows: Rows) -> None:
    for device in dict.fromkeys(row["device"] for row in rows):
        for table in tables([row for row in rows if row["device"] == device]):
            print(f"\n{device}: {table.title}\n")
            show_table(table.header, table.cells, markdown=True)


def tables(rows: Rows) -> Iterator[Table]:
    """Those that there are rows for."""
    plain = [row for row in rows if row["payload"] == MAIN_PAYLOAD]
    four = [row for row in rows if row["ranks"] == MAIN_RANKS]
    for ranks in sorted({row["ranks"] for row in plain}, key=lambda n: (n != MAIN_RANKS, n)):
        same = [row for row in plain if row["ranks"] == ranks]
        yield Table(f"{ranks} ranks, {MAIN_PAYLOAD}, µs", HEADER, main_cells(same))
    yield from by_payload(four)


def main_cells(rows: Rows) -> list[list[str]]:
    cells = []
    for point, by_graph in _by_point(rows, lambda row: row["graph"]).items():
        graph, single = by_graph.get(True), by_graph.get(False)
        told = [""] * 5 if graph is None else [_us(graph[name]) for name in TIMES]
        if graph is not None:
            told += [f"{graph['of_limit']:.0%}", _peers(graph)]
        alone = [""] * 2 if single is None else [_us(single["pair_us"]), _peers(single)]
        cells.append([*point, *told, *alone])
    return cells


def by_payload(rows: Rows) -> Iterator[Table]:
    """A column for each, of graphs where there are any; no table of one alone."""
    graphs = [row for row in rows if row["graph"]] or list(rows)
    payloads = {row["payload"] for row in graphs}
    if len(payloads) < 2:
        return
    columns = sorted(payloads, key=lambda name: (name != MAIN_PAYLOAD, name))
    found = _by_point(graphs, lambda row: row["payload"])
    cells = [[*point, *(_pair(by.get(name)) for name in columns)] for point, by in found.items()]
    title = f"{MAIN_RANKS} ranks, a pair in µs (of the limit) by payload"
    yield Table(title, ["mode", "hidden", "tokens", *columns], cells)


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
    return "" if row is None else f"{_us(row['pair_us'])} ({row['of_limit']:.0%})"


def _peers(row: dict[str, Any]) -> str:
    """What those of a row take for a pair, and how many times ours that is."""
    found = [peer["pair_us"] for peer in row["peers"]]
    return ", ".join(f"{_us(us)} ({us / row['pair_us']:.1f}×)" for us in found)
