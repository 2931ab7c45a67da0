"""`moesaic eval` with a real engine, offline and over HTTP, and against a server that falters."""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

from moesaic.cli.main import main
from moesaic.engine.engine import Engine
from moesaic.evals import http
from moesaic.evals.ask import Options
from moesaic.evals.data import write_problems
from moesaic.evals.run import evaluate
from moesaic.evals.tasks.problem import ChatTurn, Problem
from tests.server.serving import served

PROMPTS = ["What is 2 + 2?", "Name a colour.", "äöü €", "Why?\nBecause.", "One", "Two words"]
MODEL, TOKENS = "tiny:deepseek_v3", 12
OPTIONS = Options(max_new_tokens=TOKENS, progress=False)
Body = dict[str, Any]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Deterministic, so that a reply does not depend on who else is in its batch."""
    with Engine(
        model_path=MODEL,
        num_threads=1,
        log_level="warning",
        enable_deterministic_inference=True,
        context_length=256,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with served(engine) as url:
        yield url


@pytest.fixture(scope="module")
def said(url: str) -> dict[str, str]:
    """What the model says to each prompt, by the client that everybody has."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    found = {}
    for prompt in PROMPTS:
        reply = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=TOKENS,
            temperature=0,
        )
        found[prompt] = reply.choices[0].message.content or ""
    return found


def problems_of(said: dict[str, str]) -> list[Problem]:
    """Every second one with the answer that will be given; one where no answer can be read."""
    problems = [
        Problem("even" if n < 4 else "odd", prompt, text if n % 2 == 0 else "not this", "", "exact")
        for n, (prompt, text) in enumerate(said.items())
    ]
    return [*problems, Problem("odd", PROMPTS[0], "5", "", "final")]


def run(out: Path, *flags: str) -> tuple[int, Body]:
    out.unlink(missing_ok=True)
    status = main(["eval", "--disable-tqdm", "--out", str(out), *flags])
    return status, json.loads(out.read_text())


def write(path: Path, problems: list[Problem]) -> str:
    keys = ("task", "prompt", "answer", "match")
    path.write_text("".join(json.dumps({k: getattr(p, k) for k in keys}) + "\n" for p in problems))
    return str(path)


def test_engine_and_server_give_what_the_client_gets(
    engine: Engine, url: str, said: dict[str, str], tmp_path: Path
) -> None:
    """The replies are distinct texts, so a mixed-up order would show."""
    problems = problems_of(said)
    assert len(set(said.values())) == len(PROMPTS)
    offline = evaluate(engine, problems, OPTIONS)
    data = write(tmp_path / "data.jsonl", problems)
    flags = ["--base-url", f"{url}/v1/", "--data", data, "--max-new-tokens", str(TOKENS)]
    status, online = run(tmp_path / "out.json", *flags, "--api-key", "k", "--concurrency", "3")
    assert status == 0
    texts = [*said.values(), said[PROMPTS[0]]]
    assert [output.reply for output in offline.outputs] == texts
    assert [output["reply"] for output in online["outputs"]] == texts
    for tasks in (json.loads(offline.to_json())["tasks"], online["tasks"]):
        assert list(tasks) == ["even", "odd"]
        even, odd = tasks["even"], tasks["odd"]
        assert (even["n"], even["accuracy"], even["invalid"], even["failed"]) == (4, 0.5, 0, 0)
        assert (odd["n"], odd["accuracy"], odd["invalid"]) == (3, 1 / 3, 1 / 3)
    assert online["accuracy"] == offline.accuracy == 3 / 7
    assert online["data"] == offline.data
    counts = [(o.prompt_tokens, o.completion_tokens, o.finish_reason) for o in offline.outputs]
    keys = ("prompt_tokens", "completion_tokens", "finish_reason")
    assert [tuple(output[key] for key in keys) for output in online["outputs"]] == counts
    assert all(output["latency_s"] > 0 for output in online["outputs"])
    assert online["target"] == url and online["arguments"]["concurrency"] == 3
    assert "k" not in online["arguments"].values() and "api_key" not in online["arguments"]


def test_a_system_message_is_asked(engine: Engine, url: str) -> None:
    messages = (ChatTurn("system", "Be short."), ChatTurn("user", "Name a colour."))
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": m.role, "content": m.content} for m in messages],  # type: ignore[misc]
        max_tokens=TOKENS,
        temperature=0,
    )
    (output,) = evaluate(engine, [Problem("t", "", "x", messages=messages)], OPTIONS).outputs
    assert output.reply == reply.choices[0].message.content
    assert reply.usage is not None and output.prompt_tokens == reply.usage.prompt_tokens


def test_a_system_message_for_all_that_have_none(engine: Engine, url: str, tmp_path: Path) -> None:
    """Offline and over HTTP as the client with that message; --out says what it was."""
    own = (ChatTurn("developer", "Be long."), ChatTurn("user", "Two words"))
    problems = [Problem("t", "Name a colour.", "x"), Problem("t", "", "x", messages=own)]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    turns = [(ChatTurn("system", "Be short."), *problems[0].conversation), own]
    wanted = [
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": m.role, "content": m.content} for m in some],  # type: ignore[misc]
            max_tokens=TOKENS,
            temperature=0,
        )
        for some in turns
    ]
    counts = [reply.usage.prompt_tokens for reply in wanted if reply.usage is not None]
    options = Options(max_new_tokens=TOKENS, system="Be short.", progress=False)
    offline = evaluate(engine, problems, options)
    assert [o.reply for o in offline.outputs] == [w.choices[0].message.content for w in wanted]
    assert [o.prompt_tokens for o in offline.outputs] == counts
    write_problems(str(tmp_path / "d.jsonl"), problems)
    flags = ["--base-url", f"{url}/v1/chat/completions", "--data", str(tmp_path / "d.jsonl")]
    flags += ["--system", "Be short.", "--max-new-tokens", str(TOKENS)]
    status, online = run(tmp_path / "out.json", *flags)
    assert (status, online["system"], online["target"]) == (0, "Be short.", url)
    assert [output["reply"] for output in online["outputs"]] == [o.reply for o in offline.outputs]
    assert "prompt" in online["outputs"][0] and online["data"] == offline.data


def test_a_prompt_that_does_not_fit_fails_alone(engine: Engine, said: dict[str, str]) -> None:
    problems = [*problems_of(said), Problem("long", "word " * 400, "x")]
    result = evaluate(engine, problems, OPTIONS)
    assert (result.failed, result.tasks["long"].failed, result.tasks["even"].accuracy) == (
        1,
        1,
        0.5,
    )
    assert "the context holds 256" in str(result.outputs[-1].error)


def test_without_a_template_prompts_are_plain_text(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampling = {"max_new_tokens": TOKENS, "temperature": 0}
    wanted: Any = engine.generate(prompt="Name a colour.", sampling_params=sampling)
    monkeypatch.setattr(engine.tokenizer.chat, "texts", {})
    (output,) = evaluate(engine, [Problem("t", "Name a colour.", "x")], OPTIONS).outputs
    assert output.reply == wanted["text"]
    assert "has no chat template: prompts are plain text" in caplog.text


def test_chance_has_a_seed(engine: Engine) -> None:
    def texts(seed: int) -> list[str]:
        options = Options(TOKENS, temperature=1.0, seed=seed, progress=False)
        problems = [Problem("t", prompt, "x") for prompt in PROMPTS]
        return [output.reply for output in evaluate(engine, problems, options).outputs]

    assert texts(1) == texts(1) != texts(2)


class Faltering(BaseHTTPRequestHandler):
    """Does to each prompt what it says, and notes how often it was asked."""

    protocol_version = "HTTP/1.1"
    asked: Counter[str]
    keys: set[str | None]
    bodies: list[Body]
    released: threading.Event

    def do_GET(self) -> None:
        if self.headers["Authorization"] == "Bearer wrong":
            self._send(401, {"error": {"message": "who are you?"}})
        else:
            self._send(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        self.asked[prompt] += 1
        self.bodies.append(body)
        self.keys.add(self.headers["Authorization"])
        first = self.asked[prompt] <= 2
        match prompt:
            case "busy" if first:
                self._send(429, {"error": {"message": "busy"}}, {"Retry-After": "0"})
            case "loading" if first:
                self._send(503, {"error": {"message": "loading"}})
            case "drop" if first:
                self.close_connection = True
            case "gateway" if first:
                self._send(502 if self.asked[prompt] == 1 else 504, {})
            case "hang":
                self.released.wait(60)
                self.close_connection = True
            case "never":
                self._send(503, {"error": {"message": "never"}})
            case "bad":
                self._send(400, {"error": {"message": "not this"}})
            case "nonsense":
                self._send(200, {"choices": []})
            case "aborted":
                self._send(200, _answer("half", "abort"))
            case _:
                message = {"content": prompt, "reasoning_content": "so"}
                self._send(200, _answer(prompt, "stop") | {"choices": [{"message": message}]})

    def _send(self, status: int, content: Body, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


class Crowded(ThreadingHTTPServer):
    """Takes all calls that come at once: one that finds the queue full is made again after a
    second, after three, after seven."""

    request_queue_size = 128


def _answer(text: str, reason: str) -> Body:
    return {"choices": [{"message": {"content": text}, "finish_reason": reason}]}


@pytest.fixture
def faltering() -> Iterator[tuple[str, type[Faltering]]]:
    released = threading.Event()
    kind = type(
        "Kind",
        (Faltering,),
        {"asked": Counter(), "keys": set(), "bodies": [], "released": released},
    )
    server = Crowded(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", kind
    released.set()
    server.shutdown()
    thread.join(30)
    server.server_close()


def test_what_may_be_tried_again_is_and_the_rest_counts_as_failed(
    faltering: tuple[str, type[Faltering]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, kind = faltering
    monkeypatch.setattr(http, "FIRST_WAIT", 0.01)
    monkeypatch.setenv("OPENAI_API_KEY", "from-outside")
    names = ["fine", "busy", "loading", "drop", "gateway"]
    names += ["never", "bad", "nonsense", "aborted"]
    data = write(tmp_path / "d.jsonl", [Problem("t", name, name, "", "exact") for name in names])
    status, found = run(tmp_path / "out.json", "--base-url", url, "--data", data)
    assert status == 1
    assert [output["right"] for output in found["outputs"]] == [True] * 5 + [False] * 4
    scores = found["tasks"]["t"]
    assert (scores["n"], scores["failed"], scores["accuracy"], scores["invalid"]) == (
        9,
        4,
        5 / 9,
        0,
    )
    wanted = dict.fromkeys(("busy", "loading", "drop", "gateway"), 3) | {"never": http.TRIES}
    assert kind.asked == dict.fromkeys(names, 1) | wanted
    assert kind.keys == {"Bearer from-outside"}
    messages = [output.get("error") for output in found["outputs"]]
    assert messages[:5] == [None] * 5
    assert messages[5] == f"status 503: never, {http.TRIES} times"
    assert messages[6:] == [
        "status 400: not this",
        "the answer has no message",
        "it ended with finish_reason 'abort'",
    ]
    assert "4 requests failed and count as wrong:" in capsys.readouterr().err


def test_a_server_that_hangs_and_one_with_a_password(
    faltering: tuple[str, type[Faltering]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, kind = faltering
    monkeypatch.setattr(http, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(http, "TRIES", 2)
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    data = write(tmp_path / "d.jsonl", [Problem("t", p, p, "", "exact") for p in ("hang", "fine")])
    address = url.replace("//", "//user:SECRET@")
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "temperature": 0.5}
    flags = ["--base-url", address, "--data", data, "--timeout", "1.5", "--top-p", "0.9"]
    with caplog.at_level("DEBUG"):
        status, found = run(tmp_path / "out.json", *flags, "--extra-body", json.dumps(extra))
    assert status == 1 and kind.asked == {"hang": 2, "fine": 1}
    assert [output["right"] for output in found["outputs"]] == [False, True]
    assert found["outputs"][0]["error"] == "no reply within 1.5 s, 2 times"
    assert kind.keys == {f"Basic {b64encode(b'user:SECRET').decode()}"}
    assert found["target"] == found["arguments"]["base_url"] == url
    said = "".join(capsys.readouterr()) + caplog.text + (tmp_path / "out.json").read_text()
    assert "SECRET" not in said and b64encode(b"user:SECRET").decode() not in said
    for body in kind.bodies:
        assert body.items() >= (extra | {"top_p": 0.9, "max_tokens": 256}).items()
    assert (found["top_p"], found["system"]) == (0.9, None)


def test_the_table_is_printed_where_the_file_cannot_be(
    faltering: tuple[str, type[Faltering]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The folder goes while the server is asked; what was drawn is counted with a file, too."""
    url, kind = faltering
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.setattr(kind, "do_GET", lambda self: (folder.rmdir(), Faltering.do_GET(self)))
    data = write(tmp_path / "d.jsonl", [Problem("t", "fine", "fine", "", "exact")])
    flags = ["--base-url", url, "--data", data, "--out", str(folder / "x.json"), "--disable-tqdm"]
    assert main(["eval", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].split()[:3] == ["t", "1", "1.0000"]
    assert f"error: --out {folder / 'x.json'} could not be written" in captured.err
    monkeypatch.undo()
    flags = ["--base-url", url, "--data", data, "--tasks", "lists"]
    status, found = run(tmp_path / "out.json", *flags)
    assert (status, found["num"], found["tasks"]["lists"]["n"]) == (0, 100, 100)


@pytest.mark.parametrize("more", [[], ["--model", "m"]])
def test_nobody_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    data = write(tmp_path / "d.jsonl", [Problem("t", "a", "a")])
    assert main(["eval", "--base-url", "http://127.0.0.1:9", "--data", data, *more]) == 1
    assert "no server at http://127.0.0.1:9" in capsys.readouterr().err


def test_a_wrong_key(
    faltering: tuple[str, type[Faltering]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "d.jsonl", [Problem("t", "a", "a")])
    flags = ["--base-url", faltering[0], "--data", data, "--api-key", "wrong"]
    assert main(["eval", *flags]) == 1
    assert "status 401: who are you?; give --api-key KEY" in capsys.readouterr().err
    assert not faltering[1].asked


@pytest.mark.slow
def test_ranks_give_the_same_texts(said: dict[str, str], tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", problems_of(said))
    flags = ["--model-path", MODEL, "--data", data, "--max-new-tokens", str(TOKENS)]
    flags += ["--enable-deterministic-inference", "--context-length", "256"]
    found = [
        run(tmp_path / "out.json", *flags, *more.split())
        for more in ("", "--tp 2 --ep 2", "--tp 4 --dp 4 --enable-dp-attention")
    ]
    assert [status for status, _ in found] == [0, 0, 0]
    texts = [[output["reply"] for output in result["outputs"]] for _, result in found]
    assert texts[0] == texts[1] == texts[2] == [*said.values(), said[PROMPTS[0]]]
    assert found[2][1]["arguments"]["tp_size"] == 4
