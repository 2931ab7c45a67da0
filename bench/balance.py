"""How well experts are placed, how little moves, and how long planning takes.

    python -m bench.balance                                   # generated routing
    python -m bench.balance --traces FOLDER --ranks 8         # and top-k ids of .npz files
    python -m bench.balance --quick --out /tmp/balance.json   # fewer layers, draws and repeats
    python -m bench.balance --markdown                        # what was measured, as tables

Generated routing: experts follow Zipf's law in a random order for each layer; popularity drifts by
a lognormal factor, or experts trade places (a domain switch); every step has a lognormal factor of
its own and is drawn from a multinomial. Recorded routing of the house model is that of
bench/results/house_routing.json: planned for one task, then another task comes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.common import RESULTS, check_out, complaints_in_a_line, machine, positive, show_table
from moesaic.balance.algorithms import make_plan
from moesaic.balance.budget import predicted_balance, replica_budget
from moesaic.balance.compare import rank_reads
from moesaic.balance.files import read_loads
from moesaic.balance.problem import (
    BalanceProblem,
    Floats,
    Ints,
    duplicates,
    fetched_slots,
    max_over_mean,
    rank_loads,
    trivial_placement,
)
from moesaic.balance.routing import RoutingModel
from moesaic.balance.split import split_by_step

HOUSE = RESULTS / "house_routing.json"
SHAPES = ((128, 16, 8), (256, 32, 16), (256, 32, 32))
PLANNED = ("incremental", "deepseek", "deepseek_vec")
# Chosen so that the trivial placement and DeepSeek's greedy come out at TensorRT-LLM's published
# (max - mean) / mean of ranks, 1.564 and 0.109: DeepSeek-R1, EP32, 288 slots.
PUBLISHED = RoutingModel(zipf=0.624, noise=0.113, tokens=4096)
# With redundant slots and ranks.
STEP_MODELS = (
    ("published point, 256+32/32", PUBLISHED, 32, 32),
    ("noise 0.4, 256+32/32", RoutingModel(), 32, 32),
    ("noise 0.4, 128+16/8", RoutingModel(experts=128, tokens=1024), 16, 8),
)


@dataclass(frozen=True)
class Case:
    """Popularity before and after a change; [draws × layers, experts]."""

    name: str
    before_LE: Floats
    after_LE: Floats
    redundant: int
    ranks: int


def peak(load_LE: Floats, slots_LP: Ints, ranks: int) -> Floats:
    return max_over_mean(rank_loads(load_LE[None], slots_LP, ranks))[0]


def generated(args: argparse.Namespace) -> Iterator[Case]:
    for experts, redundant, ranks in SHAPES:
        for name, drift, switch in (("drift 0.3", 0.3, 0.0), ("switch 25%", 0.0, 0.25)):
            phases = [
                RoutingModel(
                    args.layers, experts, drift=drift, domain_switch=switch, seed=seed
                ).phases(2)
                for seed in range(args.draws)
            ]
            before, after = (np.concatenate(part) for part in zip(*phases, strict=True))
            yield Case(f"{name}, {experts}+{redundant}/{ranks}", before, after, redundant, ranks)


def house() -> Iterator[Case]:
    """Each task of the house model follows another; on 4 and 8 ranks."""
    domains = json.loads(HOUSE.read_text())["domains"]
    loads = [np.array(list(d["counts"].values()), np.float32) for d in domains.values()]
    pairs = [(a, b) for a in loads for b in loads if a is not b]
    before, after = (np.concatenate(part) for part in zip(*pairs, strict=True))
    for ranks in (4, 8):
        for redundant in (0, ranks):
            name = f"house model, {before.shape[1]}+{redundant}/{ranks}"
            yield Case(name, before, after, redundant, ranks)


def traces(args: argparse.Namespace) -> Iterator[Case]:
    """The second half of each file follows the first."""
    for path in sorted(args.traces.glob("*.npz")):
        loads = read_loads(path, step_tokens=1)
        half, experts = len(loads) // 2, loads.shape[2]
        before, after = loads[:half].sum(0), loads[half:].sum(0)
        for ranks in args.ranks:
            for redundant in (-experts % ranks, -experts % ranks + 2 * ranks):
                yield Case(f"{path.stem}, {experts}+{redundant}/{ranks}", before, after, redundant,
                           ranks)  # fmt: skip


def moves(case: Case) -> Iterator[dict[str, Any]]:
    """What each algorithm makes of the change, from a placement planned before it."""
    experts = case.before_LE.shape[1]
    slots, ranks = experts + case.redundant, case.ranks
    start = make_plan("incremental", BalanceProblem(case.before_LE[None], slots, ranks)).slots_LP
    problem = BalanceProblem(case.after_LE[None], slots, ranks, current_LP=start)
    for name in ("stale", *PLANNED):
        found = start if name == "stale" else make_plan(name, problem).slots_LP
        peak_L = peak(case.after_LE, found, ranks)
        fetched_L = fetched_slots(start, found, ranks, experts).mean(1)
        yield {
            "case": case.name,
            "algorithm": name,
            "max_over_mean": float(peak_L.mean()),
            "worst_layer": float(peak_L.max()),
            "fetched": float(fetched_L.mean()),
            "worst_fetched": float(fetched_L.max()),
            "duplicates": duplicates(found, ranks),
        }


def steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Single steps of a steady load: even split between replicas, and a split for every step."""
    for name, model, redundant, ranks in STEP_MODELS:
        model = RoutingModel(**{**vars(model), "layers": args.step_layers})
        (load,) = model.phases(1)
        seen, judged = model.steps(load, 32, 1), model.steps(load, args.steps, 2)
        slots = model.experts + redundant
        problem = BalanceProblem(seen.mean(0, keepdims=True), slots, ranks)
        found = {"trivial": trivial_placement(args.step_layers, model.experts, model.experts)}
        found |= {plan: make_plan(plan, problem).slots_LP for plan in ("deepseek", "incremental")}
        for plan, slots_LP in found.items():
            even = max_over_mean(rank_loads(judged, slots_LP, ranks)) - 1
            split = max_over_mean(split_by_step(judged, slots_LP, ranks)) - 1
            yield {
                "case": name,
                "algorithm": plan,
                "over_mean_even": float(even.mean()),
                "over_mean_split": float(split.mean()),
            }


def budgets(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Layers of unlike skew: as many redundant slots for each, against half as many where they
    serve most."""
    ranks, layers = 16, min(32, 4 * args.step_layers)
    skews = np.linspace(0.2, 1.2, layers)
    load = np.concatenate([RoutingModel(1, 256, zipf=float(skew)).phases(1)[0] for skew in skews])
    uniform = predicted_balance(load, ranks, 1)
    yield {"budget": "none", "slots": 0, "max_over_mean": float(uniform[0].mean())}
    every = {"slots": layers * ranks, "max_over_mean": float(uniform[1].mean())}
    yield {"budget": "a slot a rank in every layer", **every}
    for share in (0.7, 0.5):
        given, found = replica_budget(load, ranks, int(share * layers))
        yield {
            "budget": f"{share:.0%} of them, by benefit",
            "slots": int(given.sum()) * ranks,
            "max_over_mean": float(found.mean()),
        }


def reads(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Distinct experts that the fullest rank reads in a small decode step, 128+16/8."""
    for tokens in (8, 32, 128):
        model = RoutingModel(args.step_layers, 128, tokens=tokens, zipf=1.0, noise=0.2)
        (load,) = model.phases(1)
        judged = model.steps(load, args.steps, 2)
        for objective in ("tokens", "experts"):
            problem = BalanceProblem(load[None], 144, 8, objective=objective)
            slots_LP = make_plan("incremental", problem).slots_LP
            most = float(rank_reads(judged, slots_LP, 8).max(2).mean())
            yield {"tokens": tokens, "objective": objective, "most_reads": most}


def timed(plan: Callable[[], object], repeats: int) -> dict[str, float]:
    wall, cpu = [], []
    for _ in range(repeats):
        begin, used = time.perf_counter(), time.process_time()
        plan()
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - used)
    return {
        "best_ms": 1e3 * min(wall),
        "median_ms": 1e3 * float(np.median(wall)),
        "cpu_ms": 1e3 * float(np.median(cpu)),
    }


def plan_times(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """58 layers of 256 experts, 288 slots, 32 ranks, after a drift."""
    before, after = RoutingModel(58, 256).phases(2)
    start = make_plan("incremental", BalanceProblem(before[None], 288, 32)).slots_LP
    problem = BalanceProblem(after[None], 288, 32, current_LP=start)
    for name in PLANNED:
        figures = timed(lambda name=name: make_plan(name, problem), args.repeats)  # type: ignore[misc]
        yield {"algorithm": name, **figures}
    fresh = BalanceProblem(before[None], 288, 32)
    figures = timed(lambda: make_plan("incremental", fresh), args.repeats)
    yield {"algorithm": "incremental, nothing placed", **figures}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cases = [*generated(args), *house(), *(traces(args) if args.traces else ())]
    moved = [row for case in tqdm(cases, desc="balance", unit="case") for row in moves(case)]
    threads = len(os.sched_getaffinity(0))
    return {
        "machine": {**machine(threads), "numpy": np.__version__},
        "layers": args.layers,
        "draws": args.draws,
        "moves": moved,
        "steps": list(steps(args)),
        "budgets": list(budgets(args)),
        "reads": list(reads(args)),
        "plan_times": list(plan_times(args)),
    }


def show(found: dict[str, Any], markdown: bool) -> None:
    header = ["after a change", "placement", "max/mean", "worst layer", "fetched", "worst", "twins"]
    rows = [
        [
            row["case"], row["algorithm"], f"{row['max_over_mean']:.3f}",
            f"{row['worst_layer']:.3f}", f"{row['fetched']:.1%}", f"{row['worst_fetched']:.1%}",
            str(row["duplicates"]),
        ]
        for row in found["moves"]
    ]  # fmt: skip
    show_table(header, rows, markdown)
    print()
    header = ["(max - mean) / mean of a step", "placement", "even split", "split by step"]
    rows = [
        [row["case"], row["algorithm"], f"{row['over_mean_even']:.3f}",
         f"{row['over_mean_split']:.3f}"]
        for row in found["steps"]
    ]  # fmt: skip
    show_table(header, rows, markdown)
    print()
    header = ["redundant slots, 256 experts on 16 ranks", "slots", "max/mean"]
    rows = [
        [row["budget"], str(row["slots"]), f"{row['max_over_mean']:.4f}"]
        for row in found["budgets"]
    ]
    show_table(header, rows, markdown)
    print()
    header = ["tokens of a step", "objective", "experts read by the fullest rank"]
    rows = [
        [str(row["tokens"]), row["objective"], f"{row['most_reads']:.2f}"] for row in found["reads"]
    ]
    show_table(header, rows, markdown)
    print()
    header = ["58 layers, 256+32/32", "best ms", "median ms", "CPU ms"]
    rows = [
        [row["algorithm"], *(f"{row[key]:.1f}" for key in ("best_ms", "median_ms", "cpu_ms"))]
        for row in found["plan_times"]
    ]
    show_table(header, rows, markdown)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.balance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=positive, default=58, help="of the generated routing")
    parser.add_argument("--draws", type=positive, default=3, help="seeds of the generated routing")
    parser.add_argument("--steps", type=positive, default=100, help="that judge single steps")
    parser.add_argument("--repeats", type=positive, default=50, help="of timed plans")
    parser.add_argument("--traces", type=Path, help="folder with .npz files of top-k ids")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[8], help="for the traces")
    parser.add_argument("--quick", action="store_true", help="4 layers, 1 draw, 8 steps, 2 repeats")
    parser.add_argument("--markdown", action="store_true", help="tables of what --out has")
    parser.add_argument("--out", type=Path, default=RESULTS / "balance.json")
    args = parser.parse_args(argv)
    if args.markdown:
        show(json.loads(args.out.read_text()), markdown=True)
        return
    check_out(args.out)
    args.step_layers = 2 if args.quick else args.layers
    if args.quick:
        args.layers, args.draws, args.steps, args.repeats = 4, 1, 8, 2
    with complaints_in_a_line():
        found = measure(args)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    show(found, markdown=False)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
