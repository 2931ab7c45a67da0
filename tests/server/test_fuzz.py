"""Many invalid requests beside valid ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.fuzz_server import attack
from moesaic.engine.engine import Engine
from moesaic.engine.frontend.profiler import FOLDER_VARIABLE
from moesaic.server.app import ROUTES
from tests.server.serving import Running, wait_until

STATUSES = {"200", "400", "403", "404", "405", "408", "409", "413", "431", "left waiting", "closed"}


def test_fuzz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """800 bad requests with good ones beside them; bench/fuzz_server.py sends many more. Some fill
    the whole context, so a short context saves most of the time."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    flags = {"num_threads": 1, "max_running_requests": 8, "context_length": 256}
    with (
        Engine(model_path="tiny:qwen3_moe", log_level="warning", **flags) as engine,
        Running(engine).serve() as running,
    ):
        tasks = running.tasks()
        tally = asyncio.run(attack(running.port, ROUTES, range(800), seed=7))
        assert tally.problems == []
        assert sum(tally.kinds.values()) == 800 and tally.good >= 4
        assert tally.statuses["400"] > 400 and set(tally.statuses) <= STATUSES
        wait_until(running.idle)
        wait_until(lambda: not running.server.server_state.connections)
        wait_until(lambda: running.tasks() <= tasks)
        engine.flush_cache()
        assert engine.get_server_info()["pages_used"] == 0
