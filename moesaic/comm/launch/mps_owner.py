"""The process that owns an MPS daemon: it starts the daemon, and stops it when its parent is gone.

It runs as a program, by its path, with the daemon's program as its argument and the folders in the
environment. It writes one line when the daemon is ready, or the error, and runs until its standard
input or its parent ends, even by SIGKILL. The kernel could kill a foreground daemon with its
parent, but not the daemon's child, the server that holds the GPU.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PIPES: Final = "CUDA_MPS_PIPE_DIRECTORY"
LOGS: Final = "CUDA_MPS_LOG_DIRECTORY"
READY: Final = "ready"
COMMAND: Final = "nvidia-cuda-mps"
START_SECONDS: Final = 20.0
ANSWER_SECONDS: Final = 5.0
QUIT_SECONDS: Final = 5.0
POLL: Final = 0.2
LOG_LINES: Final = 5
SAID: Final = "said.log"


def main() -> None:
    program, folder, parent = sys.argv[1], sys.argv[2], os.getppid()
    # A signal to all processes of a server is not for this one, which ends after its parent.
    # Children inherit ignored signals but not handlers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    trouble = start(program)
    with contextlib.suppress(BrokenPipeError):
        print(trouble or READY, flush=True)
    while not trouble and os.getppid() == parent:
        if select.select([sys.stdin], [], [], POLL)[0]:
            break
    stop(program)
    shutil.rmtree(folder, ignore_errors=True)


def start(program: str) -> str:
    """The error; empty once the daemon is ready."""
    try:
        with Path(os.environ[LOGS], SAID).open("wb") as said:
            done = subprocess.run(
                [program, "-d"],
                stdin=subprocess.DEVNULL,
                # The daemon inherits this: a pipe to this process would not end.
                stdout=said,
                stderr=said,
                timeout=START_SECONDS,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return f"{program} -d ended with {done.returncode}{_log()}"
    deadline = time.monotonic() + ANSWER_SECONDS
    while not (_listens(os.environ[PIPES]) or answers(program)):
        if time.monotonic() > deadline:
            return f"{program} -d started no daemon that listens{_log()}"
        time.sleep(POLL)
    return ""


def answers(program: str) -> bool:
    return _tell(program, "get_server_list", ANSWER_SECONDS)


def _listens(pipes: str) -> bool:
    """Whether the daemon runs and has created its socket."""
    return Path(pipes, "control").exists() and any(mps_processes(pipes))


def stop(program: str) -> None:
    """Asks the daemon to quit; kills it and its servers if they do not."""
    _tell(program, "quit", QUIT_SECONDS)
    folder = os.environ[PIPES]
    deadline = time.monotonic() + QUIT_SECONDS
    while any(mps_processes(folder)) and time.monotonic() < deadline:
        time.sleep(POLL)
    for pid in mps_processes(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def mps_processes(pipes: str | None = None) -> Iterator[int]:
    """The machine's daemons and servers; `pipes`: those with this folder in their environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(") ")
            if not name.startswith(COMMAND) or rest.startswith("Z"):
                continue
            variables = (folder / "environ").read_bytes().split(b"\0") if pipes else []
            if not pipes or f"{PIPES}={pipes}".encode() in variables:
                yield int(folder.name)


def ask(program: str, command: str, seconds: float) -> str | None:
    """What the daemon answers; None if it does not within `seconds`."""
    try:
        done = subprocess.run(
            [program],
            input=f"{command}\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _tell(program: str, command: str, seconds: float) -> bool:
    return ask(program, command, seconds) is not None


def _log() -> str:
    """The last lines of the program's output and of the daemon's log."""
    lines: list[str] = []
    for name in (SAID, "control.log"):
        with contextlib.suppress(OSError):
            text = Path(os.environ[LOGS], name).read_text(errors="replace")
            lines += [line for line in text.splitlines() if line.strip()][-LOG_LINES:]
    return ": " + " | ".join(lines) if lines else ""


if __name__ == "__main__":
    main()
