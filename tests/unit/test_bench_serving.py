"""Figures, targets and flags of the benchmark of a server under traffic."""

from __future__ import annotations

import asyncio
import json
import math
from array import array
from dataclasses import replace

import numpy as np
import pytest

from bench.serving import main, server_flags, with_ratio
from bench.serving_load import LoadDriver, Sizes, checked
from bench.serving_tables import (
    CHATS,
    CLOSED,
    MIXED,
    SGLANG,
    ServerFacts,
    ServingRow,
    make_row,
    merge,
    peer_of,
    report,
    targets_of,
)
from moesaic.loadgen.args import Load
from moesaic.loadgen.client import Client, session
from moesaic.loadgen.endpoints import ENDPOINTS, RequestOptions
from moesaic.loadgen.metrics import measure
from moesaic.loadgen.outcome import BenchPrompt, Outcome
from moesaic.loadgen.traffic import Run, TrafficSource

H200 = ServerFacts("qwen3-30b-a3b", "moesaic", "NVIDIA H200", 1, "bf16", "", 70.0)
OPTIONS = RequestOptions("default", True, True, {})


def outcome(ttft: float, gaps: list[float], tokens: int) -> Outcome:
    """A request that starts at 0; events have one token, but for the last, which has the rest."""
    times = np.cumsum([ttft, *gaps])
    counts = [*range(1, len(times)), tokens]
    return Outcome(
        BenchPrompt("", 100, tokens),
        ended=float(times[-1]),
        arrivals=array("d", times),
        counts=array("l", counts),
        finished=True,
        prompt_tokens=100,
        output_tokens=tokens,
    )


def row(**values: object) -> ServingRow:
    figures = measure(Run([outcome(0.1, [0.02, 0.04], 3)], 2.0, 0.5), {}, None)
    return replace(make_row(H200, CLOSED, (64, None), figures), **values)


def test_percentiles_are_numpys():
    rng = np.random.default_rng(3)
    ttfts, gaps = rng.gamma(2, 0.05, 50), rng.gamma(2, 0.01, (50, 20))
    run = Run([outcome(t, list(g), 21) for t, g in zip(ttfts, gaps, strict=True)], 10.0, 0.25)
    made = make_row(H200, CLOSED, (16, None), measure(run, {}, None))
    assert (made.requests, made.failed, made.output_tokens, made.input_tokens) == (
        50,
        0,
        1050,
        5000,
    )
    assert (made.requests_s, made.output_tok_s) == (5.0, 105.0)
    for share in (50, 90, 99):
        assert getattr(made, f"ttft_p{share}_ms") == pytest.approx(
            1e3 * np.percentile(ttfts, share)
        )
        assert getattr(made, f"itl_p{share}_ms") == pytest.approx(1e3 * np.percentile(gaps, share))
    tpots = 1e3 * gaps.sum(axis=1) / 20
    assert made.tpot_p50_ms == pytest.approx(np.median(tpots))
    assert made.tpot_p99_ms == pytest.approx(np.percentile(tpots, 99))
    assert made.e2e_p50_ms == pytest.approx(1e3 * np.median(ttfts + gaps.sum(axis=1)))
    assert made.client_us_per_token == pytest.approx(0.25 * 10.0 / 1050 * 1e6)
    assert (made.ranks, made.dtype, made.concurrency, made.rate) == (1, "bf16", 16, None)


def test_an_event_with_several_tokens_counts_for_each():
    found = measure(Run([outcome(0.1, [0.02, 0.06], 5)], 1.0, 0.1), {}, None).itl
    gaps = [20, 20, 20, 20]  # one token after 20 ms, three after 60
    assert found.mean == pytest.approx(np.mean(gaps)) and found.max == pytest.approx(20)


def test_an_answer_that_is_too_short_is_a_failure():
    short = outcome(0.1, [0.02], 2)
    short.prompt = BenchPrompt("", 100, 5)
    figures = measure(checked(Run([short, outcome(0.1, [0.02], 2)], 1.0, 0.1)), {}, None)
    assert (figures.completed, figures.failed) == (1, 1)
    assert figures.errors == {"2 tokens instead of 5": 1}


def test_events_of_one_read_are_arrivals_each():
    """As in SGLang's benchmark, the second of two events at once comes after no time."""

    def event(tokens: int, reason: str) -> bytes:
        meta = f'{{"prompt_tokens":1,"completion_tokens":{tokens},"finish_reason":{reason}}}'
        return f'data: {{"text":"","meta_info":{meta}}}\n\n'.encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'"stream":true}')
        body = event(1, "null") + event(2, "null") + event(4, '{"type":"length"}')
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body)
        await writer.drain()
        writer.close()

    async def ask() -> Outcome:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, session({}) as connections:
            client = Client(connections, url, ENDPOINTS["sglang"], OPTIONS)
            return await client.ask(BenchPrompt("", 1, 4, [7]))

    found = asyncio.run(ask())
    assert not found.error and list(found.counts) == [1, 2, 4]
    assert len(found.arrivals) == 3 and found.itls() == [0.0, 0.0, 0.0]


def test_nothing_is_sent_when_the_time_is_over():
    async def run() -> Run:
        async with session({}) as connections:
            client = Client(connections, "http://127.0.0.1:1", ENDPOINTS["sglang"], OPTIONS)
            traffic = TrafficSource(client, Load(math.inf, 2, seconds=0), 1, progress=False)
            return await traffic.run([BenchPrompt("", 1, 1, [7])] * 5)

    found = asyncio.run(run())
    assert (found.outcomes, found.open, found.cut) == ([], 0, False)


def test_prompts_are_new_and_as_long_as_asked():
    async def draw() -> list[list[BenchPrompt]]:
        async with session({}) as connections:
            client = Client(connections, "http://127.0.0.1:1", ENDPOINTS["sglang"], OPTIONS)
            driver = LoadDriver(client, Sizes(), vocab_size=50, seed=1)
            return [driver.draw(200, 1024), driver.draw(200, 1024)]

    first, second = asyncio.run(draw())
    for prompts in (first, second):
        lengths = [len(p.ids or ()) for p in prompts]
        assert lengths == [p.tokens for p in prompts]
        assert 512 <= min(lengths) < 540 and 1000 < max(lengths) <= 1024
        assert {p.output_len for p in prompts} <= set(range(64, 129))
        assert {token for p in prompts for token in p.ids or ()} == set(range(50))
    assert [p.ids for p in first] != [p.ids for p in second]


def test_targets_and_peers_are_of_one_setting():
    targets = {t.field: (t.bound, t.most) for t in targets_of(row(concurrency=256), None)}
    assert targets["requests_s"] == (58, False)
    assert targets["ttft_p50_ms"] == (120, True) and targets["itl_p99_ms"] == (110, True)
    assert peer_of(row(concurrency=256)) is SGLANG[256]
    for other in (row(dtype="fp8"), row(device="Xeon"), row(model="tiny:qwen3_moe")):
        assert targets_of(other, None) == () and peer_of(other) is None
    four, single = row(ranks=4), row(requests_s=20.0, ttft_p99_ms=500.0)
    assert [t.bound for t in targets_of(four, single)] == [16.0, 500.0] and peer_of(four) is None
    assert targets_of(row(ranks=4, concurrency=16), single) == ()
    (least, *_) = targets_of(row(), None)
    assert least.shown(row(requests_s=27.0)) == "requests s >= 27: met"
    assert least.shown(row(requests_s=26.9)) == "requests s >= 27: MISSED"


def test_chats_beside_long_prompts_are_compared_with_those_without():
    plain, mixed = row(load=CHATS, itl_p99_ms=20.0), row(load=MIXED, itl_p99_ms=30.0)
    assert with_ratio(mixed, [row(), plain]).itl_p99_ratio == 1.5
    assert with_ratio(plain, [plain]).itl_p99_ratio is None
    assert with_ratio(mixed, []).itl_p99_ratio is None


def test_rows_of_the_same_load_are_replaced(tmp_path, capsys):
    path = tmp_path / "rows.json"
    merge(path, [row(), row(ranks=4), row(load="poisson 60%", concurrency=None, rate=9.5)])
    merge(path, [row(requests_s=43.0)])
    found = json.loads(path.read_text())
    kinds = [(one["ranks"], one["load"], one["concurrency"]) for one in found]
    assert kinds == [(1, CLOSED, 64), (1, "poisson 60%", None), (4, CLOSED, 64)]
    assert found[0]["requests_s"] == 43.0
    report([ServingRow(**one) for one in found], markdown=True)
    told = capsys.readouterr().out
    assert "| closed | 64 | 43.0 (2.00x) |" in told and "| poisson 60% | 9.5/s |" in told
    assert main(["--markdown", "--out", str(path)]) == 0


def test_flags_of_ranks():
    laid_out = "--dtype bfloat16 --tp 4 --ep 4 --dp 4 --enable-dp-attention"
    assert server_flags([], 1, "bf16") == ["--dtype", "bfloat16"]
    assert server_flags([], 4, "bf16") == f"{laid_out} --moe-a2a-backend deepep".split()
    given = "--moe-a2a-backend flashinfer".split()
    assert server_flags(given, 4, "bf16") == [*given, *laid_out.split()]
    assert server_flags([], 1, "fp8")[-2:] == ["--quantization", "fp8"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "error: give either --model-path"),
        (["--model-path", "a", "--attach", "http://b"], "error: give either --model-path"),
        (["--attach", "http://b", "--page-size", "4"], "error: --attach starts no server"),
        (["--attach", "http://b", "--ranks", "1", "4"], "error: --attach: give the one number"),
        (["--model-path", "a", "--tp", "2"], "error: --tp: ranks are laid out by --ranks"),
        (["--model-path", "a", "--loads", "poisson"], "error: --loads poisson is a share"),
    ],
)
def test_wrong_flags_are_one_line(words, complaint):
    with pytest.raises(SystemExit, match=complaint):
        main(words)
