"""A supervisor whose client is lost, and that notices only when the next one is there."""

import os
import signal
import subprocess
import time
from dataclasses import replace

import msgspec
import psutil

from moesaic.comm.supervise.process_watch import process_state
from moesaic.core.messages import Attached, Hello, Query, StepOutput, Submit
from tests.distributed.test_supervisor import LONG, next_message, request, serving, spec


def test_requests_of_a_lost_client_are_those_of_no_other() -> None:
    """The supervisor is held up while one client ends and the next one comes."""
    wanted = replace(spec(client=1.5), keeper=os.getpid())
    with serving(wanted) as (service, _), subprocess.Popen(["sleep", "1000"]) as former:
        service.send(Hello(facts={"pid": former.pid}))
        keyed = msgspec.structs.replace(request(1, LONG), key="a")
        service.send(Submit([request(0, LONG), keyed]))
        seen: set[int] = set()
        while seen < {0, 1}:
            message = next_message(service)
            seen |= set(message.numbers) if isinstance(message, StepOutput) else set()
        supervisor = psutil.Process(service.pid)
        supervisor.suspend()
        while process_state(service.pid) != "T":
            time.sleep(0.01)
        former.send_signal(signal.SIGKILL)
        former.wait()
        service.send(Query(1, "info"))  # the last word of the former
        service.send(Hello(facts={"pid": os.getpid()}))
        again = msgspec.structs.replace(keyed, request_no=7)
        service.send(Submit([again]))
        supervisor.resume()
        # Nobody can ask for the one without a key; the other one has a client again.
        ended = attached = False
        until = time.monotonic() + 30
        while not (ended and attached) and time.monotonic() < until:
            message = next_message(service)
            attached = attached or message == Attached(7, 1)
            if isinstance(message, StepOutput):
                ended = ended or any(d.request_no == 0 and d.finish for d in message.deltas)
        assert ended and attached
        # This client says nothing for longer than a service waits for one, and is known to live.
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            message = service.receive(until - time.monotonic())
            assert message is None or isinstance(message, StepOutput), message
