"""`moesaic bench serve` against a server of a few lines with known delays, and against ours."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moesaic.cli.main import main
from moesaic.engine.engine import Engine
from tests.server.serving import served

# Of the small server, in seconds.
FIRST, BETWEEN = 0.15, 0.04
Body = dict[str, Any]


class SmallServer:
    """Speaks as much of OpenAI's API as a benchmark needs, over plain asyncio. An answer has
    `max_tokens` tokens, two in a chunk, each `x `; prompts have a token a word. What a prompt
    begins with can make it fail."""

    def __init__(self) -> None:
        self.bodies: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.open = self.most_open = 0
        self.started = threading.Event()

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.started.set()
        async with server:
            await self._stop.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                first, *lines = head.strip().split("\r\n")
                method, path, _ = first.split(" ")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                data = await reader.readexactly(int(headers.get("content-length", 0)))
                if method == "POST" and path.startswith("/v1/"):
                    self.headers.append(headers)
                    await self._answer(path, json.loads(data), writer)
                elif path == "/v1/models":
                    self._send(writer, 200, {"data": [{"id": "small"}]})
                else:
                    self._send(writer, 404, {"detail": "Not Found"})
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _send(self, writer: asyncio.StreamWriter, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    async def _answer(self, path: str, body: Body, writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            chat = path.endswith("/chat/completions")
            prompt = body["messages"][0]["content"] if chat else body["prompt"]
            if prompt.startswith("refuse"):
                self._send(writer, 400, {"error": {"message": "not this one", "type": "x"}})
            elif body["stream"]:
                await self._stream(prompt, chat, body["max_tokens"], writer)
            else:
                await asyncio.sleep(FIRST)
                usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": 4}
                choice = {"message": {"content": "x x x x"}} if chat else {"text": "x x x x"}
                choices = [choice | {"finish_reason": "length"}]
                self._send(writer, 200, {"choices": choices, "usage": usage})
        finally:
            self.open -= 1

    async def _stream(
        self, prompt: str, chat: bool, tokens: int, writer: asyncio.StreamWriter
    ) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())

        def event(content: Any) -> None:
            text = content if isinstance(content, str) else json.dumps(content)
            data = f"data: {text}\n\n".encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        def words(text: str, reason: str | None = None) -> Body:
            part: Body = {"delta": {"content": text}} if chat else {"text": text}
            return {"choices": [{"index": 0, **part, "finish_reason": reason}], "usage": None}

        if chat:
            event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for place in range(0, tokens, 2):
            await asyncio.sleep(BETWEEN if place else FIRST)
            if place and prompt.startswith("break"):
                event({"error": {"message": "it broke", "type": "server_error"}})
                break
            if place and prompt.startswith("cut"):
                break
            event(words("x " * min(2, tokens - place)))
        else:
            event(words("", "length"))
            usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": tokens}
            event({"choices": [], "usage": usage})
            event("[DONE]")
        writer.write(b"0\r\n\r\n")


@pytest.fixture
def small() -> Iterator[SmallServer]:
    server = SmallServer()
    thread = threading.Thread(target=server.run)
    thread.start()
    assert server.started.wait(30)
    yield server
    server.stop()
    thread.join(30)


def write_prompts(path: Path, *prompts: tuple[str, int]) -> list[str]:
    lines = [json.dumps({"prompt": text, "output_len": number}) for text, number in prompts]
    path.write_text("\n".join(lines))
    flags = ["--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts"]
    return [*flags, str(len(prompts))]


def bench(url: str, out: Path, *flags: str) -> tuple[int, list[Body]]:
    """The exit status, and a line of figures for each load."""
    out.unlink(missing_ok=True)
    words = ["bench", "serve", "--base-url", url, "--disable-tqdm", "--output-file", str(out)]
    status = main([*words, *flags])
    return status, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("backend", ["vllm", "sglang-oai-chat"])
def test_times_and_counts(small: SmallServer, tmp_path: Path, backend: str) -> None:
    """Wide above, as the machine may be busy; nothing comes before its time."""
    prompts = [("three words here", 8), ("two words", 5), ("one", 1)]
    files = write_prompts(tmp_path / "prompts", *prompts)
    flags = ["--backend", backend, *files, "--output-details", "--header", "X-One=1", "X-Two: 2"]
    flags += ["--api-key", "secret", "--extra-request-body", '{"top_p": 0.5}', "--goodput"]
    status, (line,) = bench(small.url, tmp_path / "out", *flags, "ttft:100000", "tpot:100000")
    assert status == 0
    assert (line["completed"], line["failed"], line["model"]) == (3, 0, "small")
    assert (line["total_input_tokens"], line["total_output_tokens"]) == (6, 14)
    order = [line["output_lens"].index(number) for _, number in prompts]
    assert [line["input_lens"][place] for place in order] == [3, 2, 1]
    assert all(FIRST <= ttft < FIRST + 30 for ttft in line["ttfts"])
    # Four chunks of two tokens; the first token's time and its neighbour's are not between tokens.
    gaps = [line["itls"][place] for place in order]
    assert [len(found) for found in gaps] == [6, 4, 0]
    # What came late may have the next one close behind it.
    first = line["ttfts"][order[0]]
    assert FIRST + 3 * BETWEEN - 0.01 <= first + sum(gaps[0]) < FIRST + 60
    tpots = [1000 * sum(gaps[0]) / 7, 1000 * sum(gaps[1]) / 4]
    assert line["mean_tpot_ms"] == pytest.approx(sum(tpots) / 2)
    assert line["median_e2e_latency_ms"] >= 1000 * (FIRST + 2 * BETWEEN) - 1
    assert line["request_goodput"] == pytest.approx(3 / line["duration"])
    warmup, *asked = small.bodies
    assert sorted(body["max_tokens"] for body in asked) == [1, 5, 8] and warmup["max_tokens"] <= 32
    assert all(body["top_p"] == 0.5 and body["ignore_eos"] for body in asked)
    assert all(
        (h["x-one"], h["x-two"], h["authorization"]) == ("1", "2", "Bearer secret")
        for h in small.headers
    )


def test_whole_answers(small: SmallServer, tmp_path: Path) -> None:
    files = write_prompts(tmp_path / "prompts", ("a b", 4), ("c", 4))
    flags = [*files, "--backend", "vllm-chat", "--disable-stream", "--disable-ignore-eos"]
    status, (line,) = bench(small.url, tmp_path / "out", *flags)
    assert (status, line["total_output_tokens"], line["total_input_tokens"]) == (0, 8, 3)
    assert (line["mean_ttft_ms"], line["mean_tpot_ms"], line["mean_itl_ms"]) == (None, None, None)
    assert line["mean_e2e_latency_ms"] >= 1000 * FIRST
    assert not any("ignore_eos" in body or "stream_options" in body for body in small.bodies)


def test_failures_are_counted_and_shown_and_in_no_latency(
    small: SmallServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["good", "refuse", "break", "break it", "cut"]
    files = write_prompts(tmp_path / "prompts", *((kind, 6) for kind in kinds))
    flags = [*files, "--backend", "openai", "--warmup-requests", "0", "--goodput", "ttft:100000"]
    status, (line,) = bench(small.url, tmp_path / "out", *flags)
    assert status == 0
    assert (line["completed"], line["failed"], line["total_output_tokens"]) == (1, 4, 6)
    assert line["errors_by_message"] == {
        "status 400: not this one": 1,
        "it broke": 2,
        "the stream ended before the answer did": 1,
    }
    assert line["request_goodput"] == pytest.approx(1 / line["duration"])
    printed = capsys.readouterr()
    assert "Failed requests:                         4         \n" in printed.out
    assert "4 requests failed and are in no latency:\n  2 x it broke\n" in printed.err


def test_nothing_is_measured_if_warming_up_fails(
    small: SmallServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write_prompts(tmp_path / "prompts", ("refuse", 6))
    assert main(["bench", "serve", "--base-url", small.url, "--backend", "vllm", *files]) == 1
    assert "nothing was measured: status 400: not this one" in capsys.readouterr().err
    assert len(small.bodies) == 1


def test_several_loads_and_a_picture(small: SmallServer, tmp_path: Path) -> None:
    picture = tmp_path / "load.png"
    flags = "--backend vllm --num-prompts 6 --random-input-len 5 --random-output-len 2"
    flags += f" --random-range-ratio 1 --max-concurrency 1,3 --plot {picture}"
    status, lines = bench(small.url, tmp_path / "out", *flags.split())
    assert status == 0 and [line["max_concurrency"] for line in lines] == [1, 3]
    assert [line["max_concurrent_requests"] for line in lines] == [1, 3]
    assert small.most_open == 3
    assert lines[0]["duration"] >= 6 * FIRST and lines[1]["duration"] >= 2 * FIRST
    assert picture.read_bytes().startswith(b"\x89PNG")
    asked = [body["prompt"] for body in small.bodies]
    assert len(asked) == len(set(asked)) == 13  # no load gets what another left in a cache
    assert {len(prompt.split()) for prompt in asked} == {5}


def test_a_rate_spreads_requests(small: SmallServer, tmp_path: Path) -> None:
    flags = "--backend vllm --num-prompts 20 --random-input-len 5 --random-output-len 1"
    status, (line,) = bench(small.url, tmp_path / "out", *flags.split(), "--request-rate", "25")
    assert (status, line["completed"], line["request_rate"]) == (0, 20, 25.0)
    assert line["duration"] > 0.3


def test_ctrl_c_reports_what_there_is(small: SmallServer, tmp_path: Path) -> None:
    flags = "--backend vllm --num-prompts 200 --random-input-len 5 --random-output-len 2"
    command = [sys.executable, "-m", "moesaic.cli.main", "bench", "serve", "--base-url", small.url]
    process = subprocess.Popen(
        [*command, *flags.split(), "--max-concurrency", "4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while len(small.bodies) < 12 and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (line,) = (line for line in out.splitlines() if line.startswith("Successful requests:"))
    done = int(line.split(":")[1])
    assert 4 <= done < 200
    assert f"interrupted: {200 - done} requests had not ended" in err


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path="tiny:qwen3_moe", num_threads=1, log_level="warning") as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with served(engine) as url:
        yield url


BACKENDS = {
    "sglang": "/generate",
    "sglang-oai": "/v1/completions",
    "sglang-oai-chat": "/v1/chat/completions",
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_our_server(
    url: str, tmp_path: Path, backend: str, stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tokenizer is found by itself, and its counts are what was asked."""
    if httpx.post(url + BACKENDS[backend], json={}, timeout=60).status_code == 404:
        pytest.skip(f"the server has no {BACKENDS[backend]}")
    flags = "--num-prompts 12 --random-input-len 40 --random-output-len 16 --random-range-ratio 1"
    flags += f" --flush-cache --max-concurrency 4 --backend {backend}"
    switch = [] if stream else ["--disable-stream"]
    out = tmp_path / "out"
    status, (line,) = bench(url, out, *flags.split(), *switch, "--output-details")
    assert (status, line["completed"], line["failed"]) == (0, 12, 0)
    assert line["input_lens"] == [40] * 12 and line["output_lens"] == [16] * 12
    assert line["total_throughput"] == pytest.approx(12 * 56 / line["duration"])
    assert (line["mean_ttft_ms"] is not None) == stream
    if stream and backend == "sglang":
        assert all(len(gaps) <= 15 for gaps in line["itls"])
        assert sum(map(len, line["itls"])) >= 1  # tokens may come at once
    assert "not as long as asked" not in capsys.readouterr().err


def test_token_ids_to_our_server(url: str, tmp_path: Path) -> None:
    flags = "--num-prompts 4 --random-input-len 33 --random-output-len 3 --random-range-ratio 1"
    words = [*flags.split(), "--tokenize-prompt", "--output-details"]
    status, (line,) = bench(url, tmp_path / "out", *words)
    assert (status, line["input_lens"], line["output_lens"]) == (0, [33] * 4, [3] * 4)


def test_a_wish_that_is_not_granted_is_an_error(
    small: SmallServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--backend vllm --num-prompts 1 --random-output-len 1 --flush-cache --disable-tqdm"
    assert main(["bench", "serve", "--base-url", small.url, *flags.split()]) == 1
    assert "/flush_cache: status 404" in capsys.readouterr().err
