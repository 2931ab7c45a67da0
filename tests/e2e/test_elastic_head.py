"""The HTTP process and the supervisor of a server are killed under its streams: clients that ask
again by the id of their request get the answers of a run without faults, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from bench.elastic_client import Answer, Question, Tally, ask
from bench.elastic_faults import Served, serving
from bench.fault_run import wait_for

FLAGS = "--tp 2 --ep 2 --dp 2 --enable-dp-attention --ep-num-redundant-experts 8"
# Greedy and seeded, with logprobs, as text, and one that is not a stream.
QUESTIONS = [Question.draw(number) for number in (0, 1, 2, 3, 15)]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file in which a hook collects events."""
    return tmp_path_factory.mktemp("hook") / "events"


@pytest.fixture(scope="module")
def served(events: Path) -> Iterator[Served]:
    with serving(f"{FLAGS} --moe-a2a-backend deepep", f"tee -a {events}") as found:
        yield found


@pytest.fixture(scope="module")
def expected(served: Served) -> list[Any]:
    answers = asyncio.run(ask_all(served.url))
    assert all(one.done and not one.error and one.value for one in answers)
    return [one.value for one in answers]


async def ask_all(url: str, strike: Callable[[], None] | None = None) -> list[Answer]:
    """The answers; `strike` is called once a stream has begun, so that requests are open."""
    async with aiohttp.ClientSession() as session:
        found = [Answer() for _ in QUESTIONS]
        tasks = [
            asyncio.create_task(ask(session, url, question, answer))
            for question, answer in zip(QUESTIONS, found, strict=True)
        ]
        if strike is not None:
            while not any(one.times for one in found):
                await asyncio.sleep(0.01)
            strike()
        return list(await asyncio.gather(*tasks))


def during(served: Served, expected: list[Any], strike: Callable[[], None]) -> Tally:
    tally = Tally()
    answers = asyncio.run(ask_all(served.url, strike))
    for question, answer, value in zip(QUESTIONS, answers, expected, strict=True):
        tally.count(answer, value, str(question))
    assert (tally.right, tally.shown) == (len(QUESTIONS), [])
    return tally


def told(events: Path, process: str) -> list[dict[str, Any]]:
    """The events of a kind of process, which have come by now."""
    lines = events.read_text().splitlines() if events.exists() else []
    return [one for one in map(json.loads, lines) if one["process"] == process]


def losses(served: Served) -> list[dict[str, Any]]:
    told = httpx.get(f"{served.url}/server_info", timeout=60).json()
    found: list[dict[str, Any]] = told["losses"]["last"]
    return found


@pytest.mark.timeout(300)
def test_streams_survive_the_http_process(
    served: Served, expected: list[Any], events: Path
) -> None:
    pid, ranks = served.run.pid("http"), served.run.pid("supervisor")
    tally = during(served, expected, lambda: os.kill(pid, signal.SIGKILL))
    assert tally.reconnects >= 1  # whose request has come by then
    assert served.run.pid("http") != pid and served.run.pid("supervisor") == ranks
    (loss,) = losses(served)
    assert loss["process"] == "http" and 1 <= loss["requests"] <= len(QUESTIONS)
    assert f"the HTTP process {pid} was killed by signal 9" in loss["cause"]
    wait_for(lambda: len(told(events, "http")) == 2, "two events", served.run)
    assert {one["state"] for one in told(events, "http")} == {"begun", "done"}
    (done,) = (one for one in told(events, "http") if one["state"] == "done")
    assert (done["requests"], done["cause"]) == (loss["requests"], loss["cause"])
    assert 0 < loss["seconds"] < done["seconds"] + 0.01  # the keeper is told of the end


@pytest.mark.timeout(300)
def test_an_answer_that_has_ended_is_given_again(served: Served, expected: list[Any]) -> None:
    """Without a rank that computes it, within the time for which it is kept."""
    url, headers = served.url + QUESTIONS[1].path, {"X-Request-Id": "once"}
    body = QUESTIONS[1].body() | {"stream": False}
    first = httpx.post(url, json=body, headers=headers, timeout=60)
    steps = served.run.step()
    again = httpx.post(url, json=body, headers=headers, timeout=60)
    assert first.headers["x-request-id"] == again.headers["x-request-id"] == "once"
    assert first.json()["output_ids"] == again.json()["output_ids"]
    assert first.json()["output_ids"] == [token for token, _ in expected[1]]
    assert served.run.step() <= steps + 2
    other = body | {"input_ids": [9, 8, 7]}
    assert httpx.post(url, json=other, headers=headers, timeout=60).json() != first.json()
    bad = httpx.post(url, json=body, headers=headers | {"Last-Event-ID": "x"}, timeout=60)
    assert bad.status_code == 400 and "Last-Event-ID" in bad.text
    long = httpx.post(url, json=body, headers={"X-Request-Id": "x" * 257}, timeout=60)
    assert long.status_code == 400 and "256 are the most" in long.text


@pytest.mark.timeout(300)
def test_streams_survive_the_supervisor(served: Served, expected: list[Any], events: Path) -> None:
    pid = served.run.pid("supervisor")
    tally = during(served, expected, lambda: os.kill(pid, signal.SIGKILL))
    assert tally.reconnects == 0 and served.run.pid("supervisor") != pid
    loss = losses(served)[-1]
    assert loss["process"] == "supervisor" and 1 <= loss["requests"] <= len(QUESTIONS)
    assert "the supervisor died" in loss["cause"]
    wait_for(lambda: len(told(events, "supervisor")) == 2, "two events", served.run)
    metrics = httpx.get(f"{served.url}/metrics", timeout=60).text
    assert re.search(r"moesaic_supervisor_losses_total 1", metrics)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [("http",), ("supervisor",), ("http", "supervisor")], ids=str)
def test_streams_survive_what_hangs(
    served: Served, expected: list[Any], names: tuple[str, ...]
) -> None:
    pids = [served.run.pid(name) for name in names]
    during(served, expected, lambda: [os.kill(pid, signal.SIGSTOP) for pid in pids] and None)
    assert not {served.run.pid(name) for name in names} & {*pids}


@pytest.mark.timeout(120)
def test_a_signal_ends_all_of_it(served: Served) -> None:
    """The last test: also after losses, in order and without a trace."""
    served.run.learn()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0
    served.run.await_gone()
    assert served.run.left() == []
    wait_for(lambda: "the server has stopped" in served.run.log.read_text(), "end", served.run)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_ends_with_the_keeper() -> None:
    with serving(f"{FLAGS} --moe-a2a-backend deepep") as served:
        served.run.learn()
        os.kill(served.process.pid, signal.SIGKILL)
        served.process.wait()
        served.run.await_gone()
        assert served.run.left() == []
