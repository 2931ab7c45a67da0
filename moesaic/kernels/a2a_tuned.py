"""Launch plans of the all-to-all kernels: measured on the device, or predicted by a2a_plan.py.

Measured plans are in `tuned/<device>-a2a.json`, one entry for each kernel and number of rows:

    {"send P=4 H=2048 bf16": {
        "128": {"block": 2048, "warps": 4, "programs": 128, "us": 6.1}}}

`128` stands for 65 to 128 rows of a rank; fewer rows use fewer programs, and a limit on programs
always applies. `moesaic tune --a2a` writes the file (see tuning.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from moesaic.kernels import tuning
from moesaic.kernels.a2a_plan import (
    BLOCKS,
    DENSITIES,
    GROUPS,
    GpuModel,
    LaunchPlan,
    collect_plan,
    send_plan,
    warps_of,
)
from moesaic.kernels.payloads import PLAIN

FORMAT = "a2a"
SENDERS = ("send", "gather")
COLLECTORS = ("collect_rows", "collect_pairs")
# Programs of a processor that are worth measuring, besides DENSITIES.
PARTS = (0.125, 0.25, 0.5)
# Row counts whose plans are cached: they vary by step, not by layer.
KEPT = 1024


@dataclass(frozen=True, slots=True)
class Kernel:
    """An all-to-all kernel and its sizes."""

    name: str
    """One of SENDERS (`gather`: to all ranks) or COLLECTORS."""
    ranks: int
    hidden: int
    payload: str = ""
    """Format of the rows that are sent."""

    def __str__(self) -> str:
        return f"{self.name} P={self.ranks} H={self.hidden} {self.payload}".rstrip()

    @property
    def sends(self) -> bool:
        return self.name in SENDERS


_overrides: dict[Kernel, LaunchPlan] = {}


@contextmanager
def override_plan(kernel: Kernel, plan: LaunchPlan) -> Iterator[None]:
    """Overrides the kernel's plan for any number of rows; for the tuner."""
    _overrides[kernel] = plan
    plan_of.cache_clear()
    try:
        yield
    finally:
        del _overrides[kernel]
        plan_of.cache_clear()


@lru_cache(maxsize=KEPT)
def plan_of(kernel: Kernel, rows: int, machine: GpuModel, ranks: int) -> LaunchPlan:
    """The plan of a launch, cached. `ranks`: most destinations of a token."""
    return planned(kernel, rows, machine, _guess(kernel, rows, machine, ranks))


def _guess(kernel: Kernel, rows: int, machine: GpuModel, ranks: int) -> LaunchPlan:
    if kernel.name in COLLECTORS:
        return collect_plan(rows, kernel.hidden, machine)
    return send_plan(rows, kernel.hidden, kernel.payload, ranks, machine)


def planned(kernel: Kernel, rows: int, machine: GpuModel, guess: LaunchPlan) -> LaunchPlan:
    """The measured plan, with no more programs than there are items or than the limit allows."""
    found = _overrides.get(kernel)
    if found is None and machine.name:
        found = _measured(machine.name, kernel, tuning.bucket(rows))
    if found is None:
        return guess
    items = rows * -(-kernel.hidden // found.block)
    programs = min(items, found.programs)
    return replace(found, programs=max(1, machine.at_most(programs)))


@cache
def _measured(device: str, kernel: Kernel, rows: int) -> LaunchPlan | None:
    for folder in tuning.folders():
        found = load(device, folder).get((str(kernel), rows))
        if found is not None and _fits(kernel, found):
            return found
    return None


def _fits(kernel: Kernel, plan: LaunchPlan) -> bool:
    """A sender's items must have whole scales."""
    return not kernel.sends or plan.block in blocks(kernel)


def blocks(kernel: Kernel) -> list[int]:
    """Item sizes that the kernel supports."""
    if not kernel.sends:
        return sorted({collect_plan(1, kernel.hidden, GpuModel()).block, *BLOCKS})
    default = send_plan(1, kernel.hidden, kernel.payload, kernel.ranks, GpuModel()).block
    if kernel.payload not in PLAIN and kernel.payload not in GROUPS:
        return [default]  # one scale for all of a row
    group = GROUPS.get(kernel.payload, 1)
    return sorted({default, *(block for block in BLOCKS if block % group == 0)})


def candidates(kernel: Kernel, rows: int, machine: GpuModel) -> list[LaunchPlan]:
    """Plans worth measuring, the predicted one first."""
    found = dict.fromkeys([_guess(kernel, rows, machine, kernel.ranks)])
    for block in blocks(kernel):
        items = rows * -(-kernel.hidden // block)
        counts = {min(items, int(machine.processors * part)) for part in (*PARTS, *DENSITIES)}
        found |= dict.fromkeys(LaunchPlan(block, warps_of(block), n) for n in sorted(counts) if n)
    return list(found)


def load(device: str, folder: Path = tuning.TUNED) -> dict[tuple[str, int], LaunchPlan]:
    """Measured plans by kernel and number of rows."""
    return tuning.decode_entries(folder / tuning.file_name(device, FORMAT), _decode)


def _decode(entry: dict[str, Any]) -> LaunchPlan:
    plan = LaunchPlan(**{name: value for name, value in entry.items() if name != "us"})
    tuning.check_config(plan)
    return plan


def save(
    device: str, kernel: Kernel, rows: int, plan: LaunchPlan, us: float, folder: Path = tuning.TUNED
) -> None:
    """Adds or replaces an entry."""
    path = folder / tuning.file_name(device, FORMAT)
    tuning.write_entry(path, str(kernel), rows, {**asdict(plan), "us": round(us, 2)})
    _measured.cache_clear()
    plan_of.cache_clear()
