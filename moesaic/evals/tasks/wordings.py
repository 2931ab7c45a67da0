"""Wordings of problems, written as text.

    add: {S} bakes {A} more {T}.
    | {S} makes {A} fresh {T}.
    = With the new ones there are {X} + {A} = {Y} {T}.

`name: wording` opens a part, `| wording` adds a wording of the same meaning, also within a line,
and `= steps` gives the worked steps of the solution, or the reply."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from moesaic.evals.tasks.problem import plain

SEPARATOR: Final = " | "


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    texts: tuple[str, ...]
    work: str = ""


def read_parts(text: str) -> list[Part]:
    parts: list[Part] = []
    for line in filter(None, map(plain, text.splitlines())):
        if line.startswith("| "):
            parts[-1] = replace(parts[-1], texts=(*parts[-1].texts, *line[2:].split(SEPARATOR)))
        elif line.startswith("= "):
            parts[-1] = replace(parts[-1], work=line[2:])
        else:
            name, _, wording = line.partition(": ")
            parts.append(Part(name, tuple(wording.split(SEPARATOR))))
    return parts


def read_wordings(text: str) -> dict[str, tuple[str, ...]]:
    """The wordings of each part by its name."""
    return {part.name: part.texts for part in read_parts(text)}
