"""Compiles the kernels of dense collectives for Hopper, as they are launched.

python -m tests.kernels.aot_collectives          # an all-reduce of a decode step, in CI
python -m tests.kernels.aot_collectives all
"""

from __future__ import annotations

import sys
from typing import Any

from moesaic.kernels.collectives import BLOCK_BYTES
from moesaic.kernels.triton import collectives
from moesaic.kernels.triton.collectives import WARPS
from tests.kernels.aot import Usage, build

POINTERS = {"bases_ptr": "*i64", "state_ptr": "*i64", "failure_ptr": "*i64"}
PLAIN = ("tag", "rank", "channel")
BYTES = {"*bf16": 2, "*fp32": 4, "*i64": 8}


def compiled(kernel: Any, ranks: int, kind: str, **constants: Any) -> Usage:
    """Numbers are multiples of 16, as they are with any model, except which rank and channel."""
    blocks = {"SIZE": ranks, "LANES": 32 * WARPS, "PDL": True}
    if "SCOPE" in kernel.arg_names:
        blocks["SCOPE"] = "sys"
    if "BLOCK" in kernel.arg_names:
        blocks["BLOCK"] = BLOCK_BYTES // BYTES[kind]
    constants |= blocks
    known = POINTERS | {"x": kind, "out": kind}
    names = [name for name in kernel.arg_names if name not in constants]
    types = {name: known.get(name, "i32") for name in names}
    aligned = tuple(name for name in names if types[name] == "i32" and name not in PLAIN)
    return build(kernel, types, constants, aligned=aligned, num_warps=WARPS)


def check(name: str, usage: Usage, loads: int, stores: int) -> None:
    """Parts are read and written 16 bytes at a time, nothing spills, and whoever waits does
    not keep others from a processor."""
    wide = usage.count("ld.global.cg.v4") + usage.count("ld.global.v4")
    wide += usage.count("ld.global.cg.v2.b64") + usage.count("ld.global.v2.b64")
    written = usage.count("st.global.v4") + usage.count("st.global.v2.b64")
    print(
        f"{name:28} {usage.registers:4} registers {usage.local:4} local {usage.shared:5} shared "
        f"{wide:3} loads {written:3} stores"
    )
    assert usage.local == 0, f"{name} spills {usage.local} bytes"
    assert (wide, written) == (loads, stores), f"{name}: {wide} loads, {written} stores"
    assert usage.registers <= 96 and usage.shared <= 2048, name
    assert usage.count("griddepcontrol.wait") == 1, name


def push(ranks: int, kind: str, **constants: Any) -> Usage:
    base = {"SUM": False, "EVEN": True, "FLAT": False, "PUT": True, "TAKE": True}
    return compiled(collectives._push_kernel, ranks, kind, **(base | constants))


def post(ranks: int, kind: str, sums: bool) -> Usage:
    return compiled(collectives._publish_kernel, ranks, kind, SUMS=sums, EVEN=True)


def pull(ranks: int, kind: str, **constants: Any) -> Usage:
    base = {"SUM": False, "EVEN": True, "FLAT": True}
    return compiled(collectives._pull_kernel, ranks, kind, **(base | constants))


def check_flags(usage: Usage) -> None:
    """A flag is released to all of the system, and acquired from there: before and in the loop."""
    assert usage.count("atom.global.sys.release.exch.b64") == 1
    assert usage.count("ld.acquire.sys.global.b64") == 2
    # Of a channel's two halves, how often they were raised: past the first-level cache.
    assert usage.count("ld.global.cg.b64") == 2


def main(everything: bool) -> None:
    usage = push(4, "*bf16", SUM=True, FLAT=True)
    check("all-reduce of 4", usage, 1 + 4, 4 + 1)
    check_flags(usage)
    if not everything:
        return
    for kind in ("*bf16", "*fp32"):
        for ranks in (2, 8):
            usage = push(ranks, kind, SUM=True, FLAT=True)
            check(f"sum of {ranks} {kind}", usage, 1 + ranks, ranks + 1)
    for kind in ("*bf16", "*i64"):
        check(f"post {kind}", post(4, kind, sums=False), 1, 1)
    check("post a share of a sum", post(4, "*bf16", sums=True), 4, 1)
    check("pull a sum", pull(2, "*bf16", SUM=True), 2, 1)
    check("pull shares", pull(4, "*bf16"), 4, 4)
    check("rows of 4", push(4, "*i64", FLAT=True), 1 + 4, 4 + 4)
    check("columns of 4", push(4, "*i64"), 1 + 4, 4 + 4)
    # Nothing is known of where parts begin: 8 bytes at a time are read and laid out.
    check("uneven columns of 4", push(4, "*i64", EVEN=False), 1, 4)


if __name__ == "__main__":
    main("all" in sys.argv[1:])
