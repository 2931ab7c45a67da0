"""Prefill and decode instances behind routers, killed and stopped at random while clients stream:
is any answer lost or changed, what do clients wait, what is left behind.

    python -m bench.pd_faults                                   # 10000 requests, 500 faults
    python -m bench.pd_faults --requests 200 --faults 10 --out pd_faults_quick
    python -m bench.pd_faults --elastic --out pd_faults_elastic # instances outlive what they lose
    python -m bench.pd_faults --markdown                        # no run: the table from the JSON

Every process is real: instances of two ranks on CPU, started as users start them, two routers with
the same flags, the openai client. What dies is started again, on the same port. A client whose
router dies repeats its request, with the same X-Request-Id, at the other one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from bench.common import RESULTS, machine, print_table, write_json
from bench.fault_run import Run
from bench.http_server import free_port
from bench.pd_clients import Clients, send

ROOT: Final = Path(__file__).parents[1]
MODEL: Final = "tiny:qwen3_moe"
SERVER: Final = (
    f"--model-path {MODEL} --num-threads 1 --max-total-tokens 8192 --log-level warning "
    "--enable-deterministic-inference"
).split()
ROUTER: Final = (
    "--pd-disaggregation --policy round_robin --retry-max-retries 1000 "
    "--health-check-interval-secs 0.5 --log-level warning"
).split()
START_SECONDS: Final = 300.0
LOOK: Final = 0.1
# How long a stopped process sleeps.
SLEEP: Final = (1.0, 8.0)
ELASTIC: Final = "--elastic-ep-backend mooncake --restart-limit 0".split()
# Each rank has all experts.
GROUPS: Final = "--enable-dp-attention --moe-a2a-backend deepep --ep-num-redundant-experts 8"
# How often each fault is chosen.
KINDS: Final[dict[str, int]] = {
    "kill -9 of a server": 5,
    "kill -9 of a rank": 6,
    "kill -9 of a supervisor": 2,
    "SIGSTOP of a rank": 4,
    "SIGSTOP of an instance": 5,
    "SIGTERM of a server": 3,
    "kill -9 of a router": 3,
}
HTTP_KINDS: Final = {"kill -9 of an HTTP process": 4}
QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True)
class Plan:
    requests: int
    faults: int
    seconds: float = 1e9
    """After so long no further request is sent."""
    prefill: int = 2
    decode: int = 2
    ranks: int = 2
    clients: int = 8
    calls: int = 64
    """Different requests; each is sent again and again."""
    rounds: int = 4
    """How often each is sent before the first fault."""
    seed: int = 0
    elastic: bool = False
    """Instances go on without a rank, a supervisor or an HTTP process, which are started again."""


@dataclass
class Process:
    """A server or a router of the command line, started again whenever it ends."""

    role: str
    words: list[str]
    port: int
    run: Run = field(default_factory=Run)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    is_ready: bool = False
    is_asleep: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", *self.words]
        with self.run.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=self.run.environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
            )
        self.starts, self.is_ready = self.starts + 1, False

    async def watch(self, http: httpx.AsyncClient) -> None:
        """Starts it again once nothing of it is left: its ports are free then."""
        while True:
            assert self.process is not None
            if self.process.poll() is not None:
                self.is_ready = False
                while self.run.pids():
                    await asyncio.sleep(LOOK)
                self.start()
            if not self.is_asleep:
                with suppress(httpx.HTTPError):
                    answer = await http.get(f"{self.url}/health", timeout=5)
                    self.is_ready = answer.status_code == 200
            await asyncio.sleep(LOOK if not self.is_ready else 5 * LOOK)


@dataclass
class Fault:
    kind: str
    victim: str
    when: float


class Trial:
    """The processes, the clients and the faults of one run."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.chooser = plan, random.Random(plan.seed)
        self.instances = [
            self._instance(mode)
            for mode, number in (("prefill", plan.prefill), ("decode", plan.decode))
            for _ in range(number)
        ]
        where = [
            word
            for one in self.instances
            for word in (
                ["--prefill", one.url, one.words[-1]]
                if one.role == "prefill"
                else ["--decode", one.url]
            )
        ]
        self.routers = []
        for _ in range(2):
            port = free_port()
            words = ["moesaic.launch_router", "--port", str(port), *ROUTER, *where]
            self.routers.append(Process("router", words, port))
        self.faults: list[Fault] = []
        self.longest_away = dict.fromkeys(("prefill", "decode", "router"), 0.0)
        """By role, the longest time in which none was ready, once all have been."""

    def _instance(self, mode: str) -> Process:
        port, bootstrap = free_port(), free_port()
        words = ["moesaic.launch_server", *SERVER, "--port", str(port), "--tp"]
        words += [str(self.plan.ranks), "--disaggregation-mode", mode]
        if self.plan.elastic:
            words += ELASTIC
        if self.plan.elastic and self.plan.ranks > 1:
            words += [*GROUPS.split(), "--dp", str(self.plan.ranks), "--ep", str(self.plan.ranks)]
        words += ["--disaggregation-bootstrap-port", str(bootstrap)]
        return Process(mode, words, port)

    @property
    def processes(self) -> list[Process]:
        return [*self.instances, *self.routers]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with httpx.AsyncClient() as http:
            for one in self.processes:
                one.start()
            watches = [asyncio.create_task(one.watch(http)) for one in self.processes]
            try:
                await self.ready()
                watches.append(asyncio.create_task(self._note_absence()))
                yield
            finally:
                for task in watches:
                    task.cancel()
                await asyncio.gather(*watches, return_exceptions=True)

    async def _note_absence(self) -> None:
        seen = dict.fromkeys(self.longest_away, time.monotonic())
        while True:
            now = time.monotonic()
            seen |= {one.role: now for one in self.processes if one.is_ready and not one.is_asleep}
            for role, last in seen.items():
                self.longest_away[role] = max(self.longest_away[role], now - last)
            await asyncio.sleep(LOOK)

    async def ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while late := [one for one in self.processes if not one.is_ready]:
            if time.monotonic() > end:
                told = "\n".join(one.run.log.read_text()[-2000:] for one in late)
                raise TimeoutError(f"{[one.role for one in late]} did not start:\n{told}")
            await asyncio.sleep(LOOK)

    async def inject(self, number: int, until: asyncio.Event) -> None:
        """So many faults, each as soon as there is a victim whose work others can do."""
        while len(self.faults) < number and not until.is_set():
            kinds = KINDS | HTTP_KINDS if self.plan.elastic else KINDS
            kind = self.chooser.choices([*kinds], [*kinds.values()])[0]
            victims = self._victims("router" if "router" in kind else "")
            if victims:
                victim = self.chooser.choice(victims)
                self.faults.append(Fault(kind, victim.role, time.monotonic()))
                await self.strike(kind, victim)
            await asyncio.sleep(self.chooser.uniform(0.2, 1.0))

    def _victims(self, role: str) -> list[Process]:
        ready = [one for one in self.processes if one.is_ready and not one.is_asleep]
        counts = Counter(one.role for one in ready)
        wanted = [one for one in ready if (one.role == "router") == bool(role)]
        return [one for one in wanted if counts[one.role] > 1]

    async def strike(self, kind: str, victim: Process) -> None:
        assert victim.process is not None
        victim.is_ready = "SIGSTOP" in kind
        match kind.split():
            case ["kill", _, _, _, "rank"]:
                _signal([victim.run.find(f"rank{self._rank()}")], signal.SIGKILL)
            case ["kill", _, _, _, "HTTP", _]:
                _signal([victim.run.find("http")], signal.SIGKILL)
            case ["kill", _, _, _, "supervisor"]:
                _signal([victim.run.find("supervisor")], signal.SIGKILL)
            case ["kill", *_]:
                _signal([victim.process.pid], signal.SIGKILL)
            case ["SIGTERM", *_]:
                _signal([victim.process.pid], signal.SIGTERM)
            case ["SIGSTOP", _, _, "rank"]:
                await self._sleep(victim, [victim.run.find(f"rank{self._rank()}")])
            case _:
                await self._sleep(victim, victim.run.pids())

    def _rank(self) -> int:
        return self.chooser.randrange(self.plan.ranks)

    async def _sleep(self, victim: Process, pids: Sequence[int | None]) -> None:
        victim.is_asleep = True
        try:
            _signal(pids, signal.SIGSTOP)
            await asyncio.sleep(self.chooser.uniform(*SLEEP))
        finally:
            _signal(pids, signal.SIGCONT)
            victim.is_asleep = False

    def stop(self) -> list[str]:
        """Ends everything in order; returns what is left of it."""
        left: list[str] = []
        for one in [*self.routers, *self.instances]:
            one.run.learn() if one.role != "router" else None
            _signal([one.process.pid if one.process else None], signal.SIGTERM)
        for one in self.processes:
            with suppress(TimeoutError):
                one.run.await_gone()
            left += [f"{one.role}: {what}" for what in one.run.left() if "descriptors" not in what]
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if probe.connect_ex(("127.0.0.1", one.port)) == 0:
                    left.append(f"{one.role}: somebody listens at its port")
            one.run.close()
        return left


def _signal(pids: Sequence[int | None], number: signal.Signals) -> None:
    for pid in pids:
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


async def measure(plan: Plan) -> dict[str, Any]:
    begun, trial, calls = time.monotonic(), Trial(plan), plan.calls
    left: list[str] = []
    try:
        async with trial.running():
            clients = Clients([one.url for one in trial.routers], calls, plan.seed)
            ask = partial(send, clients, width=plan.clients)
            calm = await ask(range(plan.rounds * calls), until=1e12, name="without faults")
            expected = {number: answer for number, answer in calm if number < calls}
            lost = [answer.error for _, answer in calm if not answer.seconds]
            assert not lost, f"without a fault: {lost}"
            assert all(answer.text == expected[n % calls].text for n, answer in calm)
            over = asyncio.Event()
            faults = asyncio.create_task(trial.inject(plan.faults, over))
            until = time.monotonic() + plan.seconds
            found = await ask(range(plan.requests), until=until, name="with faults")
            over.set()
            await faults
            await trial.ready()
            after = await ask(range(calls), until=1e12, name="afterwards")
            await clients.close()
    finally:
        left = trial.stop()
    usual = {
        call: statistics.median([a.seconds for n, a in calm if n % calls == call])
        for call in range(calls)
    }
    added = [answer.seconds - usual[n % calls] for n, answer in found if answer.seconds]
    lost = [answer for _, answer in [*found, *after] if not answer.seconds]
    changed = [n for n, a in [*found, *after] if a.seconds and a.text != expected[n % calls].text]
    return {
        "machine": {**machine(1), "cores": len(os.sched_getaffinity(0))},
        "plan": asdict(plan),
        "seconds": time.monotonic() - begun,
        "requests": len(found) + len(after),
        "faults": len(trial.faults),
        "faults_by_kind": Counter(fault.kind for fault in trial.faults),
        "faults_by_victim": Counter(fault.victim for fault in trial.faults),
        "starts": sum(one.starts for one in trial.processes) - len(trial.processes),
        "longest_away_s": {role: round(took, 1) for role, took in trial.longest_away.items()},
        "lost": len(lost),
        "errors": Counter(answer.error for answer in lost),
        "changed": len(changed),
        "reconnected": sum(answer.reconnected > 0 for _, answer in found),
        "usual_s": quantiles([answer.seconds for _, answer in calm]),
        "added_s": quantiles(added),
        "gap_s": quantiles([answer.gap for _, answer in found]),
        "usual_gap_s": quantiles([answer.gap for _, answer in calm]),
        "left": left,
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {name: round(ordered[round(q * last)], 3) for name, q in QUANTILES.items()}


def _words(counts: dict[str, float]) -> str:
    return ", ".join(f"{name} {count:g}" for name, count in counts.items())


def table(found: dict[str, Any]) -> list[list[str]]:
    plan = found["plan"]
    kinds = ", ".join(f"{n} × {kind}" for kind, n in sorted(found["faults_by_kind"].items()))
    rows = [
        [
            "instances" + ", elastic" * plan["elastic"],
            f"{plan['prefill']} prefill, {plan['decode']} decode, {plan['ranks']} ranks",
        ],
        ["streamed requests", f"{found['requests']}, {plan['clients']} at a time"],
        ["faults", f"{found['faults']}: {kinds}"],
        ["processes started again", str(found["starts"])],
        ["requests that changed the router", str(found["reconnected"])],
        ["longest time without an instance, s", _words(found["longest_away_s"])],
        ["lost", str(found["lost"])],
        ["changed", str(found["changed"])],
        ["left behind", "; ".join(found["left"]) or "nothing"],
    ]
    for name, what in (
        ("usual_s", "a request without faults"),
        ("added_s", "added to it"),
        ("usual_gap_s", "longest pause of a stream without faults"),
        ("gap_s", "with faults"),
    ):
        told = ", ".join(f"{quantile} {value:.2f}" for quantile, value in found[name].items())
        rows.append([f"{what}, s", told])
    return rows


def main() -> int:
    args = parse_args()
    path = RESULTS / f"{args.out}.json"
    if args.markdown:
        rows = [["", ""], ["---", "---"], *table(json.loads(path.read_text()))]
        print("\n".join(f"| {one} | {other} |" for one, other in rows))
        return 0
    options = {name: getattr(args, name) for name in ("seconds", "clients", "seed", "elastic")}
    plan = Plan(args.requests, args.faults, **options)
    found = asyncio.run(measure(plan))
    print_table(["", ""], table(found))
    write_json(args.out, found)
    return int(bool(found["lost"] or found["changed"] or found["left"]))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.pd_faults", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new requests after so long")
    parser.add_argument("--clients", type=int, default=8, help="requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elastic", action="store_true", help="with --elastic-ep-backend")
    parser.add_argument("--out", default="pd_faults", help="the name of the JSON")
    parser.add_argument("--markdown", action="store_true", help="the table of the last run")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
