"""The emulated link between ranks that share a GPU: what dispatch and combine take, and should.

    python -m bench.link                               # 2 and 4 ranks, 50 and 450 GB/s
    python -m bench.link --ranks 4 --link gbps=25,us=2 --tokens 128
    python -m bench.link --device cpu --hidden 64 --tokens 4   # the kernels' twins

Every point is measured as in bench/a2a_gpu.py: many dispatches and combines in a row, inside of a
graph and launched one by one, with the link and without. `asked`: what the link's bytes take of
one rank, the one with the most, with the latency of both halves. What is measured can be more: the
kernels themselves take their time first, and it is never less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.a2a_gpu import BACKENDS, JOB_SECONDS, daemon, places
from bench.a2a_rank import Found, Job, device_name, work
from bench.common import RESULTS, check_out, merge, positive, print_table
from bench.gpu import named
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.config.devices import cuda_missing
from moesaic.core.link import EmulatedLink
from moesaic.moe.backends import load_backends

EXPERTS, TOP_K = 128, 8
LINKS = ("gbps=50,us=5", "gbps=450,us=1")


@dataclass
class Row:
    """Microseconds of a dispatch with the combine behind it."""

    device: str
    backend: str
    ranks: int
    hidden: int
    tokens: int
    link: str
    graph: bool
    asked_us: float
    with_us: float
    without_us: float
    kilobytes: float

    @property
    def key(self) -> tuple[object, ...]:
        where = (self.device, self.backend, self.ranks, self.hidden, self.tokens)
        return *where, self.link, self.graph


def parse(words: Sequence[str]) -> argparse.Namespace:
    made = argparse.ArgumentParser(
        "python -m bench.link", description=(__doc__ or "").split("\n")[0]
    )
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--ranks", type=positive, nargs="+", default=[2, 4])
    made.add_argument("--tokens", type=positive, nargs="+", default=[1, 32, 128, 1024])
    made.add_argument("--hidden", type=positive, default=2048)
    made.add_argument(
        "--link", type=EmulatedLink.parse, nargs="+", default=[*map(EmulatedLink.parse, LINKS)]
    )
    made.add_argument(
        "--backends", choices=BACKENDS, nargs="+", default=["deepep_normal", "deepep_low_latency"]
    )
    made.add_argument("--rounds", type=positive, default=3)
    made.add_argument("--out", type=Path, help="JSON list; rows of other points stay")
    return made.parse_args(words)


def rows_of(
    job: Job, ranks: Sequence[Sequence[Found]], plain: Sequence[Sequence[Found]], device: str
) -> list[Row]:
    """`ranks`, `plain`: of each rank what it found for each number of tokens."""
    assert job.link is not None
    made = []
    for number, tokens in enumerate(job.tokens):
        found, without = [one[number] for one in ranks], [one[number] for one in plain]
        asked = max(sum(map(job.link.ns, one.link_bytes.values())) for one in found)
        for graph in job.graphs:
            slowest = [
                statistics.median(
                    map(max, zip(*(one.us["pair", graph] for one in these), strict=True))
                )
                for these in (found, without)
            ]
            made.append(
                Row(
                    device, f"{job.backend} {job.mode}", len(found), job.hidden, tokens,
                    str(job.link), graph, (asked + 2 * job.link.latency_ns) / 1e3, *slowest,
                    max(sum(one.link_bytes.values()) for one in found) / 1e3,
                )
            )  # fmt: skip
    return made


def show(rows: Sequence[Row]) -> None:
    first = rows[0]
    print(f"\n{first.backend}, {first.ranks} ranks, H {first.hidden}, {first.device}")
    header = [
        "link",
        "tokens",
        "launch",
        "KB",
        "asked us",
        "with us",
        "without us",
        "over asked us",
    ]
    print_table(
        header,
        [
            [r.link, str(r.tokens), "graph" if r.graph else "single", f"{r.kilobytes:.1f}"]
            + [f"{us:.1f}" for us in (r.asked_us, r.with_us, r.without_us, r.with_us - r.asked_us)]
            for r in rows
        ],
    )
    sys.stdout.flush()


def main(words: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if words is None else words)
    if args.device == "cuda" and (missing := cuda_missing()):
        raise SystemExit(f"this benchmark needs a CUDA device: {missing}; or give --device cpu")
    check_out(args.out or RESULTS / "link.json")
    load_backends()
    graphs = (True, False) if args.device == "cuda" else (False,)
    failed = False
    with daemon(max(args.ranks), args.device) as mps:
        for ranks in args.ranks:
            where = places(ranks, mps, args.device)
            with LocalRanks(ranks, JOB_SECONDS, peer_timeout=JOB_SECONDS / 2) as pool:
                device = pool.run(device_name, where)[0]
                for name in args.backends:
                    low = BACKENDS[name][1] == "low_latency"
                    tokens = tuple(t for t in args.tokens if not low or t <= 256)
                    job = Job(
                        *BACKENDS[name],
                        args.hidden,
                        EXPERTS,
                        TOP_K,
                        "bf16",
                        tokens,
                        graphs,
                        args.rounds,
                    )
                    plain = pool.run(work, job, where)
                    rows = []
                    for link in args.link:
                        late = replace(job, link=link)
                        rows += rows_of(late, pool.run(work, late, where), plain, device)
                    show(rows)
                    failed |= any(row.with_us < row.asked_us for row in rows)
                    merge(args.out or RESULTS / f"{named('link', device)}.json", rows)
    if failed:
        print("some transfers arrived before they were due", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
