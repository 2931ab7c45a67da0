"""promtool reads the metrics, and finds nothing to complain about."""

from __future__ import annotations

import subprocess
import urllib.request
from typing import Any


def complaints(url: str) -> set[str]:
    """What promtool says, each line as 'NAME WORDS'."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=60).read()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    return set((done.stdout + done.stderr).decode().splitlines())


def test_metrics(house: Any, tiny: Any) -> None:
    """The tiny model's server has SGLang's names beside our own, of which promtool dislikes the
    colon."""
    assert complaints(house.url) == set()
    found = complaints(tiny.url)
    assert "sglang:num_running_reqs metric names should not contain ':'" in found
    assert {line for line in found if not line.startswith("sglang:")} == set()
