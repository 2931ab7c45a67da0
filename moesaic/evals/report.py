"""The printed report of an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Final

import msgspec

from moesaic.evals.figures import Latency
from moesaic.evals.result import GradedReply, Result, TaskScore, by_task, score

HEAD: Final = ("task", "n", "accuracy", "95% interval", "invalid", "failed", "tokens", "p50", "p99")
LONGEST: Final = 1200  # shown characters of a reply
REPLACEMENT: Final = "�"
MOST_ERRORS: Final = 5  # shown messages


def table(result: Result) -> str:
    groups = by_task(result.outputs)
    rows = [_row(task, result.tasks[task], some) for task, some in groups.items()]
    if len(rows) > 1:
        rows.append(_row("all", score(result.outputs), result.outputs))
    return columns([HEAD, *rows]) + "\n\n" + _speed(result)


def _row(name: str, found: TaskScore, outputs: Sequence[GradedReply]) -> tuple[str, ...]:
    answered = [output for output in outputs if not output.failed]
    counts = [o.completion_tokens for o in answered if o.completion_tokens is not None]
    latency = Latency.of([output.latency_s for output in answered])
    return (
        name_of(name),
        str(found.n),
        f"{found.accuracy:.4f}",
        f"{found.ci_low:.4f}–{found.ci_high:.4f}",
        f"{found.invalid:.1%}",
        str(found.failed),
        f"{fmean(counts):.1f}" if counts else "-",
        _seconds(latency.p50),
        _seconds(latency.p99),
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _speed(result: Result) -> str:
    text = (
        f"{len(result.outputs)} problems in {result.seconds:.2f} s: "
        f"{result.requests_per_second:.2f} replies a second, "
        f"{result.output_throughput:.1f} tokens a second"
    )
    return text if result.complete else text + "; interrupted, so not all problems are in it"


def failures(result: Result, number: int) -> str:
    """The first wrong replies, shortened."""
    wrong = [output for output in result.outputs if not output.right and not output.failed]
    parts = [_failure(output) for output in wrong[:number]]
    return "\n".join([f"{len(wrong)} wrong replies, {len(parts)} shown", *parts])


def _failure(output: GradedReply) -> str:
    found = _shown(output.found or "nothing")
    wanted = f"wanted {_shown(output.answer)}, found {found} ({name_of(str(output.finish_reason))})"
    head = f"--- {name_of(output.task)} {name_of(output.id)}: {wanted}"
    return f"{head}\n{_shown(output.asked)}\n>>> {_shown(output.reply)}"


def _shown(text: str) -> str:
    """Without control characters, which could move a terminal's cursor."""
    text = text if len(text) <= LONGEST else text[:LONGEST] + " …"
    return "".join(char if char.isprintable() or char == "\n" else REPLACEMENT for char in text)


def name_of(text: str) -> str:
    """As `_shown`, in one line."""
    return _shown(text).replace("\n", REPLACEMENT)


def errors(result: Result) -> list[str]:
    """Why requests failed, the most frequent reasons first."""
    found = Counter(o.error for o in result.outputs if o.error is not msgspec.UNSET)
    if not found:
        return []
    lines = [f"  {count} x {name_of(message)}" for message, count in found.most_common(MOST_ERRORS)]
    return [f"{result.failed} requests failed and count as wrong:", *lines]
