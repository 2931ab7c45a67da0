"""Nodes on a Ray cluster, with a stand-in for Ray: tests/e2e/test_launchers.py has the real one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moesaic.comm.launch import ray_nodes
from moesaic.comm.launch.node_place import RAY_PLACE, NodePlace
from moesaic.core.process import NODE_SECRET

ARGV = ["tiny:qwen3_moe", "--tp", "3"]


class RayError(Exception):
    pass


class StandIn(ModuleType):
    """Ray's calls that are used. A test ends the commands of actors, as `runs` lists them."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self) -> None:
        super().__init__("ray")
        self.alive, self.calls = 3, list[Any]()
        self.given, self.runs = list[tuple[Any, ...]](), list[Future[int]]()
        self.util = SimpleNamespace(
            get_node_ip_address=lambda: "127.0.0.1",
            placement_group=self._group,
            remove_placement_group=lambda _: self.calls.append("remove"),
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=dict),
        )

    def init(self, **given: object) -> None:
        self.calls.append(given["address"])

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": number < self.alive} for number in range(self.alive + 1)]

    def remote(self, kind: type) -> Any:
        assert kind is ray_nodes.RayNode
        return SimpleNamespace(options=self._options)

    def wait(self, runs: list[Future[int]]) -> tuple[list[Future[int]], list[Future[int]]]:
        done, left = wait(runs, return_when=FIRST_COMPLETED)
        return list(done), list(left)

    def get(self, run: Future[int]) -> int:
        return run.result()

    def kill(self, actor: Any) -> None:
        if not actor.run.done():
            self.calls.append("kill")
            actor.run.set_exception(RayError("killed"))

    def _group(self, bundles: list[Any], strategy: str, name: str) -> Any:
        self.calls.append((bundles, strategy))
        return SimpleNamespace(wait=lambda _: True)

    def _options(self, num_cpus: int, scheduling_strategy: dict[str, Any]) -> Any:
        run = Future[int]()

        def serve(*given: object) -> Future[int]:
            self.given.append((scheduling_strategy["placement_group_bundle_index"], *given))
            self.runs.append(run)
            return run

        actor = SimpleNamespace(run=run, serve=SimpleNamespace(remote=serve))
        return SimpleNamespace(remote=lambda: actor)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    made = StandIn()
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setenv(NODE_SECRET, "is replaced")
    yield made
    assert made.calls[-1] == "shutdown"
    names = [thread.name for thread in threading.enumerate()]
    assert "moesaic-ray" not in names, "it watches on"


def test_an_actor_on_each_other_node(ray: StandIn):
    checked, ended = list[NodePlace | None](), threading.Event()
    with ray_nodes.ray_nodes(ARGV, 0, b"", checked.append, ended.set) as place:
        assert place is not None and (place.nnodes, place.node_rank) == (3, 0)
        secret = os.environ[NODE_SECRET]
        assert len(secret) == 64 and checked == [place]
        bundles = [{"node:127.0.0.1": 0.001}, {"CPU": 1}, {"CPU": 1}]
        assert ray.calls == ["auto", (bundles, "STRICT_SPREAD")]
        for node, given in enumerate(ray.given, 1):
            told = {RAY_PLACE: f"{node} 3 {place.address}", NODE_SECRET: secret}
            assert given == (node, ARGV, told, os.getcwd())
        for run in ray.runs:
            run.set_result(0)
    assert len(ray.given) == 2 and ray.calls[2:] == ["remove", "shutdown"] and not ended.is_set()


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (3, "Ray's actor of node 2 has ended: its command ended with status 3"),
        (RayError("The actor died.\nclass: x"), "Ray's actor of node 2 has ended: The actor died."),
    ],
)
def test_an_actor_that_ends_is_named_and_ends_the_service(
    end: int | RayError,
    words: str,
    ray: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """If supervisors do not notice it."""
    monkeypatch.setattr(ray_nodes, "NOTICE_SECONDS", 0.1)
    ended = threading.Event()
    with ray_nodes.ray_nodes(ARGV, 3, b"of all nodes", lambda _: None, ended.set):
        assert os.environ[NODE_SECRET] == "of all nodes"
        if isinstance(end, int):
            ray.runs[1].set_result(end)
        else:
            ray.runs[1].set_exception(end)
        assert ended.wait(20)
        ray.runs[0].set_result(0)
    assert words in caplog.messages and len(caplog.messages) == 1


def test_actors_that_stay_are_killed(
    ray: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """After a while, or at once if the service fails; both are no news."""
    monkeypatch.setattr(ray_nodes, "END_SECONDS", 0.1)
    ended = threading.Event()
    with ray_nodes.ray_nodes(ARGV, 2, b"", lambda _: None, ended.set):
        pass
    assert ray.calls[2:] == ["kill", "remove", "shutdown"]
    assert caplog.messages == ["Ray's actors have not ended within 0.1 s: they are killed"]
    caplog.clear()
    with (
        pytest.raises(ValueError, match="no such port"),
        ray_nodes.ray_nodes(ARGV, 3, b"", lambda _: None, ended.set),
    ):
        raise ValueError("no such port")
    assert ray.calls.count("kill") == 3 and caplog.messages == [] and not ended.is_set()


def test_too_few_nodes_and_one(ray: StandIn):
    with (
        pytest.raises(
            ValueError, match="Ray's cluster has 3 nodes: start more, or give --nnodes 3"
        ),
        ray_nodes.ray_nodes(ARGV, 4, b"", lambda _: None, lambda: None),
    ):
        raise AssertionError
    ray.alive = 1
    checked: list[NodePlace | None] = []
    with ray_nodes.ray_nodes(ARGV, 0, b"", checked.append, lambda: None) as place:
        assert place is None and checked == [None] and ray.given == []
    assert os.environ[NODE_SECRET] == "is replaced"
