"""Compares two results: which answers to the same problems changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from moesaic.evals.figures import mcnemar
from moesaic.evals.report import columns, name_of
from moesaic.evals.result import GradedReply, Result, by_task, score

MOST_SHOWN: Final = 20  # names of problems in one line
Key = tuple[Any, ...]
Pair = tuple[GradedReply, GradedReply]


def read_result(path: str) -> Result:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Result)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"--compare {path}: not a file of --out: {error}") from None


@dataclass(frozen=True)
class Comparison:
    pairs: list[Pair]  # problems in both results
    alone: tuple[int, int]  # problems only in A, only in B

    @property
    def differing(self) -> int:
        """Number of pairs with different texts."""
        return sum(a.reply != b.reply or a.failed != b.failed for a, b in self.pairs)

    @property
    def lost(self) -> list[GradedReply]:
        return [a for a, b in self.pairs if a.right and not b.right]

    @property
    def won(self) -> list[GradedReply]:
        return [a for a, b in self.pairs if b.right and not a.right]

    @property
    def p_value(self) -> float:
        return mcnemar(len(self.lost), len(self.won))


def compare(a: Result, b: Result) -> Comparison:
    """Pair replies by problem, in any order; repeated problems pair in their order."""
    others = dict(_keyed(b))
    pairs = [(output, others[key]) for key, output in _keyed(a) if key in others]
    left = len(a.outputs) - len(pairs), len(b.outputs) - len(pairs)
    return Comparison(pairs, left)


def _keyed(result: Result) -> list[tuple[Key, GradedReply]]:
    seen: Counter[Key] = Counter()
    found = []
    for output in result.outputs:
        key: Key = (output.task, output.prompt, output.messages, output.answer)
        found.append(((*key, seen[key]), output))
        seen[key] += 1
    return found


def block(names: tuple[str, str], a: Result, b: Result) -> str:
    """The printed comparison."""
    found = compare(a, b)
    sides = zip("AB", names, (a, b), strict=True)
    lines = [f"{side}: {name} ({name_of(of.target)})" for side, name, of in sides]
    lines.append(_problems(a, b, found))
    if not found.pairs:
        return "\n".join(lines)
    total, differing = len(found.pairs), found.differing
    same = f"all {total} texts are identical"
    lines += ["", _table(found), "", f"{differing} of {total} texts differ" if differing else same]
    for word, flipped in (
        ("right in A, wrong in B", found.lost),
        ("wrong in A, right in B", found.won),
    ):
        lines.append(f"{word}: {len(flipped)}{_names(flipped)}")
    lines.append(f"McNemar's exact p: {found.p_value:.4g}")
    return "\n".join(lines)


def _problems(a: Result, b: Result, found: Comparison) -> str:
    if a.data == b.data and not any(found.alone):
        return f"the same {len(found.pairs)} problems"
    left, right = found.alone
    return f"{len(found.pairs)} problems in common; {left} only in A, {right} only in B"


def _table(found: Comparison) -> str:
    """Accuracies on the problems in common."""
    sides = [by_task([pair[side] for pair in found.pairs]) for side in (0, 1)]
    if len(sides[0]) > 1:
        sides = [{**side, "all": [p[n] for p in found.pairs]} for n, side in enumerate(sides)]
    rows = [("task", "n", "accuracy A", "accuracy B", "B - A")]
    for task, outputs in sides[0].items():
        before, after = score(outputs).accuracy, score(sides[1][task]).accuracy
        gain = after - before
        rows.append(
            (name_of(task), str(len(outputs)), f"{before:.4f}", f"{after:.4f}", f"{gain:+.4f}")
        )
    return columns(rows)


def _names(outputs: list[GradedReply]) -> str:
    if not outputs:
        return ""
    names = [name_of(f"{output.task}/{output.id}") for output in outputs[:MOST_SHOWN]]
    more = [f"and {len(outputs) - MOST_SHOWN} more"] if len(outputs) > MOST_SHOWN else []
    return " (" + ", ".join([*names, *more]) + ")"
