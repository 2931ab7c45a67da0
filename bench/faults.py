"""Faults in every kind of process and phase: when they are named, when all requests have an answer,
what is left behind.

    python -m bench.faults                # all cases, about six minutes
    python -m bench.faults --quick        # a dozen of them
    python -m bench.faults --markdown     # no run: the tables of docs/reliability.md from the JSON

Every case starts the product anew, with the ranks of bench.faulty_rank, which are the engine's own
and can be told to raise, and ends with a look at processes, folders, sockets and shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from tqdm import tqdm

from bench.common import RESULTS, machine, print_table, write_json
from bench.fault_cases import (
    DP_LEADER,
    FOLLOWER,
    FORK_SERVER,
    LAST,
    LEADER,
    PHASES,
    RANKS,
    SUPERVISOR,
    Case,
    Outcome,
    Pause,
    outcome,
    pause,
)
from bench.fault_commands import CLIENT, CommandCase, command_outcome

RANK_FAULTS: Final = ("kill -9", "SIGSTOP", "exception")
# An error in a step does not end the service any more: tests/e2e/test_rank_isolation.py.
OUTSIDE_STEPS: Final = ("start", "idle")
RANK_CASES: Final = [
    Case(v, fault, phase)
    for v in RANKS
    for fault in RANK_FAULTS
    for phase in (OUTSIDE_STEPS if fault == "exception" else PHASES)
]
OTHER_CASES: Final = [
    Case(FOLLOWER, "lock held", "decode"),
    Case(FOLLOWER, "lock held", "idle"),
    Case(FOLLOWER, "stuck", "decode"),
    *(Case(SUPERVISOR, f, phase) for f in RANK_FAULTS[:2] for phase in ("start", "decode", "idle")),
    Case(FORK_SERVER, "kill -9", "decode"),
]
COMMAND_CASES: Final = [
    CommandCase(("rank1",), "kill -9"),
    CommandCase(("rank1",), "exception", "start"),
    CommandCase(("supervisor",), "kill -9"),
    CommandCase((CLIENT,), "SIGINT"),
    CommandCase((CLIENT,), "SIGTERM"),
    CommandCase((CLIENT,), "kill -9"),
    CommandCase((CLIENT,), "SIGINT", "start"),
    CommandCase((CLIENT,), "kill -9", "start"),
    CommandCase((CLIENT, "supervisor"), "kill -9"),
    CommandCase(("rank1",), "kill -9", "decode", "serve"),
]
QUICK: Final[list[Case | CommandCase]] = [
    Case(LEADER, "kill -9", "start"),
    Case(LEADER, "exception", "idle"),
    Case(FOLLOWER, "SIGSTOP", "prefill"),
    Case(DP_LEADER, "kill -9", "decode"),
    Case(LAST, "kill -9", "idle"),
    Case(SUPERVISOR, "kill -9", "decode"),
    CommandCase(("rank1",), "kill -9"),
    CommandCase((CLIENT,), "kill -9"),
]
PAUSE_SECONDS: Final = 5


def main() -> int:
    args = parse_args()
    if args.markdown:
        print(markdown(json.loads((RESULTS / "faults.json").read_text())))
        return 0
    everything: list[Case | CommandCase] = [*RANK_CASES, *OTHER_CASES, *COMMAND_CASES]
    cases = QUICK if args.quick else everything
    found = []
    with tqdm(total=len(cases) + 1, desc="faults", unit="case") as bar:
        for case in cases:
            found.append(_one(case))
            bar.update()
        paused = pause(FOLLOWER, PAUSE_SECONDS)
        bar.update()
    payload = {
        "machine": {**machine(1), "cores": len(os.sched_getaffinity(0))},
        "outcomes": [asdict(o) for o in found],
        "pause": {"seconds": PAUSE_SECONDS, **asdict(paused)},
    }
    _print(found, paused)
    write_json("faults_quick" if args.quick else "faults", payload)
    return _judge(found, paused)


def _one(case: Case | CommandCase) -> Outcome:
    try:
        return outcome(case) if isinstance(case, Case) else command_outcome(case)
    except Exception as error:
        raise RuntimeError(f"{case}: {error}") from error


def _print(found: Sequence[Outcome], paused: Pause) -> None:
    rows = [[f"{o.victim} ({o.layout})", o.fault, o.phase, *_figures(asdict(o))] for o in found]
    print_table(["victim", "fault", "phase", *FIGURES], rows)
    print(f"\na rank that slept {PAUSE_SECONDS} s in a step was logged after {paused.told_s:.1f} s")
    print(f"  {paused.told}\nthe tokens afterwards are {'' if paused.same else 'NOT '}the same")


FIGURES: Final = ("named", "answered", "failed", "all gone", "status", "left")


def _figures(row: dict[str, Any]) -> list[str]:
    return [
        _seconds(row["named_s"]),
        _seconds(row["answered_s"]),
        f"{row['failed']}/{row['pending']}",
        _seconds(row["gone_s"]),
        "" if row["status"] is None else str(row["status"]),
        ", ".join(row["left"]) or "nothing",
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _judge(found: Sequence[Outcome], paused: Pause) -> int:
    """An exit status: 1 if a request had no error, something stayed, or a status was 0."""
    both = f"{CLIENT} and supervisor"
    wrong = [
        o
        for o in found
        if (o.left and o.victim != both)
        or o.status == 0
        or (o.failed < o.pending and not o.victim.startswith(CLIENT))
    ]
    for o in wrong:
        print(f"WRONG: {o}")
    return int(bool(wrong) or not paused.same)


def markdown(payload: dict[str, Any]) -> str:
    """The tables of docs/reliability.md."""
    rows = payload["outcomes"]
    ranks = {(case.victim.name, case.fault) for case in RANK_CASES}
    in_ranks = [row for row in rows if (row["victim"], row["fault"]) in ranks]
    others = [row for row in rows if (row["victim"], row["fault"]) not in ranks]
    told = payload["machine"]
    paused = payload["pause"]
    return "\n".join(
        [
            f"{told['cores']} cores of {told['cpu']}, torch {told['torch']}; seconds.",
            "",
            *_rank_table(in_ranks),
            "",
            *_other_table(others),
            "",
            f"A rank that slept {paused['seconds']} s in a step was named in the log after "
            f"{paused['told_s']:.1f} s; "
            + (
                "all tokens were those of an undisturbed run." if paused["same"] else "WRONG TOKENS"
            ),
        ]
    )


def _rank_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    header = ["rank", "layout", "fault", *(f"named: {phase}" for phase in PHASES)]
    header += ["answered: prefill", "decode", "next request, idle", "all gone", "left"]
    lines = [_line(header), _line(["---"] * len(header))]
    for victim in RANKS:
        for fault in RANK_FAULTS:
            of = {r["phase"]: r for r in rows if (r["victim"], r["fault"]) == (victim.name, fault)}
            if not of:
                continue
            cells = [victim.name, victim.layout, fault]
            cells += [_seconds(of[phase]["named_s"]) if phase in of else "" for phase in PHASES]
            cells += [_answered(of[phase]) if phase in of else "" for phase in PHASES[1:]]
            cells.append(_seconds(max(row["gone_s"] for row in of.values())))
            cells.append(", ".join(x for row in of.values() for x in row["left"]) or "nothing")
            lines.append(_line(cells))
    return lines


def _answered(row: dict[str, Any]) -> str:
    counts = f"{row['failed']} of {row['pending']}"
    return _seconds(row["answered_s"]) + ("" if row["failed"] == row["pending"] else f" ({counts})")


def _other_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    header = ["victim", "fault", "phase", "named", "answered", "all gone", "exit status", "left"]
    lines = [_line(header), _line(["---"] * len(header))]
    for row in rows:
        cells = [row["victim"], row["fault"], row["phase"]]
        figures = _figures(row)
        # A path of this run says nothing to a reader.
        left = "its run folder" if any("/" in item for item in row["left"]) else figures[5]
        lines.append(_line([*cells, figures[0], figures[1], figures[3], figures[4], left]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.faults", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="a few cases only")
    parser.add_argument("--markdown", action="store_true", help="tables of the last full run")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
