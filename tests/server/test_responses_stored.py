"""Stored responses and their bounds. The oracles are the openai client and the server's chat."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseItemList

from moesaic.engine.engine import Engine
from moesaic.server.app import make_app
from moesaic.server.auth import Keys
from moesaic.server.bodies import LARGE_BODY
from moesaic.server.errors import Refusal
from moesaic.server.openai.request_types import ChatBody, MessageBody
from moesaic.server.responses_api import handlers, truncation
from moesaic.server.responses_api.conversation import listed_items
from moesaic.server.responses_api.store import ResponseStore, StoredResponse
from tests.server.responses_client import (
    LONG,
    MODEL,
    PATH,
    SHORT,
    chat_text,
    checked,
    client_of,
)
from tests.server.serving import Listening, Running, held, wait_until


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with client_of(running.port) as client:
        yield client


def test_what_is_stored(client: openai.OpenAI) -> None:
    given: Any = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    kept = client.responses.create(input=given, metadata={"tile": "red"}, **SHORT)
    assert client.responses.retrieve(kept.id).to_dict() == kept.to_dict()
    assert kept.metadata == {"tile": "red"}
    page = client.responses.input_items.list(kept.id, limit=2, order="asc")
    ResponseItemList.model_validate_json(page.to_json(), strict=True)
    assert [item.content[0].text for item in page.data] == ["a", "b"] and page.has_more  # type: ignore[union-attr, index]
    items = list(client.responses.input_items.list(kept.id, limit=2))
    assert [item.content[0].text for item in items] == ["c", "b", "a"]  # type: ignore[union-attr, index]
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(kept.id)
    client.responses.delete(kept.id)
    gone = client.responses.create(input="x", store=False, **SHORT)
    for id in (kept.id, gone.id):
        for use in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                use(id)


def test_background(client: openai.OpenAI, engine: Engine, running: Running) -> None:
    with held(engine):
        response = client.responses.create(background=True, input="Hello", **SHORT)
        assert response.status == "in_progress" and response.output == []
        with pytest.raises(openai.BadRequestError, match="no answer to continue"):
            client.responses.create(input="x", previous_response_id=response.id, **SHORT)
        ended, deleted = (client.responses.create(background=True, **LONG) for _ in range(2))
        assert running.context.admission.calls == 3
        assert client.responses.cancel(ended.id).status == "cancelled"
        client.responses.delete(deleted.id)
    wait_until(lambda: client.responses.retrieve(response.id).status == "incomplete")
    same = client.responses.create(input="Hello", **SHORT)
    assert client.responses.retrieve(response.id).output_text == same.output_text
    for id, status in ((ended.id, "cancelled"), (response.id, "incomplete")):
        assert client.responses.cancel(id).status == status
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(deleted.id)
    wait_until(running.idle)
    wait_until(lambda: running.context.admission.calls == 0)
    broken = client.responses.create(background=True, **LONG)
    wait_until(lambda: len(engine._inflight) == 1)
    engine._thread.submit(lambda core: core.fail_all("a fault for this test"))
    wait_until(lambda: client.responses.retrieve(broken.id).status == "failed")
    error = checked(client.responses.retrieve(broken.id).to_json()).error
    assert error is not None and error.code == "server_error"
    assert "a fault for this test" in error.message


def test_a_key_reads_its_own(engine: Engine) -> None:
    keys = Keys.of(engine.args, {"MOESAIC_API_KEY": "user", "MOESAIC_ADMIN_API_KEY": "admin"})
    with (
        Listening(make_app(engine, keys=keys)).serve() as server,
        client_of(server.port, "user") as user,
        client_of(server.port, "admin") as other,
        client_of(server.port, "wrong") as wrong,
    ):
        response = user.responses.create(input="Hello", **SHORT)
        assert user.responses.retrieve(response.id).id == response.id
        for use in (other.responses.retrieve, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                use(response.id)
        with pytest.raises(openai.BadRequestError, match="is stored"):
            other.responses.create(input="x", previous_response_id=response.id, **SHORT)
        with pytest.raises(openai.AuthenticationError):
            wrong.responses.create(input="x", **SHORT)


def test_the_bounds_of_the_store() -> None:
    store = ResponseStore(max_responses=3, max_bytes=100)
    for number in range(5):
        store.put(StoredResponse(str(number), b"", b"x" * 10, b"y"))
    assert len(store) == 3 and store.size == 33
    store.put(StoredResponse("big", b"", b"x" * 80, b"y", b"z" * 8))
    assert len(store) == 2 and store.size == 100
    assert store.get("4", b"").id == "4"
    store.put(StoredResponse("4", b"", b"x" * 11, b"y"))  # it keeps its age
    with pytest.raises(Refusal):
        store.get("4", b"")
    store.remove("big")
    assert len(store) == store.size == 0

    async def running() -> None:
        task = asyncio.create_task(asyncio.sleep(60))
        store.put(StoredResponse("made", b"", b"x", b"", task=task))
        for number in range(5):
            store.put(StoredResponse(str(number), b"", b"x", b""))
        assert store.get("made", b"").task is task and len(store) == 3
        task.cancel()

    asyncio.run(running())


def test_a_client_loses_its_own() -> None:
    store = ResponseStore(max_responses=4, max_bytes=100)
    store.put(StoredResponse("other", b"", b"x" * 20, b"", client="quiet"))
    for number in range(9):
        store.put(StoredResponse(str(number), b"", b"x", b"", client="loud"))
    assert store.get("other", b"").id == "other" and len(store) == 4 and store.size == 23
    for number in range(9):  # now full of bytes, not of responses
        store.put(StoredResponse(str(number), b"", b"x" * 40, b"", client="loud"))
        assert store.get("other", b"").id == "other" and store.size <= 100
    store.put(StoredResponse("huge", b"", b"x" * 101, b"", client="loud"))
    assert len(store) == 1 and store.size == 20


def test_what_runs_has_a_limit() -> None:
    async def run() -> None:
        store = ResponseStore(max_responses=8, max_bytes=100)
        store.put(StoredResponse("other", b"", b"x" * 50, b"", client="quiet"))
        for number, size in enumerate((10, 40, 51)):
            new = StoredResponse(str(number), b"", b"", b"y", b"z" * (size - 1), client="loud")
            if number:
                with pytest.raises(Refusal, match="at most 4 with 50 bytes") as caught:
                    store.check_running(replace(new, body=b"x"))
                assert (caught.value.status, caught.value.param) == (429, "background")
            if size < 50:
                store.check_running(new)
                new.task = asyncio.create_task(asyncio.sleep(60))
                store.put(new)
        assert store.size == 100 and store.get("other", b"").id == "other"
        store.put(replace(store.get("1", b""), body=b"x", task=None))  # it has ended
        assert store.size == 60
        small = StoredResponse("", b"", b"x", b"", task=store.get("0", b"").task)
        for number in range(3):
            store.check_running(small)
            store.put(replace(small, id=f"small {number}"))
        with pytest.raises(Refusal, match="4 background responses with 13 bytes run"):
            store.check_running(small)

    asyncio.run(run())


def test_background_responses_beyond_the_limit(
    client: openai.OpenAI, engine: Engine, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.context.shared(ResponseStore), "max_responses", 4)
    with held(engine):
        made = [client.responses.create(background=True, **LONG).id for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="2 background responses") as caught:
            client.responses.create(background=True, **LONG)
        assert caught.value.code == "queue_full" and caught.value.response.headers["retry-after"]
        assert running.context.admission.calls == 2
        client.responses.cancel(made[0])
        made.append(client.responses.create(background=True, **LONG).id)
        for id in made:
            client.responses.cancel(id)
    with pytest.raises(openai.BadRequestError, match="no answer to continue"):
        client.responses.create(input="x", previous_response_id=made[0], **SHORT)
    wait_until(lambda: running.context.admission.calls == 0)


def test_many_items_are_listed_in_a_thread(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def recorded(given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return listed_items(given)

    monkeypatch.setattr(handlers, "listed_items", recorded)
    for id in ("x", "x" * LARGE_BODY):
        items = [{"role": "user", "content": "Hello", "id": id}]
        assert http.post(PATH, json={**SHORT, "input": items}).status_code == 200
    assert [name.startswith("asyncio_") for name in threads] == [False, True]


def test_the_oldest_turns_are_left_out(http: httpx.Client, client: openai.OpenAI) -> None:
    turns = [{"role": "user", "content": f"{number}" * 600} for number in range(6)]
    given: Any = [{"role": "system", "content": "Be brief."}, *turns]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input=given, **SHORT)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    response = client.responses.create(input=given, truncation="auto", **SHORT)
    assert response.output_text == chat_text(http, [given[0], *turns[-3:]])
    counted = client.responses.input_tokens.count(
        model=MODEL, input=given, truncation="auto", reasoning={"effort": "none"}
    )
    assert response.usage is not None and counted.input_tokens == response.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="x" * 3000, truncation="auto", **SHORT)
    assert caught.value.code == "context_length_exceeded"


def test_turns_are_left_out_one_list_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All shorter conversations at once would be 2000 lists with two million entries."""
    tried: list[int] = []

    async def prepare(context: Any, chat: ChatBody, *_: Any) -> Any:
        tried.append(len(chat.messages))
        if len(chat.messages) > 701:
            raise Refusal(400, "", code="context_length_exceeded")
        return SimpleNamespace(num_tokens=1, messages=chat.messages)

    monkeypatch.setattr(truncation, "prepare_chat", prepare)
    limits = SimpleNamespace(check_tokens=lambda number: None)
    context: Any = SimpleNamespace(engine=SimpleNamespace(limits=limits))
    system = MessageBody(role="system", content="Be brief.")
    turns = [MessageBody(role="user", content=str(number)) for number in range(2000)]
    chat = ChatBody(messages=[system, *turns])
    tracemalloc.start()
    found: Any = asyncio.run(truncation.prepare_truncated(context, chat, 0, None))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.messages == [system, *turns[-700:]]
    assert len(tried) <= 12 and peak < 1 << 20
    tried.clear()
    many = ChatBody(messages=turns + turns)
    with pytest.raises(Refusal, match="between 1 and 2048"):
        asyncio.run(truncation.prepare_truncated(context, many, 0, None))
    assert tried == []


def test_a_conversation_goes_on_without_input(client: openai.OpenAI, http: httpx.Client) -> None:
    """The client's `input` is optional."""
    first = client.responses.create(input="Hello", **SHORT)
    second = client.responses.create(previous_response_id=first.id, **SHORT)
    assert second.usage.input_tokens > first.usage.input_tokens  # type: ignore[union-attr]
    assert client.responses.input_items.list(second.id).data == []
    count = client.responses.input_tokens.count
    counted = count(previous_response_id=first.id, reasoning={"effort": "none"})
    assert counted.input_tokens == second.usage.input_tokens  # type: ignore[union-attr]
    error = http.post(PATH, json=SHORT).json()["error"]
    assert error["param"] == "input" and "previous_response_id" in error["message"]
