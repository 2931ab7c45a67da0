"""Paths that are not served, trailing slashes, methods, the OpenAPI document, and the routes that
SGLang's router and lm-eval ask for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
from jinja2 import Environment
from openai import NotFoundError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

import moesaic
from moesaic.engine.engine import Engine
from moesaic.server.app import ROUTES
from moesaic.server.openapi import document
from moesaic.server.paths import NOT_OFFERED, not_offered
from tests.server.serving import Running, wait_until

GREEDY = {"temperature": 0, "max_new_tokens": 4}
# What SGLang 0.5.23 serves (entrypoints/http_server.py, v1_loads.py).
SGLANG_PATHS = """
/ready /health /health_generate /get_model_info /model_info /get_server_info /server_info
/set_internal_state /dumper/x /generate /encode /classify /flush_cache /add_external_corpus
/remove_external_corpus /list_external_corpora /hicache/storage-backend/clear
/hicache/storage-backend /get_hicache_l3_cache_layout /start_profile /stop_profile
/set_trace_level /freeze_gc /start_expert_distribution_record /stop_expert_distribution_record
/dump_expert_distribution_record /update_weights_from_disk
/init_weights_send_group_for_remote_instance /send_weights_to_remote_instance
/get_remote_instance_transfer_engine_info /remote_instance_transfer_engine_info
/init_weights_update_group /destroy_weights_update_group /update_weights_from_tensor
/begin_weight_update /end_weight_update /update_weights_from_distributed /update_weights_from_ipc
/update_weight_version /get_weights_by_name /release_memory_occupation /resume_memory_occupation
/weights_checker /slow_down /pd_role_switch /load_lora_adapter /load_lora_adapter_from_tensors
/unload_lora_adapter /open_session /close_session /configure_logging /abort_request
/parse_function_call /separate_reasoning /pause_generation /continue_generation /v1/completions
/v1/chat/completions /v1/embeddings /v1/classify /tokenize /v1/tokenize /detokenize
/v1/detokenize /v1/audio/transcriptions /v1/realtime /v1/models /v1/score /v1/decisions /v1/rerank
/api/chat /api/generate /api/tags /api/show /v1/systemone /ping /invocations /vertex_generate
/v1/loads
""".split()
OPENAI_PATHS = """
/v1/embeddings /v1/moderations /v1/images/generations /v1/audio/speech /v1/files /v1/uploads
/v1/fine_tuning/jobs /v1/batches /v1/assistants /v1/threads/t/runs /v1/vector_stores
/v1/conversations /v1/engines
""".split()
SERVED = {route.path for route in ROUTES}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    flags = {"num_threads": 1, "max_running_requests": 2, "served_model_name": "org/Tiny-7B: x/"}
    with (
        Engine(model_path="tiny:qwen3_moe", log_level="warning", **flags) as engine,
        Running(engine).serve() as running,
    ):
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client


def message(answer: httpx.Response, status: int = 404) -> str:
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return str(error["message"])


# --- paths that are not served ---


def test_batches_of_messages_are_refused_in_anthropics_shape(client: httpx.Client) -> None:
    answer = client.post("/v1/messages/batches", json={"requests": []})
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"
    assert "send the requests at once" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        ),
    ],
)
def test_an_empty_name_of_the_model_counts_as_left_out(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    assert client.post(path, json={**body, "model": ""}).status_code == 200


def test_an_unknown_path_names_the_routes(client: httpx.Client) -> None:
    told = message(client.post("/v1/chat/completion", json={}))
    head, _, served = told.partition(" served: ")
    assert head == "there is no '/v1/chat/completion' here; did you mean /v1/chat/completions?"
    listed = {path for path in SERVED if not path.startswith("/page/")} | {"/openapi.json"}
    assert served.split(", ") == sorted(path.replace(":path}", "}") for path in listed)
    for wrong in ("/chat/completions", "/v1/v1/chat/completions", "//v1/chat/completions"):
        assert "did you mean /v1/chat/completions? served" in message(client.post(wrong, json={}))
    assert "did you mean" not in message(client.get("/v1/foo"))
    far = message(client.get("/x%0A%E2%80%AE'y"))
    assert far.startswith('there is no "/x\\n\\u202e\'y" here; served: /, /abort_request')
    long = message(client.get("/" + "z" * 3000))
    assert f"'/{'z' * 199}' … (3001 characters)" in long and len(long) < 2000


@pytest.mark.parametrize("path", sorted({*SGLANG_PATHS, *OPENAI_PATHS} - SERVED))
def test_what_other_servers_have_is_explained(client: httpx.Client, path: str) -> None:
    told = message(client.post(path, json={"model": "x"}))
    reason = not_offered(path)
    assert reason and told.startswith(f"'{path}' is not offered: {reason}; ")
    assert told == message(client.get(f"{path}/"))


def test_the_table_explains_nothing_that_is_served() -> None:
    assert [path for path in SERVED if not_offered(path)] == []
    assert not_offered("/v1/filesystem") == not_offered("/apixyz") == ""
    patterns = [pattern for patterns, _ in NOT_OFFERED for pattern in patterns]
    assert len(set(patterns)) == len(patterns)


@pytest.mark.parametrize("name", ["start", "stop", "dump"])
def test_a_recorder_needs_its_flag(client: httpx.Client, name: str) -> None:
    for send in (client.get, client.post):
        told = message(send(f"/{name}_expert_distribution_record"), 400)
        assert told.endswith("--expert-distribution-recorder-mode stat, per_pass or per_token")


def test_the_openai_client_shows_the_reason(running: Running) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="-", max_retries=0)
    with client, pytest.raises(NotFoundError, match="gives no embeddings: run a server for an"):
        client.embeddings.create(model="x", input="y")


def test_a_trailing_slash_works(client: httpx.Client) -> None:
    body = {"text": "x", "sampling_params": GREEDY}
    answers = [client.post(path, json=body) for path in ("/generate", "/generate/", "/generate//")]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len({tuple(answer.json()["output_ids"]) for answer in answers}) == 1
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()
    assert client.get("/health/").json() == client.get("/health").json()
    assert client.get("/").text == client.get("//").text
    for path in ("/v1/models/org/Tiny-7B: x/", "/v1/models/org/Tiny-7B: x"):
        assert client.get(path).json()["id"] == "org/Tiny-7B: x/"


def test_routes_that_generate_skip_the_middlewares(client: httpx.Client, running: Running) -> None:
    """They are counted all the same, whichever way they took, with the status of the response."""
    direct = running.app.direct  # type: ignore[attr-defined]
    assert set(direct) == {(route.method, route.path) for route in ROUTES if route.generates}
    counts = running.context.stats.http
    before = counts.copy()
    good, bad = {"text": "Lay", "sampling_params": GREEDY}, {"text": 1}
    answers = [client.post(path, json=good).json() for path in ("/generate", "/generate/")]
    assert answers[0]["text"] == answers[1]["text"]
    errors = [client.post(path, json=bad) for path in ("/generate", "/generate/")]
    assert errors[0].json() == errors[1].json() and errors[0].status_code == 400
    assert counts - before == {("/generate", 200): 2, ("/generate", 400): 2}


def test_allow_has_all_methods(client: httpx.Client) -> None:
    for path, methods in {
        "/generate": "POST",
        "/flush_cache": "GET, HEAD, POST",
        "/start_profile": "GET, HEAD, POST",
        "/health": "GET, HEAD",
    }.items():
        for method in ("DELETE", "OPTIONS", "PATCH"):
            answer = client.request(method, path)
            assert message(answer, 405) == f"this path has no such method: send {methods}"
            assert answer.headers["allow"] == methods
    for path in ("/v1/messages", "/v1/messages/count_tokens/"):
        answer = client.get(path)
        assert (answer.json()["type"], answer.headers["allow"]) == ("error", "POST")
        assert message(answer, 405) == "this path has no such method: send POST"
    for path in sorted(SERVED - {"/flush_cache"}):
        methods = {route.method for route in ROUTES if route.path == path}
        if methods == {"GET"} and "{" not in path:
            head, got = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (got.status_code, b""), path


# --- names of models ---


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("gpt-4o", "'gpt-4o'"),
        ("org/Model-7B.v2@main", "'org/Model-7B.v2@main'"),
        ("Größe 世界", "'Größe 世界'"),
        ("a\x1b[31m\n\u202eb", r"'a\x1b[31m\n\u202eb'"),
        ("m" * 999, f"'{'m' * 256}' … (999 characters)"),
    ],
)
def test_a_model_that_does_not_exist_is_quoted(client: httpx.Client, name: str, shown: str) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in {
        "/v1/chat/completions": chat,
        "/v1/completions": {"prompt": "x"},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
    }.items():
        answer = client.post(path, json=body | {"model": name})
        told = message(answer)
        assert told == f"the model {shown} does not exist; served: 'org/Tiny-7B: x/'"
        assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (
            "model_not_found",
            "model",
        )
    for model in ("org/Tiny-7B: x/", "default", None):
        assert client.post("/tokenize", json={"prompt": "x", "model": model}).status_code == 200


# --- the document ---


def test_examples_of_the_document_work(client: httpx.Client) -> None:
    """Each is valid by its own schema, and the server accepts it."""
    found = client.get("/openapi.json").json()
    for route in ROUTES:
        if route.body is None:
            continue
        operation = found["paths"][route.path][route.method.lower()]
        content = operation["requestBody"]["content"]["application/json"]
        schema = content["schema"] | {"components": found["components"]}
        jsonschema.validate(content["example"], schema)
        answer = client.request(route.method, route.path, json=content["example"])
        if route.path == "/rebalance":  # on ranks: tests/e2e/test_rebalance.py
            assert "start with --enable-eplb" in message(answer, 400)
        elif route.path == "/scale_elastic_ep":  # tests/e2e/test_elastic.py
            assert "start several with --elastic-ep-backend" in message(answer, 400)
        else:
            assert answer.status_code == 200, (route.path, answer.text)
    client.post("/stop_profile")


def test_the_document_has_404s_and_one_of_rules() -> None:
    found = json.loads(json.dumps(document(ROUTES)))
    with_409 = {
        (path, method)
        for path, operations in found["paths"].items()
        for method, operation in operations.items()
        if "409" in operation["responses"]
    }
    assert with_409 == {("/start_profile", "post"), ("/start_profile", "get")}
    with_404 = {
        path for path, methods in found["paths"].items() for one in methods.values()
        if "404" in one["responses"]
    }  # fmt: skip
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"} <= with_404
    items = found["paths"]["/v1/responses/{response_id}/input_items"]["get"]["parameters"]
    assert [(one["name"], one["in"]) for one in items] == [
        ("response_id", "path"),
        *((name, "query") for name in ("limit", "order", "after")),
    ]
    assert "/v1/models/{model}" in with_404 and "/health" not in with_404
    loads = found["paths"]["/v1/loads"]["get"]["parameters"]
    assert [one["name"] for one in loads] == ["dp_rank", "include", "format"]
    for path, first, second in (
        ("/generate", {"text": "x"}, {"input_ids": [1]}),
        ("/tokenize", {"prompt": "x"}, {"messages": []}),
    ):
        body = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        check = jsonschema.Draft202012Validator(
            body["schema"] | {"components": found["components"]}
        )
        null = dict.fromkeys(second)
        valid = [first, second, null | first]
        assert [check.is_valid(one) for one in valid] == [True] * 3
        assert [check.is_valid(one) for one in ({}, null, first | second)] == [False] * 3


# --- draining ---


def test_a_stopping_server_refuses_what_generates(
    running: Running, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.context, "_is_stopping", lambda: True)
    generating = [route for route in ROUTES if route.generates]
    assert {"/generate", "/v1/completions", "/v1/chat/completions"} <= {r.path for r in generating}
    for route in generating:
        for content in (json.dumps(route.example), "{", ""):
            answer = client.request(route.method, route.path, content=content)
            assert message(answer, 503) == "the server is stopping"
            assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
    for path in ("/health", "/health_generate", "/ping"):
        assert client.get(path).status_code == 503
    for path in (
        "/v1/models",
        "/metrics",
        "/v1/loads",
        "/get_load",
        "/server_info",
        "/",
        "/version",
    ):
        assert client.get(path).status_code == 200
    assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200
    for route in ROUTES:
        if route.path in ("/v1/messages/count_tokens", "/v1/responses/input_tokens"):
            counted = client.post(route.path, json=route.example)
            assert counted.status_code == 200 and counted.json()["input_tokens"] > 0
    assert client.post("/abort_request", json={"rid": "x"}).json()["aborted"] == 0


# --- lm-eval's remote tokenizer ---


def test_tokenizer_info(client: httpx.Client, running: Running) -> None:
    """As lm-eval 0.4.13 uses it (RemoteTokenizer in lm_eval/utils.py)."""
    info = client.get("/tokenizer_info").json()
    tokenizer = running.engine.tokenizer
    assert tokenizer is not None
    eos = client.post("/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False})
    (eos_id,) = eos.json()["tokens"]
    assert eos_id in tokenizer.eos_ids
    assert info["model_max_length"] == 2048 and info["vocab_size"] == tokenizer.vocab_size
    messages = [{"role": "user", "content": "Hi"}]
    template = Environment().from_string(info["chat_template"])
    rendered = template.render(messages=messages, add_generation_prompt=True)
    assert rendered == tokenizer.apply_chat_template(messages)
    ids = client.post("/v1/tokenize", json={"prompt": "Grüße", "add_special_tokens": False})
    back = client.post("/v1/detokenize", json={"tokens": ids.json()["tokens"]}).json()
    assert back["prompt"] == "Grüße"


# --- what SGLang's router asks ---


def test_loads(client: httpx.Client, running: Running) -> None:
    """Two requests run, one waits in the scheduler and two in the server's queue."""
    engine = running.engine
    wait_until(running.idle)
    body = {
        "input_ids": [[7] * 20] * 5,
        "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True},
        "rid": "busy",
    }
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(client.post, "/generate", json=body)
        try:
            wait_until(lambda: engine.get_server_info()["waiting"] == 1)

            def loaded() -> dict[str, Any]:
                (load,) = client.get("/v1/loads").json()["loads"]
                return dict(load)

            wait_until(lambda: loaded()["num_running_reqs"] == 2)
            load, (old,) = loaded(), client.get("/get_load").json()
        finally:
            client.post("/abort_request", json={"rid": "busy"})
        assert answer.result().status_code == 200
    assert (load["dp_rank"], load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 2, 3)
    assert (load["num_waiting_uncached_tokens"], load["max_running_requests"]) == (60, 2)
    assert load["num_total_tokens"] == load["num_used_tokens"] + 60 == load["num_active_tokens"]
    assert load["num_used_tokens"] >= 40
    assert load["token_usage"] == load["num_used_tokens"] / load["max_total_num_tokens"]
    assert load["queues"]["waiting"] == 3 and load["utilization"] == 1.0
    assert (old["dp_rank"], old["num_reqs"], old["num_waiting_reqs"]) == (0, 5, 3)
    assert old["num_pending_tokens"] == 60 and old["num_tokens"] >= 100


def test_loads_by_query(client: httpx.Client) -> None:
    whole = client.get("/v1/loads").json()
    assert (whole["version"], whole["num_accelerators"]) == (moesaic.__version__, 1)
    (core,) = client.get("/v1/loads?include=core,memory").json()["loads"]
    assert core.keys() == whole["loads"][0].keys() - {"queues"}
    assert client.get("/v1/loads?dp_rank=1").json()["loads"] == []
    assert len(client.get("/v1/loads?dp_rank=0&format=json").json()["loads"]) == 1
    for query in ("include=cores", "format=xml", "dp_rank=-1", "dp_rank=x"):
        answer = client.get(f"/v1/loads?{query}")
        assert message(answer, 400)
        assert answer.json()["error"]["param"] == query.partition("=")[0]
    text = client.get("/v1/loads?format=prometheus").text
    (sample,) = next(
        family.samples
        for family in text_string_to_metric_families(text)
        if family.name == "sglang_max_total_num_tokens"
    )
    assert (sample.labels, sample.value) == ({"dp_rank": "0"}, core["max_total_num_tokens"])
