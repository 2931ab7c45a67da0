"""The page at /, in a headless browser: what it shows, what it asks, and what it must not run."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from moesaic.engine.engine import Engine
from moesaic.observe.expert_load import expert_loads
from tests.server.page.browsing import boxes, change, engine_with
from tests.server.serving import wait_until


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


def test_cards_line_up(server: tuple[Engine, str], page: Any) -> None:
    def slow(data: dict[str, Any]) -> None:
        for sample in data["history"]:
            sample["latency"] = {"ttft": [0.4, 12.34], "itl": [0.9876, 0.9], "e2e": [2.0, None]}

    change(page, "**/dashboard/data*", slow)
    page.goto(server[1])
    page.wait_for_selector("#ttft :has-text('12.3 s')")
    for width in (1280, 1190, 800):
        page.set_viewport_size({"width": width, "height": 900})
        for selector in (".compact .numbers", ".compact b", ".compact .plot", ".wide .plot"):
            tops = {round(box["top"], 1) for box in boxes(page, selector)}
            assert len(tops) == 1, (width, selector)
        cards = boxes(page, ".compact")
        numbers = zip(boxes(page, ".compact b"), [0, 0, 1, 1, 2, 2, 3, 3], strict=True)
        assert all(number["right"] < cards[card]["right"] - 4 for number, card in numbers), width


def test_the_bar_of_a_rank_shows_shares_of_time(server: tuple[Engine, str], page: Any) -> None:
    """Idle ranks compute for the page's own queries, which is no work."""
    page.goto(server[1])
    script = """async (looks) => {
        const { Ranks } = await import("/page/ranks.js");
        const SAME = { rank: 0, place: "", state_age: 0, traffic: {} };
        const ranks = new Ranks(document.createElement("tbody"));
        looks.forEach(([steps, compute_seconds, wait_seconds, state], now) => ranks.show(
            [{ ...SAME, state, steps, compute_seconds, wait_seconds }], now));
        const row = ranks.rows.get(0);
        return [row.compute.style.width, row.wait.style.width, row.told.textContent];
    }"""
    looks = {
        "idle": [[4, 1.0, 0.5, "idle"], [4, 1.0003, 0.5, "idle"]],
        "busy": [[4, 1.0, 0.5, "idle"], [9, 1.5, 0.75, "computing"]],
        "long step": [[4, 1.0, 0.5, "computing"], [4, 1.0, 1.25, "computing"]],
        "state of 4 s": [[4, 1.0, 0.5, "computing"], [5, 4.0, 1.5, "computing"]],
    }
    shown = {name: page.evaluate(script, two) for name, two in looks.items()}
    assert shown == {
        "idle": ["0%", "0%", "idle"],
        "busy": ["50%", "25%", "50%, wait 25%"],
        "long step": ["0%", "75%", "0%, wait 75%"],
        "state of 4 s": ["75%", "25%", "75%, wait 25%"],
    }


def give_keys(page: Any, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("#key")
    page.keyboard.press("Escape")
    page.click("#give-key")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    page.wait_for_selector("#key-message:has-text('refused')")
    page.fill("#key", "open-sesame")
    page.press("#key", "Enter")
    page.wait_for_selector("#status[data-state=live]")
    assert page.evaluate("Object.values(sessionStorage)") == ["open-sesame"]
    assert page.evaluate("localStorage.length") == 0
    assert not page.is_visible("#give-key")


def test_the_page_asks_for_a_key(server: tuple[Engine, str], page: Any) -> None:
    """A proxy in front of the server asks for it."""

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
