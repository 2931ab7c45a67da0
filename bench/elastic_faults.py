"""The processes of an elastic server, and what befalls them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from bench.fault_run import Run, wait_for
from bench.http_server import free_port
from bench.memory_group import MemoryGroup
from moesaic.comm.supervise.control_page import HEAD_BYTES, STATUS_BYTES, ControlPage
from moesaic.core.rank_state import RankSnapshot, RankState

ROOT: Final = Path(__file__).parents[1]
MODEL: Final = "tiny:qwen3_moe"
FLAGS: Final = (
    "--elastic-ep-backend mooncake --restart-limit 0 --enable-deterministic-inference "
    "--max-total-tokens 4096 --num-threads 1 --skip-server-warmup"
)
SECRET: Final = {"MOESAIC_SECRET": "what the nodes of this run share"}
SIGNALS: Final = {
    "kill -9": signal.SIGKILL,
    "SIGSTOP": signal.SIGSTOP,
    "exception": signal.SIGRTMIN + 1,
    "error": signal.SIGUSR1,
    "OOM kill": signal.SIGRTMIN + 2,
}
EXCEPTION, OOM_KILL = "exception", "OOM kill"
WEIGHTS: Final = {"kill -9": 6, "SIGSTOP": 2, "exception": 2, "error": 2, OOM_KILL: 2}
# Victims besides ranks, and how likely each is.
RANK, NODE = "rank", "node"
HEADS: Final = ("http", "supervisor", NODE)
RANKS_ALONE: Final = {RANK: 1}
HEAD_WEIGHTS: Final = {RANK: 4, "http": 5, "supervisor": 1}
NODE_WEIGHTS: Final = {RANK: 6, NODE: 1}
HEAD_KINDS: Final = {"kill -9": 6, "SIGSTOP": 2}


@dataclass(frozen=True)
class Fault:
    kind: str
    """Of a rank; of another process with its name before it."""
    rank: int
    """-1 for the others."""
    doing: str
    """What went on: see `Victims.doing`."""
    when: float
    calm: bool
    """All ranks were live before it."""


class NodeView:
    """The supervisor, the fork server and the ranks of one node."""

    def __init__(self, run: Run, node: int, ranks: range) -> None:
        self._run, self._node, self.ranks = run, node, ranks
        self.supervisor = self._server = 0
        self._page: ControlPage | None = None

    @property
    def page(self) -> ControlPage:
        assert self._page is not None, "it was looked for, and found"
        return self._page

    def look(self) -> bool:
        """Whether there is a supervisor, with a fork server and a control page."""
        if self._page is not None and Path(f"/proc/{self.supervisor}/fd/0").exists():
            return True
        self._page = None
        supervisor, server = self._run.node(self._node)
        if supervisor is None or server is None:
            return False
        with suppress(OSError):
            for link in Path(f"/proc/{supervisor}/fd").iterdir():
                if "moesaic-control" in os.readlink(link):
                    seats = (link.stat().st_size - HEAD_BYTES) // STATUS_BYTES
                    self._page = ControlPage.open(str(link), seats, self.ranks.start)
        self.supervisor, self._server = supervisor, server
        return self._page is not None

    def pids(self) -> dict[int, int]:
        found = {}
        for path in Path(f"/proc/{self._server}/task").glob("*/children"):
            for pid in path.read_text().split():
                with suppress(OSError, ValueError):
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    found[int(name.removeprefix("rank"))] = int(pid)
        return found


class Victims:
    """The ranks of a server, found by the names of their processes. `heads`: how likely its other
    processes are to be victims. `group`: where ranks are killed for lack of memory."""

    def __init__(
        self,
        run: Run,
        world: int,
        kinds: Sequence[str],
        heads: Mapping[str, int] = RANKS_ALONE,
        nodes: int = 1,
        group: MemoryGroup | None = None,
    ) -> None:
        self._run, self._kinds, self._heads, self._group = run, kinds, heads, group
        self.size = world
        """How many ranks are to live: those with the lowest numbers."""
        self.resizes = False
        """Whether that has changed, and they do not all live yet, or others still do."""
        self.prompts = 0
        """How many clients wait for a first token."""
        here = world // nodes
        self._nodes = [
            NodeView(run, node, range(node * here, (node + 1) * here)) for node in range(nodes)
        ]

    def _look(self) -> list[NodeView]:
        return [node for node in self._nodes if node.look()]

    @property
    def is_calm(self) -> bool:
        """Whether all ranks are live, and no step is abandoned."""
        return self._look() == self._nodes and not (self.resizes or self._unsettled())

    def _unsettled(self) -> dict[int, str]:
        """The ranks that start, or recover from the loss of another one."""
        found = {
            rank: _unsettled_state(node.page.snapshot(rank))
            for node in self._look()
            for rank in node.ranks
            if rank < self.size
        }
        return {rank: state for rank, state in found.items() if state}

    def doing(self, rank: int) -> str:
        """What the victim does (start, recovery), or what goes on: resize, join (another one
        starts), prefill (a client waits for its first token), decode; idle."""
        unsettled = self._unsettled()
        if rank in unsettled or self.resizes:
            return unsettled.get(rank, "resize")
        if unsettled:
            return "join" if "start" in unsettled.values() else "recovery"
        states = [node.page.snapshot(one).state for node in self._look() for one in node.ranks]
        if all(state in (RankState.IDLE, RankState.ABSENT) for state in states):
            return "idle"
        return "prefill" if self.prompts else "decode"

    def strike(self, rng: random.Random, may_raise: bool) -> Fault | None:
        (who,) = rng.choices(list(self._heads), list(self._heads.values()))
        return self._strike_rank(rng, may_raise) if who == RANK else self._strike_head(rng, who)

    def _strike_head(self, rng: random.Random, who: str) -> Fault | None:
        calm, pid = self.is_calm, self._run.find(who) if who != NODE else self._run.node(1)[0]
        (kind,) = rng.choices(list(HEAD_KINDS), list(HEAD_KINDS.values()))
        doing = self.doing(-1)
        if pid is None or not _send(pid, SIGNALS[kind]):
            return None
        return Fault(f"{who} {kind}", -1, doing, time.monotonic(), calm)

    def _strike_rank(self, rng: random.Random, may_raise: bool) -> Fault | None:
        pids = {rank: pid for node in self._look() for rank, pid in node.pids().items()}
        if not pids:
            return None
        rank = rng.choice(sorted(pids))
        (kind,) = rng.choices(self._kinds, [WEIGHTS[kind] for kind in self._kinds])
        doing, calm = self.doing(rank), self.is_calm
        if kind == EXCEPTION and not (may_raise and calm):
            kind = "kill -9"
        if kind == OOM_KILL and doing == "start":  # it does not handle signals yet
            kind = "kill -9"
        if kind == OOM_KILL and not (self._group and self._group.take(pids[rank])):
            return None
        if not _send(pids[rank], SIGNALS[kind]):
            return None
        return Fault(kind, rank, doing, time.monotonic(), calm)


def _unsettled_state(seen: RankSnapshot) -> str:
    if seen.state in (RankState.ABSENT, RankState.STARTING):
        return "start"
    is_recovery = "abandon" in seen.operation or "tell experts" in seen.operation
    return "recovery" if is_recovery else ""


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
def serving(flags: str, hook: str = "", nodes: int = 1) -> Iterator[Served]:
    """The server of these flags; its processes are gone afterwards. `hook`: a command for its
    events."""
    run = Run()
    port = free_port()
    words = ["serve", MODEL, "--port", str(port), *FLAGS.split(), *flags.split()]
    words += ["--elastic-event-command", hook] if hook else []
    if nodes > 1:
        words += ["--nnodes", str(nodes), "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    process, *others = (_start(run, [*words, "--node-rank", str(node)]) for node in range(nodes))
    try:
        wait_for(lambda: "ready: http" in run.log.read_text(), "server", run)
        yield Served(f"http://127.0.0.1:{port}", run, process)
    finally:
        run.close()
        for one in (process, *others):
            one.wait()


@dataclass
class Heads:
    """A server of two nodes, each of which may lead."""

    flags: str
    urls: tuple[str, str]
    meeting: str
    """Where the nodes meet."""
    place: Callable[[list[str]], list[str]] | None
    """The command that runs another one where node 0 is; None: here."""
    runs: list[Run]
    processes: list[subprocess.Popen[bytes]]

    @classmethod
    def create(
        cls,
        flags: str,
        hosts: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),
        place: Callable[[list[str]], list[str]] | None = None,
    ) -> Heads:
        first, second = hosts
        urls = f"http://{first}:{free_port()}", f"http://{second}:{free_port()}"
        meeting = f"{first}:{free_port()},{second}:{free_port()}"
        heads = cls(flags, urls, meeting, place, [], [])
        for node in range(2):
            heads.runs.append(Run())
            heads.processes.append(heads.start(node))
        return heads

    def start(self, node: int) -> subprocess.Popen[bytes]:
        _, host, port = self.urls[node].replace("//", "").split(":")
        words = ["serve", MODEL, "--host", host, "--port", port]
        words += [*FLAGS.split(), *self.flags.split()]
        words += ["--nnodes", "2", "--dist-init-addr", self.meeting, "--node-rank", str(node)]
        return _start(self.runs[node], words, self.place if node == 0 else None)

    def kill(self, node: int) -> None:
        """All processes of a node, in any order."""
        pids = self.runs[node].pids()
        random.shuffle(pids)
        for pid in pids:
            _send(pid, signal.SIGKILL)
        self.processes[node].wait()

    def leads(self, node: int) -> bool:
        """Whether it serves HTTP."""
        try:
            return httpx.get(f"{self.urls[node]}/health", timeout=60).status_code == 200
        except httpx.ConnectError:
            return False

    def await_text(self, node: int, text: str, times: int = 1) -> None:
        """Until a node has logged it so often."""
        run = self.runs[node]
        wait_for(lambda: run.log.read_text().count(text) >= times, text, run)

    def close(self) -> None:
        for run, process in zip(self.runs, self.processes, strict=True):
            run.close()
            process.wait()


def _start(
    run: Run, words: Sequence[str], place: Callable[[list[str]], list[str]] | None = None
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.faulty_rank", *words]
    with run.log.open("ab") as log:
        return subprocess.Popen(
            command if place is None else place(command),
            env=run.environment | SECRET,
            stdout=log,
            stderr=log,
            cwd=ROOT,
        )
