"""The supervisor's process: `python -m moesaic.comm.supervise.main`, started by comm.launch.

It reads a ServiceSpec from its standard input. It answers with one line on its standard output: "ok
ROUTE FOLDER" or "error TEXT". Both pipes stay open: the end of one means that the process at its
other end is gone.

It has a session of its own, so that Ctrl-C and Ctrl-Z reach the client alone. SIGTERM or SIGINT
stop the service in order, with status 0; a fault ends it with status 1. Ranks ignore both.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from typing import Final

import msgspec
import zmq

from moesaic.comm.supervise.child_process import name_process
from moesaic.comm.supervise.follower_supervisor import FollowerSupervisor
from moesaic.comm.supervise.lead_supervisor import LeadSupervisor
from moesaic.comm.supervise.node_supervisor import NodeSupervisor
from moesaic.comm.supervise.run_folder import RunFolder
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.core.messages import Fault

LENGTH_BYTES: Final = 8
logger = logging.getLogger(__name__)


def main() -> int:
    name_process("moesaic-super")
    requests, answers = _take_pipes()
    length = int.from_bytes(_read(requests, LENGTH_BYTES), "little")
    spec = msgspec.msgpack.decode(_read(requests, length), type=ServiceSpec)
    logging.basicConfig(
        level=spec.log_level.upper(), format="[%(asctime)s] [supervisor] %(message)s"
    )
    try:
        folder = RunFolder.create()
    except (OSError, RuntimeError) as error:
        os.write(answers, f"error {error}\n".encode())
        return 1
    # The temporary files of multiprocessing are swept with the folder.
    tempfile.tempdir = str(folder.path)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        kind = LeadSupervisor if spec.is_lead else FollowerSupervisor
        node: NodeSupervisor = kind(spec, folder.path, context)
        _watch_client(node, requests)
        _watch_signals(node)
        os.write(answers, f"ok {node.client_route.decode()} {folder.path}\n".encode())
        try:
            code = _run(node)
            if isinstance(node, FollowerSupervisor) and node.takes_over:
                node = LeadSupervisor(replace(spec, leads=True), folder.path, context, node)
                _watch_client(node, requests)
                _watch_signals(node)
                code = _run(node)
            return code
        finally:
            node.close()
            context.term()
    finally:
        folder.remove()


def _run(node: NodeSupervisor) -> int:
    try:
        return node.run()
    except Exception as error:
        logger.exception("the supervisor failed")
        node.fail_with(Fault(f"the supervisor failed: {error!r}", supervisor=True))
        return 1


def _take_pipes() -> tuple[int, int]:
    """Duplicates the two pipes, so that no child inherits them."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, answers


def _read(pipe: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = os.read(pipe, length - len(data))
        if not part:
            raise SystemExit("the client ended before it said what to start")
        data += part
    return data


def _watch_client(node: NodeSupervisor, pipe: int) -> None:
    """Stops the service when the client's pipe or process ends: a child may keep the pipe open.
    Where a keeper starts clients again it is the keeper's end that does."""
    if node.spec.keeper:

        def abandoned() -> None:
            node.has_client = False
            node.abandon("the process that keeps the service ended")

        node.loop.add(os.pidfd_open(node.spec.keeper), abandoned)
        return
    number = f"node {node.spec.node_rank}'s" if node.mesh.nnodes > 1 else "the"

    def gone() -> None:
        node.has_client = False
        node.stop(f"the process that started {number} ranks ended")

    node.loop.add(pipe, gone)
    with suppress(OSError, AttributeError):
        node.loop.add(os.pidfd_open(os.getppid()), gone)


def _watch_signals(node: NodeSupervisor) -> None:
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the wakeup descriptor delivers the number

    def caught() -> None:
        for number in os.read(reader, 16):
            if number in (signal.SIGTERM, signal.SIGINT):
                node.stop(f"the supervisor got {signal.Signals(number).name}")

    node.loop.add(reader, caught)


def _leave(code: int) -> None:
    """Exits without waiting for threads that wait for the fork server."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
