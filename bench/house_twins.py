"""What fewer bits cost the house model: every weight format, and every payload between ranks.

    python -m bench.house_twins                      # 50 problems of each task
    python -m bench.house_twins --only '^nvfp4|payload'
    python -m bench.house_twins --only quantization  # needs no twins
    python -m bench.house_twins --markdown           # what was measured, as tables for the docs

Twins are written by the code of `moesaic quantize` into a temporary folder and run on one rank;
rows named `--quantization` round the experts of the bf16 folder while they load it, so that their
MB are those of that folder; payloads carry the rows of the bf16 model between 4 ranks. Lost and won
are problems that were right with bf16 on one rank and are wrong now, and the other way round; p is
McNemar's exact test of the two. Engines run in their normal mode, in which another arrangement
alone rounds otherwise: read a payload beside the bf16 row of the same backend. The model is so sure
of its replies that even 4 bits change next to none. "off by" shows how far a format really is from
bf16: by how many nats the logprob of a prompt's token differs on average. What a format or a
backend refuses is listed below the tables with its reason.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import fmean

from bench.common import show_table
from bench.house import (
    PAYLOADS,
    Case,
    Measured,
    Row,
    Sheet,
    accuracies,
    add_choice,
    ask,
    check_choice,
    chosen,
    draw,
    flips,
    house_parser,
    in_order,
    measure_all,
    open_sheet,
    question_of,
    read,
    show_errors,
    start,
)
from moesaic import Engine
from moesaic.cli.quantize import FORMATS
from moesaic.engine.setup.moe_setup import ONLINE
from moesaic.evals.figures import mcnemar
from moesaic.evals.tasks.problem import Problem
from moesaic.models.quantize import QuantizeJob, quantize
from moesaic.models.tiny import materialise

EP4 = "--tp 4 --ep 4 --enable-dp-attention --dp 4"
CARRIERS = {
    "deepep low_latency": "--moe-a2a-backend deepep --deepep-mode low_latency",
    "deepep normal": "--moe-a2a-backend deepep --deepep-mode normal",
    "mooncake": "--moe-a2a-backend mooncake",
    "mori": "--moe-a2a-backend mori",
    "flashinfer": "--moe-a2a-backend flashinfer",
    "none": "--moe-a2a-backend none",
}
SHOWN_PROMPTS = 120
BF16, FP32 = "--dtype bfloat16", "--dtype float32"


def twins() -> list[Case]:
    return [
        Case(f"{form}{words}", BF16, form, experts_only)
        for form in FORMATS
        for words, experts_only in (("", False), (", experts only", True))
    ]


def while_loading() -> list[Case]:
    return [
        Case(f"--quantization {choice}", f"{BF16} --quantization {choice}") for choice in ONLINE
    ]


def payloads() -> list[Case]:
    return [
        Case(
            f"payload {payload}, {carrier}",
            f"{BF16} {EP4} {flags} --deepep-dispatch-output-dtype {payload}",
        )
        for carrier, flags in CARRIERS.items()
        for payload in PAYLOADS
    ]


WEIGHTS = [Case("bf16", BF16), Case("fp32", FP32), *twins(), *while_loading()]
CASES = [*WEIGHTS, *payloads()]


@contextmanager
def weights_of(case: Case, model: str) -> Iterator[tuple[str, int]]:
    """A folder and the bytes of weights in it."""
    source = Path(materialise(model))
    if not case.form:
        yield model, sum(path.stat().st_size for path in source.glob("*.safetensors"))
        return
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "twin"
        written = quantize(source, target, QuantizeJob(case.form, experts_only=case.experts_only))
        yield str(target), written.bytes_after


def bytes_a_row(engine: Engine) -> float:
    """Sent to experts, on all ranks; 0 where nothing was."""
    traffic = [one for rank in engine.get_stats().ranks for one in rank.traffic.values()]
    rows = sum(one.dispatch_rows for one in traffic)
    return sum(one.dispatch_bytes for one in traffic) / rows if rows else 0.0


def prompt_logprobs(engine: Engine, problems: Sequence[Problem]) -> list[float]:
    """Of all tokens of the prompts. What comes next is open in them, where in replies it is
    certain: they show roundings that change no reply."""
    assert engine.tokenizer is not None
    messages = [[{"role": "user", "content": problem.prompt}] for problem in problems]
    chats = map(engine.tokenizer.apply_chat_template, messages)
    answers = engine.generate(
        input_ids=[engine.tokenizer.encode(chat, add_special_tokens=False) for chat in chats],
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
    )
    assert isinstance(answers, list)
    return [
        entry[0]
        for answer in answers
        for entry in answer["meta_info"]["input_token_logprobs"]
        if entry[0] is not None  # of the first token
    ]


def mean_gap(ones: Sequence[float], others: Sequence[float]) -> float:
    return fmean(abs(one - other) for one, other in zip(ones, others, strict=True))


def run(args: argparse.Namespace, cases: Sequence[Case] = CASES) -> Sheet:
    problems = draw(args)
    wanted = chosen(cases, args.only)
    sheet = open_sheet(args.out, question_of(args, problems), Sheet)
    some = problems[:: max(1, len(problems) // SHOWN_PROMPTS)]

    @cache
    def exact() -> list[float]:
        with start(args.model_path, f"{BF16} {args.flags}") as engine:
            return prompt_logprobs(engine, some)

    def measure(case: Case) -> Measured:
        with (
            weights_of(case, args.model_path) as (folder, size),
            start(folder, f"{case.flags} {args.flags}") as engine,
        ):
            result = ask(engine, problems, args.max_new_tokens)
            figures = {"bytes": float(size), "bytes_a_row": bytes_a_row(engine)}
            logprobs = prompt_logprobs(engine, some)
        return Measured(result, figures | {"gap": mean_gap(exact(), logprobs)})

    measure_all(sheet, args.out, wanted, measure, args.again)
    return sheet


def line_of(first: Row, row: Row, sheet: Sheet, size: str) -> list[str]:
    tasks = sheet.question.tasks
    if row.error:
        return [row.name, *["–"] * (len(tasks) + 8)]
    lost, won = flips(first, row)
    scores = [*accuracies(row, tasks).values(), row.accuracy]
    return [
        row.name,
        size,
        *(f"{score:.3f}" for score in scores),
        f"{100 * (row.accuracy - first.accuracy):+.2f}",
        str(lost),
        str(won),
        f"{mcnemar(lost, won):.2g}",
        f"{1 - len(row.differing) / sheet.question.number:.1%}",
        f"{row.figures['gap']:.3f}",
    ]


def report(sheet: Sheet, markdown: bool) -> None:
    tasks = list(sheet.question.tasks)
    tail = [*tasks, "all", "points", "lost", "won", "p", "same text", "off by"]
    first = sheet.row(CASES[0].name)
    assert first is not None and not first.error
    rows = [
        line_of(first, row, sheet, f"{row.figures.get('bytes', 0) / 1e6:.2f}")
        for row in in_order(sheet, WEIGHTS)
    ]
    show_table(["weights", "MB", *tail], rows, markdown)
    rows = [
        line_of(first, row, sheet, f"{row.figures.get('bytes_a_row', 0):.0f}")
        for row in in_order(sheet, CASES[len(WEIGHTS) :])
    ]
    print()
    show_table(["payload", "bytes a row", *tail], rows, markdown)
    print()
    show_errors(in_order(sheet, CASES))


def main() -> int:
    parser = house_parser(__doc__, "house_twins", num=50)
    add_choice(parser)
    args = check_choice(parser, parser.parse_args())
    if args.markdown:
        report(read(args.out, Sheet), markdown=True)
        return 0
    report(run(args), markdown=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
