"""The keeper of an elastic server, with HTTP processes that serve nothing."""

import os
import subprocess
import sys
import textwrap

import pytest

from moesaic.comm.launch.supervisor_process import FoundSupervisor, SupervisorAddress
from moesaic.comm.supervise.process_watch import started_at

PROGRAM = """
import gc, os, signal, sys, time
from moesaic.comm.launch.keeper_link import KeeperLink, Note
from moesaic.config import ServerArgs
from moesaic.core.stats import ServiceLoss
from moesaic.server import keeper

def wait(link):
    print("life", link.life, flush=True)
    link.tell(Note(ready=True))
    time.sleep(60)
    return 7

{body}

sys.exit(keeper.keep(serve, ServerArgs("tiny:mixtral")))
"""


def run(body: str) -> tuple[int, str]:
    """The exit status and the output of a keeper."""
    program = PROGRAM.format(body=textwrap.dedent(body))
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=50
    )
    return done.returncode, done.stdout


def test_a_signal_between_two_http_processes_ends_the_server() -> None:
    """It comes while the keeper collects garbage before a fork, when no process could get it."""
    status, output = run("""
        def collect():
            if keeper_pid == os.getpid() and len(collected) == 1:
                os.kill(keeper_pid, signal.SIGTERM)
            collected.append(0)

        keeper_pid, collected, gc.collect = os.getpid(), [], collect

        def serve(link):
            if link.life:
                return wait(link)
            link.tell(Note(ready=True))
            os._exit(3)
    """)
    assert status == 128 + 15 and "life 1" not in output


def test_notes_may_come_in_parts() -> None:
    """A note may be longer than a pipe has room for, and a process may die while it writes one."""
    status, output = run("""
        def serve(link):
            if link.life == 2:
                print([len(one.cause) for one in link.losses.last], flush=True)
                link.tell(Note(ended=True))
                return 5
            link.tell(Note(ready=True))
            link.tell(Note(loss=ServiceLoss("supervisor", "x" * 200_000, 1.0, seconds=1.0)))
            os.write(link.pipe, b'{"ready":')
            os._exit(3)
    """)
    assert status == 5
    sizes = [int(size) for size in output.strip("[]\n").split(",")]
    assert sizes[0] == 200_000 and len(sizes) == 4


def test_a_node_that_learns_at_its_start_that_another_one_leads_joins_it() -> None:
    """It looked before, when the other one did not lead yet."""
    status, output = run("""
        from types import SimpleNamespace
        from moesaic.comm.launch.service import Service
        from moesaic.core.messages import Fault

        def serve(link):
            if not link.leads:
                print("stands by", link.life, flush=True)
                link.tell(Note(ended=True))
                return 5
            spec = SimpleNamespace(timeouts=SimpleNamespace(start=60.0))
            fault = Fault("another node leads", supervisor=True, yields=True)
            service = SimpleNamespace(keeper=link, spec=spec, receive=lambda seconds: fault)
            Service._await_ready(service)
    """)
    assert (status, output) == (5, "stands by 0\n")


def test_another_process_with_the_number_of_a_supervisor_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "100"]) as other:
        try:
            found = FoundSupervisor(
                SupervisorAddress(other.pid, "route", "/folder", started_at(other.pid))
            )
            assert found.poll() is None
            found.close()
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(ProcessLookupError):
                FoundSupervisor(SupervisorAddress(other.pid, "route", "/folder", "1"))
            assert len(os.listdir("/proc/self/fd")) == before
        finally:
            other.kill()
