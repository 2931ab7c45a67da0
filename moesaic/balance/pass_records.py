"""Recorded passes of files, as counts of logical experts.

A file counts the rows of slots. It says which expert a slot has, or the record itself does if
experts have moved since. Replicas of the model move their experts independently, so that the
placement of one file says nothing about another.
L layers · E experts · P slots.
"""

from __future__ import annotations

import operator
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
    except (ValueError, TypeError, RuntimeError):  # of numpy, and of tensors that it cannot take
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
    records = found["records"]
    if not isinstance(records, list) or not all(isinstance(one, Mapping) for one in records):
        raise ValueError(f"{path}: records is {_brief(records)}: it must be a list of passes")
    if not records:
        return
    last_LP = _slots_in(found, LAST_PLACEMENT_KEY, path)
    for record in records:
        slots_LP = _slots_in(record, PLACEMENT_KEY, path) if PLACEMENT_KEY in record else last_LP
        rank, gatherer = record.get("rank", found.get("rank")), record.get("gatherer_key")
        yield PassRecord(
            path,
            _whole(record.get(NUMBER_KEY), path, NUMBER_KEY),
            None if rank is None else _whole(rank, path, "rank"),
            None if gatherer is None else str(gatherer),
            _counts_in(record, slots_LP, path),
            slots_LP,
        )


def _slots_in(found: Mapping[str, Any], name: str, path: Path) -> Ints:
    """[L, P] of experts. Each expert has a slot, so that there are no more experts than slots: an
    array by expert is then no larger than what the file has."""
    slots_LP = array_in(found[name], path, name)
    if slots_LP.ndim != 2 or slots_LP.dtype.kind not in "iu" or not slots_LP.size:
        raise ValueError(
            f"{path}: {name} of shape {list(slots_LP.shape)} and type {slots_LP.dtype}: it must be "
            "whole numbers, layers × slots"
        )
    for expert in (int(slots_LP.min()), int(slots_LP.max())):
        if not 0 <= expert < slots_LP.shape[1]:
            raise ValueError(
                f"{path}: {name} has expert {expert} in {slots_LP.shape[1]} slots: experts are "
                f"0 to {slots_LP.shape[1] - 1} at most"
            )
    found_LP: Ints = slots_LP.astype(np.int64)
    return found_LP


def _counts_in(record: Mapping[str, Any], slots_LP: Ints, path: Path) -> Any:
    counts_LP = array_in(record.get(COUNTS_KEY), path, COUNTS_KEY)
    if counts_LP.shape != slots_LP.shape:
        raise ValueError(
            f"{path}: a pass has counts of {list(counts_LP.shape)}, the placement is of "
            f"{list(slots_LP.shape)} (layers × slots)"
        )
    if not (counts_LP >= 0).all():  # NaN is not, either
        raise ValueError(f"{path}: {COUNTS_KEY} has {counts_LP.min()}: it must have counts of rows")
    return counts_LP


def _whole(value: Any, path: Path, name: str) -> int:
    """A number of Python, or a tensor that holds one."""
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{path}: {name} is {_brief(value)}: it must be a whole number") from None


def _brief(value: Any) -> str:
    return repr(value)[:100]


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
    wanted: set[int] = set()
    for path, found in files.items():
        ranks = found.get("ranks", [])
        if not isinstance(ranks, list):
            raise ValueError(f"{path}: ranks is {_brief(ranks)}: it must be a list of ranks")
        wanted |= {_whole(rank, path, "ranks") for rank in ranks}
    missing = wanted - {
        rank for found in files.values() if isinstance(rank := found.get("rank"), int)
    }
    if missing:
        names = ", ".join(map(str, sorted(missing)))
        raise ValueError(
            f"{source} lacks the passes of ranks {names}: give the folder with the files of all "
            "ranks of the dump"
        )
