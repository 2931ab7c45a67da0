"""Hundreds of streaming clients at once, some of which leave, abort or send nonsense: does each get
the answer that is right, or the error that is due?

    python -m bench.soak                                  # 512 clients for two minutes, 4 EP ranks
    python -m bench.soak --clients 64 --seconds 20        # a short one
    python -m bench.soak --url http://127.0.0.1:30000     # a server that runs already

Every prompt is first answered alone; under load its answer must be the same. The server computes
deterministically, so that "the same" needs no tolerance. What each client does is drawn from a
seed. In the end every request that was sent is counted in exactly one line of the table, and the
server must be as empty as before: no request, no page, no socket of a client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from tqdm import tqdm

from bench.common import print_table, write_json
from bench.http_server import Server, ServerState, settle, started

MODEL: Final = "tiny:deepseek_v3"
FLAGS: Final = (
    "--tp 4 --ep 4 --enable-dp-attention --dp 4 --moe-a2a-backend deepep "
    "--enable-deterministic-inference"
)
PROMPTS: Final = 48
# What becomes of a request, as the table shows it.
RIGHT, LEFT, ABORTED, REFUSED, BUSY = (
    "right answer",
    "client left",
    "aborted by its client",
    "bad request, refused",
    "queue full (429)",
)
WRONG, FAILED, LOST = "WRONG answer", "FAILED", "LOST: no end"
BAD_ENDS: Final = (WRONG, FAILED, LOST)
DEADLINE_SECONDS: Final = 120.0
# Of each kind of bad end.
SHOWN: Final = 5


@dataclass(frozen=True)
class Question:
    """A prompt, and how it is asked: the path, the body, and where the text is in the answer."""

    prompt: str
    max_tokens: int
    kind: str

    def body(self, stream: bool, rid: str) -> dict[str, Any]:
        if self.kind == "/generate":
            sampling = {"temperature": 0, "max_new_tokens": self.max_tokens, "ignore_eos": True}
            return {
                "text": self.prompt,
                "sampling_params": sampling,
                "stream": stream,
                "rid": rid,
            }
        body = {
            "model": MODEL,
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": stream,
            "rid": rid,
        }
        if self.kind == "/v1/completions":
            return body | {"prompt": self.prompt}
        return body | {"messages": [{"role": "user", "content": self.prompt}]}

    def whole_text(self, answer: dict[str, Any]) -> str:
        if self.kind == "/generate":
            return str(answer["text"])
        choice = answer["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])


@dataclass
class Reading:
    """What a stream has told so far."""

    kind: str
    text: str = ""
    reason: str | None = None
    error: str | None = None
    done: bool = False
    events: int = 0

    def take(self, line: bytes) -> None:
        self.events += 1
        data = line.removeprefix(b"data: ")
        if data == b"[DONE]":
            self.done = True
            return
        told = json.loads(data)
        if "error" in told:
            self.error = told["error"]["message"]
        elif self.kind == "/generate":
            self.text = told["text"]
            reason = told["meta_info"]["finish_reason"]
            self.reason = reason and reason["type"]
        elif told["choices"]:
            choice = told["choices"][0]
            new = choice.get("text") or choice.get("delta", {}).get("content") or ""
            self.text += new
            self.reason = choice["finish_reason"] or self.reason


BAD_BODIES: Final = (
    b"",
    b"{",
    b'{"model": 3}',
    b'{"text": "x", "sampling_params": {"temperature": -1}}',
    b'{"text": "x", "sampling_params": {"temperature": NaN}}',
    b'{"text": "\\ud800"}',
    b'{"input_ids": [999999999]}',
    b'{"input_ids": []}',
    b"[" * 20000,
    b'{"messages": "no", "prompt": 7, "text": false}',
    b'{"text": "x", "sampling_params": {"n": 1e9}}',
)


@dataclass
class Tally:
    ends: Counter[str] = field(default_factory=Counter)
    seen: list[str] = field(default_factory=list)
    tokens: int = 0
    first: list[float] = field(default_factory=list)

    def count(self, end: str, detail: str = "") -> None:
        self.ends[end] += 1
        if end in BAD_ENDS and self.ends[end] <= SHOWN:
            self.seen.append(f"{end}: {detail}"[:500])


class Client:
    """Asks one thing after the other until the time is over."""

    def __init__(
        self,
        number: int,
        session: aiohttp.ClientSession,
        answers: dict[Question, str],
        tally: Tally,
    ) -> None:
        self._random = random.Random(number)
        self._number, self._session, self._answers, self._tally = number, session, answers, tally
        self._sent = 0

    async def run(self, until: float) -> None:
        actions = {
            self._read: 70,
            self._whole: 8,
            self._leave: 8,
            self._abort: 6,
            self._nonsense: 8,
        }
        while time.monotonic() < until:
            (action,) = self._random.choices(list(actions), list(actions.values()))
            self._sent += 1
            try:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    await action()
            except TimeoutError:
                self._tally.count(LOST, f"{action.__name__} after {DEADLINE_SECONDS:g} s")
            except (aiohttp.ClientError, ConnectionError) as error:
                self._tally.count(FAILED, f"{action.__name__}: {error!r}")

    def _question(self) -> tuple[Question, str]:
        question = self._random.choice(list(self._answers))
        return question, f"soak-{self._number}-{self._sent}"

    async def _read(self) -> None:
        question, rid = self._question()
        begun = time.monotonic()
        async with self._post(question, rid, stream=True) as response:
            if not self._is_accepted(response.status, await _error(response)):
                return
            reading = Reading(question.kind)
            async for line in _lines(response):
                if not reading.events:
                    self._tally.first.append(time.monotonic() - begun)
                reading.take(line)
        self._judge(question, reading, ("length", "stop"))

    async def _whole(self) -> None:
        question, rid = self._question()
        async with self._post(question, rid, stream=False) as response:
            if not self._is_accepted(response.status, await _error(response)):
                return
            text = question.whole_text(await response.json())
        reading = Reading(question.kind, text, "length", done=True)
        self._judge(question, reading, ("length",))

    async def _leave(self) -> None:
        """At any moment, before the first event too."""
        question, rid = self._question()
        enough = self._random.randrange(12)
        reading = Reading(question.kind)
        response = await self._post(question, rid, stream=True)
        try:
            if not self._is_accepted(response.status, await _error(response)):
                return
            if enough:
                async for line in _lines(response):
                    reading.take(line)
                    if reading.events >= enough or reading.done:
                        break
        finally:
            response.close()
        if self._answers[question].startswith(reading.text):
            self._tally.count(LEFT)
        else:
            self._tally.count(WRONG, f"{question} began {reading.text!r}")

    async def _abort(self) -> None:
        question, rid = self._question()
        enough = self._random.randrange(1, 8)
        reading = Reading(question.kind)
        async with self._post(question, rid, stream=True) as response:
            if not self._is_accepted(response.status, await _error(response)):
                return
            async for line in _lines(response):
                reading.take(line)
                if reading.events == enough:
                    async with self._session.post("/abort_request", json={"rid": rid}) as told:
                        assert told.status == 200, told.status
        self._judge(question, reading, ("length", "stop", "abort"), aborted=True)

    async def _nonsense(self) -> None:
        path = self._random.choice(("/generate", "/v1/completions", "/v1/chat/completions"))
        body = self._random.choice(BAD_BODIES)
        async with self._session.post(path, data=body) as response:
            error = await _error(response)
        if response.status == 400 and error:
            self._tally.count(REFUSED)
        else:
            self._tally.count(FAILED, f"{path} {body[:60]!r} got {response.status} {error}")

    def _post(self, question: Question, rid: str, stream: bool) -> Any:
        return self._session.post(question.kind, json=question.body(stream, rid))

    def _is_accepted(self, status: int, error: str) -> bool:
        if status == 200:
            return True
        if status == 429:
            self._tally.count(BUSY)
        else:
            self._tally.count(FAILED, f"{status}: {error}")
        return False

    def _judge(
        self, question: Question, reading: Reading, reasons: tuple[str, ...], aborted: bool = False
    ) -> None:
        expected = self._answers[question]
        self._tally.tokens += len(reading.text)
        if not reading.done or reading.error or reading.reason not in reasons:
            self._tally.count(FAILED, f"{question} ended with {reading.reason}, {reading.error}")
        elif reading.text == expected:
            self._tally.count(RIGHT)
        # An abort may cut a character in two.
        elif aborted and expected.startswith(reading.text.rstrip("\ufffd")):
            self._tally.count(ABORTED)
        else:
            self._tally.count(WRONG, f"{question}: {reading.text!r} is not {expected!r}")


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for line in response.content:
        if line := line.strip():
            yield line


async def _error(response: aiohttp.ClientResponse) -> str:
    """The message of a refusal; nothing for an answer, which is not read."""
    if response.status == 200:
        return ""
    return str(json.loads(await response.read())["error"]["message"])


def questions(seed: int) -> list[Question]:
    chooser = random.Random(seed)
    kinds = ("/generate", "/v1/completions", "/v1/chat/completions")
    words = "alpha beta gamma delta tiles of a mosaic router expert token rank".split()
    return [
        Question(
            " ".join(chooser.choices(words, k=chooser.randint(1, 40))),
            chooser.randint(2, 48),
            kinds[number % len(kinds)],
        )
        for number in range(PROMPTS)
    ]


async def ask_alone(session: aiohttp.ClientSession) -> dict[Question, str]:
    found = {}
    for question in tqdm(questions(0), desc="each prompt alone", unit="prompt"):
        body = question.body(False, "alone")
        async with session.post(question.kind, json=body) as response:
            assert response.status == 200, await response.text()
            found[question] = question.whole_text(await response.json())
    assert len(set(found.values())) > PROMPTS // 2, "answers must differ to show a mix-up"
    return found


async def soak(url: str, clients: int, seconds: float) -> Tally:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        answers = await ask_alone(session)
        tally = Tally()
        until = time.monotonic() + seconds
        running = [
            asyncio.create_task(Client(number, session, answers, tally).run(until))
            for number in range(clients)
        ]
        await _watch(tally, until, seconds)
        await asyncio.gather(*running)
        return tally


async def _watch(tally: Tally, until: float, seconds: float) -> None:
    with tqdm(total=round(seconds), desc="load", unit="s") as bar:
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(1.0, left))
            bar.n = round(seconds - max(0.0, until - time.monotonic()))
            bad = sum(tally.ends[end] for end in BAD_ENDS)
            bar.set_postfix(ended=sum(tally.ends.values()), bad=bad)


def report(args: argparse.Namespace, tally: Tally, seconds: float, left: list[str]) -> int:
    ends = [RIGHT, ABORTED, LEFT, REFUSED, BUSY, *BAD_ENDS]
    print_table(["end", "requests"], [[end, str(tally.ends[end])] for end in ends])
    first = sorted(tally.first)
    p50, p99 = (first[int(len(first) * q)] for q in (0.5, 0.99))
    total = sum(tally.ends.values())
    print(f"{total} requests in {seconds:.0f} s; time to first event {p50:.2f} s (P99 {p99:.2f} s)")
    print("left behind: " + ("; ".join(left) or "nothing"))
    for text in tally.seen:
        print(text)
    payload = {
        "clients": args.clients,
        "seconds": round(seconds, 1),
        "flags": args.flags,
        "model": MODEL,
        "requests": total,
        "ends": {end: tally.ends[end] for end in ends},
        "ttfe_p50_s": round(p50, 3),
        "ttfe_p99_s": round(p99, 3),
        "left_behind": left,
    }
    write_json("soak", payload)
    return 1 if left or any(tally.ends[end] for end in BAD_ENDS) else 0


def run(server: Server, args: argparse.Namespace) -> int:
    before = ServerState.of(server)
    begun = time.monotonic()
    tally = asyncio.run(soak(server.url, args.clients, args.seconds))
    seconds = time.monotonic() - begun
    return report(args, tally, seconds, settle(server, before))


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--url", help="of a server that runs; unset: one is started")
    parser.add_argument("--flags", default=FLAGS, help="of the server that is started")
    args = parser.parse_args()
    if args.url:
        return run(Server(args.url, None), args)
    with started(MODEL, args.flags.split()) as server:
        return run(server, args)


if __name__ == "__main__":
    raise SystemExit(main())
