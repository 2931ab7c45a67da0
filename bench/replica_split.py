"""How evenly ranks are loaded in single steps, by how tokens choose among replicas.

    python -m bench.replica_split                  # on generated routing
    python -m bench.replica_split --quick          # fewer layers and steps
    python -m bench.replica_split --markdown       # what was measured, as tables
    python -m bench.replica_split --device cuda    # how long the kernels of `lp` take

Routing is that of bench.balance: planned from 32 steps, judged by others. `lp` is the function that
the service runs on CPU, the twin of its kernels, with whole numbers of pairs. For `static` every
rank sends an equal part of each expert's pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.balance import STEP_MODELS
from bench.common import RESULTS, check_out, complaints_in_a_line, machine, positive, show_table
from moesaic.balance.algorithms import make_plan
from moesaic.balance.problem import BalanceProblem, Floats, Ints, max_over_mean, rank_loads
from moesaic.balance.routing import RoutingModel
from moesaic.balance.split import split_by_step
from moesaic.kernels.routing import replica_of_row
from moesaic.kernels.split import ReplicaTable, count_pairs, fill_replicas, take_replicas
from moesaic.kernels.timing import measure
from moesaic.moe.placement import EpLayout, Placement
from moesaic.moe.replicas import SourceRank, nearest_replicas
from moesaic.moe.step_split import replica_rows

PLANS = ("deepseek", "incremental")
Choice = Callable[[torch.Tensor, int, int], torch.Tensor]
REPLICAS = (2, 3, 4, 8)


def table_of(placement: Placement, ranks: int, device: str = "cpu") -> ReplicaTable:
    rows = replica_rows(placement, EpLayout(len(placement.slots), ranks))
    return ReplicaTable(*(torch.tensor(r, dtype=torch.int32, device=device) for r in rows))


def placement_of(slots_P: Ints, experts: int) -> Placement:
    return Placement(experts, tuple(int(expert) for expert in slots_P))


def lp_loads(steps_SE: Floats, placement: Placement, ranks: int) -> Floats:
    """[S, D]: pairs of ranks, as the service splits them."""
    table = table_of(placement, ranks)
    several = table.several_R[table.several_R >= 0].long()
    fixed_ED = ((table.slots_ED >= 0) & (table.single_E >= 0)[:, None]).long()
    loads = []
    for step_E in torch.from_numpy(steps_SE).int():
        ends_ED = fill_replicas(step_E[None], table, 0).long()
        quota_RD = ends_ED[several].diff(dim=1, prepend=torch.zeros(len(several), 1).long())
        loads.append(step_E.long() @ fixed_ED + quota_RD.sum(0))
    return torch.stack(loads).numpy().astype(np.float32)


def static_loads(steps_SE: Floats, placement: Placement, ranks: int) -> Floats:
    """[S, D]: expected pairs of ranks where each rank takes the nearest replica, on nodes of 8."""
    nodes = tuple(rank // 8 for rank in range(ranks))
    share_ED = np.zeros((placement.num_experts, ranks), np.float32)
    for rank in range(ranks):
        source = SourceRank(EpLayout(len(placement.slots), ranks, 1, rank), nodes)
        for expert, (slot,) in enumerate(nearest_replicas(placement, source)):
            share_ED[expert, source.group_of(slot)] += 1 / ranks
    return steps_SE @ share_ED


def by_layer(
    loads: Callable[[Floats, Placement, int], Floats],
    steps_SLE: Floats,
    slots_LP: Ints,
    ranks: int,
) -> Floats:
    found = [
        loads(steps_SLE[:, layer], placement_of(slots_P, steps_SLE.shape[2]), ranks)
        for layer, slots_P in enumerate(slots_LP)
    ]
    return np.stack(found, 1)


def step_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name, model, redundant, ranks in STEP_MODELS:
        model = RoutingModel(**{**vars(model), "layers": args.layers})
        (load,) = model.phases(1)
        seen, judged = model.steps(load, 32, 1), model.steps(load, args.steps, 2)
        problem = BalanceProblem(seen.mean(0, keepdims=True), model.experts + redundant, ranks)
        for plan in PLANS:
            slots_LP = make_plan(plan, problem).slots_LP
            begin = time.process_time()
            lp = by_layer(lp_loads, judged, slots_LP, ranks)
            seconds = time.process_time() - begin
            loads = {
                "static": by_layer(static_loads, judged, slots_LP, ranks),
                "dynamic": rank_loads(judged, slots_LP, ranks),
                "lp": lp,
                "fractions": split_by_step(judged, slots_LP, ranks),
            }
            peaks = {key: float(max_over_mean(found).mean()) for key, found in loads.items()}
            split_ms = 1e3 * seconds / (args.layers * args.steps)
            yield {"case": name, "placement": plan, **peaks, "lp_cpu_ms": split_ms}


def shared_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A shared expert beside the routed ones: where ranks compute it for their own tokens, and
    where `--enable-waterfill` sends its pairs to the ranks with the fewest."""
    for name, model, most, ranks in STEP_MODELS:
        model = RoutingModel(**{**vars(model), "layers": args.layers})
        (load,) = model.phases(1)
        seen, judged = model.steps(load, 32, 1), model.steps(load, args.steps, 2)
        tokens_SL1 = judged.sum(2, keepdims=True) / model.top_k
        for redundant in (0, most):
            problem = BalanceProblem(seen.mean(0, keepdims=True), model.experts + redundant, ranks)
            slots_LP = make_plan("incremental", problem).slots_LP
            own_SL1, wide = tokens_SL1 / ranks, np.concatenate((judged, tokens_SL1), 2)
            wide_LP = np.array(
                [
                    placement_of(row, model.experts).with_everywhere(1, ranks).slots
                    for row in slots_LP
                ]
            )
            loads = {
                "own_dynamic": rank_loads(judged, slots_LP, ranks) + own_SL1,
                "own_lp": by_layer(lp_loads, judged, slots_LP, ranks) + own_SL1,
                "waterfill": by_layer(lp_loads, wide, wide_LP, ranks),
            }
            peaks = {key: float(max_over_mean(found).mean()) for key, found in loads.items()}
            yield {"case": name, "redundant": redundant, **peaks}


def by_turns(row: torch.Tensor, count: int, rank: int) -> torch.Tensor:
    return row % count


def by_golden(row: torch.Tensor, count: int, rank: int) -> torch.Tensor:
    return replica_of_row(row, torch.tensor(count))


def by_golden_and_rank(row: torch.Tensor, count: int, rank: int) -> torch.Tensor:
    return (replica_of_row(row, torch.tensor(count)) + rank) % count


def row_peak(choice: Choice, rows: int, period: int, ranks: int, draws: int) -> float:
    """Max/mean over an expert's replicas: half of every `period`-th row of each rank takes it."""
    generator, peaks = torch.Generator().manual_seed(0), []
    for count in REPLICAS:
        for _ in range(draws):
            taken = torch.zeros(count, dtype=torch.int64)
            for rank in range(ranks):
                row = torch.arange(0, rows, period)
                row = row[torch.rand(len(row), generator=generator) < 0.5]
                taken += choice(row, count, rank).bincount(minlength=count)
            if int(taken.sum()):
                peaks.append(float(taken.max()) * count / float(taken.sum()))
    return float(np.mean(peaks))


def row_splits(draws: int) -> Iterator[dict[str, Any]]:
    choices = {"turns": by_turns, "golden": by_golden, "golden_and_rank": by_golden_and_rank}
    for ranks, rows, period in ((1, 64, 1), (1, 64, 4), (1, 512, 2), (8, 1, 1), (8, 16, 1)):
        found = {
            name: row_peak(choice, rows, period, ranks, draws) for name, choice in choices.items()
        }
        yield {"ranks": ranks, "rows": rows, "period": period, **found}


def kernel_times() -> Iterator[dict[str, Any]]:
    """Microseconds of the three kernels, without the exchange of counts."""
    for name, model, redundant, ranks in STEP_MODELS[1:]:
        model = RoutingModel(**{**vars(model), "layers": 1})
        (load,) = model.phases(1)
        problem = BalanceProblem(load[None], model.experts + redundant, ranks)
        slots_LP = make_plan("incremental", problem).slots_LP
        table = table_of(placement_of(slots_LP[0], model.experts), ranks, "cuda")
        popularity = torch.from_numpy(load[0]).cuda()
        for rows in (16, 128, 4096):
            ids = torch.multinomial(popularity.expand(rows, -1), model.top_k).int()
            counts = count_pairs(ids, model.experts)
            counts_PE = counts.count_E.expand(ranks, -1).contiguous()
            ends = fill_replicas(counts_PE, table, 1)
            works = {
                "count_us": partial(count_pairs, ids, model.experts),
                "fill_us": partial(fill_replicas, counts_PE, table, 1),
                "take_us": partial(take_replicas, ids, counts, ends, table),
            }
            times = {key: measure(work, flush=False) for key, work in works.items()}
            yield {"case": name, "rows": rows, **times}


def figures(args: argparse.Namespace) -> dict[str, Any]:
    if args.device == "cuda":
        return {"device": torch.cuda.get_device_name(), "kernels": list(kernel_times())}
    return {
        "machine": machine(len(os.sched_getaffinity(0))),
        "layers": args.layers,
        "steps": args.steps,
        "single_steps": list(step_rows(args)),
        "shared_experts": list(shared_rows(args)),
        "rows": list(row_splits(args.draws)),
    }


def show(found: dict[str, Any], markdown: bool) -> None:
    for rows in found.values():
        if isinstance(rows, list):
            header = [name.replace("_", " ") for name in rows[0]]
            cells = [
                [f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()]
                for row in rows
            ]
            show_table(header, cells, markdown)
            print()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.replica_split",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=positive, default=58, help="of the generated routing")
    parser.add_argument("--steps", type=positive, default=30, help="that judge single steps")
    parser.add_argument("--draws", type=positive, default=200, help="of rows that take an expert")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="2 layers, 4 steps, 20 draws")
    parser.add_argument("--markdown", action="store_true", help="tables of what --out has")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(argv)
    name = "replica_split.json" if args.device == "cpu" else "h200_replica_split.json"
    out = args.out or RESULTS / name
    if args.markdown:
        show(json.loads(out.read_text()), markdown=True)
        return
    check_out(out)
    if args.quick:
        args.layers, args.steps, args.draws = 2, 4, 20
    with complaints_in_a_line():
        found = figures(args)
    out.write_text(json.dumps(found, indent=1) + "\n")
    show(found, markdown=False)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
