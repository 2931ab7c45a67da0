"""A server and a browser that the tests of a module share; without a browser they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from moesaic.engine.engine import Engine
from tests.server.page.browsing import close, engine_with

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ARGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Not for longer than a module: while it is open, no test can run an event loop of its own."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=ARGS.split())
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(browser: Any) -> Iterator[tuple[Engine, str]]:
    with engine_with() as found:
        yield found


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
    close(page)
