"""aiperf: a short benchmark over chat completions, completions and responses."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

REQUESTS, OUTPUT = 6, 8


# It reads no usage of a response that its limit ended, and counts the tokens of the text itself.
OPTIONS = {
    "chat": "--use-server-token-count",
    "completions": "--use-server-token-count",
    "responses": "",
}


@pytest.mark.parametrize("endpoint", OPTIONS)
def test_benchmark(house: Any, tmp_path: Path, endpoint: str) -> None:
    command = f"aiperf profile --model {house.model} --url {house.url} --endpoint-type {endpoint}"
    command += f" --streaming --tokenizer models/house-moe --request-count {REQUESTS}"
    command += " --concurrency 2 --synthetic-input-tokens-mean 32 --ui none"
    command += f" --output-tokens-mean {OUTPUT} --extra-inputs ignore_eos:true"
    command += f" --artifact-dir {tmp_path} {OPTIONS[endpoint]}"
    # Where downloads are switched off it does not look for the tokenizer in a folder either.
    environ = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    subprocess.run(command.split(), check=True, timeout=300, env=environ)
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == REQUESTS and not found["error_summary"]
    length = found["output_sequence_length"]
    assert 0 < length["min"] <= length["max"] <= OUTPUT
    assert length["min"] == OUTPUT or endpoint == "responses"
