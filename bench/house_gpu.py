"""The house model on ranks that share a GPU: every backend and payload at ep 4 against one rank.

    python -m bench.house_grid --device cuda              # 50 problems of each task
    python -m bench.house_grid --device cuda --only 'bf16, deterministic'
    python -m bench.house_grid --device cuda --markdown   # what was measured, as a table
    python -m bench.house_gpu --device cpu --num 1        # the same without a GPU, slowly, and
                                     # bench/results/cpu_house.json, which git ignores

Each arrangement runs twice, greedily. In deterministic mode its texts must be those of one rank
that rounds rows to the same payload. In normal mode, where another order of sums may change a text,
it must score as one rank does that sends nothing: lost and won are problems that are right there
and wrong here, and the other way round, and p, of McNemar's exact test, is how probable so uneven a
pair is by chance. Engines run in processes of their own, `--jobs` at a time. The exit status is 1
if a text differs that must not, if any p is below 0.01, or if an arrangement failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from tqdm import tqdm

from bench.common import RESULTS, Distinct, complaints_in_a_line, positive, show_table
from bench.house import (
    BACKENDS,
    DETERMINISTIC,
    MOST_EXAMPLES,
    PAYLOADS,
    Case,
    Example,
    Row,
    Sheet,
    add_choice,
    arguments,
    ask,
    check_choice,
    draw,
    flips,
    house_parser,
    matching,
    open_sheet,
    question_of,
    read,
    reply_digest,
    show_errors,
    start,
    write,
)
from moesaic.config.devices import cuda_missing
from moesaic.config.resolve import MAX_RANKS_PER_NODE, resolve
from moesaic.engine.setup.memory_plan import check_plan
from moesaic.evals.figures import mcnemar
from moesaic.models.tiny import materialise
from moesaic.moe.backends import load_backends
from moesaic.moe.registry import A2A_REGISTRY

ONE = "1 rank"
PLAIN = PAYLOADS[0]
BITS = ", deterministic"
# Engines beside each other must not take all of the memory; few graphs are captured quickly.
ON_DEVICE = {
    "cuda": "--device cuda --dtype bfloat16 --max-total-tokens 32768 --max-running-requests 64 "
    "--chunked-prefill-size 2048 --cuda-graph-bs 4 16 64 --dist-timeout 120",
    "cpu": "--device cpu --dtype bfloat16",
}
OUT = {"cuda": "h200_house.json", "cpu": "cpu_house.json"}
ON_CPU = "the same on a CPU: python -m bench.house_gpu --device cpu"
ENGINE_SECONDS = 300.0
IMPROBABLE = 0.01


class Answers(msgspec.Struct, frozen=True):
    """What an engine said. `right`: a 1 or 0 for each problem. `gpu`: its name, of one rank."""

    replies: list[str]
    right: str
    seconds: float
    gpu: str = ""


class GpuSheet(Sheet):
    """`replies`: of every row that others are compared with, by its name."""

    replies: dict[str, list[str]] = msgspec.field(default_factory=dict)  # type: ignore[assignment]


@dataclass(frozen=True)
class GpuCase(Case):
    """`against`: the name of the row that it is compared with; its own if it is such a one."""

    against: str = ""

    @property
    def is_reference(self) -> bool:
        return self.name == self.against


def name_of(arrangement: str, payload: str, deterministic: bool) -> str:
    return f"{arrangement}, {payload}{BITS if deterministic else ''}"


def against_of(name: str) -> str:
    """In normal mode all are compared with one rank that rounds nothing."""
    payload = name.removesuffix(BITS).rpartition(", ")[2]
    return name_of(ONE, payload, True) if name.endswith(BITS) else name_of(ONE, PLAIN, False)


def cases(ranks: int = 4, backends: Sequence[str] = tuple(BACKENDS)) -> list[GpuCase]:
    """Rows that others are compared with come first, then what is asked for most."""
    load_backends()
    ep = f"ep {ranks}"
    dense = f"--tp {ranks} --ep {ranks}"
    groups = f"{dense} --dp {ranks} --enable-dp-attention"
    lines = {f"{ep} {name}": f"{groups} {BACKENDS[name]}" for name in backends}
    found = [_case(ONE, "", PLAIN, False)]
    found += [_case(ONE, "", payload, True) for payload in PAYLOADS]
    for deterministic in (True, False):
        found.append(_case(f"{ep} none, attention cut", dense, PLAIN, deterministic))
    sent = [(name, payload) for payload in PAYLOADS for name in lines]
    for name, payload in sent:
        backend = A2A_REGISTRY[arguments("", lines[name]).moe_a2a_backend]
        if payload in backend.payloads:
            found += [_case(name, lines[name], payload, bits) for bits in (True, False)]
    return found


def _case(arrangement: str, flags: str, payload: str, deterministic: bool) -> GpuCase:
    words = [
        flags,
        f"--deepep-dispatch-output-dtype {payload}",
        DETERMINISTIC if deterministic else "",
    ]
    name = name_of(arrangement, payload, deterministic)
    return GpuCase(name, " ".join(filter(None, words)), against=against_of(name))


def make_row(case: GpuCase, found: Answers, replies: Sequence[str]) -> Row:
    pairs = list(zip(replies, found.replies, strict=True))
    differing = [place for place, (first, this) in enumerate(pairs) if first != this]
    return Row(
        name=case.name,
        flags=case.flags,
        right=found.right,
        differing={place: reply_digest(pairs[place][1]) for place in differing},
        examples=[Example(place, *pairs[place]) for place in differing[:MOST_EXAMPLES]],
        seconds=round(found.seconds, 2),
    )


def serve(args: argparse.Namespace, case: GpuCase) -> Answers:
    """In this process."""
    problems = draw(args)
    flags = f"{ON_DEVICE[args.device]} {case.flags} {args.flags}"
    with start(args.model_path, flags) as engine:
        result = ask(engine, problems, args.max_new_tokens)
    gpu = args.device == "cuda" and case.is_reference
    return Answers(
        [output.reply for output in result.outputs],
        "".join("01"[output.right] for output in result.outputs),
        result.seconds,
        torch.cuda.get_device_name(0) if gpu else "",
    )


def serve_apart(words: Sequence[str], case: GpuCase, folder: Path) -> Answers:
    """In a process of its own; RuntimeError with what it said last if it fails."""
    part = folder / f"{reply_digest(case.name)}.json"
    command = [sys.executable, "-m", "bench.house_gpu", *words]
    command += ["--part", str(part), "--row", case.name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ENGINE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {ENGINE_SECONDS:g} s") from None
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-8:]))
    return msgspec.json.decode(part.read_bytes(), type=Answers)


Serve = Callable[[GpuCase], Answers]


def measure(sheet: GpuSheet, path: Path, todo: Sequence[GpuCase], serve: Serve, jobs: int) -> None:
    """Some at a time; written after every row. Those that others are compared with first."""
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(todo), desc=path.stem, unit="row") as bar:
        for first in (True, False):
            some = {pool.submit(serve, case): case for case in todo if case.is_reference == first}
            for future in as_completed(some):
                _take(sheet, some[future], future.result)
                write(path, sheet)
                bar.update()


def _take(sheet: GpuSheet, case: GpuCase, result: Callable[[], Answers]) -> None:
    try:
        found = result()
        if case.is_reference:
            sheet.replies[case.name] = found.replies
            sheet.machine |= {"gpu": found.gpu} if found.gpu else {}
        if case.against not in sheet.replies:
            raise RuntimeError(f"there is nothing to compare with: {case.against} failed")
        sheet.put(make_row(case, found, sheet.replies[case.against]))
    except (RuntimeError, OSError, msgspec.DecodeError) as error:
        sheet.replies.pop(case.name, None)  # those of an earlier run
        sheet.put(Row(case.name, case.flags, error=str(error)))


def left(sheet: GpuSheet, wanted: Sequence[GpuCase], again: bool) -> list[GpuCase]:
    """What is not measured yet, and what was compared with something that now is."""
    fresh = {case.name for case in wanted if again or not _is_there(sheet, case)}
    return [case for case in wanted if fresh & {case.name, case.against}]


def _is_there(sheet: GpuSheet, case: GpuCase) -> bool:
    row = sheet.row(case.name)
    return row is not None and not row.error and row.flags == case.flags


def wanted_of(every: Sequence[GpuCase], only: re.Pattern[str] | None) -> list[GpuCase]:
    """Those whose names match, with what they are compared with."""
    names = matching(every, only)
    needed = names | {case.against for case in every if case.name in names}
    return [case for case in every if case.name in needed]


def is_compared(sheet: GpuSheet, row: Row) -> bool:
    """Neither it failed, nor what it was compared with since then."""
    return not row.error and against_of(row.name) in sheet.replies


def judge(sheet: GpuSheet, row: Row) -> tuple[int, int, float]:
    """Lost, won, p: against one rank in normal mode that rounds nothing."""
    first = sheet.row(against_of(row.name))
    assert first is not None and first.right
    lost, won = flips(first, row)
    return lost, won, mcnemar(lost, won)


def faults(sheet: GpuSheet) -> Iterator[str]:
    for row in sheet.rows:
        if row.error:
            yield f"{row.name} failed: {row.last_words}"
        elif not is_compared(sheet, row):
            yield f"{row.name}: {against_of(row.name)} has failed since"
        elif row.name.endswith(BITS) and row.differing:
            yield f"{row.name}: {len(row.differing)} texts differ from those of one rank"
        elif not row.name.endswith(BITS) and (p := judge(sheet, row)[2]) < IMPROBABLE:
            yield f"{row.name}: scores otherwise than one rank, p = {p:.2g}"


def in_order(sheet: GpuSheet) -> list[Row]:
    """All rows, of whatever numbers of ranks, in the order of cases."""
    ranks = sorted({arguments("", row.flags).tp_size for row in sheet.rows})
    names = dict.fromkeys(case.name for number in ranks for case in cases(number))
    places = {name: place for place, name in enumerate(names)}
    return sorted(sheet.rows, key=lambda row: places.get(row.name, len(places)))


def report(sheet: GpuSheet, markdown: bool) -> None:
    """Both modes of an arrangement in one line."""
    header = ["arrangement, payload", "score", "lost", "won", "p", "same text"]
    header += ["deterministic: score", "texts ≠ 1 rank"]
    rows = in_order(sheet)
    told = {row.name: row for row in rows if is_compared(sheet, row)}
    lines = []
    for name in dict.fromkeys(row.name.removesuffix(BITS) for row in rows):
        lines.append([name, *_plain(sheet, told.get(name)), *_bits(told.get(name + BITS))])
    show_table(header, lines, markdown)
    if markdown:  # else they are told as faults
        show_errors(rows)


def _plain(sheet: GpuSheet, row: Row | None) -> list[str]:
    if row is None:
        return ["–"] * 5
    lost, won, p = judge(sheet, row)
    same = 1 - len(row.differing) / sheet.question.number
    return [f"{row.accuracy:.3f}", str(lost), str(won), f"{p:.2g}", f"{same:.1%}"]


def _bits(row: Row | None) -> list[str]:
    if row is None:
        return ["–"] * 2
    return [f"{row.accuracy:.3f}", str(len(row.differing))]


def parse(words: Sequence[str], prog: str = "") -> argparse.Namespace:
    parser = house_parser(__doc__, "house_gpu", num=50)
    parser.set_defaults(out=None)
    parser.prog = prog or parser.prog
    add_choice(parser, "those that they are compared with")
    parser.add_argument("--device", choices=tuple(ON_DEVICE), default="cuda", help=ON_CPU)
    parser.add_argument("--jobs", type=positive, default=6, help="engines at a time")
    parser.add_argument("--ranks", type=positive, default=4)
    parser.add_argument(
        "--backends", nargs="+", action=Distinct, choices=BACKENDS, default=list(BACKENDS)
    )
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = check_choice(parser, parser.parse_args(words))
    args.out = args.out or RESULTS / OUT[args.device]
    return args


def check(args: argparse.Namespace) -> None:
    """ValueError for what an engine of so many ranks would refuse."""
    if not 2 <= args.ranks <= MAX_RANKS_PER_NODE:
        raise ValueError(f"--ranks {args.ranks}: give 2 to {MAX_RANKS_PER_NODE}")
    ranks = " ".join(f"--{kind} {args.ranks}" for kind in ("tp", "ep", "dp"))
    flags = f"{ON_DEVICE[args.device]} {ranks} --enable-dp-attention {args.flags}"
    folder = materialise(args.model_path)
    check_plan(resolve(arguments(folder, flags)))


def main(argv: Sequence[str] | None = None, prog: str = "") -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    args = parse(words, prog)
    every, on_device = cases(args.ranks, args.backends), ON_DEVICE[args.device]
    if args.markdown:
        report(read(args.out, GpuSheet), markdown=True)
        return 0
    if args.device == "cuda" and (missing := cuda_missing()):
        raise SystemExit(f"this benchmark needs a CUDA device: {missing}; {ON_CPU}")
    if args.part is not None:
        case: Any = next(case for case in every if case.name == args.row)
        args.part.write_bytes(msgspec.json.encode(serve(args, case)))
        return 0
    wanted, question = wanted_of(every, args.only), question_of(args, draw(args), on_device)
    with complaints_in_a_line():
        check(args)
    sheet = open_sheet(args.out, question, GpuSheet)
    todo = left(sheet, wanted, args.again)
    with tempfile.TemporaryDirectory() as folder:
        apart = Path(folder)
        measure(sheet, args.out, todo, lambda case: serve_apart(words, case, apart), args.jobs)
    report(sheet, markdown=False)
    found = list(faults(sheet))
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
