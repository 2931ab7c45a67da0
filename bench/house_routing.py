"""Where the tokens of each task go: shares of experts, balance over ranks, distance of domains.

    python -m bench.house_routing                    # 200 problems of each task, and the picture
    python -m bench.house_routing --num 2 --out small.json     # and small.png beside it
    python -m bench.house_routing --markdown         # what was measured, as tables for the docs

Prompts and greedy replies on one rank, without a prefix cache, so that every token is counted.
Balancedness is the mean over the greatest: of the tokens of ranks that hold contiguous experts, and
of the experts' own. It is 1 where all get the same. The distance of two tasks is the total
variation of their shares, half the sum of the differences, averaged over layers: 0 for the same
experts, 1 for others altogether.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from bench.common import check_out, machine, show_table, spare_larger
from bench.house import Question, ask, draw, house_parser, question_of, read, start, write
from moesaic import Engine
from moesaic.evals.result import by_task
from moesaic.observe.expert_load import balancedness, expert_loads

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "house_routing.png"
RANKS = (4, 8)
MIX = "all"
Counts = dict[int, list[int]]
"""Of each layer, tokens of each expert."""


class Domain(msgspec.Struct, frozen=True):
    """`tokens`: prompt tokens and those of replies that were computed."""

    n: int
    accuracy: float
    tokens: int
    counts: Counts


class Routing(msgspec.Struct, frozen=True):
    question: Question
    machine: dict[str, Any]
    domains: dict[str, Domain]


def counted(engine: Engine) -> Counts:
    return {load.layer: load.experts for load in expert_loads(engine.get_stats())}


def minus(after: Counts, before: Counts) -> Counts:
    return {
        layer: [new - old for new, old in zip(tokens, before[layer], strict=True)]
        for layer, tokens in after.items()
    }


def added(parts: Sequence[Counts]) -> Counts:
    return {
        layer: [sum(tokens) for tokens in zip(*(part[layer] for part in parts), strict=True)]
        for layer in parts[0]
    }


def shares(tokens: Sequence[int]) -> list[float]:
    return [number / sum(tokens) for number in tokens]


def balance(tokens: Sequence[int], ranks: int) -> float:
    """Of ranks that hold contiguous experts, as many each."""
    each, rest = divmod(len(tokens), ranks)
    if rest:
        raise ValueError(f"{len(tokens)} experts cannot be laid evenly on {ranks} ranks")
    loads = {rank: sum(tokens[rank * each : (rank + 1) * each]) for rank in range(ranks)}
    found = balancedness(loads)
    if found is None:
        raise ValueError("no tokens were counted")
    return found


def distance(one: Counts, other: Counts) -> float:
    """Total variation of the shares, averaged over layers."""
    found = [
        sum(abs(a - b) for a, b in zip(shares(one[layer]), shares(other[layer]), strict=True)) / 2
        for layer in one
    ]
    return sum(found) / len(found)


def measure(args: argparse.Namespace) -> Routing:
    problems = draw(args)
    question = question_of(args, problems)
    domains: dict[str, Domain] = {}
    with start(args.model_path, f"--disable-radix-cache {args.flags}") as engine:
        for task in tqdm(question.tasks, desc="house_routing", unit="task"):
            before = counted(engine)
            result = ask(engine, [p for p in problems if p.task == task], args.max_new_tokens)
            # The last token of a reply is never computed.
            tokens = sum(
                (out.prompt_tokens or 0) + (out.completion_tokens or 0) - 1
                for out in by_task(result.outputs)[task]
            )
            counts = minus(counted(engine), before)
            domains[task] = Domain(len(result.outputs), result.accuracy, tokens, counts)
    return Routing(question, machine(len(os.sched_getaffinity(0))), domains)


def with_mix(domains: Mapping[str, Domain]) -> dict[str, Counts]:
    found = {name: domain.counts for name, domain in domains.items()}
    return {**found, MIX: added(list(found.values()))}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def balances(counts: Counts) -> dict[str, list[float]]:
    """Of each layer: over ranks, and over the experts themselves."""
    experts = len(next(iter(counts.values())))
    ways = {f"{ranks} ranks": ranks for ranks in RANKS if experts % ranks == 0}
    return {
        words: [balance(tokens, ranks) for tokens in counts.values()]
        for words, ranks in {**ways, "experts": experts}.items()
    }


def report(routing: Routing, markdown: bool) -> None:
    domains = with_mix(routing.domains)
    layers = list(domains[MIX])
    rows = [
        [name, words, f"{mean(found):.3f}", *(f"{value:.3f}" for value in found)]
        for name, counts in domains.items()
        for words, found in balances(counts).items()
    ]
    show_table(
        ["tokens of", "balancedness of", "mean", *(f"layer {n}" for n in layers)], rows, markdown
    )
    print()
    names = list(routing.domains)
    rows = [
        [name, *(f"{distance(domains[name], domains[other]):.3f}" for other in names)]
        for name in names
    ]
    show_table(["distance", *names], rows, markdown)
    print()
    rows = [
        [name, str(domain.n), str(domain.tokens), f"{domain.accuracy:.3f}", _hottest(domain.counts)]
        for name, domain in routing.domains.items()
    ]
    show_table(["task", "problems", "tokens", "accuracy", "hottest experts"], rows, markdown)


def _hottest(counts: Counts) -> str:
    """One of each layer, with its share."""
    found = []
    for layer, tokens in counts.items():
        most = max(range(len(tokens)), key=tokens.__getitem__)
        found.append(f"{layer}/{most} {tokens[most] / sum(tokens):.1%}")
    return ", ".join(found)


def paint(path: Path, domains: Mapping[str, Counts], title: str) -> None:
    """Layers × experts of each domain, one colour scale for all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    grids = {
        name: [[100 * share for share in shares(tokens)] for tokens in counts.values()]
        for name, counts in domains.items()
    }
    experts = len(next(iter(grids.values()))[0])
    most = max(max(row) for grid in grids.values() for row in grid)
    lines = -(-len(grids) // 2)
    figure, axes = pyplot.subplots(
        lines, 2, figsize=(15, 1.2 + 1.5 * lines), layout="constrained", squeeze=False
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    for axis, (name, grid) in zip(axes.flat, grids.items(), strict=False):
        image = axis.imshow(grid, cmap="viridis", vmin=0, vmax=most, aspect="auto")
        _label(axis, name, domains[name], experts)
    for axis in list(axes.flat)[len(grids) :]:
        axis.axis("off")
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=30)
    bar.set_label("% of the layer's tokens × top-k; white: an even share")
    bar.ax.axhline(100 / experts, color="white", linewidth=1.5)  # where all would be alike
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _label(axis: Any, name: str, counts: Counts, experts: int) -> None:
    found = balances(counts)
    words = ", ".join(f"{mean(values):.2f} over {way}" for way, values in found.items())
    axis.set_title(f"{name}: balancedness {words}", loc="left", fontsize=10)
    axis.set_yticks(range(len(counts)), [f"layer {layer}" for layer in counts])
    axis.set_xticks(range(experts), [str(number) for number in range(experts)], fontsize=7)
    axis.set_xlabel("expert", fontsize=8)
    axis.tick_params(length=0)
    if experts % RANKS[0] == 0:  # where a rank of 4 ends
        for edge in range(experts // RANKS[0], experts, experts // RANKS[0]):
            axis.axvline(edge - 0.5, color="white", linewidth=1.5)


def _problems_of(old: dict[str, Any]) -> int:
    return sum(domain["n"] for domain in old["domains"].values())


def main() -> int:
    parser = house_parser(__doc__, "house_routing", num=200)
    parser.add_argument("--picture", type=Path, help="unset: that of the docs, or beside --out")
    parser.add_argument(
        "--again", action="store_true", help="replace a file measured with more problems, too"
    )
    usual = parser.get_default("out")
    args = parser.parse_args()
    if args.markdown:
        report(read(args.out, Routing), markdown=True)
        return 0
    picture = args.picture or (PICTURE if args.out == usual else args.out.with_suffix(".png"))
    spare_larger(args.out, len(draw(args)), _problems_of, args.again)
    check_out(args.out)
    routing = measure(args)
    write(args.out, routing)
    paint(picture, with_mix(routing.domains), f"{routing.question.model}: where tokens go")
    report(routing, markdown=False)
    print(f"wrote {args.out} and {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
