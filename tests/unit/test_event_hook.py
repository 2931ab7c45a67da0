"""Events of an elastic service reach a command and a URL, and a slow one delays nobody."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from moesaic.comm.supervise import event_hook
from moesaic.comm.supervise.event_hook import EventHooks, ServiceEvent, event_of_loss
from moesaic.config import ServerArgs, resolve
from moesaic.core.stats import MembershipChange, ServiceLoss
from tests.server.serving import wait_until


@pytest.fixture
def posts() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """A URL, and the paths and bodies that it got."""
    found: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.append((self.path, json.loads(body)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/events?of=me", found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def change(**fields: Any) -> MembershipChange:
    return MembershipChange(2, "lost", [3], "rank 3 died", 1000.5, [0, 1, 2], **fields)


def test_changes_are_told_twice(posts: tuple[str, list[Any]], tmp_path: Path) -> None:
    url, found = posts
    path = tmp_path / "events"
    hooks = EventHooks({"elastic_event_url": url, "elastic_event_command": f"tee -a {path}"})
    hooks.tell_changes([change()])
    wait_until(lambda: len(found) == 1 and path.exists() and path.read_text().count("\n") == 1)
    hooks.tell_changes([change()])
    done = change(seconds=0.25, moved_requests=4, experts=2, nbytes=4096)
    hooks.tell_changes([done])
    hooks.tell_changes([done])
    wait_until(lambda: len(found) == 2 and path.read_text().count("\n") == 2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [b for _, b in found]
    assert {path for path, _ in found} == {"/events?of=me"}
    begun, ended = (body for _, body in found)
    assert (begun["state"], begun["seconds"], ended["state"]) == ("begun", None, "done")
    assert ended | {"state": "", "live": []} == {
        "process": "rank",
        "event": "lost",
        "state": "",
        "cause": "rank 3 died",
        "when": 1000.5,
        "seconds": 0.25,
        "ranks": [3],
        "live": [],
        "requests": 4,
        "experts": 2,
        "nbytes": 4096,
    }


def test_a_slow_hook_delays_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Hooks end only once all events have been told."""
    monkeypatch.setattr(event_hook, "MOST_AT_ONCE", 2)
    told = tmp_path / "told"
    waits = f"sh -c 'until [ -e {told} ]; do sleep 0.05; done'"
    hooks = EventHooks({"elastic_event_command": waits})
    for number in range(4):
        hooks.tell(event_of_loss(ServiceLoss("http", f"loss {number}", 1.0)))
    assert [one.poll() for one in hooks._running] == [None, None]
    told.touch()
    dropped = [record.message for record in caplog.records]
    assert [text.rpartition(": ")[2] for text in dropped] == ["loss 2", "loss 3"]
    wait_until(lambda: all(one.poll() == 0 for one in hooks._running))


def test_hooks_have_a_limit_and_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(event_hook, "HOOK_SECONDS", 0.3)
    begin = time.monotonic()
    wrong = event_hook.run_command("sh -c 'sleep 60 & wait'", b"{}")
    assert "did not end within 0.3 s" in wrong and time.monotonic() - begin < 30
    assert "exit code 3" in event_hook.run_command("sh -c 'exit 3'", b"{}")
    monkeypatch.setenv("MOESAIC_API_KEY", "secret")
    path = tmp_path / "environment"
    hooks = EventHooks({"elastic_event_command": f"sh -c 'env > {path}.new; mv {path}.new {path}'"})
    hooks.tell(ServiceEvent("rank", "lost", "begun", "x", 1.0))
    wait_until(path.exists)
    assert "PATH=" in path.read_text() and "MOESAIC_API_KEY" not in path.read_text()
    assert event_hook._shown("https://user:word@host/token?x=1") == "host"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"elastic_event_url": "ftp://x"}, "begins with http:// or https://"),
        ({"elastic_event_command": "no-such-program -x"}, "there is no such program"),
        ({"elastic_event_command": "sh -c 'x"}, "No closing quotation"),
        ({"elastic_event_command": "tee x", "elastic_ep_backend": None}, "needs --elastic-ep-"),
    ],
    ids=str,
)
def test_hooks_that_cannot_work_are_refused(flags: dict[str, Any], why: str) -> None:
    given = {"model_path": "tiny:qwen3_moe", "elastic_ep_backend": "mooncake"} | flags
    with pytest.raises(ValueError, match=why):
        resolve(ServerArgs.from_kwargs(**given))


def test_without_flags_nothing_runs() -> None:
    hooks = EventHooks({"elastic_event_command": None})
    hooks.tell_changes([change()])
    hooks.tell(ServiceEvent("rank", "lost", "begun", "x", 1.0))
    assert hooks._running == []
