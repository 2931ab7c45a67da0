"""The page at /, in a headless browser: what it shows, what it asks, and what it must not run."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from moesaic.engine.engine import Engine
from moesaic.observe.expert_load import expert_loads
from tests.server.serving import served, wait_until

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
ARGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
)
MODEL = "tiny:qwen3_moe,num_hidden_layers=3"
EVIL = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"


@contextmanager
def engine_with(**flags: Any) -> Iterator[tuple[Engine, str]]:
    with (
        Engine(model_path=MODEL, num_threads=1, log_level="warning", **flags) as engine,
        served(engine) as url,
    ):
        yield engine, url


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Engine, str]]:
    with engine_with() as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=ARGS.split())
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Anything that the page complains about is in `complaints`, all it asks for in `asked`."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.complaints, page.asked = [], []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.set_default_timeout(30_000)
    yield page
    page.close()


def number(page: Any, selector: str) -> float:
    text = page.text_content(selector)
    return -1.0 if text == "–" else float(text.replace(",", ""))


def cells(page: Any, figure: str) -> list[int]:
    script = "cells => cells.map(cell => Number(cell.dataset.tokens))"
    found: list[int] = page.eval_on_selector_all(f"{figure} rect.cell", script)
    return found


def test_shows_what_the_engine_counts(server: tuple[Engine, str], page: Any) -> None:
    engine, url = server
    page.goto(url)
    page.wait_for_selector("#status[data-state=live]")
    before = max(0.0, number(page, "#generated-total"))
    params = {"max_new_tokens": 40, "ignore_eos": True}
    engine.generate(["one", "two", "three"], params)
    wait_until(lambda: number(page, "#generated-total") == before + 120)
    loads = expert_loads(engine.get_stats())
    assert len(loads) == 3 and sum(loads[0].experts) > 2 * 117
    experts = [tokens for load in loads for tokens in load.experts]
    assert len(experts) == 3 * 8
    wait_until(lambda: cells(page, "#expert-map") == experts)
    assert cells(page, "#rank-map") == [load.ranks[0] for load in loads]
    bars = page.eval_on_selector_all(
        "rect.balance", "bars => bars.map(b => b.dataset.balancedness)"
    )
    assert bars == ["1"] * 3
    wait_until(lambda: page.text_content("#ttft [data-quantile='1']").endswith("s"))
    assert page.text_content("#model") == engine.args.served_model_name
    assert page.complaints == []
    assert {url for url in page.asked if not url.startswith(server[1])} == set()


def test_recent_load_is_a_difference(server: tuple[Engine, str], page: Any) -> None:
    engine, url = server
    engine.generate("before", {"max_new_tokens": 4})
    before = [load.experts for load in expert_loads(engine.get_stats())]

    def seen() -> list[list[int]]:
        layers = httpx.get(f"{url}/dashboard/data").json()["experts"]["layers"]
        return [layer["experts"] for layer in layers]

    wait_until(lambda: seen() == before)
    page.goto(url)
    wait_until(lambda: cells(page, "#expert-map") == [n for row in before for n in row])
    page.click("button[data-period=recent]")
    wait_until(lambda: set(cells(page, "#expert-map")) == {0})
    then = expert_loads(engine.get_stats())
    engine.generate("more", {"max_new_tokens": 30, "ignore_eos": True})
    now = expert_loads(engine.get_stats())
    wanted = [
        after - before
        for new, old in zip(now, then, strict=True)
        for after, before in zip(new.experts, old.experts, strict=True)
    ]
    wait_until(lambda: cells(page, "#expert-map") == wanted)


def test_a_fresh_page_has_curves_at_once(server: tuple[Engine, str], page: Any) -> None:
    engine, url = server
    engine.generate("history", {"max_new_tokens": 8})
    with httpx.Client(base_url=url) as client:

        def samples() -> list[dict[str, Any]]:
            history: list[dict[str, Any]] = client.get("/dashboard/data").json()["history"]
            return history

        wait_until(lambda: len(samples()) >= 3)
        newest = samples()[-2]["when"]
        later = client.get("/dashboard/data", params={"since": newest}).json()["history"]
        assert [sample["when"] > newest for sample in later] == [True] * len(later)
        for wrong in ("nan", "x", ""):
            assert client.get("/dashboard/data", params={"since": wrong}).status_code == 400
    page.goto(url)
    page.wait_for_selector("#status[data-state=live]")
    drawn = page.get_attribute("#throughput path.a", "d")
    assert drawn.count("L") >= 2


def test_files_come_with_a_policy(server: tuple[Engine, str]) -> None:
    with httpx.Client(base_url=server[1]) as client:
        for path in ("/", "/page/app.js", "/page/style.css", "/page/icon.svg"):
            response = client.get(path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'self';")
        for path in ("/page/", "/page/../app.py", "/page/%2e%2e/app.py", "/page/app.py"):
            assert client.get(path).status_code == 404


@pytest.mark.parametrize("width", [380, 1440])
def test_no_sideways_scrolling(server: tuple[Engine, str], page: Any, width: int) -> None:
    engine, url = server
    engine.generate("wide", {"max_new_tokens": 4})
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(url)
    wait_until(lambda: len(cells(page, "#expert-map")) == 24)
    page.fill("#prompt", "W" * 300)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".message.user")
    assert page.evaluate("document.documentElement.scrollWidth") == width


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def test_what_a_model_says_stays_text(server: tuple[Engine, str], page: Any) -> None:
    """The answers are made up here, in the form that OpenAI's API gives them."""
    pieces = [chunk({"role": "assistant", "content": ""}), chunk({"reasoning_content": EVIL})]
    pieces += [chunk({"content": EVIL}), chunk({"content": "\ndone"}), chunk({}, "length")]
    pieces += [{"choices": [], "usage": {"completion_tokens": 7}}]
    body = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
    sent: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        sent.append(route.request.post_data_json)
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "some-model"}]}))
    page.route("**/v1/chat/completions", answer)
    page.goto(server[1])
    page.fill("#temperature", "0.3")
    page.fill("#max-tokens", "99")
    page.fill("#prompt", EVIL)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".message.assistant .after:has-text('7 tokens, cut at max tokens')")
    assert page.text_content(".message.user .text") == EVIL
    assert page.text_content(".message.assistant .text") == EVIL + "\ndone"
    assert page.text_content(".message.assistant details div") == EVIL
    assert not page.is_visible(".message.assistant details div")
    assert (
        page.eval_on_selector_all("#messages img, #messages script", "found => found.length") == 0
    )
    assert page.evaluate("window.hacked") is None
    assert (sent[0]["model"], sent[0]["temperature"], sent[0]["max_tokens"]) == (
        "some-model",
        0.3,
        99,
    )
    page.fill("#prompt", "again")
    page.click("#send")
    wait_until(lambda: len(sent) == 2)
    roles = [message["role"] for message in sent[1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_errors_of_the_chat_are_shown(server: tuple[Engine, str], page: Any) -> None:
    refusal = {"error": {"message": "the queue is full: <b>try</b> again", "code": "queue_full"}}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "m"}]}))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=429, json=refusal))
    page.goto(server[1])
    page.fill("#prompt", "hello")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".message.error")
    assert page.text_content(".message.error .text") == "the queue is full: <b>try</b> again"
    assert page.is_visible("#send") and not page.is_visible("#stop")


def test_the_chat_streams_and_stops(server: tuple[Engine, str], page: Any) -> None:
    engine, url = server
    if httpx.get(f"{url}/v1/models").status_code == 404:
        pytest.skip("this server has no OpenAI API")
    page.goto(url)
    page.fill("#max-tokens", "20")
    page.fill("#prompt", "Hello")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".message.assistant .after:has-text('tokens')")
    assert page.query_selector(".message.error") is None
    page.click("#clear")
    page.fill("#max-tokens", "1500")
    page.fill("#prompt", "Hello again")
    go_on = threading.Event()
    engine._thread.submit(lambda core: go_on.wait(30))
    page.press("#prompt", "Enter")
    page.click("#stop")
    page.wait_for_selector(".message.assistant .after:has-text('stopped')")
    go_on.set()
    wait_until(lambda: engine.request_stats().open == 0)


def give_keys(page: Any, url: str) -> None:
    page.goto(url)
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    page.wait_for_selector("#key-message:has-text('refused')")
    page.fill("#key", "open-sesame")
    page.press("#key", "Enter")
    page.wait_for_selector("#status[data-state=live]")
    assert page.evaluate("Object.values(sessionStorage)") == ["open-sesame"]
    assert page.evaluate("localStorage.length") == 0


def test_the_page_asks_for_a_key(server: tuple[Engine, str], page: Any) -> None:
    """Of somebody between it and the server."""

    def check(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer open-sesame":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "no key"}})

    page.route("**/dashboard/data*", check)
    give_keys(page, server[1])


def test_the_page_asks_for_the_key_of_the_server(page: Any) -> None:
    with engine_with(api_key="open-sesame") as (_, url):
        if httpx.get(f"{url}/dashboard/data").status_code != 401:
            pytest.skip("this server knows no keys")
        assert httpx.get(url).status_code == 200
        give_keys(page, url)
