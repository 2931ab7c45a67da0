"""The node that leads is lost, with all of its processes: the other one takes its place, and
clients that ask there by the id of their request get the answers of a run without faults."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import aiohttp
import httpx
import pytest

from bench.elastic_client import Answer, Question, Tally, ask
from bench.elastic_faults import Heads
from bench.fault_run import wait_for
from tests.e2e.namespaces import NotAllowed, nodes

FLAGS = (
    "--tp 2 --ep 2 --dp 2 --enable-dp-attention --ep-num-redundant-experts 8 "
    "--moe-a2a-backend deepep --decode-log-interval 1000"
)
# Greedy and seeded, with logprobs, as text, and one that is not a stream.
QUESTIONS = [Question.draw(number) for number in (0, 1, 2, 3, 15)]


@pytest.fixture(scope="module")
def heads() -> Iterator[Heads]:
    made = Heads.create(FLAGS)
    try:
        made.await_text(0, "ready: http")
        made.await_text(0, "mirrored on node 1")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def expected(heads: Heads) -> list[Any]:
    answers = asyncio.run(ask_all(heads.urls[:1]))
    assert all(one.done and not one.error and one.value for one in answers)
    return [one.value for one in answers]


async def ask_all(
    urls: tuple[str, ...],
    strike: Callable[[], object] | None = None,
    patience: float | None = None,
) -> list[Answer]:
    """The answers; `strike` is called once streams have begun. `patience`: for the next event, as
    nothing ends a connection to a node that is cut off."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=patience, sock_read=patience)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        found = [Answer() for _ in QUESTIONS]
        tasks = [
            asyncio.create_task(ask(session, urls, question, answer))
            for question, answer in zip(QUESTIONS, found, strict=True)
        ]
        if strike is not None:
            while not all(one.times for one in found[:-1]):
                await asyncio.sleep(0.01)
            strike()
        return list(await asyncio.gather(*tasks))


def during(
    heads: Heads,
    expected: list[Any],
    strike: Callable[[], object],
    patience: float | None = None,
) -> Tally:
    """No answer is another one."""
    tally = Tally()
    answers = asyncio.run(ask_all(heads.urls, strike, patience))
    for question, answer, value in zip(QUESTIONS, answers, expected, strict=True):
        tally.count(answer, value, str(question))
    assert (tally.right, tally.shown) == (len(QUESTIONS), [])
    return tally


def info(heads: Heads, node: int) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{heads.urls[node]}/server_info", timeout=60).json()
    return found


def ask_once(url: str, request_id: str) -> dict[str, Any]:
    body, headers = Question.draw(5).body() | {"stream": False}, {"X-Request-Id": request_id}
    answer: dict[str, Any] = httpx.post(
        f"{url}/generate", json=body, headers=headers, timeout=60
    ).json()
    return answer


def comes_again(heads: Heads, node: int, expected: list[Any]) -> None:
    """A node that was lost joins the one that leads, which then has all ranks and a mirror."""
    leads, text = 1 - node, f"mirrored on node {node}"
    before = heads.runs[leads].log.read_text().count(text)
    heads.processes[node] = heads.start(node)
    heads.await_text(leads, text, before + 1)
    live = [0, 1]
    wait_for(lambda: info(heads, leads)["membership"]["live"] == live, "all", heads.runs[leads])
    assert [one.value for one in asyncio.run(ask_all(heads.urls))] == expected


@pytest.mark.timeout(400)
def test_the_second_node_takes_the_place_of_the_first(heads: Heads, expected: list[Any]) -> None:
    """Also of answers that had ended."""
    first = ask_once(heads.urls[0], "first")
    assert ask_once(heads.urls[0], "kept")["meta_info"]["cached_tokens"] > 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{heads.urls[1]}/health")
    tally = during(heads, expected, lambda: heads.kill(0))
    assert tally.reconnects >= len(QUESTIONS)
    (loss,) = info(heads, 1)["losses"]["last"]
    assert (loss["process"], loss["requests"]) == ("node", len(QUESTIONS)) and loss["seconds"]
    assert "is lost: " in loss["cause"]
    metrics = httpx.get(f"{heads.urls[1]}/metrics").text
    assert "moesaic_node_takeovers_total 1" in metrics
    again = ask_once(heads.urls[1], "kept")
    assert again["output_ids"] == first["output_ids"]
    assert again["meta_info"]["cached_tokens"] > 0, "node 1 has not computed it"


def who_leads(heads: Heads, expected: list[Any]) -> int:
    """The other node is there, too, then: a test before may have ended it."""
    leads = 0 if heads.leads(0) else 1
    if heads.processes[1 - leads].poll() is not None:
        comes_again(heads, 1 - leads, expected)
    return leads


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nodes_take_turns(heads: Heads, expected: list[Any]) -> None:
    """Whichever leads is lost, or the other one; it comes again each time, and may lead again."""
    rng, leads = random.Random(1), who_leads(heads, expected)
    for _ in range(6):
        victim = rng.choice([leads, leads, 1 - leads])
        during(heads, expected, lambda victim=victim: heads.kill(victim))  # type: ignore[misc]
        leads = 1 - victim
        comes_again(heads, victim, expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_supervisor_that_is_lost_is_replaced_on_its_node(
    heads: Heads, expected: list[Any]
) -> None:
    """The keeper there lives: nobody takes over, and no connection breaks."""
    leads = who_leads(heads, expected)
    pid, text = heads.runs[leads].pid("supervisor"), f"mirrored on node {1 - leads}"
    before = heads.runs[leads].log.read_text().count(text)
    tally = during(heads, expected, lambda: os.kill(pid, signal.SIGKILL))
    asked_first = leads * len(QUESTIONS)  # at node 0, which refused
    assert tally.reconnects == asked_first
    assert heads.leads(leads) and not heads.leads(1 - leads)
    heads.await_text(leads, text, before + 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_mirror_that_sleeps_joins_again(heads: Heads, expected: list[Any]) -> None:
    """The node that led waits for it, and keeps the connections of its clients."""
    leads = who_leads(heads, expected)
    text = f"mirrored on node {1 - leads}"
    before = heads.runs[leads].log.read_text().count(text)
    asleep = heads.runs[1 - leads].pids()

    def strike() -> None:
        for pid in asleep:
            os.kill(pid, signal.SIGSTOP)
        threading.Timer(5.0, wake).start()

    def wake() -> None:
        for pid in asleep:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    tally = during(heads, expected, strike)
    asked_first = leads * len(QUESTIONS)  # at node 0, which refused
    assert tally.reconnects == asked_first
    assert "and may lead from now on: " in heads.runs[leads].log.read_text()
    heads.await_text(leads, text, before + 1)
    assert heads.leads(leads) and not heads.leads(1 - leads)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_that_leads_is_cut_off() -> None:
    """It shows nothing from then on, and the other one leads. Once it hears of that, it joins."""
    try:
        with nodes(1) as (far,):
            cut = Heads.create(FLAGS, (far.address, far.bridge), far.command)
            try:
                check_cut(cut, far.cut, far.mend)
            finally:
                cut.close()
    except NotAllowed as reason:
        pytest.skip(f"no network namespaces here: {reason}")


def check_cut(cut: Heads, strike: Callable[[], object], mend: Callable[[], object]) -> None:
    cut.await_text(0, "mirrored on node 1")
    cut.await_text(0, "ready: http")
    wanted = [one.value for one in asyncio.run(ask_all(cut.urls[:1]))]
    during(cut, wanted, strike, 5.0)
    (loss,) = info(cut, 1)["losses"]["last"]
    assert loss["process"] == "node" and "is lost: silent for" in loss["cause"]
    cut.await_text(0, "and may lead from now on: node 0 waits for it")
    mend()
    cut.await_text(0, "another node leads, at ")
    cut.await_text(1, "mirrored on node 0")
    live = [0, 1]
    wait_for(lambda: info(cut, 1)["membership"]["live"] == live, "all ranks", cut.runs[1])
    assert not cut.leads(0)
    assert [one.value for one in asyncio.run(ask_all(cut.urls))] == wanted


@pytest.mark.timeout(300)
def test_a_signal_to_the_node_that_leads_ends_both(heads: Heads) -> None:
    """The last test: in order, and nothing is left."""
    here = [node for node in range(2) if heads.processes[node].poll() is None]
    for node in here:
        heads.runs[node].learn()
    for node in here:
        if heads.leads(node):
            heads.processes[node].send_signal(signal.SIGTERM)
    assert [heads.processes[node].wait(60) for node in here] == [0] * len(here) != []
    for run in heads.runs:
        run.await_gone()
        assert run.left() == []
