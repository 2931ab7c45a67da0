"""How long each part of a rank's loss and return takes, and what is left after many of them.

    python -m bench.elastic_parts            # 20 kills of ranks that have nothing to do

The supervisor's own figures, from `membership` in the server's info: how long the other ranks took
to abandon their step, how long to adopt the epoch (they read experts that no other rank holds from
the checkpoint), and how long the rank was away. The processor time of its start is what a busy
machine does not change.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.common import machine, print_table, write_json
from bench.fault_run import Run, wait_for
from moesaic import Engine
from moesaic.comm.supervise.restarts import SHORT_LIFE

FLAGS: Final[dict[str, Any]] = {
    "model_path": "tiny:qwen3_moe",
    "tp_size": 4,
    "ep_size": 4,
    "dp_size": 4,
    "enable_dp_attention": True,
    "moe_a2a_backend": "deepep",
    "ep_num_redundant_experts": 4,
    "elastic_ep_backend": "mooncake",
    "restart_limit": 0,
    "max_total_tokens": 4096,
    "num_threads": 1,
}
TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    descriptors: int
    threads: int
    mebibytes: int

    @classmethod
    def of(cls, pid: int) -> Held:
        folder = Path(f"/proc/{pid}")
        resident = re.search(r"VmRSS:\s+(\d+)", (folder / "status").read_text())
        assert resident is not None
        counts = (len(list((folder / name).iterdir())) for name in ("fd", "task"))
        return cls(*counts, int(resident[1]) >> 10)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def kill(engine: Engine, run: Run, number: int) -> float:
    """Kills a rank, not the first, and waits for its return; the processor time of its start."""
    # One that has lived for less is started later.
    time.sleep(SHORT_LIFE)
    rank = 1 + number % 3
    pid = engine.get_server_info()["ranks"][rank]["pid"]
    os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        told = engine.get_server_info()["membership"]
        ended = all(one["seconds"] is not None for one in told["changes"])
        return bool(told["returned"] == number + 1 and ended)

    wait_for(is_back, "return", run)
    return cpu_seconds(engine.get_server_info()["ranks"][rank]["pid"])


def figures(values: list[float]) -> list[str]:
    return [f"{value:.3f}" for value in (min(values), statistics.median(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.elastic_parts", description=__doc__.split("\n\n", maxsplit=1)[0]
    )
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    run = Run()
    try:
        with run.marked():
            engine = Engine(**FLAGS)
        pids = run.pid("supervisor"), engine.get_server_info()["ranks"][0]["pid"]
        before = [Held.of(pid) for pid in pids]
        cpu = [kill(engine, run, number) for number in range(args.kills)]
        after = [Held.of(pid) for pid in pids]
        changes = engine.get_server_info()["membership"]["changes"]
        engine.shutdown()
        away = re.findall(r"returns after ([\d.]+) s", run.log.read_text())
    finally:
        run.close()
    parts = {
        f"{kind}: {words}": [one[name] for one in changes if one["kind"] == kind]
        for kind in ("lost", "returned")
        for words, name in (("step abandoned", "abandoned_seconds"), ("adopted", "seconds"))
    }
    parts |= {"away": [float(value) for value in away], "processor time of the start": cpu}
    header = ["part", "least", "median", "most"]
    print_table(header, [[name, *figures(values)] for name, values in parts.items()])
    for name, *both in zip(("supervisor", "rank 0"), before, after, strict=True):
        print(f"{name}: {both[0]} before, {both[1]} after {args.kills} losses")
    facts = {**machine(1), "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()}
    write_json("elastic_parts", {"machine": facts, "parts": parts})


if __name__ == "__main__":
    main()
