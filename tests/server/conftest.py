"""A tiny model behind the server, for modules that bring no engine of their own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from moesaic.engine.engine import Engine
from tests.server.serving import Running


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path="tiny:qwen3_moe", num_threads=1, log_level="warning") as engine:
        yield engine


@pytest.fixture(scope="module")
def running(engine: Engine) -> Iterator[Running]:
    with Running(engine).serve() as running:
        yield running


@pytest.fixture(scope="module")
def http(running: Running) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client
