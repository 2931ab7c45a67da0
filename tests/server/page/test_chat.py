"""The chat of the page: what it sends, shows and must not run, and what it does after a failure."""

from __future__ import annotations

import re
import threading
from typing import Any

import httpx

from moesaic.engine.engine import Engine
from tests.server.page.browsing import MadeUpAnswers, ask, change, chunk, events, said
from tests.server.serving import wait_until

EVIL = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"


def test_what_a_model_says_stays_text(server: tuple[Engine, str], page: Any) -> None:
    pieces = [chunk({"role": "assistant", "content": ""}), chunk({"reasoning_content": EVIL})]
    pieces += [chunk({"content": EVIL}), chunk({"content": "\ndone"}), chunk({}, "length")]
    pieces += [{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}]
    answers = MadeUpAnswers(page, events(*pieces), said("yes"))
    page.goto(server[1])
    ask(page, EVIL)
    after = page.text_content(".message.assistant .after").split(" · ")
    assert (after[0], after[-1]) == ("7 tokens", "cut at max tokens")
    assert re.fullmatch(r"first token after [\d.]+ m?s", after[-2])
    assert page.text_content(".message.user .text") == EVIL
    assert page.text_content(".message.assistant > .text") == EVIL + "\ndone"
    assert page.text_content(".message.assistant details div") == EVIL
    assert not page.is_visible(".message.assistant details div")
    found = "found => found.length"
    assert page.eval_on_selector_all("#messages img, #messages script", found) == 0
    assert page.evaluate("window.hacked") is None
    ask(page, "again")
    assert answers.conversations == [[EVIL], [EVIL, EVIL + "\ndone", "again"]]


def test_only_what_the_user_sets_overrides_the_model(server: tuple[Engine, str], page: Any) -> None:
    def defaults(facts: dict[str, Any]) -> None:
        facts.update(model="some-model", temperature=0.6, context_length=2048)

    change(page, "**/dashboard/chat", defaults)
    answers = MadeUpAnswers(page, said("a"), said("b"))
    page.goto(server[1])
    page.wait_for_selector("#temperature[placeholder='0.6']")
    assert page.get_attribute("#max-tokens", "placeholder") == "2,048"
    ask(page, "one")
    page.fill("#temperature", "0.3")
    page.fill("#max-tokens", "99")
    ask(page, "two")
    assert [body["model"] for body in answers.sent] == ["some-model"] * 2
    assert not {"temperature", "max_tokens", "top_p"} & set(answers.sent[0])
    assert (answers.sent[1]["temperature"], answers.sent[1]["max_tokens"]) == (0.3, 99)
    page.fill("#max-tokens", "0")
    page.fill("#prompt", "three")
    page.press("#prompt", "Enter")
    assert page.eval_on_selector("#max-tokens", "field => field.validity.rangeUnderflow") is True
    assert len(answers.sent) == 2


def test_a_failed_message_is_not_part_of_the_conversation(
    server: tuple[Engine, str], page: Any
) -> None:
    full = 429, {"message": "the queue is full: <b>try</b> again", "code": "queue_full"}
    broken = events(chunk({"content": "half"}), {"error": {"message": "a rank died"}})
    answers = MadeUpAnswers(page, full, broken, said("fine"), said("good"))
    page.goto(server[1])
    ask(page, "hello")
    assert page.text_content(".message.error .text") == "the queue is full: <b>try</b> again"
    assert page.is_visible("#send") and not page.is_visible("#stop")
    page.click("text=Try again")
    page.wait_for_selector(".message.error:has-text('a rank died')")
    assert page.text_content(".message.assistant > .text") == "half"
    ask(page, "what now?")
    page.click("text=Try again")
    wait_until(lambda: page.query_selector(".message.error") is None)
    page.wait_for_selector(".message.assistant:has-text('good')")
    assert answers.conversations == [
        ["hello"],
        ["hello"],
        ["what now?"],
        ["what now?", "fine", "hello"],
    ]


def test_a_conversation_that_is_too_long_starts_anew(server: tuple[Engine, str], page: Any) -> None:
    error = {"message": "too long", "code": "context_length_exceeded"}
    answers = MadeUpAnswers(page, said("a"), (400, error), said("b"))
    page.goto(server[1])
    ask(page, "one")
    ask(page, "two")
    page.click("text=Ask in a new conversation")
    page.wait_for_selector(".message.assistant:has-text('b')")
    assert answers.conversations == [["one"], ["one", "a", "two"], ["two"]]
    assert page.text_content(".message.user") == "two"


def test_examples_are_asked_with_a_click(server: tuple[Engine, str], page: Any) -> None:
    page.goto(server[1])
    page.wait_for_selector("#status[data-state=live]")
    assert httpx.get(f"{server[1]}/dashboard/chat").json()["examples"] == []
    assert not page.is_visible("#examples")
    prompts = ["A list:\n1, 2\nHow many?", "| a | b |\n|---|---|\n| 1 | 2 |\n\nWhich is more?"]

    def examples(facts: dict[str, Any]) -> None:
        facts["examples"] = [{"task": f"kind {i}", "prompt": p} for i, p in enumerate(prompts)]

    change(page, "**/dashboard/chat", examples)
    answers = MadeUpAnswers(page, said("b"))
    page.reload()
    page.wait_for_selector("#example-list button")
    shown = page.eval_on_selector_all("#example-list span", "all => all.map(o => o.textContent)")
    assert shown == ["A list: 1, 2 How many?", "Which is more?"]
    page.click("text=kind 1")
    page.wait_for_selector(".message.assistant:has-text('b')")
    assert answers.conversations == [[prompts[1]]]
    cells = page.eval_on_selector_all(".message.user td", "all => all.map(one => one.textContent)")
    assert cells == ["1", "2"] and not page.is_visible("#examples")
    page.click("#clear")
    assert page.is_visible("#examples")


def test_links_cannot_run_anything(server: tuple[Engine, str], page: Any) -> None:
    links = "[a](javascript:alert(1)) [b](data:text/html,x) [c](https://example.org) ![d](http://e.org/x.png)"
    MadeUpAnswers(page, said(links))
    page.goto(server[1])
    ask(page, "links?")
    script = "all => all.map(one => [one.href, one.rel, one.target])"
    rel = "noopener noreferrer nofollow"
    assert page.eval_on_selector_all("#messages a", script) == [
        ["https://example.org/", rel, "_blank"],
        ["http://e.org/x.png", rel, "_blank"],
    ]
    assert page.text_content(".message.assistant > .text") == "a b c image: d"
    assert [url for url in page.asked if "e.org" in url] == []


def test_the_chat_streams_and_stops(server: tuple[Engine, str], page: Any) -> None:
    engine, url = server
    assert httpx.get(f"{url}/v1/models").status_code == 200
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
