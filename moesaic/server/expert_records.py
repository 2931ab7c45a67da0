"""Routes of the expert distribution recorder, with SGLang's names."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from moesaic.server.context import Context
from moesaic.server.responses import json_response
from moesaic.server.routes import ADMIN, Route

STARTED: Final = "Start recording the expert distribution."
STOPPED: Final = "Stop recording the expert distribution."
DUMPED: Final = "Dump expert distribution record."
NOTHING_RAN: Final = "no pass was recorded: send requests between start and dump"


async def start(context: Context, _: Request) -> Response:
    await context.in_thread(context.engine.start_expert_distribution_record)
    return json_response({"message": STARTED})


async def stop(context: Context, _: Request) -> Response:
    await context.in_thread(context.engine.stop_expert_distribution_record)
    return json_response({"message": STOPPED})


async def dump(context: Context, _: Request) -> Response:
    found = await context.in_thread(context.engine.dump_expert_distribution_record)
    warning = {} if found["passes"] else {"warning": NOTHING_RAN}
    return json_response({"message": DUMPED, **found, **warning})


ROUTES = tuple(
    Route(method, f"/{name}_expert_distribution_record", handler, ADMIN, summary, changes=changes)
    for name, handler, does in (
        ("start", start, "Records which experts take the tokens"),
        ("stop", stop, "Ends the recording of experts"),
        ("dump", dump, "Writes the recorded experts; the paths of the files"),
    )
    for method, summary, changes in (
        ("POST", does, False),
        ("GET", "The same, as in SGLang", True),
    )
)
