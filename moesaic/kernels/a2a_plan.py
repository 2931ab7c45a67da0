"""A small cost model: the number and size of programs of the all-to-all kernels.

A kernel moves items: rows or pieces of rows. Its programs process them in rounds:

    seconds = max(bytes / bandwidth, rounds * round) + programs * arrival

A round is a load, and a store that overlaps with the next load; an arrival is the cost of counting
a program before the kernel signals. The plan has the best number of programs by this model, up to
the given limit, which leaves room for other kernels. On an H200 that four ranks share (2048
bfloat16 a row, 16 to 4096 rows), its plans were at most 4% slower than the best of up to 20 that
`moesaic tune --a2a` measured. The model predicts, for 4.3 TB/s of reads and writes together, 4
ranks with a GPU each and 8 of 128 experts chosen, so that a token goes to 3.6 ranks on average:

    tokens of a rank    send: bytes, time      collect_rows: bytes, time
    1                   19 KB     2 us         19 KB     2 us
    128                 2.4 MB    2.4 us       2.4 MB    2 us
    4096                77 MB     20 us        77 MB     18 us

If four ranks share a GPU, the bytes, and with them the time of the last line, are four times as
large. Launches, fences and flags are not included.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.kernels.formats import NVFP4_GROUP
from moesaic.kernels.payloads import MXFP4_GROUP, PLAIN
from moesaic.kernels.quantise import FP8_GROUP

BANDWIDTH = 4.3e12
ROUND = 2.0e-6
ARRIVAL = 3.0e-9
# Two loads of 16 bytes.
CHANNELS_OF_A_THREAD = 16
MAX_WARPS = 8
# Programs per processor to consider.
DENSITIES = (1, 2, 4, 8)
BLOCKS = (2048, 1024, 512)
GROUPS = {"fp8": FP8_GROUP, "nvfp4": NVFP4_GROUP, "mxfp4": MXFP4_GROUP}


@dataclass(frozen=True, slots=True)
class GpuModel:
    """The GPU that a plan is for."""

    processors: int = 132
    limit: int = 0
    """Most programs; 0: no limit."""
    name: str = ""
    """The GPU whose measured plans apply; empty: none."""

    def at_most(self, programs: int) -> int:
        return min(programs, self.limit) if self.limit else programs


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """An item has `block` channels of a row."""

    block: int
    warps: int
    programs: int


def send_plan(rows: int, hidden: int, payload: str, ranks: int, machine: GpuModel) -> LaunchPlan:
    """`rows`: C, as the ids of all rows are sent; `ranks`: most destinations of a token."""
    if payload in PLAIN or payload in GROUPS:
        block = even_block(hidden, GROUPS.get(payload, 1))
    else:
        block = power_of_two(hidden)  # one scale for all of a row
    items = rows * -(-hidden // block)
    programs = best_programs(items, block * 2 * (1 + ranks), machine)
    return LaunchPlan(block, warps_of(block), programs)


def collect_plan(tokens: int, hidden: int, machine: GpuModel) -> LaunchPlan:
    """One item for each program: they neither wait nor are counted."""
    block = even_block(hidden, 1)
    return LaunchPlan(block, warps_of(block), machine.at_most(tokens * -(-hidden // block)))


def seconds(programs: int, items: int, item_bytes: int) -> float:
    rounds = -(-items // programs)
    return max(items * item_bytes / BANDWIDTH, rounds * ROUND) + programs * ARRIVAL


def best_programs(items: int, item_bytes: int, machine: GpuModel) -> int:
    """At least one: a rank without rows still signals."""
    tries = {min(items, machine.processors * density) for density in DENSITIES}
    allowed = {max(1, machine.at_most(programs)) for programs in tries}
    return min(sorted(allowed), key=lambda programs: seconds(programs, items, item_bytes))


def even_block(hidden: int, group: int) -> int:
    """The largest block with the least padding."""
    if hidden <= BLOCKS[-1]:
        return max(group, power_of_two(hidden))
    return min(BLOCKS, key=lambda block: -(-hidden // block) * block)


def power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def warps_of(block: int) -> int:
    return min(MAX_WARPS, max(1, block // (32 * CHANNELS_OF_A_THREAD)))
