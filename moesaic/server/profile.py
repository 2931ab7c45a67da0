"""/start_profile and /stop_profile: traces of all ranks, with SGLang's names."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moesaic.engine.frontend.profiler import FOLDER_VARIABLE, trace_folder
from moesaic.server.bodies import read_body
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.responses import json_response
from moesaic.server.routes import ADMIN, Route

# Spans are recorded where the engine waits for its device, so a trace always has both.
ACTIVITIES: Final = frozenset(("CPU", "GPU"))
LONGEST_FOLDER: Final = 255
MOST_STEPS: Final = 100_000
NOTHING_RAN: Final = (
    "no step ran between start and stop, so the trace has none: send requests in between"
)


class StartProfileBody(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's fields. Those that a trace of spans does not support are refused if set."""

    output_dir: str | None = None
    num_steps: int | None = None
    activities: list[str] | None = None
    start_step: int | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_by_stage: bool | None = None
    profile_stages: list[str] | None = None
    profile_id: str | None = None
    profile_prefix: str | None = None
    merge_profiles: bool | None = None

    def check(self) -> None:
        asked = {
            "start_step": (self.start_step is not None, "a recording begins at once"),
            "with_stack": (self.with_stack, "spans have no Python stacks"),
            "record_shapes": (self.record_shapes, "spans have tokens and bytes, no shapes"),
            "profile_by_stage": (self.profile_by_stage, "prompts and decodes share steps"),
            "profile_stages": (self.profile_stages, "prompts and decodes share steps"),
            "profile_id": (self.profile_id, "files are named by their time"),
            "profile_prefix": (self.profile_prefix, "files are named by their time"),
        }
        for name, (given, why) in asked.items():
            if given:
                raise Refusal(400, f"{name} is not supported: {why}; leave it out", name)
        if not ACTIVITIES.issuperset(self.activities or ()):
            known = " and ".join(sorted(ACTIVITIES))
            raise Refusal(400, f"activities can be {known}, and nothing else", "activities")
        if self.num_steps is not None and not 1 <= self.num_steps <= MOST_STEPS:
            raise Refusal(400, f"num_steps must be between 1 and {MOST_STEPS}", "num_steps")


async def start_profile(context: Context, request: Request) -> Response:
    """merge_profiles needs no support: one file has the spans of all ranks."""
    body = await read_body(request, StartProfileBody) if _has_body(request) else StartProfileBody()
    body.check()
    folder = folder_for(body.output_dir)
    await context.in_thread(lambda: context.engine.start_profile(folder, body.num_steps))
    return json_response({"status": "recording", "output_dir": str(folder)})


async def stop_profile(context: Context, _: Request) -> Response:
    path = await context.in_thread(context.engine.stop_profile)
    steps = context.engine.profiled_steps
    warning = {} if steps else {"warning": NOTHING_RAN}
    return json_response({"path": path, "steps": steps, **warning})


def folder_for(asked: str | None) -> Path:
    """The folder for a client's trace: the server's or one inside it, whatever the name has."""
    root = trace_folder().resolve()
    if asked is None:
        return root
    if len(asked) > LONGEST_FOLDER or "\0" in asked:
        raise Refusal(400, "output_dir is not the name of a folder", "output_dir")
    folder = (root / asked).resolve()
    if not folder.is_relative_to(root):
        raise Refusal(
            400,
            f"output_dir must be inside the server's own folder, {root}, which {FOLDER_VARIABLE} "
            "sets when the server starts",
            "output_dir",
        )
    return folder


def _has_body(request: Request) -> bool:
    headers = request.headers
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


ROUTES = (
    Route("POST", "/start_profile", start_profile, ADMIN, "Records all ranks", StartProfileBody),
    Route("POST", "/stop_profile", stop_profile, ADMIN, "Ends the recording; the trace's path"),
)
