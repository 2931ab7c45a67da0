"""Programs of the kernels between ranks: what was measured on the device, or a guess (a2a_plan.py).

Measured plans are in `tuned/<device>-a2a.json`, one entry a kernel and number of rows:

    {"send P=4 H=2048 bf16": {
        "128": {"block": 2048, "warps": 4, "programs": 128, "us": 6.1}}}

`128` stands for 65 to 128 rows of a rank; of fewer than were measured, there are fewer programs.
Who was told to take few takes few. `moesaic tune --a2a` writes the file (tuning.py tells how).
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
# Programs that are worth being measured, of a processor's.
PARTS = (0.125, 0.25, 0.5)
# Numbers of rows whose plans are kept: steps differ, the layers of one do not.
KEPT = 1024


@dataclass(frozen=True, slots=True)
class Kernel:
    """`name`: of SENDERS (`gather`: to all ranks) or COLLECTORS; `payload`: of what is sent."""

    name: str
    ranks: int
    hidden: int
    payload: str = ""

    def __str__(self) -> str:
        return f"{self.name} P={self.ranks} H={self.hidden} {self.payload}".rstrip()

    @property
    def sends(self) -> bool:
        return self.name in SENDERS


_tried: dict[Kernel, LaunchPlan] = {}


@contextmanager
def trying(kernel: Kernel, plan: LaunchPlan) -> Iterator[None]:
    """That kernel goes by this plan meanwhile, whatever its rows; for the tuner."""
    _tried[kernel] = plan
    plan_of.cache_clear()
    try:
        yield
    finally:
        del _tried[kernel]
        plan_of.cache_clear()


@lru_cache(maxsize=KEPT)
def plan_of(kernel: Kernel, rows: int, machine: GpuModel, ranks: int) -> LaunchPlan:
    """What a kernel goes by; `ranks`: that a token may be sent to. Kept, as every launch asks."""
    return planned(kernel, rows, machine, _guess(kernel, rows, machine, ranks))


def _guess(kernel: Kernel, rows: int, machine: GpuModel, ranks: int) -> LaunchPlan:
    if kernel.name in COLLECTORS:
        return collect_plan(rows, kernel.hidden, machine)
    return send_plan(rows, kernel.hidden, kernel.payload, ranks, machine)


def planned(kernel: Kernel, rows: int, machine: GpuModel, guess: LaunchPlan) -> LaunchPlan:
    """What was measured, with no more programs than there are items, or than are allowed."""
    found = _tried.get(kernel)
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
    """Scales must be of whole items."""
    return not kernel.sends or plan.block in blocks(kernel)


def blocks(kernel: Kernel) -> list[int]:
    """Channels of an item that the kernel can take."""
    if not kernel.sends:
        return sorted({collect_plan(1, kernel.hidden, GpuModel()).block, *BLOCKS})
    default = send_plan(1, kernel.hidden, kernel.payload, kernel.ranks, GpuModel()).block
    if kernel.payload not in PLAIN and kernel.payload not in GROUPS:
        return [default]  # one scale for all of a row
    group = GROUPS.get(kernel.payload, 1)
    return sorted({default, *(block for block in BLOCKS if block % group == 0)})


def candidates(kernel: Kernel, rows: int, machine: GpuModel) -> list[LaunchPlan]:
    """Plans that are worth being measured; the guess comes first."""
    found = dict.fromkeys([_guess(kernel, rows, machine, kernel.ranks)])
    for block in blocks(kernel):
        items = rows * -(-kernel.hidden // block)
        counts = {min(items, int(machine.processors * part)) for part in (*PARTS, *DENSITIES)}
        found |= dict.fromkeys(LaunchPlan(block, warps_of(block), n) for n in sorted(counts) if n)
    return list(found)


def load(device: str, folder: Path = tuning.TUNED) -> dict[tuple[str, int], LaunchPlan]:
    """What was measured, by kernel and number of rows."""
    path = folder / tuning.file_name(device, FORMAT)
    return {
        (kernel, int(rows)): _decode(entry, path)
        for kernel, sizes in tuning.read(path).items()
        for rows, entry in sizes.items()
    }


def _decode(entry: dict[str, Any], path: Path) -> LaunchPlan:
    try:
        plan = LaunchPlan(**{name: value for name, value in entry.items() if name != "us"})
        tuning.check_config(plan)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error} in entry {entry}: {tuning.MEND}") from error
    return plan


def save(
    device: str, kernel: Kernel, rows: int, plan: LaunchPlan, us: float, folder: Path = tuning.TUNED
) -> None:
    """Adds an entry or replaces it."""
    path = folder / tuning.file_name(device, FORMAT)
    entries = tuning.read(path)
    entry = {**asdict(plan), "us": round(us, 2)}
    entries.setdefault(str(kernel), {})[str(tuning.bucket(rows))] = entry
    tuning.write(path, entries)
    _measured.cache_clear()
    plan_of.cache_clear()
