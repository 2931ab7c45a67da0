"""Flags of the server that SGLang's users know: HTTPS, names, defaults, logs and crash dumps."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import shutil
import socket
import ssl
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from moesaic.cli.main import main
from moesaic.config import ServerArgs
from moesaic.engine.engine import Engine
from moesaic.engine.frontend import crash_dump
from moesaic.engine.frontend.crash_dump import MOST_FILES, CrashDump
from moesaic.models.tiny import make_tiny_checkpoint
from moesaic.server import request_log
from moesaic.server.auth import Keys
from moesaic.server.request_log import set_up_request_log
from moesaic.server.run import Server
from moesaic.server.tls import check_certificate, refresh_certificate
from tests.server.serving import Running, talk

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined %} thinking {{ enable_thinking }}{% endif %}"
)
GREEDY = {"temperature": 0, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model"))
    (folder / "generation_config.json").write_text('{"do_sample": false, "top_k": 7}')
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def make_certificate(folder: Path, password: str = "") -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    cert, key = folder / "cert.pem", folder / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    secret = ["-passout", f"pass:{password}"] if password else ["-nodes"]
    files = ["-keyout", str(key), "-out", str(cert), "-days", "2"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command = ["openssl", "req", "-x509", *curve, *names, *secret, *files]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    flags: Any = {
        "served_model_name": ["mosaic", "gpt-4o"],
        "preferred_sampling_params": {"temperature": 0.0, "top_k": 5, "max_new_tokens": 3},
        "default_chat_template_kwargs": {"enable_thinking": False},
        "stream_response_default_include_usage": True,
        "prefill_max_requests": 2,
        "json_model_override_args": '{"max_position_embeddings": 512}',
        "crash_dump_folder": str(tmp_path_factory.mktemp("crash") / "dumps"),
        "api_key": "secret-key",
        "num_threads": 1,
    }
    with Engine(model_path=str(folder), **flags) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine, certificate: tuple[Path, Path]) -> Iterator[Running]:
    cert, key = map(str, certificate)
    args = ServerArgs(
        ssl_certfile=cert,
        ssl_keyfile=key,
        log_level_http="info",
        uvicorn_access_log_exclude_prefixes=("/health", "/metrics"),
    )
    with Running(engine).serve(args=args) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running, certificate: tuple[Path, Path]) -> Iterator[httpx.Client]:
    trusted = ssl.create_default_context(cafile=str(certificate[0]))
    base = f"https://127.0.0.1:{server.port}"
    headers = {"Authorization": "Bearer secret-key"}
    with httpx.Client(base_url=base, verify=trusted, timeout=60, headers=headers) as client:
        yield client


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{http.base_url}/v1", api_key="secret-key", http_client=http, max_retries=0
    )


def test_https(server: Running, http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"https://127.0.0.1:{server.port}/health")
    assert talk(server.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") == b""  # plain HTTP


def test_a_long_stream_over_https(http: httpx.Client) -> None:
    body = {"text": "Hello", "stream": True, "sampling_params": {"max_new_tokens": 64, "n": 4}}
    with http.stream("POST", "/generate", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.status_code == 200 and lines[-1] == "data: [DONE]"


def test_all_names_are_answered(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["mosaic", "gpt-4o"]
    assert client.models.retrieve("gpt-4o").id == "gpt-4o"
    for name in ("mosaic", "gpt-4o", "default"):
        answer = client.completions.create(model=name, prompt="x", max_tokens=1)
        assert answer.model == "mosaic"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="x")


def test_preferred_parameters_are_for_requests_that_leave_them_out(
    client: openai.OpenAI, http: httpx.Client, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    logged = dataclasses.replace(engine.args, log_requests=True, log_requests_format="json")
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO"):
        patch.setattr(engine, "args", logged)
        client.completions.create(model="mosaic", prompt="x", max_tokens=2)
        client.completions.create(model="mosaic", prompt="x", max_tokens=2, temperature=0.5)
        http.post("/generate", json={"text": "a secret"})
    found = [json.loads(r.getMessage()) for r in caplog.records if r.name == request_log.__name__]
    params = [entry["sampling_params"] for entry in found]
    assert [(p["temperature"], p["top_k"]) for p in params] == [(0.0, 5), (0.5, 5), (0.0, 5)]
    assert [entry["completion_tokens"] for entry in found] == [2, 2, 3]
    assert found[2]["prompt"] == "a secret"
    assert found[2]["finish_reason"] == {"type": "length", "length": 3}
    assert 0 < found[2]["ttft"] <= found[2]["e2e_latency"]
    preferred = http.get("/get_model_info").json()["preferred_sampling_params"]
    assert preferred == {"temperature": 0.0, "top_k": 5, "max_new_tokens": 3}


def test_a_changed_config_does_not_change_the_paths(
    http: httpx.Client, engine: Engine, folder: Path
) -> None:
    assert engine.context_length == 512
    for path in ("/model_info", "/server_info"):
        info = http.get(path).json()
        assert (info["model_path"], info["tokenizer_path"]) == (str(folder), str(folder)), path
    manager = engine.tokenizer_manager
    assert (engine.server_args.model_path, manager.model_path) == (str(folder), str(folder))
    assert engine.get_tokenizer().name_or_path == str(folder)


def test_defaults_of_chats(client: openai.OpenAI, engine: Engine) -> None:
    """The prompt's length shows what the template got."""

    def prompt_tokens(**kwargs: Any) -> int:
        messages: Any = [{"role": "user", "content": "Hi"}]
        answer = client.chat.completions.create(
            model="mosaic", messages=messages, max_tokens=1, **kwargs
        )
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    assert engine.tokenizer is not None
    false, true = (
        len(engine.tokenizer.encode(f"Hi thinking {word}", add_special_tokens=False))
        for word in ("False", "True")
    )
    assert false != true
    assert prompt_tokens() == false
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    assert prompt_tokens(extra_body=thinking) == true


@pytest.mark.parametrize(("options", "has_usage"), [(None, True), (False, False), (True, True)])
def test_streams_end_with_usage(
    client: openai.OpenAI, options: bool | None, has_usage: bool
) -> None:
    asked: Any = {} if options is None else {"stream_options": {"include_usage": options}}
    stream = client.completions.create(
        model="mosaic", prompt="x", max_tokens=2, stream=True, **asked
    )
    last = list(stream)[-1]
    assert (last.usage is not None and last.usage.completion_tokens == 2) == has_usage


def test_overrides_of_the_config(engine: Engine, folder: Path) -> None:
    assert engine.context_length == 512
    changed = Path(engine.args.model_path)
    assert changed != folder
    read = json.loads((changed / "config.json").read_text())
    own = json.loads((folder / "config.json").read_text())
    assert read == own | {"max_position_embeddings": 512}
    assert (changed / "model.safetensors").resolve() == folder / "model.safetensors"


def test_access_log(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(logging.getLogger("uvicorn.access"), "handlers", [handler])
    for path in ("/version", "/health", "/metrics", "/nowhere"):
        http.get(path)
    lines = [record.getMessage().split(" - ")[1] for record in records]
    assert lines == ['"GET /version HTTP/1.1" 200', '"GET /nowhere HTTP/1.1" 404']


def test_times_of_requests(
    http: httpx.Client, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    logged = dataclasses.replace(engine.args, enable_request_time_stats_logging=True)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO"):
        patch.setattr(engine, "args", logged)
        body = {"text": "Hi", "rid": "mine", "sampling_params": GREEDY}
        total = http.post("/generate", json=body).json()["meta_info"]["e2e_latency"]
    (line,) = [m for m in caplog.messages if m.startswith("request mine took: ")]
    parts = dict(part.split()[:2] for part in line.partition(": ")[2].split(", "))
    assert list(parts) == ["queue", "prefill", "decode"]
    assert sum(map(float, parts.values())) == pytest.approx(total, abs=0.002)


def test_targets_of_the_request_log(
    http: httpx.Client, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "logs"
    logged = dataclasses.replace(engine.args, log_requests=True, log_requests_target=(str(target),))
    monkeypatch.setattr(engine, "args", logged)
    monkeypatch.setattr(request_log.logger, "handlers", [])
    monkeypatch.setattr(request_log.logger, "propagate", True)
    request_log.logger.setLevel("INFO")
    set_up_request_log(logged)
    http.post("/generate", json={"text": "Hi", "rid": "there", "sampling_params": GREEDY})
    file = target / "requests.log"
    assert "] request there: 2 prompt tokens, 4 generated, length" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(target.stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--log-requests-target .*file: "):
        set_up_request_log(dataclasses.replace(logged, log_requests_target=(f"{tmp_path}/file",)))


def test_the_open_requests_of_an_engine_that_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        monkeypatch.undo()
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(engine._core, "step", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY, rid="the-one")
    assert engine.args.crash_dump_folder is not None
    dumps = Path(engine.args.crash_dump_folder)
    (file,) = dumps.iterdir()
    head, entry = map(json.loads, file.read_text().splitlines())
    assert head["reason"] == "ZeroDivisionError('on purpose')"
    assert head["flags"]["served_model_name"] == "mosaic"
    assert "secret-key" not in file.read_text()
    assert (entry["rid"], entry["prompt_ids"], entry["output_ids"]) == ("the-one", [5, 6, 7], [])
    assert entry["sampling_params"]["max_new_tokens"] == 4
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(dumps.stat().st_mode) == 0o700
    assert engine.generate(input_ids=[5], sampling_params=GREEDY)  # it goes on


def test_each_failure_has_its_dump_up_to_a_limit(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dump = CrashDump(dataclasses.replace(engine.args, crash_dump_folder=str(tmp_path)))
    for turn in range(MOST_FILES + 2):
        dump.write(f"failure {turn}", [])
    reasons = [json.loads(file.read_text())["reason"] for file in sorted(tmp_path.iterdir())]
    assert sorted(reasons) == sorted(f"failure {turn}" for turn in range(MOST_FILES))
    assert caplog.messages[-1].startswith(f"no dump of this failure: {MOST_FILES} files")


def test_a_dump_that_cannot_be_encoded_does_not_keep_requests_open(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = engine._core.step

    def fail() -> Any:
        monkeypatch.setattr(engine._core, "step", step)
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(crash_dump, "_entry", lambda request: {"rid": object()})
    monkeypatch.setattr(engine._core, "step", fail)
    with pytest.raises(RuntimeError, match="the engine failed: ZeroDivisionError"):
        engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)
    assert any("were not written to" in line and "object" in line for line in caplog.messages)
    assert engine.generate(input_ids=[5], sampling_params=GREEDY)


@pytest.mark.parametrize("command", ["bench serve --disable-tqdm", "eval --disable-tqdm"])
def test_clients_say_that_a_certificate_is_not_trusted(
    server: Running, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"https://127.0.0.1:{server.port}"
    assert main([*command.split(), "--base-url", url]) == 1
    error = capsys.readouterr().err
    assert f"error: the certificate of {url} is not trusted: " in error
    assert "self-signed certificate" in error and "SSL_CERT_FILE" in error


def test_certificates_are_checked_before_anything_is_loaded(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = map(str, certificate)
    check_certificate(ServerArgs(ssl_certfile=cert, ssl_keyfile=key))
    for other in (str(tmp_path / "none.pem"), cert):
        with pytest.raises(ValueError, match=r"--ssl-certfile cannot be used \("):
            check_certificate(ServerArgs(ssl_certfile=cert, ssl_keyfile=other))
    locked, secret = map(str, make_certificate(tmp_path, "a password"))
    args = ServerArgs(ssl_certfile=locked, ssl_keyfile=secret, ssl_keyfile_password="a password")
    check_certificate(args)
    with pytest.raises(ValueError, match="cannot be used"):  # and it does not ask at the terminal
        check_certificate(dataclasses.replace(args, ssl_keyfile_password=None))


def test_a_changed_certificate_is_read_again(
    certificate: tuple[Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cert, key = (shutil.copy(path, tmp_path / path.name) for path in certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    loaded: list[tuple[Any, ...]] = []
    args = ServerArgs(ssl_certfile=str(cert), ssl_keyfile=str(key), enable_ssl_refresh=True)

    class Recording(ssl.SSLContext):
        def load_cert_chain(self, *files: Any) -> None:
            loaded.append(files[:2])
            context.load_cert_chain(*files)

    async def change() -> None:
        watch = refresh_certificate(Recording(ssl.PROTOCOL_TLS_SERVER), args, seconds=0.01)
        task = asyncio.create_task(watch)
        await asyncio.sleep(0.1)
        assert loaded == []
        with monkeypatch.context() as rotation:
            rotation.setattr(Path, "stat", lambda *_, **__: os.stat(tmp_path / "gone"))
            await _until_logged(caplog, "cannot be read now: ")
        make_certificate(tmp_path)
        await _until_logged(caplog, "was read again")
        task.cancel()

    with caplog.at_level("INFO"):
        asyncio.run(asyncio.wait_for(change(), 60))
    assert loaded[-1] == (str(cert), str(key))


async def _until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    while not any(text in line for line in caplog.messages):
        await asyncio.sleep(0.01)


def test_a_failed_task_does_not_break_the_shutdown(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def drain(server: Server) -> None:
        server.should_exit = True
        raise OSError("on purpose")

    monkeypatch.setattr(Server, "_stop_when_drained", drain)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(Server(engine, listener, Keys()).serve_until_stopped())
    assert "a task of the server failed: OSError('on purpose')" in caplog.messages
