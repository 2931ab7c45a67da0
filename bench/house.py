"""Shared parts of the house model's measurements: problems, engines, and a sheet of rows on disk.

A sheet belongs to one model, one state of the code, one set of problems and one way to ask them.
A row is one arrangement; what is there is not measured again. The first row is the one with which
all others are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tqdm import tqdm

import moesaic
from bench.common import RESULTS, check_out, complaints_in_a_line, machine, positive
from moesaic import Engine
from moesaic.config.args import ServerArgs
from moesaic.config.parser import FlagParser, merge
from moesaic.config.resolve import resolve
from moesaic.evals.ask import Options
from moesaic.evals.data import draw_tasks, write_whole
from moesaic.evals.result import Result, digest
from moesaic.evals.run import evaluate
from moesaic.evals.tasks.problem import Problem
from moesaic.models.config import RawConfig
from moesaic.models.tiny import materialise

MODEL = Path(__file__).parents[1] / "models" / "house-moe"
MOST_EXAMPLES = 3
DETERMINISTIC = "--enable-deterministic-inference"
BACKENDS = {
    "none": "--moe-a2a-backend none",
    "deepep normal": "--moe-a2a-backend deepep --deepep-mode normal",
    "deepep low_latency": "--moe-a2a-backend deepep --deepep-mode low_latency",
    "deepep auto": "--moe-a2a-backend deepep --deepep-mode auto",
    "mooncake": "--moe-a2a-backend mooncake",
    "mori": "--moe-a2a-backend mori",
    "flashinfer": "--moe-a2a-backend flashinfer",
    "ascend_fuseep": "--moe-a2a-backend ascend_fuseep",
}
PAYLOADS = ("bf16", "fp8", "int8", "nvfp4", "mxfp4")
T = TypeVar("T")
# A machine with fewer cores than ranks may keep one of them waiting for long.
COMMON = "--log-level warning --dist-timeout 600"


class Question(msgspec.Struct, frozen=True):
    """What rows must have in common to stand in one sheet. `tasks`: how many problems of each, in
    the order in which they are asked."""

    model: str
    weights: str
    code: str
    data: str
    tasks: dict[str, int]
    seed: int
    max_new_tokens: int
    flags: str

    @property
    def number(self) -> int:
        return sum(self.tasks.values())


class Example(msgspec.Struct, frozen=True):
    place: int
    first: str
    this: str


class Row(msgspec.Struct, frozen=True):
    """`right`: a 1 or 0 for each problem. `differing`: places of the replies that are not those of
    the first row, with their digests; `examples`: some of them. `error`: why there is nothing."""

    name: str
    flags: str
    right: str = ""
    differing: dict[int, str] = {}
    examples: list[Example] = []
    figures: dict[str, float] = {}
    seconds: float = 0.0
    error: str = ""

    @property
    def accuracy(self) -> float:
        return self.right.count("1") / len(self.right)

    @property
    def last_words(self) -> str:
        """Of its error, which may be the end of a log."""
        return self.error.strip().rpartition("\n")[2]


class Sheet(msgspec.Struct):
    """`replies`: those of the first row."""

    question: Question
    machine: dict[str, Any]
    replies: list[str] = []
    rows: list[Row] = []

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)

    def put(self, row: Row) -> None:
        self.rows = [other for other in self.rows if other.name != row.name] + [row]


S = TypeVar("S", bound=Sheet)


@dataclass(frozen=True)
class Case:
    """`form`: of a twin to be made first; the weights as they are if empty."""

    name: str
    flags: str = ""
    form: str = ""
    experts_only: bool = False


@dataclass(frozen=True)
class Measured:
    result: Result
    figures: dict[str, float]


Measure = Callable[[Case], Measured]


def arguments(model: str, flags: str) -> ServerArgs:
    parser = FlagParser("moesaic serve", "moesaic serve MODEL [flags]", "")
    parser.add_flags(ServerArgs)
    given = parser.parse(f"{COMMON} {flags}".split())
    return merge(ServerArgs, {**given, "model_path": model}, {})


def start(model: str, flags: str) -> Engine:
    return Engine(**asdict(arguments(model, flags)))


def weights_hash(folder: Path) -> str:
    """Of all files that decide what a model says."""
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in {".json", ".safetensors", ".jinja"}:
            found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def code_hash() -> str:
    """Of the package: rows of other code do not stand in the same sheet."""
    found = hashlib.sha256()
    root = Path(moesaic.__file__).parent
    for path in sorted(root.rglob("*.py")):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def ask(engine: Engine, problems: Sequence[Problem], max_new_tokens: int) -> Result:
    """All problems at once, greedily. What a request cannot be asked is an error of the whole."""
    result = evaluate(engine, problems, Options(max_new_tokens=max_new_tokens, progress=False))
    if not result.complete:
        raise KeyboardInterrupt
    errors = [output.error for output in result.outputs if output.failed]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(problems)} requests failed: {errors[0]}")
    return result


def reply_digest(reply: str) -> str:
    return hashlib.sha256(reply.encode()).hexdigest()[:16]


def make_row(case: Case, found: Measured, replies: Sequence[str]) -> Row:
    """Compared with the replies of the first row."""
    pairs = list(zip(replies, found.result.outputs, strict=True))
    differing = [place for place, (first, this) in enumerate(pairs) if first != this.reply]
    return Row(
        name=case.name,
        flags=case.flags,
        right="".join("01"[output.right] for output in found.result.outputs),
        differing={place: reply_digest(pairs[place][1].reply) for place in differing},
        examples=[
            Example(place, pairs[place][0], pairs[place][1].reply)
            for place in differing[:MOST_EXAMPLES]
        ],
        figures=found.figures,
        seconds=round(found.result.seconds, 2),
    )


def flips(first: Row, this: Row) -> tuple[int, int]:
    """Problems right in the first and wrong in this, and the other way round."""
    pairs = list(zip(first.right, this.right, strict=True))
    return pairs.count(("1", "0")), pairs.count(("0", "1"))


def accuracies(row: Row, tasks: dict[str, int]) -> dict[str, float]:
    found, begin = {}, 0
    for task, number in tasks.items():
        found[task] = row.right[begin : begin + number].count("1") / number
        begin += number
    return found


def measure_all(
    sheet: Sheet, path: Path, cases: Sequence[Case], measure: Measure, again: bool
) -> None:
    """Measures what the sheet does not have, and writes it after every row. A row that fails says
    why, and the others go on; without the first there is nothing to compare with."""
    with tqdm(cases, desc=path.stem, unit="row") as bar:
        for number, case in enumerate(bar):
            bar.set_postfix_str(case.name)
            old = sheet.row(case.name)
            if old is not None and not old.error and old.flags == case.flags and not again:
                continue
            _measure_one(sheet, case, measure, is_first=number == 0)
            write(path, sheet)


def _measure_one(sheet: Sheet, case: Case, measure: Measure, is_first: bool) -> None:
    try:
        found = measure(case)
    except Exception as error:
        if is_first:
            raise
        sheet.put(Row(case.name, case.flags, error=f"{type(error).__name__}: {error}"))
        return
    if is_first:
        replies = [output.reply for output in found.result.outputs]
        if replies != sheet.replies:  # the others were compared with something else
            sheet.replies, sheet.rows = replies, []
    sheet.put(make_row(case, found, sheet.replies))


def read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise SystemExit(f"{path} cannot be read: {error}; measure first, or name --out") from None


def write(path: Path, content: msgspec.Struct) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def open_sheet(path: Path, question: Question, kind: type[S]) -> S:
    """The one on disk if it is of this question, else a new one; the other is kept beside it."""
    check_out(path)
    if path.exists():
        sheet = read(path, kind)
        if sheet.question == question:
            return sheet
        fields = question.__struct_fields__
        others = [
            name for name in fields if getattr(question, name) != getattr(sheet.question, name)
        ]
        print(f"{path} has another {', '.join(others)}: starting anew, that is {keep(path)} now")
    return kind(question, machine(len(os.sched_getaffinity(0))))


def keep(path: Path) -> Path:
    """A copy beside it, in no other's place."""
    content = path.read_bytes()
    names = (path.with_name(f"{path.name}.old{number or ''}") for number in count())
    free = next(name for name in names if not name.exists() or name.read_bytes() == content)
    free.write_bytes(content)
    return free


def matching(cases: Sequence[Case], only: re.Pattern[str] | None) -> set[str]:
    """Their names; SystemExit where there is none."""
    names = {case.name for case in cases if only is None or only.search(case.name)}
    if only is not None and not names:
        some = ", ".join(repr(case.name) for case in (cases[0], cases[-1]))
        raise SystemExit(f"--only {only.pattern!r}: no row has such a name; there are {some}, …")
    return names


def chosen(cases: Sequence[Case], only: re.Pattern[str] | None) -> list[Case]:
    """The first, and those whose names match."""
    names = matching(cases, only)
    return [case for case in cases if case is cases[0] or case.name in names]


def in_order(sheet: Sheet, cases: Sequence[Case]) -> list[Row]:
    rows = [sheet.row(case.name) for case in cases]
    return [row for row in rows if row is not None]


def house_parser(
    doc: str | None, name: str, num: int, parents: Sequence[argparse.ArgumentParser] = ()
) -> argparse.ArgumentParser:
    """`name`: of the module, and of the file that it writes."""
    parser = argparse.ArgumentParser(
        f"python -m bench.{name}",
        description=(doc or "").partition("\n")[0],
        parents=parents,
        allow_abbrev=False,
    )
    parser.add_argument("--model-path", default=str(MODEL))
    parser.add_argument("--tasks", default="all", metavar="A,B|all")
    parser.add_argument("--num", type=positive, default=num, help="problems of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=positive, default=256)
    parser.add_argument("--flags", default="", help="of the engine, for every row")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    parser.add_argument(
        "--markdown", action="store_true", help="measure nothing: print what --out holds"
    )
    return parser


def add_choice(parser: argparse.ArgumentParser, others: str = "the first") -> None:
    how = f"rows whose names match, and {others}"
    parser.add_argument("--only", metavar="REGEX", type=pattern, help=how)
    parser.add_argument("--again", action="store_true", help="also what is measured already")


def check_choice(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """What is chosen is what is measured; a table has all rows, and the first among them."""
    if args.markdown and (args.only or args.again):
        parser.error("--markdown prints all that --out holds: leave out --only and --again")
    return args


def pattern(word: str) -> re.Pattern[str]:
    """Type of an argument."""
    try:
        return re.compile(word)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{word!r} is no regular expression: {error}") from None


def show_errors(rows: Sequence[Row]) -> None:
    for row in rows:
        if row.error:
            print(f"- {row.name}: {row.last_words}")


def question_of(args: argparse.Namespace, problems: Sequence[Problem], flags: str = "") -> Question:
    """`flags`: in front of those given. SystemExit for a model or flags that no engine takes."""
    flags = f"{flags} {args.flags}".strip()
    with complaints_in_a_line():
        folder = Path(materialise(args.model_path))
        RawConfig.read(folder)
        resolve(arguments(args.model_path, flags))
    tasks: dict[str, int] = {}
    for problem in problems:
        tasks[problem.task] = tasks.get(problem.task, 0) + 1
    return Question(
        model=args.model_path if args.model_path.startswith("tiny:") else folder.name,
        weights=weights_hash(folder),
        code=code_hash(),
        data=digest(problems),
        tasks=tasks,
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
        flags=flags,
    )


def draw(args: argparse.Namespace) -> list[Problem]:
    with complaints_in_a_line():
        return draw_tasks(args.tasks, args.seed, args.num)
