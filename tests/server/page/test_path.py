"""The path of a token through experts and ranks."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

import httpx

from moesaic.engine.engine import Engine
from tests.server.page.browsing import (
    Answer,
    MadeUpAnswers,
    ask,
    change,
    chunk,
    close,
    events,
    said,
)

# 3 decoder layers, the first without experts; 8 experts on 4 ranks of 2 groups, and expert 0 on the
# last rank, too. In the first layer with experts, expert 1 has its place.
HELD = ([[0, 1], [0, 1]], [[2, 3], [2, 3]], [[4, 5], [4, 5]], [[6, 7, 1], [6, 7, 0]])
ROUTING = {
    "num_layers": 3,
    "top_k": 2,
    "ranks": [{"layers": [1, 2], "experts": held} for held in HELD],
}
MESH = [{"rank": rank, "replica": 0, "group": rank // 2, "ep": rank} for rank in range(4)]
TOKENS = [[[0, 0], [5, 2], [7, 6]], [[0, 0], [3, 1], [0, 4]]]


def routed(
    page: Any,
    text: str = "a b",
    earlier: Sequence[Answer] = (),
    later: Sequence[Answer] = (),
    counts: tuple[int, int] = (1, 2),
) -> MadeUpAnswers:
    """A server of these sizes, one of whose answers has two tokens with this text; `counts`: how
    many each piece counts."""
    flat = [expert for token in TOKENS for layer in token for expert in layer]
    ids = base64.b64encode(struct.pack(f"<{len(flat)}i", *flat)).decode()
    usage = [{"usage": {"prompt_tokens": 3, "completion_tokens": number}} for number in counts]
    pieces = [{**chunk({"content": text}), **usage[0]}, {**chunk({}, "stop"), **usage[1]}]
    change(page, "**/dashboard/chat", lambda facts: facts.update(mesh=MESH))
    group = {"running": 1, "waiting": 0, "pages_used": 0, "pages_total": 1}
    groups = [{**group, "group": 0}, {**group, "group": 1, "running": 0}]
    change(page, "**/dashboard/data*", lambda data: data.update(routing=ROUTING, groups=groups))
    pieces.append({"choices": [], "sglext": {"routed_experts": ids}})
    return MadeUpAnswers(page, *earlier, events(*pieces), *later)


def dots(page: Any) -> list[tuple[int, int, int, str]]:
    script = """all => all.map(({ dataset, classList }) =>
        [Number(dataset.layer), Number(dataset.expert), Number(dataset.rank), classList.value])"""
    return [tuple(dot) for dot in page.eval_on_selector_all(".lanes .dot", script)]


def test_the_path_of_each_token(server: tuple[Engine, str], page: Any) -> None:
    answers = routed(page)
    page.goto(server[1])
    page.wait_for_selector("#path-hint:has-text('Ask something')")
    ask(page, "where to?")
    page.wait_for_selector(".lanes .dot")
    sent = answers.sent[0]
    assert sent["return_routed_experts"] is True and sent["routed_experts_start_len"] == -1
    assert sent["data_parallel_rank"] == 1  # which has less to do
    assert dots(page) == [
        (1, 1, 0, "dot far maybe"),
        (1, 3, 1, "dot far"),
        (1, 1, 3, "dot near maybe"),
        (2, 0, 0, "dot far maybe"),
        (2, 4, 2, "dot near"),
        (2, 0, 3, "dot near maybe"),
    ]
    assert page.text_content("#token-number") == "2 of 2"
    assert page.text_content("#token-text") == "end of the answer"
    page.press("#token", "ArrowLeft")
    assert page.text_content("#token-text") == "a␣b"
    assert [dot[:3] for dot in dots(page)] == [(1, 2, 1), (1, 5, 2), (2, 7, 3), (2, 6, 3)]
    summary = "4 experts on 3 ranks; for 1 of them the token travels"
    assert page.text_content("#path-cell") == summary
    page.hover(".dot[data-expert='5']")
    assert page.text_content("#path-cell") == "layer 1 · expert 5 (choice 1) · rank 2"
    page.hover("h1")
    assert page.text_content("#path-cell") == summary
    page.focus(".lanes")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    assert page.text_content("#path-cell") == "layer 2 · expert 6 (choice 2) · rank 3"
    homes = "all => all.map(one => one.classList.contains('home'))"
    assert page.eval_on_selector_all(".lane", homes) == [False, False, True, True]


SPEED = """async () => {
    const { Turn } = await import("/page/turn.js");
    const turn = new Turn(document.createElement("div"), "x");
    let now = 0;
    performance.now = () => now;
    for (const [at, tokens] of [[1000, 40], [1100, 50], [1200, 60]]) {
        now = at;
        const usage = { prompt_tokens: 1, completion_tokens: tokens };
        turn.take({ choices: [{ delta: { content: "a b" } }], usage });
    }
    return turn.summary();
}"""


def test_the_tokens_of_the_first_piece_took_no_time_after_it(
    server: tuple[Engine, str], page: Any
) -> None:
    page.goto(server[1])
    assert page.evaluate(SPEED)[:2] == ["60 tokens", "100 tokens/s"]


def test_tokens_that_came_together_are_named_together(
    server: tuple[Engine, str], page: Any
) -> None:
    routed(page, counts=(2, 2))
    page.goto(server[1])
    page.wait_for_selector("#path-hint:has-text('Ask something')")
    ask(page, "where to?")
    page.wait_for_selector(".lanes .dot")
    assert page.text_content("#token-text") == "tokens 1 to 2: a␣b"


def test_a_tapped_dot_stays_chosen(server: tuple[Engine, str], browser: Any) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844}, has_touch=True)
    routed(page)
    page.goto(server[1])
    page.wait_for_selector("#path-hint:has-text('Ask something')")
    ask(page, "where to?")
    page.tap(".dot[data-expert='3']")
    assert page.text_content("#path-cell") == "layer 1 · expert 3 (choice 1) · rank 1"
    close(page)


def test_a_server_may_refuse_to_return_the_path(server: tuple[Engine, str], page: Any) -> None:
    many = {"message": "return_routed_experts: 9 tokens, more than 8: lower the number of tokens"}
    unknown = {"message": "unknown field", "param": "return_routed_experts"}
    answers = MadeUpAnswers(
        page, (400, many), said("yes"), said("no"), (400, unknown), said("well")
    )
    page.goto(server[1])
    ask(page, "one")
    page.wait_for_selector("#path-hint:has-text('lower the number of tokens')")
    ask(page, "two")
    page.fill("#max-tokens", "8")
    ask(page, "three")
    page.wait_for_selector("#path-hint:has-text('unknown field')")
    asked = ["return_routed_experts" in body for body in answers.sent]
    assert asked == [True, False, False, True, False]
    texts = page.eval_on_selector_all(
        ".assistant .text p", "all => all.map(one => one.textContent)"
    )
    assert texts == ["yes", "no", "well"] and page.query_selector(".message.error") is None


def test_the_path_is_that_of_the_engine(server: tuple[Engine, str], page: Any) -> None:
    """The oracle is /generate, which gives the routing of the whole sequence."""
    engine, url = server
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0},
    ).json()
    assert "routing" in httpx.get(f"{url}/dashboard/data").json()
    assert answer["usage"]["completion_tokens"] == 3
    page.goto(url)
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "3")
    ask(page, "Hi")
    page.wait_for_selector(".lanes .dot")
    told = engine.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    ids = engine.tokenizer.encode(told, add_special_tokens=False)
    params = {"max_new_tokens": 3, "temperature": 0}
    whole = engine.generate(input_ids=ids, sampling_params=params, return_routed_experts=True)
    text = whole["meta_info"]["routed_experts"]
    row = struct.unpack(f"<{3 * 2}i", base64.b64decode(text)[-3 * 2 * 4 :])
    wanted = sorted((layer, row[2 * layer + k], 0) for layer in range(3) for k in range(2))
    assert sorted(dot[:3] for dot in dots(page)) == wanted
