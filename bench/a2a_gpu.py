"""Dispatch and combine between ranks on a GPU, without experts, against a copy of as many bytes.

    python -m bench.a2a --device cuda                    # the whole grid, below 4 minutes
    python -m bench.a2a --device cuda --quick            # 4 ranks, H 2048, below a minute
    python -m bench.a2a --device cuda --ranks 8 --tokens 1 128 --hidden 7168 --payload fp8
    python -m bench.a2a --device cuda --markdown         # no run: tables of what was measured
    python -m bench.a2a_gpu --device cpu --ranks 2 --hidden 64 --tokens 1 4   # kernels' twins, and
                                     # bench/results/cpu_a2a.json, which git ignores

Ranks are processes, on a GPU each or, where there are fewer, sharing them under MPS. Top-8 of 128
experts, uniformly drawn, of 256 from H 7168 on. Every point is checked against a plain computation
before it is timed. Microseconds: the median over rounds of the slowest rank's. With `graph`, many
dispatches and combines in a row are one CUDA graph, so that launches do not count; without, each
is launched by itself. Up to 128 tokens a rank all of it may stay in the L2 cache, as in an engine;
tokens, outputs and copies rotate over four sets of buffers (two for more tokens).

Limit: a copy of as many bytes (those that are read and written for a rank's tokens: values and
scales, by the routing that was drawn) by all ranks at once, and one meeting of all ranks (a signal
and a wait), both measured in the same run. What the libraries of others take for a pair:
bench/a2a_peers.py; each is compared with what was launched as it was. Halves are told of graphs
only: launched one by one, the meeting that is taken off them is a launch, too.

By default payloads other than bf16 and H 4096 are measured with 4 ranks only; all that is asked for
by --ranks, --hidden or --payload is measured. Low latency is for decoding: up to 256 tokens. So is
`mooncake`, which has its layout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import a2a_tables
from bench.a2a_peers import Key, Peer, peers_of
from bench.a2a_rank import FEW_TOKENS, Found, Job, device_name, work
from bench.common import (
    RESULTS,
    Distinct,
    above_zero,
    check_out,
    positive,
    print_table,
    read_rows,
)
from bench.gpu import named
from moesaic.comm.errors import RankFailed
from moesaic.comm.launch.local_ranks import LocalRanks, PerRank
from moesaic.comm.launch.mps import Mps, start_mps
from moesaic.config.devices import cuda_missing, num_gpus
from moesaic.config.gpus import max_ranks_per_gpu, share_gpus
from moesaic.config.resolve import MAX_RANKS_PER_NODE
from moesaic.kernels.timing_ranks import TimedRank
from moesaic.moe.backends import load_backends
from moesaic.moe.registry import A2A_REGISTRY, MoeProblem, supports

BACKENDS = {
    "deepep_normal": ("deepep", "normal"),
    "deepep_low_latency": ("deepep", "low_latency"),
    "flashinfer": ("flashinfer", "auto"),
    "none": ("none", "auto"),
    "mori": ("mori", "auto"),
    "mooncake": ("mooncake", "low_latency"),
}
RANKS, TOKENS, HIDDEN = (4, 2, 8), (1, 16, 64, 128, 1024, 4096), (2048, 7168, 4096)
PAYLOADS = ("bf16", "fp8", "nvfp4")
TOP_K, WIDE, WIDE_EXPERTS, EXPERTS = 8, 7168, 256, 128
MAIN_RANKS = 4
JOB_SECONDS = 120.0
PROG = "python -m bench.a2a_gpu"
TWINS = "the kernels' twins on a CPU: python -m bench.a2a_gpu --device cpu"
OUT = {"cuda": "h200_a2a.json", "cpu": "cpu_a2a.json"}
LAUNCH = {True: "in a graph", False: "one by one"}


@dataclass
class Row:
    """Microseconds of the slowest rank; bytes of the rank with the most. `of_limit`: 1 is as fast
    as the copies and one meeting; of a half, which is without one, as its copy."""

    backend: str
    mode: str
    ranks: int
    tokens: int
    hidden: int
    payload: str
    graph: bool
    dispatch_us: float
    combine_us: float
    pair_us: float
    bytes: int
    limit_us: float
    of_limit: float
    dispatch_of_limit: float
    combine_of_limit: float
    meet_us: float
    error: float
    device: str
    peers: list[Peer] = field(default_factory=list)

    @property
    def key(self) -> tuple[Any, ...]:
        where = (self.device, self.backend, self.mode, self.payload)
        return (*where, self.ranks, self.hidden, self.tokens, self.graph)


def summarise(job: Job, found: Sequence[Found], graph: bool, device: str) -> Row:
    """`found`: of all ranks, of one number of tokens."""

    def us(name: str, graph: bool = graph) -> float:
        rounds = zip(*(one.us[name, graph] for one in found), strict=True)
        return statistics.median(max(ranks) for ranks in rounds)

    meet, copies = us("meet"), [us("dispatch copy", False), us("combine copy", False)]
    halves = [max(us(name) - meet, 0.0) for name in ("dispatch", "combine")]
    pair, limit = us("pair"), sum(copies) + meet
    pairs = zip(copies, halves, strict=True)
    of_limit = [copy / half if half else 0.0 for copy, half in pairs]
    tokens = found[0].tokens
    return Row(
        *(job.backend, job.mode, len(found), tokens, job.hidden, job.payload, graph),
        *(*halves, pair),
        max(sum(one.nbytes.values()) for one in found),
        *(limit, limit / pair, *of_limit, meet),
        max(one.error for one in found),
        device,
        peers_of(job.mode, Key(len(found), job.hidden, tokens), job.payload, graph),
    )


def jobs_of(args: argparse.Namespace) -> list[tuple[int, Job]]:
    """Ranks, and what they do; what matters most first. ValueError for what cannot be."""
    load_backends()
    chosen = any((args.ranks, args.hidden, args.payload))
    found = []
    for ranks in args.ranks or ((MAIN_RANKS,) if args.quick else RANKS):
        for hidden in args.hidden or (HIDDEN[:1] if args.quick else HIDDEN):
            for payload in args.payload or (PAYLOADS[:1] if args.quick else PAYLOADS):
                plain = payload == "bf16" and hidden in HIDDEN[:2]
                if chosen or plain or ranks == MAIN_RANKS:
                    found += [(ranks, job) for job in _jobs(args, hidden, payload)]
    for ranks, job in found:
        check(ranks, job)
    if not found:
        raise ValueError(
            f"--tokens {' '.join(map(str, args.tokens))}: low latency is for at most {FEW_TOKENS}; "
            "give some, or --backends deepep_normal"
        )
    return found


def check(ranks: int, job: Job) -> None:
    """ValueError for what an engine would refuse."""
    if not 2 <= ranks <= MAX_RANKS_PER_NODE:
        raise ValueError(
            f"--ranks {ranks}: give 2 to {MAX_RANKS_PER_NODE}; one sends nothing, and a machine "
            "holds no more"
        )
    asked = MoeProblem(
        job.backend, job.mode, payload=job.payload, ep=ranks, tp=ranks, device="cuda"
    )
    found = supports(replace(asked, hidden_size=job.hidden, experts=job.experts))
    if not found.ok:
        raise ValueError(f"{ranks} ranks, H {job.hidden}, {job.payload}: {found.reason}")


def _jobs(args: argparse.Namespace, hidden: int, payload: str) -> Iterator[Job]:
    experts = WIDE_EXPERTS if hidden >= WIDE else EXPERTS
    graphs = (True, False) if args.device == "cuda" else (False,)
    for name in args.backends:
        backend, mode = BACKENDS[name]
        tokens = tuple(t for t in args.tokens if mode != "low_latency" or t <= FEW_TOKENS)
        if tokens and (args.payload or payload in A2A_REGISTRY[backend].payloads):
            yield Job(backend, mode, hidden, experts, TOP_K, payload, tokens, graphs, args.rounds)


def places(ranks: int, mps: Mps | None, device: str) -> PerRank:
    if device == "cpu":
        return PerRank([TimedRank({}, -1)] * ranks)
    gpus = share_gpus(ranks, num_gpus())
    shared = {} if mps is None else mps.for_ranks(max_ranks_per_gpu(gpus))
    return PerRank([TimedRank(shared, gpu) for gpu in gpus])


@contextmanager
def daemon(most_ranks: int, device: str) -> Iterator[Mps | None]:
    """Of all ranks of this run, where some have to share a GPU."""
    needed = device == "cuda" and most_ranks > num_gpus()
    try:
        made = start_mps() if needed else nullcontext()
    except (RuntimeError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    with made as mps:
        yield mps


@dataclass
class Run:
    """What a job finds is written before the next begins; one that fails ends no other."""

    args: argparse.Namespace
    rows: list[Row] = field(default_factory=list)
    failed: int = 0
    left: int = 0

    def all(self, jobs: Sequence[tuple[int, Job]]) -> None:
        begin = time.monotonic()
        most = max(ranks for ranks, _ in jobs)
        with (
            daemon(most, self.args.device) as mps,
            tqdm(total=len(jobs), desc="windows", disable=None) as bar,
        ):
            for ranks in dict.fromkeys(ranks for ranks, _ in jobs):
                mine = [job for number, job in jobs if number == ranks]
                where = places(ranks, mps, self.args.device)
                with LocalRanks(ranks, JOB_SECONDS, peer_timeout=JOB_SECONDS / 2) as pool:
                    device = pool.run(device_name, where)[0]
                    for job in mine:
                        if time.monotonic() - begin > self.args.seconds:
                            self.left += 1
                        else:
                            self._one(pool, job, where, device)
                        bar.update()

    def _one(self, pool: LocalRanks, job: Job, where: PerRank, device: str) -> None:
        try:
            found = list(zip(*pool.run(work, job, where), strict=True))
        except RankFailed as error:
            print(f"{job}: {error}", file=sys.stderr, flush=True)
            self.failed += 1
            return
        points = ((ranks, graph) for ranks in found for graph in job.graphs)
        rows = [summarise(job, ranks, graph, device) for ranks, graph in points]
        self.rows += rows
        show(rows)
        write(self.args.out or RESULTS / f"{named('a2a', device)}.json", rows)


def write(path: Path, rows: Sequence[Row]) -> None:
    """Rows of the same points are replaced, others stay. Numbers keep four digits."""
    new = {row.key for row in rows}
    kept = [row for row in read_rows(path, Row) if row.key not in new] if path.exists() else []
    ordered = sorted([*kept, *rows], key=lambda row: row.key)
    made = [{k: _short(v) for k, v in asdict(row).items()} for row in ordered]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("[\n" + ",\n".join(map(json.dumps, made)) + "\n]\n", encoding="utf-8")
    part.replace(path)


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def show(rows: Sequence[Row]) -> None:
    header = ["tokens", "launch", "dispatch us", "combine us", "pair us", "MB", "limit us"]
    header += ["of limit", "dispatch", "combine", "pair faster than"]
    first = rows[0]
    print(
        f"\n{first.backend} {first.mode}, {first.ranks} ranks, H {first.hidden}, {first.payload}, "
        f"{first.device}; a meeting {first.meet_us:.1f} us"
    )
    cells = [
        [str(r.tokens), "graph" if r.graph else "single"]
        + [f"{us:.1f}" if r.graph else "" for us in (r.dispatch_us, r.combine_us)]
        + [f"{r.pair_us:.1f}", f"{r.bytes / 1e6:.2f}", f"{r.limit_us:.1f}", f"{r.of_limit:.0%}"]
        + [f"{of:.0%}" if r.graph else "" for of in (r.dispatch_of_limit, r.combine_of_limit)]
        + [", ".join(faster(r, peer) for peer in r.peers)]
        for r in rows
    ]
    print_table(header, cells)
    sys.stdout.flush()


def faster(row: Row, peer: Peer) -> str:
    """`DeepEP one by one 2.0x`."""
    return f"{peer.name} {LAUNCH[row.graph]} {peer.pair_us / row.pair_us:.1f}x"


def parse(words: Sequence[str], prog: str = PROG) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog, description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=TWINS)
    parser.add_argument("--ranks", type=positive, nargs="+", action=Distinct)
    parser.add_argument("--tokens", type=positive, nargs="+", action=Distinct, default=list(TOKENS))
    parser.add_argument("--hidden", type=positive, nargs="+", action=Distinct)
    several: dict[str, Any] = {"nargs": "+", "action": Distinct}
    parser.add_argument("--payload", choices=(*PAYLOADS, "int8", "mxfp4"), **several)
    parser.add_argument("--backends", choices=BACKENDS, default=list(BACKENDS)[:2], **several)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument(
        "--seconds", type=above_zero, default=225.0, help="no window is begun after so many"
    )
    parser.add_argument("--quick", action="store_true", help="4 ranks, H 2048, bf16, fewer rounds")
    parser.add_argument("--out", type=Path, help="JSON list; rows of other points stay")
    parser.add_argument(
        "--markdown", action="store_true", help="no run: what --out has, as tables for the docs"
    )
    args = parser.parse_args(words)
    if args.quick:
        args.rounds, args.seconds = min(args.rounds, 3), min(args.seconds, 45.0)
    return args


def main(words: Sequence[str] | None = None, prog: str = PROG) -> int:
    args = parse(sys.argv[1:] if words is None else words, prog)
    if args.markdown:
        rows = read_rows(args.out or RESULTS / OUT[args.device], Row)
        a2a_tables.report([asdict(row) for row in rows])
        return 0
    if args.device == "cuda" and (missing := cuda_missing()):
        raise SystemExit(f"this benchmark needs a CUDA device: {missing}; {TWINS}")
    try:
        jobs = jobs_of(args)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    check_out(args.out or RESULTS / "a2a.json")
    if args.out is not None and args.out.exists():
        read_rows(args.out, Row)  # before anything is measured that could not be written there
    run = Run(args)
    try:
        run.all(jobs)
    except KeyboardInterrupt:
        print("interrupted: what was measured is written", file=sys.stderr)
    if run.left:
        print(f"{run.left} windows were left out after {args.seconds:g} s: see --seconds")
    return 1 if run.failed or not run.rows else 0


if __name__ == "__main__":
    sys.exit(main())
