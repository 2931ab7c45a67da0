"""SGLang's own router (sglang_router from PyPI) in front of the same instances as ours: clients get
the same answers. It is looked for in this environment, or in that of SGLANG_ROUTER_PYTHON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from bench.http_server import free_port
from moesaic.router.args import RouterArgs
from tests.e2e.test_disaggregation import Pair, start
from tests.server.routers import routed
from tests.server.serving import served, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PYTHON = os.environ.get("SGLANG_ROUTER_PYTHON", sys.executable)


def has_router() -> bool:
    return not subprocess.run(
        [PYTHON, "-c", "import sglang_router"], capture_output=True
    ).returncode


@contextmanager
def sglang_router(prefill: str, bootstrap_port: int, decode: str) -> Iterator[httpx.Client]:
    port = free_port()
    flags = f"--pd-disaggregation --prefill {prefill} {bootstrap_port} --decode {decode} "
    flags += f"--policy round_robin --host 127.0.0.1 --port {port} --prometheus-port {free_port()}"
    command = [PYTHON, "-m", "sglang_router.launch_router", *flags.split()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        try:
            wait_until(lambda: _is_ready(client), 120)
            yield client
        finally:
            process.kill()
            process.wait(60)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readiness").status_code == 200
    except httpx.HTTPError:
        return False


PARAMS: dict[str, Any] = {
    "temperature": 0.8,
    "sampling_seed": 3,
    "max_new_tokens": 6,
    "ignore_eos": True,
}
LOGPROBS: dict[str, Any] = {
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 1,
}
CHAT: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "Hello"}],
    "temperature": 0.8,
    "seed": 3,
    "max_tokens": 6,
    "ignore_eos": True,
}
TEXT: dict[str, Any] = {"model": "default", "prompt": "Hi", "seed": 3, "max_tokens": 6}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "Hello there", "sampling_params": PARAMS}),
    ("/generate", {"input_ids": [1, 2, 3], "sampling_params": PARAMS}),
    ("/generate", {"text": "Hello there", "sampling_params": PARAMS, "stream": True}),
    ("/generate", {"text": "Hello there", "sampling_params": PARAMS, **LOGPROBS}),
    ("/generate", {"text": "Hello there", "sampling_params": PARAMS, **LOGPROBS, "stream": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", CHAT | {"n": 2}),
    ("/v1/chat/completions", CHAT | {"n": 3} | USAGE),
    ("/v1/completions", TEXT),
    ("/v1/completions", TEXT | {"prompt": ["Hi", "yo"], "echo": True, "logprobs": 1}),
    ("/v1/completions", TEXT | USAGE),
]


def answer_of(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """What does not differ from one time to the next."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return plain(answer.json())
    lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    if path == "/generate":
        return plain(json.loads(lines[-1]))
    events = [json.loads(line) for line in lines]
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text = choice["delta"].get("content") if "delta" in choice else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + (text or "")
        ends |= {choice["index"]: choice["finish_reason"]} if choice["finish_reason"] else {}
    return texts, ends, events[-1]["usage"]


def plain(value: Any) -> Any:
    left_out = {"id", "created", "e2e_latency", "ttft", "cached_tokens", "cached_tokens_details"}
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if name not in left_out}
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-12)  # their router writes other last digits
    return [plain(one) for one in value] if isinstance(value, list) else value


@pytest.mark.skipif(not has_router(), reason="sglang_router is not installed")
def test_both_routers_give_the_same_answers() -> None:
    with ExitStack() as stack:
        pair: Pair = start(stack, "qwen3_moe", {"tp_size": 2}, {})
        prefill, decode = (stack.enter_context(served(one)) for one in (pair.prefill, pair.decode))
        args = RouterArgs(
            pd_disaggregation=True, prefill=(f"{prefill} {pair.port}",), decode=(decode,)
        )
        _, ours = stack.enter_context(routed(args))
        theirs = stack.enter_context(sglang_router(prefill, pair.port, decode))
        for path, body in CALLS:
            assert answer_of(theirs, path, body) == answer_of(ours, path, body), (path, body)
        arrived, recomputed, _ = pair.counts()
        assert recomputed == 0 and arrived > 2 * len(CALLS)
        wrong = {"text": "x", "sampling_params": {"temperature": -1}}
        assert theirs.post("/generate", json=wrong).status_code == 400
        pair.check_idle()
