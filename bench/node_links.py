"""The links between nodes of CPU ranks against gloo: an all-gather of both, over loopback.

    python -m bench.node_links
    python -m bench.node_links --nodes 2x1 --bytes 64 --rounds 1
    python -m bench.node_links --markdown          # no run: the table of what was measured

Ranks of a node share memory, and between nodes each sends what it gives once to every other node.
gloo connects all ranks with each other. Times are of the slowest rank, the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.common import RESULTS, Distinct, check_out, node_shape, positive, read_rows, show_table
from bench.nodes import SECONDS, TIMEOUT, on_nodes
from moesaic.comm.collectives.collective import WindowCollective
from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks

NODES = ("2x1", "2x2")
SIZES = (64, 16384, 1 << 20, 8 << 20)
LARGE = 1 << 20
ROUNDS = 7


@dataclass
class Row:
    nodes: int
    ranks: int
    """Ranks on each node."""
    nbytes: int
    """Bytes that each rank gives."""
    links_us: float
    gloo_us: float

    @property
    def ratio(self) -> float:
        return self.gloo_us / self.links_us


def work(
    group: RankGroup, nodes: tuple[int, ...], sizes: Sequence[int], rounds: int
) -> list[tuple[float, float]]:
    """Microseconds of the links and of gloo, for each size."""
    with on_nodes(group, nodes, torch.device("cpu")):
        links = WindowCollective(group, max(sizes), TIMEOUT)
        found = []
        for nbytes in sizes:
            own, counts = torch.zeros(1, nbytes, dtype=torch.uint8), [1] * group.size
            calls: list[Callable[[], object]] = [
                lambda own=own, counts=counts: links.gather_rows(own, counts, "benchmark"),
                lambda own=own: group.all_gather(own, "benchmark"),
            ]
            ours, gloo = (median_us(call, rounds, 5 if nbytes >= LARGE else 20) for call in calls)
            found.append((ours, gloo))
        return found


def median_us(call: Callable[[], object], rounds: int, each: int) -> float:
    times = []
    for number in range(rounds + 1):
        began = time.perf_counter()
        for _ in range(each):
            call()
        if number:  # the first connects
            times.append((time.perf_counter() - began) / each * 1e6)
    return statistics.median(times)


def run(args: argparse.Namespace) -> list[Row]:
    rows = []
    for shape in args.nodes:
        nodes, ranks = map(int, shape.split("x"))
        layout = tuple(node for node in range(nodes) for _ in range(ranks))
        with LocalRanks(len(layout), SECONDS, peer_timeout=TIMEOUT) as pool:
            found = pool.run(work, layout, args.bytes, args.rounds)
        for nbytes, times in zip(args.bytes, zip(*found, strict=True), strict=True):
            links, gloo = (max(one) for one in zip(*times, strict=True))
            rows.append(Row(nodes, ranks, nbytes, links, gloo))
    return rows


def show(rows: Sequence[Row], markdown: bool) -> None:
    cells = [
        [f"{r.nodes}x{r.ranks}", f"{r.nbytes:,}", f"{r.links_us:,.0f}", f"{r.gloo_us:,.0f}"]
        + [f"{r.ratio:.2f}"]
        for r in rows
    ]
    show_table(["nodes", "bytes of a rank", "links us", "gloo us", "gloo / links"], cells, markdown)


def default_out(args: argparse.Namespace) -> Path:
    """The file of the docs' table has all of it; git ignores the other."""
    is_whole = (args.nodes, args.bytes, args.rounds) == (list(NODES), list(SIZES), ROUNDS)
    return RESULTS / ("node_links.json" if is_whole else "cpu_node_links.json")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.node_links", description=(__doc__ or "").split("\n")[0]
    )
    several = {"nargs": "+", "action": Distinct}
    parser.add_argument(
        "--nodes", type=node_shape, default=list(NODES), metavar="NODESxRANKS", **several
    )
    parser.add_argument("--bytes", type=positive, default=list(SIZES), **several)
    parser.add_argument("--rounds", type=positive, default=ROUNDS)
    parser.add_argument(
        "--out", type=Path, help="JSON list; without it what is not all goes to cpu_node_links.json"
    )
    parser.add_argument("--markdown", action="store_true", help="no run: the table for the docs")
    args = parser.parse_args(words)
    if args.markdown:
        show(read_rows(args.out or RESULTS / "node_links.json", Row), markdown=True)
        return 0
    out = args.out or default_out(args)
    check_out(out)
    rows = run(args)
    show(rows, markdown=False)
    text = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    out.write_text(text, encoding="utf-8")
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
