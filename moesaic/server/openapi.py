"""The OpenAPI document, generated from the table of routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moesaic import __version__
from moesaic.server.context import Context
from moesaic.server.responses import json_response
from moesaic.server.routes import PARAMETER, Route, RouteAccess, plain_path

PATH: Final = "/openapi.json"
REF: Final = "#/components/schemas/{name}"
ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
EVERYWHERE: Final = {
    400: "The request is not HTTP/1.1, or does not have one valid Host header",
    405: "The path has other methods; the Allow header lists them",
    408: "The request did not arrive in time",
    431: "Path and headers are too large",
    500: "Internal server error; the server's log has it",
    503: "The server is stopping, has failed, or has too many connections",
}
WITH_A_MODEL: Final = {404: "The model is not served; the message names the one that is"}
# Two ways to send a key, of which Anthropic's clients have the second.
KEYS: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
WITH_A_KEY: Final = {401: "The key is missing or wrong", 403: "The route needs another key"}
WITH_A_BODY: Final = {
    400: "The body is not JSON of this shape, or has values that are not possible",
    413: "The body is too large",
    429: "The queue is full; the Retry-After header says when to retry",
}


def route(routes: Sequence[Route]) -> Route:
    """GET /openapi.json, which the document also lists."""

    async def openapi(_: Context, __: Request) -> Response:
        return json_response(found)

    own = Route("GET", PATH, openapi, RouteAccess.OPEN, "This document")
    found = document((*routes, own))
    return own


def document(routes: Sequence[Route]) -> dict[str, Any]:
    bodies = list(dict.fromkeys(route.body for route in routes if route.body is not None))
    schemas, components = msgspec.json.schema_components(bodies, ref_template=REF)
    by_body = dict(zip(bodies, schemas, strict=True))
    for route in routes:
        if route.one_of:
            components[by_body[route.body]["$ref"].rpartition("/")[2]] |= _one_of(route.one_of)
    paths: dict[str, Any] = {}
    for route in routes:
        operations = paths.setdefault(plain_path(route.path), {})
        operations[route.method.lower()] = _operation(route, by_body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Moesaic", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR},
            "securitySchemes": KEYS,
        },
    }


def _operation(route: Route, by_body: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    has_key, has_body = route.access is not RouteAccess.OPEN, route.body is not None
    parameters = PARAMETER.findall(route.path)
    errors = dict(EVERYWHERE)
    errors |= WITH_A_KEY if has_key else {}
    errors |= WITH_A_BODY if has_body else {}
    errors |= {404: "There is no such object"} if parameters else {}
    takes_model = "model" in (*parameters, *getattr(route.body, "__struct_fields__", ()))
    errors |= WITH_A_MODEL if takes_model else {}
    errors |= route.errors
    found: dict[str, Any] = {"summary": route.summary, "responses": _responses(errors)}
    if parameters or route.query:
        found["parameters"] = _parameters(parameters, route)
    if has_body:
        content: dict[str, Any] = {"schema": by_body[route.body]}
        content |= {} if route.example is None else {"example": route.example}
        required = not route.body_optional
        found["requestBody"] = {"required": required, "content": {"application/json": content}}
    if has_key:
        found["security"] = [{}, *({name: []} for name in KEYS)]
    return found


def _responses(errors: Mapping[int, str]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": REF.format(name="Error")}}}
    found: dict[str, Any] = {"200": {"description": "Success"}}
    for status, words in sorted(errors.items()):
        found[str(status)] = {"description": words, "content": content}
    return found


def _parameters(names: Sequence[str], route: Route) -> list[dict[str, Any]]:
    text = {"type": "string"}
    path = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    query = [
        {"name": name, "in": "query", "description": words, "schema": text}
        for name, words in route.query.items()
    ]
    return path + query


def _one_of(fields: Sequence[str]) -> dict[str, Any]:
    """A null field counts as omitted."""
    given = {"not": {"type": "null"}}
    return {"oneOf": [{"required": [name], "properties": {name: given}} for name in fields]}
