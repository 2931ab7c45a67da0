"""Instances that come and go: listed in a file, or pods of a cluster, whose API is a small one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from moesaic.cli.main import main
from moesaic.router.app import Router
from moesaic.router.args import RouterArgs
from moesaic.router.discovery import ClusterApi
from tests.server.routers import routed
from tests.server.serving import listening, wait_until


@contextmanager
def instance(name: str) -> Iterator[str]:
    """Answers with its name."""

    async def answer(_: Request) -> Response:
        return JSONResponse({"name": name})

    routes = [Route("/health", answer), Route("/{path:path}", answer, methods=["POST"])]
    with listening(Starlette(routes=routes)) as url:
        yield url


QUICK: dict[str, Any] = {"health_check_interval_secs": 0.05, "retry_max_retries": 0}


def test_a_file_that_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "instances.json"
    path.write_text('{"workers": []}')
    with instance("one") as one, instance("two") as two:
        args = RouterArgs(service_discovery_file=str(path), policy="round_robin", **QUICK)
        with routed(args) as (router, client):

            def names() -> set[str]:
                answers = [client.post("/generate", json={"text": "x"}) for _ in "abc"]
                return {found.json().get("name", "none") for found in answers}

            assert names() == {"none"} and client.get("/health").status_code == 503
            for listed, expected in (([one], {"one"}), ([one, two], {"one", "two"})):
                path.write_text(json.dumps({"workers": listed}))
                wait_until(lambda expected=expected: names() == expected)
            path.write_text('{"workers": [')
            wait_until(lambda: "the instances stay as they are" in caplog.text)
            assert names() == {"one", "two"}
            path.write_text(json.dumps({"workers": [two]}))
            wait_until(lambda: names() == {"two"})
            assert [worker.url for worker in router.workers] == [two]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("[]", "give an object with lists under workers, prefill, decode"),
        ('{"router": []}', "give an object with lists under"),
        ('{"prefill": ["http://a:1"]}', "'prefill' is not used with these flags: give workers"),
        ('{"workers": "http://a:1"}', "must be a list of texts"),
        ('{"workers": ["a:1"]}', "workers a:1: give http://HOST:PORT"),
        ('{"workers": [7]}', "must be a list of texts"),
        ('{"workers": ["http://a:1 8998"]}', "workers http://a:1 8998: give http://HOST:PORT"),
    ],
)
def test_files_that_are_refused(
    tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "instances.json"
    if content is not None:
        path.write_text(content)
    assert main(["router", "--service-discovery-file", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--service-discovery", "--service-discovery needs --selector"),
        ("--selector a=b --worker-urls http://a:1", "--selector needs --service-discovery"),
        ("--service-discovery --selector a", "--selector a: give KEY=VALUE"),
        (
            "--service-discovery --pd-disaggregation --prefill-selector a=b",
            "needs --prefill-selector and --decode-selector",
        ),
        (
            "--service-discovery --selector a=b --decode-selector c=d",
            "--decode-selector is not used with these flags: give --selector",
        ),
        ("--service-discovery --selector a=b", "and this is no pod with a service account"),
    ],
)
def test_flags_that_are_refused(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["router", *line.split()]) == 2
    assert message in capsys.readouterr().err


def pod(name: str, **more: Any) -> dict[str, Any]:
    status: dict[str, Any] = {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    metadata = {"uid": name, "resourceVersion": "7", "labels": {"app": "moesaic"}}
    return {
        "metadata": metadata | more.pop("metadata", {}),
        "status": status | more.pop("status", {}),
    }


class Cluster:
    """Its API: what it has listed, and events that a test puts into a watch."""

    def __init__(self) -> None:
        self.pods: dict[str, list[dict[str, Any]]] = {}
        """By selector."""
        self.asked: list[tuple[str, dict[str, str], str | None]] = []
        self._events: dict[str, asyncio.Queue[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def answer(self, request: Request) -> Response:
        self._loop, query = asyncio.get_running_loop(), dict(request.query_params)
        self.asked.append((request.url.path, query, request.headers.get("authorization")))
        selector = query["labelSelector"]
        if "watch" not in query:
            listed = self.pods.get(selector, [])
            return JSONResponse({"metadata": {"resourceVersion": "5"}, "items": listed})
        events = self._events[selector] = asyncio.Queue()

        async def lines() -> AsyncIterator[bytes]:
            while (event := await events.get()) is not None:
                yield json.dumps(event).encode() + b"\n"

        return StreamingResponse(lines(), media_type="application/json")

    def tell(self, selector: str, *events: Any) -> None:
        wait_until(lambda: selector in self._events)
        assert self._loop is not None
        for event in events:
            self._loop.call_soon_threadsafe(self._events[selector].put_nowait, event)

    def end(self, selector: str) -> None:
        self.tell(selector, None)
        del self._events[selector]


def test_pods_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready pods are used, those that end are not; a watch that ends goes on, and one that has
    ended for good begins with a list."""
    monkeypatch.setattr("moesaic.router.discovery.PAUSE_SECONDS", 0.05)
    (tmp_path / "token").write_text("secret\n")
    cluster, role = Cluster(), "role=prefill,app=moesaic"
    annotated = {"annotations": {"sglang.ai/bootstrap-port": "9001"}}
    cluster.pods = {role: [pod("p0", metadata=annotated)], "role=decode": []}
    args = RouterArgs(
        pd_disaggregation=True,
        service_discovery=True,
        prefill_selector=tuple(role.split(",")),
        decode_selector=("role=decode",),
        service_discovery_port=30000,
        service_discovery_namespace="models",
        **QUICK,
    )
    app = Starlette(routes=[Route("/{path:path}", cluster.answer)])
    with listening(app) as url:
        router = Router(args, ClusterApi(url, tmp_path))
        with listening(router.app()):

            def found(role: str) -> list[tuple[str, int]]:
                listed = [one for one in router.workers if one.role == role]
                return sorted((one.url, one.bootstrap_port) for one in listed)

            wait_until(lambda: found("prefill") == [("http://127.0.0.1:30000", 9001)])
            first = {
                "type": "ADDED",
                "object": pod("d0", status={"podIP": "127.0.0.2", "phase": "Pending"}),
            }
            ready = {"type": "MODIFIED", "object": pod("d0", status={"podIP": "127.0.0.2"})}
            other = {"type": "ADDED", "object": pod("d1", status={"podIP": "::1"})}
            cluster.tell("role=decode", first)
            cluster.tell("role=decode", ready, other)
            both = [("http://127.0.0.2:30000", 8998), ("http://[::1]:30000", 8998)]
            wait_until(lambda: found("decode") == both)
            leaving = pod("d1", metadata={"deletionTimestamp": "2026"}, status={"podIP": "::1"})
            [worker] = [one for one in router.workers if "::1" in one.url]
            cluster.tell("role=decode", {"type": "MODIFIED", "object": leaving})
            wait_until(lambda: found("decode") == both[:1])
            assert worker.leaving.is_set()
            mark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "99"}}}
            cluster.tell("role=decode", mark)
            cluster.end("role=decode")
            cluster.tell("role=decode", {"type": "DELETED", "object": ready["object"]})
            wait_until(lambda: found("decode") == [])
            versions = [query.get("resourceVersion") for _, query, _ in cluster.asked]
            assert "99" in versions
            cluster.pods["role=decode"] = [ready["object"]]
            cluster.tell("role=decode", {"type": "ERROR", "object": {"message": "too old"}})
            wait_until(lambda: found("decode") == both[:1])
            wrong = {"annotations": {"sglang.ai/bootstrap-port": "9001²"}}
            cluster.pods[role] += [pod("p1", metadata=wrong), pod("p2", status={"podIP": "::2"})]
            cluster.tell(role, {"type": "ADDED", "object": "no pod"})  # they are listed again
            prefill = [("http://127.0.0.1:30000", 9001), ("http://[::2]:30000", 8998)]
            wait_until(lambda: found("prefill") == prefill)
    paths = {path for path, _, _ in cluster.asked}
    assert paths == {"/api/v1/namespaces/models/pods"}
    assert {token for _, _, token in cluster.asked} == {"Bearer secret"}
    assert {query["labelSelector"] for _, query, _ in cluster.asked} == {role, "role=decode"}
