"""CUDA's MPS for ranks that share a GPU.

Without it the GPU runs one process at a time, and a rank that waits for another's data waits for a
time slice of some milliseconds. Each server has its own daemon, in its own folders, which ends with
the server. No torch here.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from moesaic.comm.launch import mps_owner
from moesaic.comm.launch.mps_owner import LOGS, PIPES, READY
from moesaic.config.devices import VISIBLE
from moesaic.config.gpus import MAX_MPS_CLIENTS, PERCENT, processor_percent
from moesaic.core.process import child_environment

logger = logging.getLogger(__name__)

PROGRAM: Final = "nvidia-cuda-mps-control"
DEFAULT_PIPES: Final = "/tmp/nvidia-mps"
QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_QUEUES: Final = 8
"""Clients of a daemon take their queues to the GPU from one pool: with 32 each the third finds none
left, which CUDA reports as "out of memory". 8 is CUDA's own default."""
CROWD: Final = "MOESAIC_MPS_CROWD"
STOP_SECONDS: Final = 20.0
FENCE_SECONDS: Final = 1.0
NEEDED: Final = "ranks that share a GPU need it"
INSTALL: Final = (
    "it comes with NVIDIA's driver; containers get it with "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
)


@dataclass(slots=True)
class Mps:
    """A daemon that ranks can use. `environment`: the variables that select it."""

    environment: dict[str, str]
    _watch: subprocess.Popen[str] | None = field(default=None, repr=False)

    @property
    def is_own(self) -> bool:
        """Whether it ends with this process."""
        return self._watch is not None

    def for_ranks(self, sharers: int) -> dict[str, str]:
        """The environment of each of `sharers` ranks on a GPU; keeps a user's processor limit."""
        if sharers == 1:
            return {}
        shown = {**self.environment, CROWD: str(0 if self.is_own else MAX_MPS_CLIENTS)}
        percent = processor_percent(sharers, crowded=not self.is_own)
        if given := os.environ.get(PERCENT):
            logger.info("MPS: ranks compute on as many processors as %s=%s says", PERCENT, given)
        elif percent < 100:
            logger.info("MPS: a rank computes on up to %d%% of processors (%s)", percent, PERCENT)
            shown[PERCENT] = str(percent)
        return shown

    def stop(self) -> None:
        """Called when its ranks have ended. May be repeated."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        assert watch.stdin is not None and watch.stdout is not None
        watch.stdin.close()
        try:
            watch.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("process %d is still stopping the MPS daemon", watch.pid)
        watch.stdout.close()

    def __enter__(self) -> Mps:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def crowd() -> int:
    """Ranks of all servers that may wait on this rank's GPU; 0 if the server has its own daemon."""
    return int(os.environ.get(CROWD) or 0)


def cramped(processors: int) -> str:
    """The advice if ranks of other servers may wait on all `processors` of a rank; else empty."""
    if processors > crowd():
        return ""
    return (
        f"a rank may compute on {processors} processors of its GPU, and up to {crowd()} ranks on "
        "its MPS daemon may wait on as many, which would keep it from its work: have no other "
        f"server on that daemon, or allow more by {PERCENT}, or by the daemon's own"
    )


def find_program() -> str:
    """Raises RuntimeError if it is not installed."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise RuntimeError(
            f"{PROGRAM} is not on PATH: {NEEDED} ({INSTALL}): install it, or give each rank a GPU "
            "of its own"
        )
    return program


def start_mps() -> Mps:
    """Uses the daemon that CUDA_MPS_PIPE_DIRECTORY names, if it runs; else starts one, even if
    another runs: servers that share one fail together, and must leave each other processors."""
    program, pipes = find_program(), os.environ.get(PIPES) or DEFAULT_PIPES
    named, runs = bool(os.environ.get(PIPES)), _answers_in(pipes, program)
    if named and runs:
        logger.info(
            "MPS: using the daemon in %s, as %s says; other servers may, too: each rank waits with "
            "one program, to leave theirs room",
            pipes,
            PIPES,
        )
        return Mps({PIPES: pipes, **_few_queues()})
    if named:
        logger.warning(
            "MPS: no daemon answers in %s, which %s names: starting one of our own", pipes, PIPES
        )
    elif runs:
        logger.warning(
            "MPS: the daemon in %s is left alone; %s=%s takes it, as a GPU in exclusive mode needs",
            pipes,
            PIPES,
            pipes,
        )
    return _start_own(program)


def terminate_client(pid: int) -> bool:
    """Has the daemon end what a process computes, which is about to be killed: a process that is
    killed while its kernels run may take others on its daemon along. False if that failed."""
    program = shutil.which(PROGRAM)
    servers = "" if program is None else mps_owner.ask(program, "get_server_list", FENCE_SECONDS)
    if program is None or not servers:
        return False
    command = "\n".join(f"terminate_client {server} {pid}" for server in servers.split())
    return mps_owner.ask(program, command, FENCE_SECONDS) is not None


def describe_daemon() -> str:
    """The daemon that a server here would use for ranks that share a GPU."""
    program, named = shutil.which(PROGRAM), os.environ.get(PIPES)
    others = any(mps_owner.mps_processes())
    if program is None:
        return f"{'one runs, but ' if others else ''}{PROGRAM} is not on PATH"
    if named and _answers_in(named, program):
        return f"the one in {named}, as {PIPES} says"
    if named:
        return f"none answers in {named}, which {PIPES} names; a server starts its own"
    if others:
        return f"one runs; a server starts its own unless {PIPES} names it"
    return "none runs; a server starts its own"


def _answers_in(pipes: str, program: str) -> bool:
    """`pipes`: the folder that this environment names."""
    return Path(pipes, "control").exists() and mps_owner.answers(program)


def _few_queues() -> dict[str, str]:
    given = os.environ.get(QUEUES, "")
    number = re.match(r"\s*\+?([0-9]+)", given)  # CUDA ignores what is around it
    if number is None or int(number[1]) <= MOST_QUEUES:
        return {}
    logger.warning(
        "MPS: %s=%r leaves other ranks no queue: taken as %d", QUEUES, given, MOST_QUEUES
    )
    return {QUEUES: str(MOST_QUEUES)}


def _start_own(program: str) -> Mps:
    folder = tempfile.mkdtemp(prefix="moesaic-mps-")
    environment = {
        name: str(Path(folder, part)) for name, part in ((PIPES, "pipes"), (LOGS, "log"))
    }
    for path in environment.values():
        os.mkdir(path, mode=0o700)
    # A daemon that sees only some GPUs renumbers them, but ranks use the original numbers.
    inherited = {name: value for name, value in child_environment().items() if name != VISIBLE}
    watch = subprocess.Popen(
        [sys.executable, "-I", mps_owner.__file__, program, folder],
        env={**inherited, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert watch.stdout is not None
    shown = watch.stdout.readline().strip()
    if shown != READY:
        Mps(environment, watch).stop()
        raise RuntimeError(
            f"no MPS daemon: {shown or 'the process that starts it died'}; {NEEDED}: fix that, or "
            "give each rank a GPU of its own"
        )
    logger.info("MPS: daemon of our own in %s, stopped with this process", folder)
    return Mps({**environment, **_few_queues()}, watch)
