"""Problems from tasks and from files of one JSON object a line."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from moesaic.config.flags import nearest
from moesaic.evals.report import name_of
from moesaic.evals.tasks.problem import MARK, MATCHES, ChatTurn, Problem, is_number

logger = logging.getLogger(__name__)

DRAWN: Final = 100  # default number of problems of a task
ROLES: Final = ("system", "user", "assistant", "developer", "tool")
KNOWN: Final = frozenset(
    {"task", "id", "prompt", "messages", "question", "answer", "match", "solution"}
)


class InvalidLine(ValueError):
    """A line of a file that is not a problem."""


def choose(
    tasks: str | None, data: str | None, seed: int, num: int | None, progress: bool = False
) -> list[Problem]:
    """Problems of tasks (a,b or all), then of a file; by default of all tasks."""
    words = tasks or (None if data is not None else "all")
    drawn = [] if words is None else draw_tasks(words, seed, num or DRAWN, progress)
    return drawn + ([] if data is None else first_of_each(read_problems(data), num))


def draw_tasks(words: str, seed: int, num: int, progress: bool = False) -> list[Problem]:
    from moesaic.evals.tasks.draw import TASKS, distinct

    names = list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    for name in names:
        if name not in (*TASKS, "all"):
            hint = nearest(name, TASKS)
            raise ValueError(f"--tasks: unknown task {name}: choose of {', '.join(TASKS)}{hint}")
    if not names:
        raise ValueError(f"--tasks is {words!r}: choose of {', '.join(TASKS)}, or all")
    chosen = list(TASKS) if "all" in names else names
    return [
        replace(problem, id=problem.id or str(number))
        for name in chosen
        for number, problem in enumerate(distinct(name, "test", seed, num, progress))
    ]


def first_of_each(problems: Sequence[Problem], num: int | None) -> list[Problem]:
    """At most `num` problems of each task."""
    counts: dict[str, int] = {}
    kept = []
    for problem in problems:
        counts[problem.task] = counts.get(problem.task, 0) + 1
        if num is None or counts[problem.task] <= num:
            kept.append(problem)
    return kept


def read_problems(path: str) -> list[Problem]:
    """Read a file; ValueError names a wrong line and the reason."""
    file = Path(path)
    stem = file.stem.encode(errors="replace").decode()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--data {path}: cannot be read: {error}") from None
    found, ignored = [], set[str]()
    # Not splitlines: JSON strings may contain other line separators.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = _object(line)
            found.append(_problem(entry, stem, str(number)))
        except InvalidLine as error:
            raise ValueError(f"--data {path}, line {number}: {error}") from None
        ignored |= entry.keys() - KNOWN
    if not found:
        raise ValueError(f'--data {path} has no problems: give lines {{"prompt": …, "answer": …}}')
    if ignored:
        names = ", ".join(map(name_of, sorted(ignored)))
        logger.info("--data %s: ignored keys: %s", path, names)
    return found


def _object(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidLine(f"it is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise InvalidLine('it is not an object: write {"prompt": "…", "answer": "…"}')
    for key in KNOWN & entry.keys():
        if not is_text(json.dumps(entry[key], ensure_ascii=False)):
            raise InvalidLine(
                f'"{key}" has half a surrogate pair, which is no character: correct it'
            )
    return entry


def is_text(value: str) -> bool:
    """Whether it can be encoded as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _problem(entry: dict[str, Any], task: str, number: str) -> Problem:
    asked = [key for key in ("prompt", "messages", "question") if key in entry]
    if len(asked) != 1:
        found = " and ".join(asked) or "neither"
        raise InvalidLine(f'it has {found}: give one of "prompt" and "messages"')
    prompt = "" if asked == ["messages"] else _text(entry, asked[0])
    messages = _messages(entry["messages"]) if asked == ["messages"] else ()
    answer, solution = _text(entry, "answer"), entry.get("solution", "")
    match = "auto"
    if asked == ["question"]:
        # A line of GSM8K: the answer is a worked solution with the number behind the mark.
        match = "number" if MARK in answer or is_number(answer) else "auto"
        if MARK in answer:
            solution, answer = answer, answer.rpartition(MARK)[2].strip().replace(",", "")
    match = entry.get("match", match)
    _check_match(match, answer)
    return Problem(
        task=_task(entry, task),
        prompt=prompt,
        answer=answer,
        solution=solution if isinstance(solution, str) else "",
        match=match,
        messages=messages,
        id=_text(entry, "id") if "id" in entry else number,
    )


def _text(entry: dict[str, Any], key: str) -> str:
    """The text of a key; numbers are accepted, as people write them as answers."""
    value = entry.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        what = "is missing" if value is None else f"is {value!r:.40}"
        raise InvalidLine(f'"{key}" {what}: give a text that is not empty')
    return value


def _task(entry: dict[str, Any], default: str) -> str:
    name = _text(entry, "task") if "task" in entry else default
    if name == "all":
        raise InvalidLine('its task is "all", which is the name of the sum: give another "task"')
    return name


def _messages(value: Any) -> tuple[ChatTurn, ...]:
    if not isinstance(value, list) or not value:
        raise InvalidLine('"messages" must be a list that is not empty')
    for number, turn in enumerate(value):
        good = isinstance(turn, dict) and isinstance(turn.get("content"), str)
        if not good or turn.get("role") not in ROLES:
            raise InvalidLine(
                f'message {number} must be {{"role": "user", "content": "…"}}, with a role of '
                + ", ".join(ROLES)
            )
    return tuple(ChatTurn(turn["role"], turn["content"]) for turn in value)


def _check_match(name: Any, answer: str) -> None:
    if not isinstance(name, str) or name not in MATCHES:
        hint = nearest(str(name), MATCHES)
        raise InvalidLine(f'"match" is {name!r:.40}: choose one of {", ".join(MATCHES)}{hint}')
    needs: dict[str, tuple[bool, str]] = {
        "number": (is_number(answer), "a number, and nothing besides"),
        "choice": (MATCHES["choice"].read(answer) is not None, "a letter from A to E"),
    }
    good, what = needs.get(name, (True, ""))
    if not good:
        raise InvalidLine(f'"answer" is {answer!r:.40} and "match" is "{name}": give {what}')


def write_problems(path: str, problems: Sequence[Problem]) -> None:
    """Write problems as `read_problems` reads them."""
    lines = [json.dumps(_line(problem), ensure_ascii=False) + "\n" for problem in problems]
    write_whole(Path(path), "".join(lines).encode())


def _line(problem: Problem) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(problem)
    return {key: value for key, value in values.items() if value}


def check_target(flag: str, path: str) -> None:
    """Raise ValueError, before anything slow, if the file cannot be written."""
    if not path:
        raise ValueError(f"{flag} is empty: name a file")
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{flag} {path} is a folder: name a file")
    if _is_special(file):
        if not os.access(file, os.W_OK):
            raise ValueError(f"{flag} {path}: nothing may be written there: name a file")
        return
    try:
        folder = file.resolve().parent
        if not folder.is_dir():
            raise ValueError(f"{flag} {path}: there is no folder {folder}: make it")
        probe = _beside(file.resolve())
        probe.touch(exist_ok=False)  # permissions are not enough: see /proc
        probe.unlink()
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise ValueError(f"{flag} {path}: nothing can be written there: {error}") from None


def _is_special(path: Path) -> bool:
    """Whether it is a pipe, a terminal or a device, which must not be replaced."""
    return path.exists() and not path.is_file()


def _beside(path: Path) -> Path:
    """A unique name in the same folder."""
    return path.with_name(f".{path.name[:40]}.{secrets.token_hex(6)}.part")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically. Links stay links, and their targets are written; pipes and devices
    are written directly."""
    if _is_special(path):
        path.write_bytes(content)
        return
    path = path.resolve()
    part = _beside(path)
    try:
        part.write_bytes(content)
        if path.exists():
            shutil.copymode(path, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
