"""`moesaic balance`: compares placements of experts on recorded or generated routing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.cli.balance_args import BalanceCommandArgs, RoutingArgs
from moesaic.cli.common import requires_extra
from moesaic.config.flags import specs
from moesaic.config.parser import FlagParser, merge, read_config

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from moesaic.balance.compare import Comparison, Row
    from moesaic.balance.problem import Floats, Ints

    Bools = npt.NDArray[np.bool_]

DESCRIPTION = """\
Compare placements of experts, without a model and without a server: how evenly ranks would be
loaded, what would have to be fetched, and how long a step would take.

LOADS is a file with recorded routing:
  .pt    a dump of the expert distribution recorder, of this server or of SGLang
  .json  the same: logical_count [steps, layers, experts], or the records of passes
  .npz   data: the top-k ids [tokens, k] of one layer, or [layers, tokens, k]
The first half of its steps is planned from, the second half judges. Without LOADS routing is
generated: experts follow Zipf's law in a random order; then popularity drifts, and every step adds
noise. The current placement there is the one planned before the drift.

  moesaic balance --ep 32 --redundant 0 32
  moesaic balance trace.npz --ep 8 --redundant 16 --num-experts 128 --algorithms auto deepseek
  moesaic balance counts.json --ep 16 --redundant 32 --out placement.json --plot heat.png
  moesaic balance counts.json --ep 16 --redundant 32 --current placement.json

max/mean is the load of the fullest rank over the mean (1 is perfect), averaged over steps and
layers; split: the same if every step split tokens between replicas to spare the fullest rank.
Fetched slots hold an expert that was not on their rank in the current placement. Times
of a step and of the move are predictions for the experts alone, by the figures under "Hardware"."""
USAGE = "moesaic balance [LOADS] [flags]"
PICTURES = (".png", ".svg", ".pdf")
ALGORITHMS = ("auto", "deepseek", "deepseek_vec")


def run(argv: Sequence[str]) -> int:
    parser = FlagParser("moesaic balance", USAGE, DESCRIPTION)
    parser.add_argument("loads", metavar="LOADS", nargs="?", help="recorded routing; put it first")
    parser.add_flags(BalanceCommandArgs)
    given = parser.parse(argv)
    file = read_config(BalanceCommandArgs, given["config"])
    args = merge(BalanceCommandArgs, given, file)
    _check_targets(args)
    if given["loads"] is not None:
        _refuse_generator_flags({**file, **given})
    steps, used = _recorded(given["loads"], args)
    comparison = _comparison(steps, used, args)
    rows = _compare(comparison, args)
    print(_heading(given["loads"], comparison))
    print(_table(rows))
    for line in _reasons(rows):
        print(line)
    _write(rows, comparison, used, args)
    return 0


def _check_targets(args: BalanceCommandArgs) -> None:
    """Before anything slow."""
    from moesaic.evals.data import check_target

    if args.out is not None and Path(args.out).suffix != ".json":
        raise ValueError(f"--out {args.out}: give a file that ends in .json")
    if args.plot is not None and Path(args.plot).suffix not in PICTURES:
        raise ValueError(f"--plot {args.plot}: give a file that ends in {', '.join(PICTURES)}")
    for name, path in (("--out", args.out), ("--plot", args.plot), ("--json", args.json)):
        if path is not None:
            check_target(name, path)
    if args.plot is not None:
        with requires_extra("--plot", "bench", "matplotlib"):
            import matplotlib  # noqa: F401


def _refuse_generator_flags(given: dict[str, Any]) -> None:
    own = [spec.name for spec in specs(RoutingArgs).values() if spec.field in given]
    if unused := [name for name in own if name != "--num-experts"]:
        raise ValueError(f"{', '.join(unused)}: for generated routing, and LOADS is given")


def _recorded(loads: str | None, args: BalanceCommandArgs) -> tuple[Floats | None, Bools | None]:
    """The recorded steps, without layers that have no rows in any (those without experts), and
    which layers have some."""
    import numpy as np

    from moesaic.balance.files import read_loads

    if loads is None:
        return None, None
    steps = read_loads(Path(loads), args.num_experts, args.step_tokens)
    used: Bools = np.asarray(steps.any((0, 2)))
    if not used.any():
        raise ValueError(f"{loads} has no rows of any expert: record while requests run")
    return steps[:, used], used


def _comparison(steps: Floats | None, used: Bools | None, args: BalanceCommandArgs) -> Comparison:
    from moesaic.balance.compare import Comparison, StepModel
    from moesaic.balance.routing import RoutingModel

    before = current = None
    if steps is None:
        model = RoutingModel(
            args.num_layers, args.num_experts or 256, args.top_k, args.tokens, args.zipf,
            args.drift, args.noise, args.domain_switch, args.seed,
        )  # fmt: skip
        before, after = model.phases(2)
        plan, judge = model.steps(after, args.steps, 1), model.steps(after, args.steps, 2)
    else:
        half = len(steps) // 2
        plan, judge = (steps[:half], steps[half:]) if half else (steps, steps)
    if args.current is not None:
        before, current = None, _current(args, plan, used)
    size = 3 * args.hidden_size * args.intermediate_size
    step = StepModel(
        size * args.weight_bytes, 2 * size, args.tflops * 1e12, args.memory_gb_s * 1e9,
        args.link_gb_s * 1e9, args.horizon,
    )  # fmt: skip
    return Comparison(
        plan, judge, args.ep_size, args.num_groups, args.nnodes, before, current, args.windows,
        args.objective, args.target, args.max_fetches, step,
    )  # fmt: skip


def _current(args: BalanceCommandArgs, loads_SLE: Floats, used: Bools | None) -> Ints:
    """The placement of --current, without layers that have no experts."""
    from moesaic.balance.files import read_placement
    from moesaic.balance.problem import check_placement

    assert args.current is not None
    current_LP = read_placement(Path(args.current))
    if used is not None and len(current_LP) == len(used):
        current_LP = current_LP[used]
    _, layers, experts = loads_SLE.shape
    try:
        for redundant in args.redundant or (0,):
            check_placement(current_LP, layers, experts, experts + redundant)
    except ValueError as error:
        raise ValueError(f"--current {args.current}: {error}") from None
    return current_LP


def _compare(comparison: Comparison, args: BalanceCommandArgs) -> list[Row]:
    from tqdm import tqdm

    from moesaic.balance.compare import compare

    redundancies, algorithms = args.redundant or (0,), args.algorithms or ALGORITHMS
    experts, ranks = comparison.judge_SLE.shape[2], comparison.ranks
    most = experts * (ranks - 1)
    if max(redundancies) > most:
        raise ValueError(
            f"--redundant {max(redundancies)}: with {most} each of {ranks} ranks has all {experts} "
            "experts; give at most that"
        )
    total = len(redundancies) * (1 + len(algorithms))
    off = True if args.disable_tqdm else None
    with tqdm(total=total, desc="placements", leave=False, disable=off) as bar:
        return compare(comparison, redundancies, algorithms, bar.update)


def _heading(loads: str | None, comparison: Comparison) -> str:
    steps, layers, experts = comparison.judge_SLE.shape
    seen = _several(len(comparison.plan_SLE), "step")
    same = comparison.plan_SLE is comparison.judge_SLE
    how = "planned from and judged by" if same else f"planned from {seen}, judged by"
    return (
        f"{loads or 'generated routing'}: {_several(layers, 'layer')} of {experts} experts on "
        f"{_several(comparison.ranks, 'rank')}; {how} {_several(steps, 'step')}"
    )


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _table(rows: Sequence[Row]) -> str:
    header = (
        "redundant", "placement", "balancedness", "max/mean", "split", "fetched", "GB", "step ms",
        "move ms", "plan ms",
    )  # fmt: skip
    cells = [
        (
            str(row.redundant),
            row.algorithm,
            f"{row.balancedness:.3f}",
            f"{row.max_over_mean:.3f}",
            f"{row.split:.3f}",
            f"{row.fetched_share:.1%}",
            f"{row.fetched_bytes / 1e9:.2f}",
            f"{row.step_ms:.3f}",
            f"{row.move_ms:.1f}",
            f"{row.plan_ms:.1f}" if row.plan_ms else "",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (header, *cells)
    )


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Why `auto` took what it took, each once."""
    found = [f"{row.algorithm}: {row.reason}" for row in rows if row.algorithm.startswith("auto:")]
    return list(dict.fromkeys(found))


def _all_layers(slots_LP: Ints, used: Bools | None, experts: int) -> Ints:
    """A placement of all layers of the model: trivial in those that have no experts."""
    from moesaic.balance.problem import trivial_placement

    if used is None:
        return slots_LP
    whole_LP = trivial_placement(len(used), experts, slots_LP.shape[1])
    whole_LP[used] = slots_LP
    return whole_LP


def _write(
    rows: Sequence[Row], comparison: Comparison, used: Bools | None, args: BalanceCommandArgs
) -> None:
    from moesaic.balance.compare import best_of
    from moesaic.balance.files import write_placement
    from moesaic.evals.data import write_whole

    best = best_of(rows, args.horizon)
    if args.json is not None:
        table = [asdict(row) for row in rows]
        for row in table:
            del row["slots_LP"]
        write_whole(Path(args.json), json.dumps(table, indent=1).encode() + b"\n")
        print(f"wrote {args.json}")
    if args.out is not None:
        experts = comparison.judge_SLE.shape[2]
        write_placement(Path(args.out), _all_layers(best.slots_LP, used, experts))
        print(f"wrote {args.out}: {best.algorithm} with {best.redundant} redundant slots")
    if args.plot is not None:
        from moesaic.cli.balance_picture import draw

        before = next(row for row in rows if row.redundant == best.redundant)
        draw(args.plot, comparison, before, best)
        print(f"wrote {args.plot}")
