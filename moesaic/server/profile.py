"""/start_profile and /stop_profile: traces of all ranks, with SGLang's names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moesaic.engine.frontend.profiler import trace_folder
from moesaic.server.bodies import has_body, read_body
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.responses import json_response
from moesaic.server.routes import ADMIN, Route

logger = logging.getLogger(__name__)

# Spans are recorded where the engine waits for its device, so a trace always has both.
ACTIVITIES: Final = frozenset(("CPU", "GPU"))
LONGEST_FOLDER: Final = 4096  # Linux's limit of a path
MOST_STEPS: Final = 100_000
MOST_DIGITS: Final = 9
ONE_AT_A_TIME: Final = {409: "A profile is being recorded already"}
NOTHING_RAN: Final = (
    "no step ran between start and stop, so the trace has none: send requests in between"
)


class StartProfileBody(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's fields. Those that a trace of spans does not support are refused if set. SGLang's
    bench_serving sends numbers as texts."""

    output_dir: str | None = None
    num_steps: int | str | None = None
    activities: list[str] | None = None
    start_step: int | str | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_by_stage: bool | None = None
    profile_stages: list[str] | None = None
    profile_id: str | None = None
    profile_prefix: str | None = None
    merge_profiles: bool | None = None
    detailed_annotations: bool | None = None

    @property
    def steps(self) -> int | None:
        return _number("num_steps", self.num_steps) or None

    def check(self) -> None:
        asked = {
            "start_step": (_number("start_step", self.start_step), "a recording begins at once"),
            "with_stack": (self.with_stack, "spans have no Python stacks"),
            "record_shapes": (self.record_shapes, "spans have tokens and bytes, no shapes"),
            "profile_by_stage": (self.profile_by_stage, "prompts and decodes share steps"),
            "profile_stages": (self.profile_stages, "prompts and decodes share steps"),
            "profile_id": (self.profile_id, "files are named by their time"),
            "profile_prefix": (self.profile_prefix, "files are named by their time"),
            "detailed_annotations": (self.detailed_annotations, "spans have tokens and bytes"),
        }
        for name, (given, why) in asked.items():
            if given:
                raise Refusal(400, f"{name} is not supported: {why}; leave it out", name)
        if not ACTIVITIES.issuperset(self.activities or ()):
            known = " and ".join(sorted(ACTIVITIES))
            raise Refusal(400, f"activities can be {known}, and nothing else", "activities")
        if self.steps is not None and not 1 <= self.steps <= MOST_STEPS:
            raise Refusal(400, f"num_steps must be between 1 and {MOST_STEPS}", "num_steps")


def _number(name: str, value: int | str | None) -> int:
    """A number, or the digits of one; 0 if it is not given."""
    if isinstance(value, int):
        return value
    if value and not (value.isascii() and value.isdigit() and len(value) <= MOST_DIGITS):
        raise Refusal(400, f"{name} must be a number of steps", name)
    return int(value or 0)


async def start_profile(context: Context, request: Request) -> Response:
    """merge_profiles needs no support: one file has the spans of all ranks."""
    body = await read_body(request, StartProfileBody) if has_body(request) else StartProfileBody()
    try:
        body.check()
        folder = folder_for(body.output_dir, trace_folder(context.args.profile_dir))
        await context.in_thread(lambda: context.engine.start_profile(folder, body.steps))
    except Refusal as refusal:
        # SGLang's bench_serving goes on without a word.
        logger.warning("/start_profile is refused: %s", refusal.message)
        raise
    return json_response({"status": "recording", "output_dir": str(folder)})


async def stop_profile(context: Context, _: Request) -> Response:
    path = await context.in_thread(context.engine.stop_profile)
    steps = context.engine.profiled_steps
    warning = {} if steps else {"warning": NOTHING_RAN}
    return json_response({"path": path, "steps": steps, **warning})


def folder_for(asked: str | None, root: Path) -> Path:
    """The folder for a client's trace: `root` or one inside it, whatever the name has."""
    root = root.resolve()
    if not asked:
        return root
    if len(asked) > LONGEST_FOLDER or "\0" in asked:
        raise Refusal(400, "output_dir is not the name of a folder", "output_dir")
    folder = (root / asked).resolve()
    if not folder.is_relative_to(root):
        raise Refusal(
            400,
            f"output_dir must be inside the server's own folder {root}: give one in it or leave it "
            "out, or start the server with another --profile-dir",
            "output_dir",
        )
    return folder


ROUTES = (
    Route(
        "POST",
        "/start_profile",
        start_profile,
        ADMIN,
        "Records all ranks",
        StartProfileBody,
        example={"num_steps": 20},
        body_optional=True,
        errors=ONE_AT_A_TIME,
    ),
    Route("POST", "/stop_profile", stop_profile, ADMIN, "Ends the recording; the trace's path"),
    Route(
        "GET",
        "/start_profile",
        start_profile,
        ADMIN,
        "The same, as in SGLang",
        changes=True,
        errors=ONE_AT_A_TIME,
    ),
    Route("GET", "/stop_profile", stop_profile, ADMIN, "The same, as in SGLang", changes=True),
)
