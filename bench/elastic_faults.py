"""The processes of an elastic server, and what befalls them."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.fault_run import Run, wait_for
from moesaic.comm.supervise.control_page import HEAD_BYTES, STATUS_BYTES, ControlPage
from moesaic.core.rank_state import RankState

ROOT: Final = Path(__file__).parents[1]
MODEL: Final = "tiny:qwen3_moe"
FLAGS: Final = (
    "--elastic-ep-backend mooncake --restart-limit 0 --enable-deterministic-inference "
    "--max-total-tokens 4096 --num-threads 1 --skip-server-warmup"
)
SIGNALS: Final = {
    "kill -9": signal.SIGKILL,
    "SIGSTOP": signal.SIGSTOP,
    "exception": signal.SIGRTMIN + 1,
    "error": signal.SIGUSR1,
}
EXCEPTION: Final = "exception"
WEIGHTS: Final = {"kill -9": 6, "SIGSTOP": 2, "exception": 2, "error": 2}
# Victims besides ranks, and how likely each is.
HEADS: Final = ("http", "supervisor")
HEAD_WEIGHTS: Final = {"rank": 4, "http": 5, "supervisor": 1}
HEAD_KINDS: Final = {"kill -9": 6, "SIGSTOP": 2}


@dataclass(frozen=True)
class Fault:
    kind: str
    """Of a rank; of another process with its name before it."""
    rank: int
    """-1 for the others."""
    doing: str
    when: float
    calm: bool
    """All ranks were live before it."""


class Victims:
    """The ranks of a server, found by the names of their processes. `heads`: its HTTP process and
    its supervisor are victims, too."""

    def __init__(self, run: Run, world: int, kinds: Sequence[str], heads: bool = False) -> None:
        self._run, self._world, self._kinds, self._heads = run, world, kinds, heads
        self._server = self._supervisor = 0
        self._page: ControlPage | None = None

    def _look(self) -> bool:
        """Whether there is a supervisor, with a fork server and a control page."""
        if self._page is not None and Path(f"/proc/{self._supervisor}/fd/0").exists():
            return True
        self._page = None
        supervisor, server = (self._run.find(name) for name in ("supervisor", "fork server"))
        if supervisor is None or server is None:
            return False
        with suppress(OSError):
            for link in Path(f"/proc/{supervisor}/fd").iterdir():
                if "moesaic-control" in os.readlink(link):
                    seats = (link.stat().st_size - HEAD_BYTES) // STATUS_BYTES
                    self._page = ControlPage.open(str(link), seats)
        self._supervisor, self._server = supervisor, server
        return self._page is not None

    def pids(self) -> dict[int, int]:
        found = {}
        for path in Path(f"/proc/{self._server}/task").glob("*/children"):
            for pid in path.read_text().split():
                with suppress(OSError, ValueError):
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    found[int(name.removeprefix("rank"))] = int(pid)
        return found

    @property
    def is_calm(self) -> bool:
        """Whether all ranks are live, and no step is abandoned."""
        if not self._look():
            return False
        assert self._page is not None
        ranks = range(self._world)
        return self._page.live == (1 << self._world) - 1 and not any(
            self._doing(rank) in ("start", "recovery") for rank in ranks
        )

    def strike(self, rng: random.Random, may_raise: bool) -> Fault | None:
        who = "rank"
        if self._heads:
            (who,) = rng.choices(list(HEAD_WEIGHTS), list(HEAD_WEIGHTS.values()))
        return self._strike_rank(rng, may_raise) if who == "rank" else self._strike_head(rng, who)

    def _strike_head(self, rng: random.Random, who: str) -> Fault | None:
        calm, pid = self.is_calm, self._run.find(who)
        (kind,) = rng.choices(list(HEAD_KINDS), list(HEAD_KINDS.values()))
        if pid is None or not _send(pid, SIGNALS[kind]):
            return None
        return Fault(f"{who} {kind}", -1, "step" if calm else "recovery", time.monotonic(), calm)

    def _strike_rank(self, rng: random.Random, may_raise: bool) -> Fault | None:
        pids = self.pids() if self._look() else {}
        if not pids:
            return None
        rank = rng.choice(sorted(pids))
        (kind,) = rng.choices(self._kinds, [WEIGHTS[kind] for kind in self._kinds])
        doing, calm = self._doing(rank), self.is_calm
        if kind == EXCEPTION and not (may_raise and calm):
            kind = "kill -9"
        if not _send(pids[rank], SIGNALS[kind]):
            return None
        return Fault(kind, rank, doing, time.monotonic(), calm)

    def _doing(self, rank: int) -> str:
        assert self._page is not None
        seen = self._page.snapshot(rank)
        if seen.state in (RankState.ABSENT, RankState.STARTING):
            return "start"
        if "abandon" in seen.operation or "tell experts" in seen.operation:
            return "recovery"
        if seen.state == RankState.IDLE:
            return "idle"
        return "prefill" if "normal" in seen.operation else "step"


def _send(pid: int, number: int) -> bool:
    """Whether the process was there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


@dataclass(frozen=True)
class Served:
    url: str
    run: Run
    process: subprocess.Popen[bytes]


@contextmanager
def serving(flags: str, hook: str = "") -> Iterator[Served]:
    """The server of these flags; its processes are gone afterwards. `hook`: a command for its
    events."""
    run = Run()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = ["serve", MODEL, "--port", str(port), *FLAGS.split(), *flags.split()]
    words += ["--elastic-event-command", hook] if hook else []
    with run.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.faulty_rank", *words],
            env=run.environment,
            stdout=log,
            stderr=log,
            cwd=ROOT,
        )
    try:
        wait_for(lambda: "ready: http" in run.log.read_text(), "server", run)
        yield Served(f"http://127.0.0.1:{port}", run, process)
    finally:
        run.close()
        process.wait()
