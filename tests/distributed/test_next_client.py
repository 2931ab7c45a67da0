"""A supervisor whose client is lost, and that notices only when the next one is there."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import psutil

from moesaic.comm.launch.service import Service
from moesaic.comm.supervise.process_watch import process_state
from moesaic.core.messages import AnyMessage, Attached, Hello, StepOutput, Submit
from tests.distributed.test_supervisor import LONG, next_message, request, serving, spec


@contextmanager
def client() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            yield process
        finally:
            process.kill()


def await_message(service: Service, is_wanted: Callable[[AnyMessage], bool]) -> None:
    until = time.monotonic() + 60
    while not is_wanted(next_message(service)):
        assert time.monotonic() < until


def has_token(number: int) -> Callable[[AnyMessage], bool]:
    return lambda message: isinstance(message, StepOutput) and number in message.numbers


def ends(number: int) -> Callable[[AnyMessage], bool]:
    return lambda message: (
        isinstance(message, StepOutput)
        and any(delta.request_no == number and delta.finish is not None for delta in message.deltas)
    )


def test_requests_of_a_lost_client_are_not_those_of_the_next() -> None:
    """The supervisor is held up while one client ends and the next one comes."""
    wanted = replace(spec(), keeper=os.getpid())
    with client() as former, client() as later, serving(wanted) as (service, _):
        service.send(Hello(facts={"pid": former.pid}))
        keyed = msgspec.structs.replace(request(1, LONG), key="a")
        service.send(Submit([request(0, LONG), keyed]))
        await_message(service, has_token(0))
        await_message(service, has_token(1))
        supervisor = psutil.Process(service.pid)
        supervisor.suspend()
        while process_state(service.pid) != "T":
            time.sleep(0.01)
        former.send_signal(signal.SIGKILL)
        former.wait()
        service.send(Hello(facts={"pid": later.pid}))
        supervisor.resume()
        # Request 0 has no key, so no client can ask for it again, and it ends. Request 1 has one.
        await_message(service, ends(0))
        service.send(Submit([msgspec.structs.replace(keyed, request_no=7)]))
        await_message(service, lambda message: message == Attached(7, 1))
        # The end of the next client is seen, too.
        service.send(Submit([request(8, LONG)]))
        await_message(service, has_token(8))
        later.send_signal(signal.SIGKILL)
        await_message(service, ends(8))
