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
    namespace: str
    address: str

    def command(self, words: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]


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
    made = [Node(f"mz{pid}n{k}", f"{subnet}.{k + 1}") for k in range(number)]
    try:
        try:
            _ip(f"link add {bridge} type bridge")
            _ip(f"addr add {subnet}.254/24 dev {bridge}")
            _ip(f"link set {bridge} up")
            for k, node in enumerate(made):
                _plug(node, bridge, f"mz{pid}v{k}")
        except subprocess.CalledProcessError as error:
            raise NotAllowed(error.stderr.strip()) from None
        yield made
    finally:
        for node in made:
            with suppress(subprocess.CalledProcessError):
                _ip(f"netns del {node.namespace}")
        with suppress(subprocess.CalledProcessError):
            _ip(f"link del {bridge}")


def _plug(node: Node, bridge: str, cable: str) -> None:
    _ip(f"netns add {node.namespace}")
    _ip(f"link add {cable} type veth peer name eth0 netns {node.namespace}")
    _ip(f"link set {cable} master {bridge} up")
    _ip(f"-n {node.namespace} addr add {node.address}/24 dev eth0")
    _ip(f"-n {node.namespace} link set eth0 up")
    _ip(f"-n {node.namespace} link set lo up")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)
