"""Pictures of the server's page under load: `python -m bench.screenshots`, on 4 ranks.

Writes docs/images/dashboard_light.png, dashboard_dark.png and dashboard_phone.png.
"""

from __future__ import annotations

import argparse
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
from PIL import Image
from playwright.sync_api import Browser, ViewportSize, sync_playwright

from bench.http_server import started
from moesaic.evals.tasks.draw import TASKS, problems

IMAGES = Path(__file__).parent.parent / "docs" / "images"
MODEL = str(IMAGES.parents[1] / "models" / "house-moe")
QUESTION = (
    "Rosa has a basket with 56 lemons. She uses 8 lemons for each of 2 cakes. "
    "In the end, how many lemons are there?"
)
RANKS = "--tp 4 --ep 4 --dp 4 --enable-dp-attention --moe-a2a-backend deepep"
CHROMIUM = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
)
SETTLE = 4  # seconds, for rates of the table
NAMES = ("--served-model-name", "house-moe", "--num-threads", "1")


@contextmanager
def load(url: str, clients: int) -> Iterator[None]:
    """Problems of all tasks, by clients that pause in between."""
    done = threading.Event()
    tasks = list(TASKS)

    def client(number: int) -> None:
        rng = random.Random(number)
        asked = problems(tasks[number % len(tasks)], "test", number)
        with httpx.Client(base_url=url, timeout=600) as http:
            while not done.is_set():
                messages = [{"role": "user", "content": next(asked).prompt}]
                http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 200})
                done.wait(rng.random() * (0.2 + number % 3))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


@dataclass(frozen=True)
class View:
    name: str
    scheme: Literal["light", "dark"]
    width: int
    height: int


VIEWS = (
    View("light", "light", 1280, 960),
    View("dark", "dark", 1280, 960),
    View("phone", "light", 390, 1250),
)


def picture(browser: Browser, url: str, view: View, path: Path) -> None:
    """The page, when it has shown the path of an answer's tokens."""
    size = ViewportSize(width=view.width, height=view.height)
    page = browser.new_page(viewport=size, color_scheme=view.scheme)
    page.goto(url)
    page.wait_for_selector("#example-list button")
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".lanes .dot", timeout=120_000)
    page.press("#token", "ArrowLeft")  # the last one with a text
    time.sleep(SETTLE)
    page.evaluate("document.activeElement.blur()")
    page.screenshot(path=path, full_page=view.width > view.height)
    page.close()
    compress(path)
    print(f"{path}: {path.stat().st_size // 1024} KB")


def compress(path: Path) -> None:
    """256 colours are enough for text and charts."""
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(
            256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
    small.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.screenshots", description=__doc__)
    parser.add_argument("--seconds", type=float, default=100, help="of load before the first one")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--flags", default=RANKS, help="of the server, for its ranks")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    flags = [*args.flags.split(), *NAMES]
    with started(args.model, flags) as server, load(server.url, args.clients):
        time.sleep(args.seconds)
        with sync_playwright() as tools:
            browser = tools.chromium.launch(executable_path=chromium, args=CHROMIUM.split())
            for view in VIEWS:
                picture(browser, server.url, view, args.folder / f"dashboard_{view.name}.png")
            browser.close()


if __name__ == "__main__":
    main()
