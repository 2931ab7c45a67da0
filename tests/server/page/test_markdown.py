"""Markdown of the page, against markdown-it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from moesaic.engine.engine import Engine

markdown_it = pytest.importorskip("markdown_it")

# The subset in which the page's Markdown is CommonMark's with tables.
MARKDOWN = [
    "# Title\n\nSome *text* with **bold**, __bold__, _it_ and `code <b>`.\n\n## Two ##",
    "2 * 3 * 4 = 24, snake_case_name, a_b, 5 ** 2, \\*no\\* and ~~gone~~",
    "- one\n- two\n  - inner\n  - more\n- three\n\n3. third\n4. fourth",
    "```python\nif a < b:\n\n    print('*x*')\n```\nafter",
    "> quoted **text**\n> more\n\n---\n\nline\nnext",
    "| a | b |\n|---|--:|\n| 1 | `x\\|y` |\n| **2** | 3 |\n\nend",
    "[site](https://example.org/a_(b)) and **all *of* it**",
    "<b>no</b> & <script>alert(1)</script>",
    "### ` odd\n\n**open *marks",
]


def html_of(text: str) -> str:
    """The oracle's, with the levels and attributes that the page uses."""
    parser = markdown_it.MarkdownIt("commonmark", {"html": False}).enable(
        ["table", "strikethrough"]
    )
    html = parser.render(text).replace("<s>", "<del>").replace("</s>", "</del>")
    html = re.sub(r"<(/?)h(\d)>", lambda found: f"<{found[1]}h{min(6, int(found[2]) + 2)}>", html)
    html = (
        re.sub(r' (class|style)="[^"]*"', "", html).replace("&quot;", '"').replace("<hr />", "<hr>")
    )
    return re.sub(r"\s+", "", html)


@pytest.mark.parametrize("pieces", ["whole", "characters"])
def test_markdown_is_that_of_commonmark(server: tuple[Engine, str], page: Any, pieces: str) -> None:
    page.goto(server[1])
    script = """async ([text, whole]) => {
        const { Markdown } = await import("/page/markdown.js");
        const root = document.createElement("div");
        const view = new Markdown(root);
        for (const piece of whole ? [text] : text) { view.append(piece); view.render(); }
        for (const box of root.querySelectorAll(".scroll")) box.replaceWith(box.firstChild);
        const names = ["class", "tabindex", "aria-label", "target", "rel"];
        for (const one of root.querySelectorAll("*")) names.forEach((n) => one.removeAttribute(n));
        return root.innerHTML.replace(/\\s+/g, "");
    }"""
    for text in MARKDOWN:
        assert page.evaluate(script, [text, pieces == "whole"]) == html_of(text), text


def test_long_runs_of_spaces_take_linear_time(server: tuple[Engine, str], page: Any) -> None:
    """A rule for the second line of a table that is quadratic would take minutes."""
    page.goto(server[1])
    script = """async (text) => {
        const { Markdown } = await import("/page/markdown.js");
        const root = document.createElement("div");
        const view = new Markdown(root);
        view.append(text);
        view.render();
        return [root.querySelectorAll("table").length, root.textContent.replace(/\\s+/g, "")];
    }"""
    spaces = " " * 300_000
    assert page.evaluate(script, f"a|b\n:-{spaces}x|") == [0, "a|b:-x|"]
    assert page.evaluate(script, f"a|b\n{spaces}|x") == [0, "a|b|x"]
    assert page.evaluate(script, f"a|b\n:-{spaces}|{spaces}-\nc|d") == [1, "abcd"]
