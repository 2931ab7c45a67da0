"""Faults around the `moesaic` command: its exit status, what it says, what is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.fault_cases import MODEL, Outcome, Struck, logged
from bench.fault_run import PATIENCE, Run, wait_for
from bench.faulty_rank import HOLD
from bench.http_server import free_port

ROOT: Final = Path(__file__).parents[1]
FLAGS: Final = "--tp 2 --num-threads 1 --max-total-tokens 16384".split()
ASK: Final = "--max-new-tokens 1900 --ignore-eos --prompt Tiles".split()
SIGNALS: Final = {
    "kill -9": signal.SIGKILL,
    "SIGINT": signal.SIGINT,
    "SIGTERM": signal.SIGTERM,
    "exception": signal.SIGUSR1,
}
CLIENT: Final = "the client"
# In the middle of an answer: so many steps are done.
STEPS: Final = 10


@dataclass(frozen=True)
class CommandCase:
    """`victims`: the client, or processes as Run.find names them. `phase`: start, decode."""

    victims: tuple[str, ...]
    fault: str
    phase: str = "decode"
    command: str = "generate"


def command_outcome(case: CommandCase) -> Outcome:
    run = Run()
    try:
        return (_generate if case.command == "generate" else _serve)(case, run)
    finally:
        run.close()


def _start(run: Run, *words: str, held: bool = False) -> subprocess.Popen[bytes]:
    environment = run.environment | ({HOLD: "0"} if held else {})
    command = [sys.executable, "-m", "bench.faulty_rank", *words, *FLAGS]
    with run.log.open("ab") as log:
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT
        )


def _generate(case: CommandCase, run: Run) -> Outcome:
    process = _start(run, "generate", MODEL, *ASK, held=case.phase == "start")
    run.pid("rank0")
    run.pid("rank1")
    if case.phase == "decode":
        wait_for(lambda: run.step() > STEPS, "steps", run)
    run.learn()
    struck = _strike(case, process, run)
    status = process.wait(PATIENCE)
    ended = time.monotonic()
    return _result(case, struck, ended, status, run)


def _serve(case: CommandCase, run: Run) -> Outcome:
    """Also what the HTTP client is told."""
    port = free_port()
    process = _start(run, "serve", MODEL, "--port", str(port))
    wait_for(lambda: "ready: http" in run.log.read_text(), "server", run)
    call = Call(f"http://127.0.0.1:{port}/generate")
    wait_for(lambda: run.step() > STEPS, "steps", run)
    run.learn()
    struck = _strike(case, process, run)
    call.join()
    status = process.wait(PATIENCE)
    with run.log.open("a") as log:
        log.write(f"error: HTTP {call.status}: {call.text}\n")
    return _result(case, struck, call.ended, status, run)


class Call:
    """A request to a server, in a thread."""

    def __init__(self, url: str) -> None:
        self.status, self.text, self.ended = 0, "", 0.0
        sampling = {"max_new_tokens": 1900, "ignore_eos": True}
        body = json.dumps({"text": "Tiles", "sampling_params": sampling}).encode()
        self._request = urllib.request.Request(url, body, {"content-type": "application/json"})
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert self.ended, "the server gave no answer"

    def _run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=PATIENCE) as answer:
                self.status, self.text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            self.status, self.text = error.code, error.read().decode()
        self.ended = time.monotonic()


def _strike(case: CommandCase, process: subprocess.Popen[bytes], run: Run) -> Struck:
    pids = [process.pid if name == CLIENT else run.pid(name) for name in case.victims]
    struck = Struck(time.monotonic(), time.time())
    for pid in pids:
        os.kill(pid, SIGNALS[case.fault])
    return struck


def _result(case: CommandCase, struck: Struck, ended: float, status: int, run: Run) -> Outcome:
    run.await_gone()
    gone = time.monotonic()
    text = run.log.read_text()
    told = re.findall(r"^error: (.*)", text, re.M)
    named = logged(run, case.victims[0].replace("rank", "rank "), struck)
    return Outcome(
        layout="tp 2",
        victim=" and ".join(case.victims).replace("rank", "rank "),
        fault=case.fault,
        phase=f"{case.command}, {case.phase}",
        named_s=min(named) if named else None,
        answered_s=ended - struck.at,
        gone_s=gone - struck.at,
        pending=int(case.phase == "decode"),
        failed=int(bool(told)),
        message=told[-1] if told else "",
        status=status,
        left=run.left(),
    )
