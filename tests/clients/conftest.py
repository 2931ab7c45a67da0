"""What the runner hands to the tests of a client: the servers, and what they must answer."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Server:
    url: str
    model: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@pytest.fixture(scope="session")
def given() -> dict[str, Any]:
    """What the runner, run.py, has written."""
    return json.loads(Path(os.environ["MOESAIC_CLIENTS"]).read_text())


@pytest.fixture(scope="session")
def house(given: dict[str, Any]) -> Server:
    """The house model, in float32: its greedy replies are those of transformers."""
    return Server(given["house"], "models/house-moe")


@pytest.fixture(scope="session")
def tiny(given: dict[str, Any]) -> Server:
    """Random weights: the text says nothing, but forced tool calls have their form."""
    return Server(given["tiny"], "tiny:qwen2_moe")


@pytest.fixture(scope="session")
def problems(given: dict[str, Any]) -> list[dict[str, Any]]:
    """One of each task, with the reply of transformers."""
    return given["problems"]


@pytest.fixture
def problem(problems: list[dict[str, Any]]) -> dict[str, Any]:
    return problems[0]
