"""Reads, cancels and deletes stored responses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moesaic.core.redact import shown
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.responses import json_response
from moesaic.server.responses_api.store import ResponseStore, StoredResponse
from moesaic.server.routes import CLIENT

DEFAULT_ITEMS: Final = 20
MAX_ITEMS: Final = 100
ORDERS: Final = ("asc", "desc")
ITEMS_QUERY: Final = {
    "limit": f"The most items, 1 to {MAX_ITEMS}; {DEFAULT_ITEMS} if left out",
    "order": "desc (the default) or asc",
    "after": "The id of an item: those that follow it are listed",
}


async def retrieve_response(context: Context, request: Request) -> Response:
    if request.query_params.get("stream", "false") not in ("false", "0", ""):
        text = "a stored response is not streamed: leave stream out"
        raise Refusal(400, text, "stream", "unsupported_parameter")
    return json_response(msgspec.Raw(_stored(context, request).body))


async def delete_response(context: Context, request: Request) -> Response:
    stored = _stored(context, request)
    await _stop(stored)
    context.shared(ResponseStore).remove(stored.id)
    return json_response({"id": stored.id, "object": "response", "deleted": True})


async def cancel_response(context: Context, request: Request) -> Response:
    """Ends a background response; one that has ended stays as it is."""
    stored = _stored(context, request)
    if not stored.background:
        text = "only a response with background can be cancelled: close the connection of others"
        raise Refusal(400, text, "response_id")
    if stored.running:
        await _stop(stored)
        stored = _stored(context, request)
        body = msgspec.json.decode(stored.body)
        if body["status"] == "in_progress":
            data = msgspec.json.encode(body | {"status": "cancelled"})
            stored = replace(stored, body=data, conversation=b"", task=None)
            context.shared(ResponseStore).put(stored)
    return json_response(msgspec.Raw(stored.body))


async def list_input_items(context: Context, request: Request) -> Response:
    items: list[Any] = msgspec.json.decode(_stored(context, request).items)
    query = request.query_params
    limit, order = _limit(query.get("limit")), query.get("order", "desc")
    if order not in ORDERS:
        raise Refusal(400, f"order is {shown(order)}: give asc or desc", "order")
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise Refusal(400, f"after is {shown(after)}: no item has this id", "after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else "",
            "last_id": page[-1]["id"] if page else "",
            "has_more": len(items) > limit,
        }
    )


def _stored(context: Context, request: Request) -> StoredResponse:
    owner = request.scope.get(CLIENT, b"")
    return context.shared(ResponseStore).get(request.path_params["response_id"], owner)


async def _stop(stored: StoredResponse) -> None:
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.gather(stored.task, return_exceptions=True)


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_ITEMS
    number = int(given) if given.isascii() and given.isdigit() and len(given) < 4 else 0
    if not 1 <= number <= MAX_ITEMS:
        raise Refusal(400, f"limit must be between 1 and {MAX_ITEMS}", "limit")
    return number
