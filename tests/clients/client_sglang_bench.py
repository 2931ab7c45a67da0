"""SGLang's bench_serving, with each backend that speaks an API of this server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang.benchmark import serving

REQUESTS, OUTPUT = 6, 8
BACKENDS = ["sglang", "sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat"]
Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(house: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """python -m sglang.bench_serving, in this process, which takes long to import it."""

    def run(backend: str, options: str = "") -> dict[str, Any]:
        file = tmp_path / "report.jsonl"
        command = f"bench_serving --backend {backend} --base-url {house.url} --model {house.model}"
        command += f" --tokenizer models/house-moe --dataset-name random-ids --output-file {file}"
        command += f" --random-input-len 32 --random-output-len {OUTPUT} --random-range-ratio 1"
        command += f" --num-prompts {REQUESTS} --output-details {options}"
        monkeypatch.setattr(sys, "argv", command.split())
        serving.cli_main()
        return json.loads(file.read_text())

    return run


def check(found: dict[str, Any]) -> None:
    assert found["completed"] == REQUESTS
    assert not any(found["errors"])
    assert found["output_lens"] == [OUTPUT] * REQUESTS
    assert found["total_output_tokens"] == OUTPUT * REQUESTS


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend(bench: Bench, backend: str) -> None:
    check(bench(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_stream(bench: Bench, backend: str) -> None:
    check(bench(backend, "--disable-stream"))


def test_options(bench: Bench) -> None:
    options = "--return-logprob --top-logprobs-num 2 --return-routed-experts --cache-report"
    check(bench("sglang", f"{options} --flush-cache --max-concurrency 2 --tokenize-prompt"))


def test_profile(bench: Bench, given: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(given["profile_dir"])
    check(bench("sglang", f"--profile --profile-output-dir {folder}"))
    said = capsys.readouterr().out
    assert "Profiler started" in said and "Profiler stopped" in said
    assert len(list(folder.glob("*/*.trace.json.gz"))) == 1


def test_profile_elsewhere(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    check(bench("sglang", "--profile"))  # into a folder of its own in /tmp
    assert "Profiler started" not in capsys.readouterr().out
