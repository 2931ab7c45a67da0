"""Dispatch and combine between nodes of ranks, against collectives of as many bytes.

    python -m bench.nodes                          # nodes on one GPU, NCCL between them
    python -m bench.nodes --nodes 2x2 --tokens 128 --payload fp8
    python -m bench.nodes --device cpu --nodes 2x1 --hidden 64 --tokens 1 4    # kernels' twins
    python -m bench.nodes --markdown               # no run: tables of what was measured

2x4 are two nodes of four ranks. All ranks share the GPUs of this machine; to NCCL each is a host of
its own, so that rows cross by sockets: a slow network. On CPU they cross by windows over TCP. Top-8
of 128 experts, uniformly drawn; experts give back what they get, and every point is checked before
it is timed.

Microseconds: the median over rounds of the slowest rank's. *collectives*: one all-gather and one
all-to-all of the same bytes between the same ranks, and nothing else. *crossing*: bytes that a rank
sends to other nodes, for its tokens there and their results, over the least that can be: a row to
each node with one of the token's experts, and one back.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from bench.a2a_gpu import daemon, places
from bench.a2a_rank import MOST_ERROR, Job, config_of, device_name, error_of, identity, route
from bench.common import RESULTS, Distinct, check_out, node_shape, positive, read_rows, show_table
from bench.gpu import named
from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks, PerRank
from moesaic.comm.windows.factory import create_device_window
from moesaic.comm.windows.tcp_links import TcpLinks
from moesaic.config.devices import cuda_missing
from moesaic.core.step import Step
from moesaic.kernels.timing_ranks import NUM_CHANNELS, RankTimer, RunLength, TimedRank
from moesaic.moe.backends import load_backends
from moesaic.moe.dispatch.base import CommContext
from moesaic.moe.dispatch.nodes import NodeDispatcher
from moesaic.moe.formats import RowsCombineInput, StandardDispatchOutput
from moesaic.moe.registry import A2A_REGISTRY

EXPERTS, TOP_K, HIDDEN = 128, 8, 2048
NODES = ("2x1", "2x2", "4x1")
TOKENS = (1, 16, 128, 1024)
TIMEOUT, SECONDS = 60.0, 300.0
SECRET = b"of the nodes of a benchmark"


@dataclass
class Row:
    device: str
    nodes: int
    ranks: int
    """Ranks on each node."""
    payload: str
    hidden: int
    tokens: int
    graph: bool
    pair_us: float
    collectives_us: float
    crossing: float
    error: float

    @property
    def ratio(self) -> float:
        return self.pair_us / self.collectives_us


@dataclass(frozen=True)
class NodeJob:
    nodes: tuple[int, ...]
    job: Job


@dataclass
class Found:
    pair_us: list[float]
    collectives_us: list[float]
    sent: int
    least: int
    error: float


@contextmanager
def on_nodes(group: RankGroup, nodes: tuple[int, ...], device: torch.device) -> Iterator[None]:
    links = None
    if device.type == "cpu":
        node = nodes[group.rank]
        links = TcpLinks(group.rank, node, f"127.0.0.{1 + node}", SECRET)
    group.nodes, group.links = nodes, links
    try:
        yield
    finally:
        group.nodes, group.links = (), None
        for part in ("node_peers", "rail"):
            vars(group).pop(part, None)
        if links is not None:
            links.close()


def work(group: RankGroup, asked: NodeJob, place: TimedRank) -> list[Found]:
    job, device = asked.job, place.open()
    window = create_device_window(group, [], TIMEOUT, NUM_CHANNELS, device)
    calls = tuple(window.call(n, "start together") for n in range(NUM_CHANNELS))
    timer = RankTimer(calls, lambda: group.barrier("benchmark"))
    try:
        with torch.inference_mode(), on_nodes(group, asked.nodes, device):
            with torch.device(device):
                made = dispatcher_of(group, job)
            return [measure(made, job, tokens, timer) for tokens in job.tokens]
    finally:
        gc.collect()  # graphs go before the memory that they write to
        window.close()


def dispatcher_of(group: RankGroup, job: Job) -> NodeDispatcher:
    load_backends()
    provider = A2A_REGISTRY[job.backend].provider("cuda")
    return NodeDispatcher(config_of(group, job), CommContext(group, TIMEOUT), provider)


def measure(dispatcher: NodeDispatcher, job: Job, tokens: int, timer: RankTimer) -> Found:
    config, device = dispatcher.config, timer.device
    x_TH, topk = route(job, tokens, config.layout.rank, device)
    step = Step(rows=tokens)

    def dispatched() -> StandardDispatchOutput:
        out = dispatcher.dispatch(x_TH, topk, step)
        assert isinstance(out, StandardDispatchOutput)
        return out

    traffic = dispatcher.traffic
    traffic.dispatch_bytes = traffic.combine_bytes = 0
    given = given_back(dispatched())
    error = error_of(dispatcher.combine(given), config.encode(x_TH).dense(torch.float32))
    if not error <= MOST_ERROR:
        raise AssertionError(f"{tokens} tokens: one is off by {error:.1%}")
    sent = traffic.dispatch_bytes + traffic.combine_bytes
    wire = torch.zeros(tokens, dispatcher.row.nbytes, dtype=torch.uint8, device=device)
    back = x_TH.repeat(dispatcher.nodes, 1)

    def collectives(number: int) -> None:
        dispatcher.rail.gather_rows(wire, [tokens] * dispatcher.nodes, "benchmark")
        dispatcher.rail.exchange_rows(back, "benchmark")

    length = RunLength(8, 2, job.rounds) if timer.on_gpu else RunLength(2, 1, job.rounds)
    graph = job.graphs[0]
    pair = timer.microseconds(
        lambda number: dispatcher.combine(replace(given, handle=dispatched().handle)), length, graph
    )
    alone = timer.microseconds(collectives, length, graph)
    row_bytes = dispatcher.row.nbytes + config.hidden_size * config.dtype.itemsize
    return Found(pair, alone, sent, row_bytes * needed(dispatcher, topk.ids_TK), error)


def given_back(out: StandardDispatchOutput) -> RowsCombineInput:
    """As if every expert gave back what it got; in the buffer for results, where there is one."""
    if out.y_OH is not None or out.y_NH is not None:
        return identity(out)
    assert out.weights_RK is not None
    share_R1 = torch.where(out.ids_RK >= 0, out.weights_RK, 0.0).sum(1, keepdim=True)
    y_RH = torch.where(share_R1 > 0, out.x.dense(torch.bfloat16) * share_R1, 0.0)
    return RowsCombineInput(out.handle, y_RH.bfloat16())


def needed(dispatcher: NodeDispatcher, ids_TK: torch.Tensor) -> int:
    """Rows that must leave the node: a token's to each other node with one of its experts."""
    nodes_TK = ids_TK.cpu() // (dispatcher.config.layout.num_slots // dispatcher.nodes)
    found = [set(row) - {dispatcher.node} for row in nodes_TK.tolist()]
    return sum(map(len, found))


def run(args: argparse.Namespace) -> list[Row]:
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.nodes]
    most, rows = max(nodes * ranks for nodes, ranks in shapes), list[Row]()
    with daemon(most, args.device) as mps:
        for nodes, ranks in shapes:
            size, layout = nodes * ranks, tuple(n for n in range(nodes) for _ in range(ranks))
            where = PerRank(list(map(as_host, enumerate(places(size, mps, args.device).values))))
            with LocalRanks(size, SECONDS, peer_timeout=TIMEOUT) as pool:
                device = pool.run(device_name, where)[0]
                for payload in args.payload:
                    shape = (args.hidden, EXPERTS, TOP_K, payload, tuple(args.tokens))
                    job = Job("deepep", "normal", *shape, (args.device == "cuda",), args.rounds)
                    found = pool.run(work, NodeJob(layout, job), where)
                    rows += [
                        row_of(device, (nodes, ranks), job, tokens, points)
                        for tokens, points in zip(job.tokens, zip(*found, strict=True), strict=True)
                    ]
    return rows


def as_host(numbered: tuple[int, TimedRank]) -> TimedRank:
    """A rank that is a host of its own to NCCL, which refuses two ranks of a host on one GPU."""
    number, place = numbered
    host = {"NCCL_HOSTID": f"rank {number}", "NCCL_SOCKET_IFNAME": "lo"}
    return replace(place, environment=place.environment | host)


def row_of(
    device: str, shape: tuple[int, int], job: Job, tokens: int, found: Sequence[Found]
) -> Row:
    def us(rounds: list[list[float]]) -> float:
        return statistics.median(max(ranks) for ranks in zip(*rounds, strict=True))

    return Row(
        *(device, *shape, job.payload, job.hidden, tokens, job.graphs[0]),
        us([one.pair_us for one in found]),
        us([one.collectives_us for one in found]),
        sum(one.sent for one in found) / max(1, sum(one.least for one in found)),
        max(one.error for one in found),
    )


def show(rows: Sequence[Row], markdown: bool) -> None:
    header = ["nodes", "payload", "H", "tokens", "launch", "pair us", "collectives us", "ratio"]
    cells = [
        [f"{r.nodes}x{r.ranks}", r.payload, str(r.hidden), str(r.tokens)]
        + ["graph" if r.graph else "single", f"{r.pair_us:.0f}", f"{r.collectives_us:.0f}"]
        + [f"{r.ratio:.2f}", f"{r.crossing:.3f}"]
        for r in rows
    ]
    show_table([*header, "crossing"], cells, markdown)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.nodes", description=(__doc__ or "").split("\n")[0]
    )
    several = {"nargs": "+", "action": Distinct}
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--nodes", type=node_shape, default=list(NODES), metavar="NODESxRANKS", **several
    )
    parser.add_argument("--tokens", type=positive, default=list(TOKENS), **several)
    parser.add_argument("--payload", choices=("bf16", "fp8"), default=["bf16", "fp8"], **several)
    parser.add_argument("--hidden", type=positive, default=HIDDEN)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--out", type=Path, help="JSON list")
    parser.add_argument("--markdown", action="store_true", help="no run: tables for the docs")
    args = parser.parse_args(words)
    if args.markdown:
        show(read_rows(args.out or RESULTS / "h200_nodes.json", Row), markdown=True)
        return 0
    if args.device == "cuda" and (missing := cuda_missing()):
        raise SystemExit(f"this benchmark needs a CUDA device: {missing}; or give --device cpu")
    if args.out is not None:
        check_out(args.out)
    rows = run(args)
    show(rows, markdown=False)
    path = args.out or RESULTS / f"{named('nodes', rows[0].device)}.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
