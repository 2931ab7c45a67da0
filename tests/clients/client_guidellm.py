"""guidellm: a short benchmark over chat completions, completions and responses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

REQUESTS, OUTPUT = 6, 8
ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/responses"]


@pytest.mark.parametrize("route", ROUTES)
def test_benchmark(house: Any, tmp_path: Path, route: str) -> None:
    backend = f"kind=openai_http,target={house.url},model={house.model},request_format={route}"
    report = tmp_path / "report.json"
    command = ["guidellm", "run", "--disable-console", "--backend", backend]
    command += ["--tokenizer", "kind=hf_auto,model=models/house-moe"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT}"]
    command += ["--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    subprocess.run([*command, "--output", f"kind=json,path={report}"], check=True, timeout=300)
    found = json.loads(report.read_text())["benchmarks"][0]
    totals = found["metrics"]["request_totals"]
    assert totals == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    counts = [r["output_metrics"]["text_tokens"] for r in found["requests"]["successful"]]
    assert counts == [OUTPUT] * REQUESTS
