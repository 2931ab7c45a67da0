"""Requests that a client sends again, after it has lost its connection, and streams that go on
behind what it has. Routers do the same where an instance is lost, with the same headers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from moesaic.core.request_id import LAST_EVENT_ID, REQUEST_ID
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.event_ids import NOTHING, StreamMark
from moesaic.server.replay import Diverged, StreamReplay
from moesaic.server.responses import EventStream

# Routes whose events can be numbered.
NUMBERED: Final = ("/generate", "/v1/chat/completions", "/v1/completions")
MAX_REQUEST_ID: Final = 256
DATA: Final = b"data: "


@dataclass(frozen=True, slots=True)
class Resumption:
    """What the client of a stream has of it, and whether it wants its events to have ids."""

    wants_ids: bool = False
    mark: StreamMark | None = None

    @classmethod
    def of(cls, last_event_id: str | None) -> Resumption:
        """By the header Last-Event-ID; a Refusal if that is no id of an event."""
        if last_event_id is None or last_event_id in NOTHING:
            return cls(wants_ids=last_event_id is not None)
        try:
            mark = StreamMark.decode(last_event_id)
        except ValueError as error:
            raise Refusal(400, str(error), "Last-Event-ID") from None
        return cls(True, mark)

    def replay(self, path: str) -> StreamReplay:
        return StreamReplay(path) if self.mark is None else StreamReplay.resumed(path, self.mark)


NO_IDS: Final = Resumption()


def request_id_of(context: Context, request: Request) -> str:
    """The id by which the client may ask for the answer again; empty without --elastic-ep-backend,
    as then the server ends with what it could ask."""
    if context.args.elastic_ep_backend is None:
        return ""
    found = request.headers.get(REQUEST_ID, "")
    if len(found) > MAX_REQUEST_ID:
        text = f"X-Request-Id has {len(found)} characters; {MAX_REQUEST_ID} are the most"
        raise Refusal(400, text, "X-Request-Id")
    return found


def resumption_of(context: Context, request: Request) -> Resumption:
    if not request_id_of(context, request) or request.scope["path"] not in NUMBERED:
        return NO_IDS
    return Resumption.of(request.headers.get(LAST_EVENT_ID))


def resumable(
    context: Context, request: Request, response: Response, resumption: Resumption
) -> Response:
    """The response with the id of its request, and if the client asks for it of its events."""
    if not (found := request_id_of(context, request)):
        return response
    if resumption.wants_ids and isinstance(response, EventStream):
        replay = resumption.replay(request.scope["path"])
        response = EventStream(_numbered(response, replay), response.on_error, response.end)
    response.headers[REQUEST_ID] = found
    return response


async def _numbered(stream: EventStream, replay: StreamReplay) -> AsyncGenerator[bytes, None]:
    """The events that are new for the client, each with an id."""
    try:
        async with aclosing(stream.source) as source:
            async for data in source:
                if new := b"".join(_new_events(data, replay)):
                    yield new
            if new := b"".join(_new_events(stream.tail(), replay)):
                yield new
    except Diverged:
        raise Refusal(503, "the answer, computed anew, is not the one that was begun") from None


def _new_events(data: bytes, replay: StreamReplay) -> Iterator[bytes]:
    for one in filter(None, data.split(b"\n\n")):
        if (event := replay.pass_on(one.removeprefix(DATA).decode())) is not None:
            yield f"id: {replay.mark.encode()}\ndata: {event}\n\n".encode()
