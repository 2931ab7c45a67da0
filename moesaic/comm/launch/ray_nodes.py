"""Nodes of a service on a Ray cluster (--use-ray): this process is node 0, and an actor on each
other node runs the same command there.

Ray places the processes and says when one is gone. All else is as with other launchers: supervisors
watch ranks and nodes, and messages take our own authenticated links.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from moesaic.comm.launch.node_place import RAY_PLACE, NodePlace
from moesaic.comm.supervise.address import family_of
from moesaic.config.devices import VISIBLE
from moesaic.core.addresses import host_and_port
from moesaic.core.process import NODE_SECRET

logger = logging.getLogger(__name__)

# How long Ray may take to find room for the actors, and they to end after the service.
PLACE_SECONDS: Final = 60.0
END_SECONDS: Final = 60.0
# How long supervisors may take to notice that a node is gone.
NOTICE_SECONDS: Final = 10.0
PROGRAM: Final = (sys.executable, "-m", "moesaic.launch_server")


class RayNode:
    """The actor of a node."""

    def serve(self, argv: Sequence[str], environment: dict[str, str], folder: str) -> int:
        """Runs the command until the service ends; its exit status. It ends with the actor.
        `folder`: node 0's, from which paths of the command line count where it is here, too."""
        return subprocess.run(
            [*PROGRAM, *argv],
            env=_own_environment() | environment,
            cwd=folder if os.path.isdir(folder) else None,
            check=False,
        ).returncode


def _own_environment() -> dict[str, str]:
    """Returns this actor's environment with the node's GPUs visible. Older versions of Ray hide all
    GPUs from an actor that reserves none; Ray's own process, which started it, sees them."""
    found = dict(os.environ)
    if found.get(VISIBLE) == "":
        del found[VISIBLE]
        with suppress(OSError):
            started_by = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
            words = (os.fsdecode(word).partition("=") for word in started_by)
            found |= {name: value for name, _, value in words if name == VISIBLE}
    return found


@contextmanager
def ray_nodes(
    argv: Sequence[str],
    nnodes: int,
    secret: bytes,
    check: Callable[[NodePlace | None], object],
    on_end: Callable[[], None],
) -> Iterator[NodePlace | None]:
    """Starts the other nodes; `nnodes`: 0 for all of the cluster; an empty `secret`: one is made.
    Gives node 0's place, None if there is one node only, after `check` has seen it. Calls `on_end`
    in another thread if an actor fails and the service does not end by itself."""
    ray: Any = importlib.import_module("ray")
    try:
        ray.init(address="auto", logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ValueError(
            "--use-ray: there is no Ray cluster here: run `ray start --head` and, on the other "
            "nodes, `ray start --address HEAD:6379`; or set RAY_ADDRESS"
        ) from error
    try:
        alive = sum(node["Alive"] for node in ray.nodes())
        nnodes = nnodes or alive
        if nnodes > alive:
            raise ValueError(
                f"--use-ray --nnodes {nnodes}: Ray's cluster has {alive} nodes: start more, or "
                f"give --nnodes {alive}"
            )
        if nnodes == 1:
            check(None)
            yield None
            return
        host = ray.util.get_node_ip_address()
        place = NodePlace("Ray", nnodes, 0, host_and_port(host, _free_port(host)))
        check(place)
        os.environ[NODE_SECRET] = secret.decode() or secrets.token_hex(32)
        with _actors(ray, argv, place, host, on_end):
            yield place
    finally:
        ray.shutdown()


@contextmanager
def _actors(
    ray: Any, argv: Sequence[str], place: NodePlace, host: str, on_end: Callable[[], None]
) -> Iterator[None]:
    """One a node, of which node 0 is here."""
    bundles = [{f"node:{host}": 0.001}, *({"CPU": 1} for _ in range(place.nnodes - 1))]
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD", name="moesaic")
    try:
        if not group.wait(PLACE_SECONDS):
            raise ValueError(
                f"--use-ray: Ray has not found {place.nnodes} nodes with a free CPU each within "
                f"{PLACE_SECONDS:g} s: see `ray status`"
            )
        made = ray.remote(RayNode)
        running = {}
        for node in range(1, place.nnodes):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=node
            )
            actor = made.options(num_cpus=1, scheduling_strategy=strategy).remote()
            told = f"{node} {place.nnodes} {place.address}"
            given = {RAY_PLACE: told, NODE_SECRET: os.environ[NODE_SECRET]}
            running[actor.serve.remote(list(argv), given, os.getcwd())] = (node, actor)
        watch = _Watch(ray, running, on_end)
        try:
            yield
        except BaseException:
            watch.end(0.0)
            raise
        watch.end(END_SECONDS)
    finally:
        ray.util.remove_placement_group(group)


class _Watch:
    """Reports actors that end before the service does."""

    def __init__(
        self, ray: Any, running: dict[Any, tuple[int, Any]], on_end: Callable[[], None]
    ) -> None:
        self._ray, self._running, self._on_end = ray, running, on_end
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moesaic-ray", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        left = list(self._running)
        while left:
            done, left = self._ray.wait(left)
            for future in done:
                self._report(future)

    def _report(self, future: Any) -> None:
        """A command that ends with status 0 was told to. Supervisors notice a node that is lost,
        but not one that never came."""
        node, _ = self._running[future]
        try:
            status = self._ray.get(future)
            how = f"its command ended with status {status}" if status else ""
        except self._ray.exceptions.RayError as error:
            how = str(error).strip().partition("\n")[0] or type(error).__name__
        if how and not self._ends.is_set():
            logger.error("Ray's actor of node %d has ended: %s", node, how)
            if not self._ends.wait(NOTICE_SECONDS):
                self._on_end()

    def end(self, seconds: float) -> None:
        """Node 0 has ended the service, so that the others end by themselves."""
        self._ends.set()
        self._thread.join(seconds)
        if seconds and self._thread.is_alive():
            logger.warning("Ray's actors have not ended within %g s: they are killed", seconds)
        for _, actor in self._running.values():
            self._ray.kill(actor)
        self._thread.join(NOTICE_SECONDS)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=family_of(host)) as listener:
        return int(listener.getsockname()[1])
