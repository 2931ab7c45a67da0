"""How the page looks in light and dark, on a phone and a screen: readable, whole, in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moesaic.engine.engine import Engine
from tests.server.page.browsing import ask, boxes, change, chunk, events
from tests.server.page.test_path import routed
from tests.server.serving import wait_until

TEXTS = Path(__file__).with_name("texts.js").read_text()
SIZES = {390: 844, 1280: 900}
LEAST_CONTRAST = 4.5  # WCAG 2, level AA, for text of any size
MARKDOWN = """# Title

Some *text* with **bold**, `code` and a [link](https://example.org).

> A quotation of someone.

| item | price in euros | how many | in which shop |
|---|--:|--:|---|
| lemons | 3.20 | 56 | the one at the corner |

```python
print("a line of code that is much longer than the window of a phone is wide", 1, 2, 3, 4)
```

1. one
2. two
"""
EXAMPLES = [
    {"task": f"kind {number}", "prompt": "How many lemons are there in the end, and why? " * 4}
    for number in range(6)
]


@pytest.fixture(
    params=[(scheme, width) for scheme in ("light", "dark") for width in SIZES], ids=str
)
def looks(page: Any, request: pytest.FixtureRequest) -> Iterator[tuple[Any, str, int]]:
    scheme, width = request.param
    page.set_viewport_size({"width": width, "height": SIZES[width]})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    yield page, scheme, width


def busy_ranks(data: dict[str, Any]) -> None:
    """Four ranks, one of which is gone, and one in a long state."""
    (rank,) = data["ranks"]
    states = ["computing", "waiting", "gone", "idle"]
    data["ranks"] = [
        {**rank, "rank": n, "place": f"rank {n} (tp {n}, dp {n}, ep {n})", "state": state}
        for n, state in enumerate(states)
    ]
    data["ranks"][1]["state_age"] = 12.3
    data["requests"]["ended"]["error"] = 3


def check_texts(page: Any, width: int, at_least: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") == width
    found = page.evaluate(TEXTS)
    assert len(found) >= at_least
    for one in found:
        assert one["contrast"] >= LEAST_CONTRAST and not one["cut"], one


def test_texts_at_the_start(server: tuple[Engine, str], looks: tuple[Any, str, int]) -> None:
    page, _, width = looks

    def facts(found: dict[str, Any]) -> None:
        found.update(examples=EXAMPLES, context_length=1_048_576, temperature=0.65)

    change(page, "**/dashboard/chat", facts)
    change(page, "**/dashboard/data*", busy_ranks)
    page.goto(server[1])
    page.wait_for_selector("#example-list button >> nth=5")
    page.wait_for_selector("#ranks tr >> nth=3")
    check_texts(page, width, 70)


def test_texts_of_a_conversation(server: tuple[Engine, str], looks: tuple[Any, str, int]) -> None:
    page, _, width = looks
    thought = events(chunk({"reasoning_content": "I think."}), chunk({"content": "Yes."}, "length"))
    broken = events(chunk({"content": "half"}), {"error": {"message": "a rank died: " + "W" * 80}})
    long = {"message": "too long", "code": "context_length_exceeded"}
    routed(page, MARKDOWN, [thought], [broken, (400, long)])
    page.goto(server[1])
    page.wait_for_selector("#path-hint:has-text('Ask something')")
    for question in ("where to?", "W" * 200, "and then?", "more?"):
        ask(page, question)
    page.wait_for_selector(".lanes .dot")
    page.click(".message.assistant summary >> visible=true")
    lines = "all => all.map(one => one.getClientRects().length)"
    assert {*page.eval_on_selector_all(".message .after span", lines)} == {1}
    check_texts(page, width, 70)


def test_texts_of_the_dialog(server: tuple[Engine, str], looks: tuple[Any, str, int]) -> None:
    page, _, width = looks
    page.route("**/dashboard/data*", lambda route: route.fulfill(status=401, json={}))
    page.goto(server[1])
    page.wait_for_selector("#key")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    page.wait_for_selector("#key-message:has-text('refused')")
    check_texts(page, width, 3)


def test_colours_follow_the_scheme(server: tuple[Engine, str], looks: tuple[Any, str, int]) -> None:
    page, scheme, _ = looks
    page.goto(server[1])
    script = "one => getComputedStyle(one).backgroundColor.match(/\\d+/g).map(Number)"
    for selector in ("body", ".card", "textarea"):
        levels = page.eval_on_selector(selector, script)
        assert all(level > 230 if scheme == "light" else level < 40 for level in levels), selector


def test_the_chat_is_in_sight_and_no_room_is_lost(
    server: tuple[Engine, str], looks: tuple[Any, str, int]
) -> None:
    page, _, width = looks
    page.goto(server[1])
    page.wait_for_selector("#ranks td.busy:has-text('idle')")
    wait_until(lambda: boxes(page, "#expert-map rect.cell") != [])
    [chat], [curves] = boxes(page, ".chat"), boxes(page, "#throughput")
    [figures], [side] = boxes(page, ".figures"), boxes(page, ".stack")
    if width == 390:
        assert chat["bottom"] < SIZES[width] and chat["bottom"] < curves["top"]
    else:
        assert chat["top"] == curves["top"] and chat["left"] > curves["right"]
        assert abs(side["bottom"] - figures["bottom"]) < 1
    cells = boxes(page, "#ranks td, #ranks em")
    edge = 16 if width == 390 else 24
    assert len(cells) == 7
    assert all(edge <= box["left"] <= box["right"] <= width - edge for box in cells)
    assert page.evaluate("getComputedStyle(document.body).animationName") == "none"


def test_an_idle_rank_has_an_empty_bar(
    server: tuple[Engine, str], looks: tuple[Any, str, int]
) -> None:
    page, _, _ = looks
    page.goto(server[1])
    page.wait_for_selector("#ranks td.busy:has-text('idle')")
    assert page.text_content("#ranks td.state") == "idle"
    assert [box["width"] for box in boxes(page, "#ranks .bar i")] == [0, 0]
    [bar] = boxes(page, "#ranks .bar span")
    assert bar["width"] > 40
