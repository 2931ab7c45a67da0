"""What the kernels between ranks take of a Hopper GPU.

A program: `python -m tests.kernels.aot_a2a [all]` compiles, prints and asserts.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from moesaic.kernels.a2a import RowPlanes, SlotOwners
from moesaic.kernels.a2a_plan import GpuModel, collect_plan, send_plan
from moesaic.kernels.triton import a2a, a2a_collect
from moesaic.kernels.triton.a2a_signals import lanes
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from tests.kernels.aot import Usage, build

TYPES = {
    "x_ptr": "*bf16",
    "out_ptr": "*bf16",
    "ids_ptr": "*i32",
    "weights_ptr": "*fp32",
    "num_tokens_ptr": "*i32",
    "bases_ptr": "*i64",
    "state_ptr": "*i64",
    "failure_ptr": "*i64",
    "scale": "fp32",
}
ALIGNED = ("stride", "values", "scales", "ids", "weights", "results", "flags")
TOP_K = 8
# Of 4 ranks with 32 slots each; a group may have two.
SPREAD = {"OWNERS": SlotOwners(32)}
# A fence comes with each of these: of all the system, unless all ranks are on one GPU.
RELEASE, ACQUIRE = "atom.global.sys.release.exch.b64", "ld.acquire.sys.global.b64"
ARRIVAL = "atom.global.sys.acq_rel.add"
# Of results, and of what a rank counts: what others, or other programs, have written meanwhile.
PAST_L1, COUNT = "ld.global.cg.v4", "ld.global.cg.b64"


def use(kernel: Any, warps: int, size: int, scope: str = "sys", **constants: Any) -> Usage:
    fixed = {**constants, "SIZE": size, "PDL": True}
    if "LINK" in kernel.arg_names:
        fixed.setdefault("LINK", 0)
    if "LANES" in kernel.arg_names:
        fixed |= {"LANES": lanes(size, warps), "SCOPE": scope}
    types = {name: TYPES.get(name, "i32") for name in kernel.arg_names if name not in fixed}
    fusion = {} if kernel.__name__.startswith("_") else {"enable_fp_fusion": False}
    usage = build(kernel, types, fixed, aligned=ALIGNED, num_warps=warps, **fusion)
    print(
        f"{kernel.__name__:20} {size} ranks {warps} warps {usage.registers:4} registers "
        f"{usage.local:3} spilled {usage.shared:5} shared {usage.count('bar.sync'):3} barriers "
        f"{usage.count('st.global.v4'):3} wide stores "
        f"{usage.count('ld.global.v4') + usage.count(PAST_L1):3} loads"
    )
    assert usage.local <= 16, f"{kernel.__name__} spills {usage.local} bytes"
    assert usage.count("griddepcontrol.wait") == 1
    assert usage.count("griddepcontrol.launch_dependents") == 1
    return usage


def check_signals(size: int) -> None:
    usage = use(a2a._signal_kernel, 1, size)
    assert usage.count(RELEASE) >= 1 and usage.shared <= 64 and usage.registers <= 32
    assert usage.count(COUNT) == 1
    for signals in (False, True):
        usage = use(a2a._wait_kernel, 1, size, SIGNAL_FIRST=signals)
        assert (usage.count(RELEASE) > 0) == signals and usage.count(ACQUIRE) >= 2
        assert usage.shared <= 64 and usage.registers <= 64 and usage.count(COUNT) == 1
        # A kernel behind must not take the place of a peer that this one waits for.
        release = usage.ptx.index("griddepcontrol.launch_dependents")
        assert usage.ptx.rindex(ACQUIRE) < release


def check_link(size: int) -> None:
    """With an emulated link; the words are behind the flags."""
    use(a2a._signal_kernel, 1, size, LINK=48)
    for signals in (False, True):
        usage = use(a2a._wait_kernel, 1, size, SIGNAL_FIRST=signals, LINK=48)
        assert usage.count("%globaltimer") > 0
        # It waits before the next kernel may start.
        release = usage.ptx.index("griddepcontrol.launch_dependents")
        assert usage.ptx.rindex("%globaltimer") < release
    plan = send_plan(16, 2048, "bf16", size, GpuModel())
    planes = RowPlanes("bf16", 0, 0, 0, 0, 4096, 0)
    fixed = {**a2a.send_constants(planes, 2048, TOP_K, plan), **SPREAD, "LINK": 48}
    for receives in (False, True):
        usage = use(a2a._send_kernel, plan.warps, size, **fixed, RECEIVES=receives)
        assert usage.registers <= 128


def check_send(payload: str, rows: int, hidden: int, size: int = 4, weights: bool = True) -> None:
    format = PAYLOAD_FORMATS[payload]
    values = format.values.width(hidden) * format.values.dtype.itemsize
    planes = RowPlanes(payload, 0, 0, 0, 0, values, format.row_bytes(hidden) - values)
    plan = send_plan(rows, hidden, payload, size, GpuModel())
    absent = {"num_tokens_ptr": None} | ({} if weights else {"weights_ptr": None})
    fixed = {**a2a.send_constants(planes, hidden, TOP_K, plan), **SPREAD, **absent}
    print(f"    {payload} {hidden}: {plan}")
    for receives, scope in ((False, "sys"), (True, "gpu")):
        usage = use(a2a._send_kernel, plan.warps, size, scope, **fixed, RECEIVES=receives)
        assert usage.registers <= 128 and usage.count("ld.global.v4") >= 2
        # Each rank gets its own stores, of 16 bytes where the values of 16 channels have as many.
        if payload in ("bf16", "fp8"):
            assert usage.count("st.global.v4") >= size
        arrival, release, acquire = (
            word.replace("sys", scope) for word in (ARRIVAL, RELEASE, ACQUIRE)
        )
        assert usage.count(arrival) == 1 and usage.count(release) >= 1
        assert (usage.count(acquire) > 0) == receives
        if receives:
            assert "sys" not in usage.ptx.replace("fence.acq_rel.sys", "")
            assert usage.ptx.rindex(acquire) < usage.ptx.index("griddepcontrol.launch_dependents")


def check_collect(pairs: bool, tokens: int, hidden: int, size: int = 4) -> None:
    plan = collect_plan(tokens, hidden, GpuModel())
    fixed = a2a.collect_constants(hidden, TOP_K, torch.bfloat16, plan)
    fixed |= {**SPREAD, "PAIRS": pairs, "num_tokens_ptr": None}
    usage = use(a2a_collect.collect_kernel, plan.warps, size, **fixed)
    print(f"    {hidden}: {plan}")
    sources = TOP_K if pairs else size
    each = plan.block // (plan.warps * 32 * 8)
    # Past the first-level cache, which may hold what was there in the layer before.
    assert usage.count(PAST_L1) == sources * each and usage.count("ld.global.v4") == 0
    assert usage.shared <= 64 and usage.registers <= 128 and usage.count(ACQUIRE) == 0


def check_variants() -> None:
    """With a number of tokens that only the device knows, and groups of two ranks."""
    plan = send_plan(4, 2048, "bf16", 4, GpuModel())
    planes = RowPlanes("bf16", 0, 0, 0, 0, 4096, 0)
    for everywhere in (False, True):
        fixed: dict[str, Any] = {"OWNERS": SlotOwners(32, 2, everywhere)}
        constants = a2a.send_constants(planes, 2048, TOP_K, plan)
        use(a2a._send_kernel, plan.warps, 4, **constants, **fixed, RECEIVES=False)
        few = collect_plan(4, 2048, GpuModel())
        fixed |= a2a.collect_constants(2048, TOP_K, torch.bfloat16, few)
        use(a2a_collect.collect_kernel, few.warps, 4, **fixed, PAIRS=False)
        use(a2a_collect.collect_kernel, few.warps, 4, **fixed, PAIRS=True)


def main() -> None:
    check_signals(4)
    check_send("bf16", 16, 2048)
    check_send("fp8", 4096, 2048)
    check_collect(False, 16, 2048)
    check_collect(True, 16, 2048)
    if "all" not in sys.argv:
        return
    check_link(4)
    check_variants()
    check_signals(3)
    check_signals(8)
    for payload in PAYLOAD_FORMATS:
        for hidden in (2048, 2880, 7168):
            check_send(payload, 128, hidden, size=8, weights=False)
    for pairs in (False, True):
        for hidden in (2048, 2880, 7168):
            check_collect(pairs, 4, hidden, size=8)
            check_collect(pairs, 4096, hidden, size=8)


if __name__ == "__main__":
    main()
