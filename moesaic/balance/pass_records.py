"""Recorded passes of files, as counts of logical experts.

A file counts the rows of slots. It says which expert a slot has, or the record itself does if
experts have moved since. Replicas of the model move their experts independently, so that the
placement of one file says nothing about another.
L layers · E experts · P slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from moesaic.balance.problem import Ints

PLACEMENT_KEY: Final = "physical_to_logical_map"
LAST_PLACEMENT_KEY: Final = "last_physical_to_logical_map"
COUNTS_KEY: Final = "global_physical_count"
NUMBER_KEY: Final = "forward_pass_id"
Files = Mapping[Path, Mapping[str, Any]]


@dataclass(frozen=True)
class PassRecord:
    """The rows that one rank has computed in one pass, and the expert of each slot then."""

    path: Path
    number: int
    rank: int | None
    gatherer: str | None
    """SGLang's name for a part of a pass, where micro-batches split it."""
    counts_LP: Any
    slots_LP: Ints


def array_in(value: Any, path: Path, name: str) -> Any:
    try:
        found = np.asarray(value)
        if found.dtype.kind not in "iuf":
            raise ValueError
    except ValueError:
        raise ValueError(f"{path}: {name} is no array of numbers") from None
    return found


def loads_of_passes(files: Files, source: Path) -> Any:
    """[passes, L, E]: the counts of all ranks, in the order of the passes."""
    records = [one for path, found in files.items() for one in _records(found, path)]
    if not records:
        raise ValueError(f"{source} has no passes: record again while the model computes")
    _check_ranks(files, source)
    _check_once(records)
    layers = len(records[0].slots_LP)
    experts = 1 + max(int(slots_LP.max()) for slots_LP in _placements(records))
    by_pass: dict[int, Any] = {}
    for one in records:
        if len(one.slots_LP) != layers:
            raise ValueError(
                f"{one.path} is of {len(one.slots_LP)} layers, {records[0].path} of {layers}: "
                "they belong to different models"
            )
        step_LE = by_pass.setdefault(one.number, np.zeros((layers, experts)))
        np.add.at(step_LE, (np.arange(layers)[:, None], one.slots_LP), one.counts_LP)
    return np.stack([by_pass[number] for number in sorted(by_pass)])


def _placements(records: list[PassRecord]) -> list[Ints]:
    """The different ones: most records share the placement of their file."""
    return list({id(one.slots_LP): one.slots_LP for one in records}.values())


def _records(found: Mapping[str, Any], path: Path) -> Iterator[PassRecord]:
    if LAST_PLACEMENT_KEY not in found:
        raise ValueError(f"{path} has records and no {LAST_PLACEMENT_KEY}: record again")
    last_LP = array_in(found[LAST_PLACEMENT_KEY], path, LAST_PLACEMENT_KEY)
    for record in found["records"]:
        counts_LP = array_in(record[COUNTS_KEY], path, COUNTS_KEY)
        slots_LP = last_LP
        if PLACEMENT_KEY in record:
            slots_LP = array_in(record[PLACEMENT_KEY], path, PLACEMENT_KEY)
        if counts_LP.shape != slots_LP.shape:
            raise ValueError(
                f"{path}: a pass has counts of {list(counts_LP.shape)}, the placement is of "
                f"{list(slots_LP.shape)} (layers × slots)"
            )
        rank, gatherer = record.get("rank", found.get("rank")), record.get("gatherer_key")
        number = int(record[NUMBER_KEY])
        yield PassRecord(path, number, rank, gatherer, counts_LP, slots_LP)


def _check_once(records: list[PassRecord]) -> None:
    """Refuses a pass that a rank has recorded twice: its rows would be counted twice."""
    seen: dict[tuple[Any, ...], Path] = {}
    for one in records:
        key = (one.path if one.rank is None else one.rank, one.number, one.gatherer)
        if key in seen:
            raise ValueError(
                f"{one.path} has pass {one.number} of rank {one.rank}, which {seen[key]} has too: "
                "keep the files of one dump, or of dumps that followed each other"
            )
        seen[key] = one.path


def _check_ranks(files: Files, source: Path) -> None:
    """Refuses the records of some ranks alone, where the dump says which belong together."""
    wanted = {rank for found in files.values() for rank in found.get("ranks", ())}
    missing = wanted - {found.get("rank") for found in files.values()}
    if missing:
        ranks = ", ".join(map(str, sorted(missing)))
        raise ValueError(
            f"{source} lacks the passes of ranks {ranks}: give the folder with the files of all "
            "ranks of the dump"
        )
