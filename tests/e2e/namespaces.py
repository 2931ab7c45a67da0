"""Nodes on one machine: network namespaces with addresses of their own, joined by a bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """`cable`: the end of its network that is here. `bridge`: the address by which nodes reach this
    process."""

    namespace: str
    address: str
    cable: str
    bridge: str

    def command(self, words: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]

    def cut(self) -> None:
        """Nothing reaches it any more, and nobody is told."""
        _ip(f"link set {self.cable} down")

    def mend(self) -> None:
        _ip(f"link set {self.cable} up")


class NotAllowed(Exception):
    """This user or machine may not make namespaces."""


@contextmanager
def nodes(number: int) -> Iterator[list[Node]]:
    """The nodes; this process reaches them too. Names and addresses follow the process id, so that
    two runs do not meet."""
    if shutil.which("ip") is None:
        raise NotAllowed("the ip command is missing")
    pid = os.getpid()
    bridge, subnet = f"mz{pid}", f"10.{64 + (pid >> 8) % 128}.{pid % 256}"
    here = f"{subnet}.254"
    made = [Node(f"mz{pid}n{k}", f"{subnet}.{k + 1}", f"mz{pid}v{k}", here) for k in range(number)]
    try:
        try:
            _ip(f"link add {bridge} type bridge")
            _ip(f"addr add {here}/24 dev {bridge}")
            _ip(f"link set {bridge} up")
            for node in made:
                _plug(node, bridge)
        except subprocess.CalledProcessError as error:
            raise NotAllowed(error.stderr.strip()) from None
        yield made
    finally:
        for node in made:
            with suppress(subprocess.CalledProcessError):
                _ip(f"netns del {node.namespace}")
        with suppress(subprocess.CalledProcessError):
            _ip(f"link del {bridge}")


def _plug(node: Node, bridge: str) -> None:
    _ip(f"netns add {node.namespace}")
    _ip(f"link add {node.cable} type veth peer name eth0 netns {node.namespace}")
    _ip(f"link set {node.cable} master {bridge} up")
    _ip(f"-n {node.namespace} addr add {node.address}/24 dev eth0")
    _ip(f"-n {node.namespace} link set eth0 up")
    _ip(f"-n {node.namespace} link set lo up")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)
