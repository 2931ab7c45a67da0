"""The house model in every arrangement of ranks: the same text for every problem, the same score.

    python -m bench.house_grid                       # 50 problems of each task
    python -m bench.house_grid --only 'ep 4' --again
    python -m bench.house_grid --markdown            # what was measured, as a table for the docs
    python -m bench.house_grid --device cuda --help  # ranks that share a GPU: bench/house_gpu.py

All engines run in deterministic mode, greedily, which promises the bits of one rank on every mesh.
The exit status is 1 if any text differs or any arrangement failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench import house_gpu
from bench.common import device_option, parse_on_cpu, show_table
from bench.house import (
    BACKENDS,
    DETERMINISTIC,
    Case,
    Measured,
    Row,
    Sheet,
    accuracies,
    add_choice,
    arguments,
    ask,
    check_choice,
    chosen,
    draw,
    house_parser,
    in_order,
    measure_all,
    open_sheet,
    question_of,
    read,
    show_errors,
    start,
)

DPA = "--enable-dp-attention --dp"
DEEPEP = "--moe-a2a-backend deepep"


def over_backends() -> list[Case]:
    attentions = {"": "", ", dp 2": f" {DPA} 2", ", dp 4": f" {DPA} 4"}
    return [
        Case(f"ep 4 {name}{words}", f"--tp 4 --ep 4 {flags}{more}")
        for words, more in attentions.items()
        for name, flags in BACKENDS.items()
    ]


CASES = [
    Case("1 rank"),
    Case("1 rank, runner deep_gemm", "--moe-runner-backend deep_gemm"),
    Case("1 rank, runner cutlass", "--moe-runner-backend cutlass"),
    Case("2 replicas", "--dp 2"),
    Case("pp 2", "--pp 2"),
    Case("pp 4", "--pp 4"),
    Case("pp 2, ep 2 none", "--pp 2 --tp 2 --ep 2"),
    Case("pp 2, ep 2 deepep", f"--pp 2 --tp 2 --ep 2 {DEEPEP}"),
    Case("pp 2, ep 2 deepep, dp 2", f"--pp 2 --tp 2 --ep 2 {DEEPEP} {DPA} 2"),
    Case("ep 2 none", "--tp 2 --ep 2"),
    Case("ep 2 deepep, dp 2", f"--tp 2 --ep 2 {DEEPEP} {DPA} 2"),
    Case("ep 2 of tp 4, none", "--tp 4 --ep 2"),
    Case("ep 2 of tp 4, none, dp 4", f"--tp 4 --ep 2 {DPA} 4"),
    *over_backends(),
    Case("ep 8 none", "--tp 8 --ep 8"),
    Case("ep 8 deepep, dp 8", f"--tp 8 --ep 8 {DEEPEP} {DPA} 8"),
    Case("ep 8 deepep, dp 4", f"--tp 8 --ep 8 {DEEPEP} {DPA} 4"),
]


def attention_tp(row: Row) -> int:
    args = arguments("", row.flags)
    return args.tp_size // args.dp_size if args.enable_dp_attention else args.tp_size


def faults(sheet: Sheet) -> list[str]:
    """What must not be: rows without a result, or with other texts than one rank's."""
    found = []
    for row in sheet.rows:
        if row.error:
            found.append(f"{row.name} failed: {row.last_words}")
        elif row.differing:
            found.append(f"{row.name}: {len(row.differing)} texts differ from those of one rank")
    return found


def report(sheet: Sheet, markdown: bool) -> None:
    tasks = list(sheet.question.tasks)
    header = ["arrangement", "attention TP", *tasks, "all", "texts ≠ 1 rank", "s"]
    lines = []
    for row in in_order(sheet, CASES):
        cut = attention_tp(row)
        if row.error:
            lines.append([row.name, str(cut), *["–"] * (len(tasks) + 3)])
            continue
        scores = [*accuracies(row, sheet.question.tasks).values(), row.accuracy]
        lines.append(
            [row.name, str(cut)]
            + [f"{score:.3f}" for score in scores]
            + [str(len(row.differing)), f"{row.seconds:.0f}"]
        )
    show_table(header, lines, markdown)
    if markdown:  # else they are told as faults
        show_errors(in_order(sheet, CASES))


def run(args: argparse.Namespace, cases: Sequence[Case] = CASES) -> Sheet:
    problems, wanted = draw(args), chosen(cases, args.only)
    sheet = open_sheet(args.out, question_of(args, problems), Sheet)

    def measure(case: Case) -> Measured:
        with start(args.model_path, f"{case.flags} {DETERMINISTIC} {args.flags}") as engine:
            return Measured(ask(engine, problems, args.max_new_tokens), {})

    measure_all(sheet, args.out, wanted, measure, args.again)
    return sheet


def main(words: Sequence[str] | None = None) -> int:
    where, rest = device_option("house_grid").parse_known_args(words)
    if where.device == "cuda":
        return house_gpu.main(rest, "python -m bench.house_grid --device cuda")
    return on_cpu(rest)


def on_cpu(words: Sequence[str]) -> int:
    parser = house_parser(__doc__, "house_grid", 50, [device_option("house_grid")])
    add_choice(parser)
    args = check_choice(parser, parse_on_cpu(parser, words))
    if args.markdown:
        report(read(args.out, Sheet), markdown=True)
        return 0
    sheet = run(args)
    report(sheet, markdown=False)
    found = faults(sheet)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
