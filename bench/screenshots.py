"""Pictures of the server's page under load: `python -m bench.screenshots`, on 4 ranks.

Writes docs/images/dashboard_light.png and dashboard_dark.png.
"""

from __future__ import annotations

import argparse
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import Browser, sync_playwright

from bench.http_server import started

IMAGES = Path(__file__).parent.parent / "docs" / "images"
MODEL = "tiny:qwen3_moe,num_hidden_layers=8,num_experts=32,num_experts_per_tok=4"
RANKS = "--tp 4 --ep 4 --dp 4 --enable-dp-attention --moe-a2a-backend deepep"
CHROMIUM = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
)
NAMES = ("--served-model-name", "Moesaic-Tiny-32E", "--num-threads", "1")
WORDS = "expert token rank layer mosaic tile router balance window lane step cache".split()


@contextmanager
def load(url: str, clients: int) -> Iterator[None]:
    """Requests of all lengths, by clients that pause in between."""
    done = threading.Event()

    def client(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=url, timeout=600) as http:
            while not done.is_set():
                text = " ".join(rng.choices(WORDS, k=rng.randint(4, 40)))
                params = {"max_new_tokens": rng.randint(16, 160), "ignore_eos": True}
                http.post("/generate", json={"text": text, "sampling_params": params})
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


def picture(browser: Browser, url: str, scheme: str, path: Path) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 1000}, color_scheme=scheme)
    page.goto(url)
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "48")
    page.fill("#prompt", "What is a mixture of experts?")
    page.press("#prompt", "Enter")
    time.sleep(6)
    page.evaluate("document.activeElement.blur()")
    page.screenshot(path=path, full_page=True)
    page.close()
    print(f"{path}: {path.stat().st_size // 1024} KB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100, help="of load before the first one")
    parser.add_argument("--clients", type=int, default=8)
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
            for scheme in ("light", "dark"):
                picture(browser, server.url, scheme, args.folder / f"dashboard_{scheme}.png")
            browser.close()


if __name__ == "__main__":
    main()
