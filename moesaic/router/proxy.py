"""Sends requests to instances, and to others when one of them is lost."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from starlette.responses import Response
from yarl import URL

from moesaic.router.answers import Events, unavailable
from moesaic.router.args import RouterArgs
from moesaic.router.halves import Call
from moesaic.router.policies import POLICIES
from moesaic.router.workers import Worker
from moesaic.server.context import ID_IN_USE
from moesaic.server.errors import TYPES
from moesaic.server.replay import Diverged, StreamReplay
from moesaic.server.resume import NO_IDS, Resumption

logger = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 5.0
READ_BUFFER: Final = 1 << 20
# Bytes of one event: with logprobs of a long prompt it has many.
MAX_EVENT: Final = 64 << 20
# Before a request is sent again where no instance is left: one may come back.
PAUSE_SECONDS: Final = 0.5
# How long an instance may take to end a request.
ABORT_SECONDS: Final = 5.0
# Responses that are stored are known to the instance that made them.
STORED: Final = "/v1/responses"
NOT_STORED: Final = b'"previous_response_not_found"'
# Answers after which another instance is asked: this one is overloaded, or stops (or it may still
# have the request, which was sent before: ID_IN_USE). A request that fails by itself (500) would
# fail there too, and could do harm to one instance after the other.
OVERLOADED: Final = 429
ELSEWHERE: Final = frozenset((OVERLOADED, 502, 503, 504))
# The same, as the types of errors in streams.
TYPES_ELSEWHERE: Final = frozenset(TYPES[status] for status in ELSEWHERE if status in TYPES)
# Headers that belong to one connection.
HOP: Final = frozenset(
    "connection content-length host keep-alive transfer-encoding upgrade te trailer date".split()
)
SSE: Final = "text/event-stream"


class WorkerLost(Exception):
    """An instance cannot answer, or not to the end; `response`: what it has said, if it has."""

    def __init__(self, worker: Worker, why: str, response: Response | None = None) -> None:
        super().__init__(f"{worker.url}: {why}")
        self.worker, self.why, self.response = worker, why, response

    @property
    def is_overload(self) -> bool:
        return self.response is not None and self.response.status_code == OVERLOADED


class StreamFailed(Exception):
    """An answer ends with this event: no other instance would do better."""

    def __init__(self, event: bytes) -> None:
        super().__init__(event)
        self.event = event


@dataclass(slots=True)
class Attempt:
    """The answer of an instance, while its connection is open."""

    worker: Worker
    answer: aiohttp.ClientResponse
    stack: AsyncExitStack


@dataclass(slots=True)
class RouterStats:
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By route and status."""
    retries: int = 0
    resumed: int = 0
    """Streams that another instance has continued."""


class Proxy:
    def __init__(
        self, args: RouterArgs, workers: list[Worker], session: aiohttp.ClientSession
    ) -> None:
        self.args, self.workers, self._session = args, workers, session
        self.stats = RouterStats()
        prefill, decode = args.prefill_policy or args.policy, args.decode_policy or args.policy
        names = {"both": args.policy, "prefill": prefill, "decode": decode}
        self._policies = {role: POLICIES[name]() for role, name in names.items()}
        self._timeout = aiohttp.ClientTimeout(
            total=None, connect=CONNECT_SECONDS, sock_read=args.request_timeout_secs
        )

    def healthy(self, role: str) -> list[Worker]:
        return [one for one in self.workers if one.role == role and one.is_healthy]

    @property
    def last_role(self) -> str:
        """Of the instances that give answers."""
        return "decode" if self.args.pd_disaggregation else "both"

    def _others(self, worker: Worker, avoided: Collection[Worker] = ()) -> bool:
        """Whether others could do its work."""
        return not {worker, *avoided}.issuperset(self.healthy(worker.role))

    async def generate(
        self, call: Call, headers: Mapping[str, str], resumes: Resumption = NO_IDS
    ) -> Response:
        """The answer to a request that generates; it is sent again until it is whole. `resumes`:
        what its client has already."""
        attempt = await self._try_all(call, headers)
        if isinstance(attempt, Response):
            return attempt
        answer = attempt.answer
        if answer.content_type == SSE:
            events = self._events(call, headers, attempt, resumes)
            return Events(events, attempt.stack, answer.status, _kept(answer.headers))
        return await self._whole(call, headers, attempt)

    async def forward(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Response:
        """Any other request, to one instance. `path`: quoted, with the query; it is sent as it is,
        since an instance must get the path that was checked."""
        answer: Response | None = None
        for worker in self._in_order(self.last_role):
            async with AsyncExitStack() as stack:
                try:
                    answer = await self._pass_on(stack, worker, method, path, body, headers)
                except aiohttp.ClientConnectorError as error:  # it has not got the request
                    worker.lose(_text(error))
                    continue
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    worker.lose(_text(error))
                    return unavailable([worker])
                if not _is_elsewhere(path, answer):
                    return answer
        return answer or unavailable(self.workers)

    async def forward_to_all(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Response:
        """To all instances, since any may have what is meant. The answer is the one of an instance
        that did the most, by the number in its `aborted`."""
        found: list[Response] = []
        for ended in await asyncio.gather(
            *(self._ask(one, method, path, body, headers) for one in list(self.workers)),
            return_exceptions=True,
        ):
            if isinstance(ended, Response):
                found.append(ended)
        return max(found, key=_aborted, default=unavailable(self.workers))

    async def _ask(
        self, worker: Worker, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Response:
        async with AsyncExitStack() as stack, asyncio.timeout(ABORT_SECONDS):
            return await self._pass_on(stack, worker, method, path, body, headers)

    async def _pass_on(
        self,
        stack: AsyncExitStack,
        worker: Worker,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
    ) -> Response:
        """A stream is passed on as it comes, and then ends the request; else `stack` does."""
        answer = await stack.enter_async_context(
            self._session.request(
                method,
                URL(worker.url + path, encoded=True),
                data=body,
                headers=headers,
                timeout=self._timeout,
                allow_redirects=False,
            )
        )
        if answer.content_type != SSE:
            return Response(await answer.read(), answer.status, _kept(answer.headers))
        rest = stack.pop_all()
        rest.enter_context(worker.serving(len(body)))
        return Events(_parts(worker, answer), rest, answer.status, _kept(answer.headers))

    def _in_order(self, role: str) -> list[Worker]:
        """The instance that the policy chooses, and then the others."""
        workers = self.healthy(role)
        first = [self._policies[role].choose(workers, "")] if workers else []
        return [*first, *(one for one in workers if one not in first)]

    async def _whole(self, call: Call, headers: Mapping[str, str], attempt: Attempt) -> Response:
        """A body that breaks off is asked for again: the client has nothing of it."""
        for _ in range(self.args.retry_max_retries + 1):
            try:
                async with attempt.stack:
                    data = await attempt.answer.read()
                    return Response(data, attempt.answer.status, _kept(attempt.answer.headers))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                attempt.worker.lose(_text(error))
                self.stats.retries += 1
            found = await self._try_all(call, headers)
            if isinstance(found, Response):
                return found
            attempt = found
        return unavailable(self.workers)

    async def _try_all(
        self, call: Call, headers: Mapping[str, str], has_begun: bool = False
    ) -> Attempt | Response:
        """The first good beginning of an answer, or the last bad one. `has_begun`: the client has
        a part of it, so that instances which are overloaded are asked again."""
        avoided: set[Worker] = set()
        last: Response | None = None
        for number in range(self.args.retry_max_retries + 1):
            if number:
                self.stats.retries += 1
            try:
                return await self._attempt(call, headers, avoided)
            except WorkerLost as lost:
                logger.info("a request is sent again: %s", lost)
                avoided.add(lost.worker)
                last = lost.response or last
                if avoided.issuperset(self.healthy(lost.worker.role)):
                    if lost.is_overload and lost.response is not None and not has_begun:
                        return lost.response  # all of them are
                    avoided = {one for one in avoided if one.role != lost.worker.role}
                    await asyncio.sleep(PAUSE_SECONDS)  # those that stop are replaced
            except _NobodyThere:
                avoided.clear()
                await asyncio.sleep(PAUSE_SECONDS)
        return last or unavailable(self.workers)

    def _choose(self, role: str, call: Call, avoided: set[Worker]) -> Worker:
        healthy = self.healthy(role)
        if not healthy:
            raise _NobodyThere
        fresh = [worker for worker in healthy if worker not in avoided] or healthy
        return self._policies[role].choose(fresh, call.text)

    async def _attempt(
        self, call: Call, headers: Mapping[str, str], avoided: set[Worker]
    ) -> Attempt:
        worker = self._choose(self.last_role, call, avoided)
        body, first, prefill, stack = call.body, None, None, AsyncExitStack()
        try:
            if fresh := [one for one in self.healthy("prefill") if one not in avoided]:
                prefill = self._policies["prefill"].choose(fresh, call.text)
                half, body = call.halves(prefill)
                first = asyncio.create_task(self._send_half(prefill, call, half, headers))
                first.add_done_callback(_heed)
                stack.callback(first.cancel)  # without one, a decode instance computes the prompt
            stack.enter_context(worker.serving(call.size))
            second = asyncio.create_task(self._send(stack, worker, call.path, body, headers))
            stack.callback(second.cancel)
            answer = await self._begin(second, first, worker, prefill, avoided)
            stack.callback(asyncio.create_task(self._close_to_move(worker, answer)).cancel)
            return Attempt(worker, answer, stack)
        except BaseException:
            await stack.aclose()
            raise

    async def _begin(
        self,
        second: asyncio.Task[aiohttp.ClientResponse],
        first: asyncio.Task[None] | None,
        worker: Worker,
        prefill: Worker | None,
        avoided: Collection[Worker],
    ) -> aiohttp.ClientResponse:
        """Waits for the answer's beginning. If the prompt is lost before, or an instance is
        drained, so is the attempt, as far as others can do better. Decode instances do not compute
        prompts because those that should are overloaded: their answers would stall."""
        both = [worker] if prefill is None else [worker, prefill]
        leaving = {asyncio.create_task(self._until_moved(one)): one for one in both}
        waiting: set[asyncio.Task[Any]] = {second, *leaving}
        waiting |= set() if first is None else {first}
        try:
            while not second.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if second.done():
                    break
                if first in done and first is not None and (lost := first.exception()):
                    is_overload = isinstance(lost, WorkerLost) and lost.is_overload
                    if is_overload or (prefill and self._others(prefill, avoided)):
                        raise lost
                for one in (leaving[task] for task in done if task in leaving):
                    if one is worker or (first and not first.done()):
                        raise WorkerLost(one, one.why)
            return second.result()
        finally:
            for task in leaving:
                task.cancel()

    async def _close_to_move(self, worker: Worker, answer: aiohttp.ClientResponse) -> None:
        """Whoever reads the answer of an instance that is drained then goes on elsewhere."""
        await self._until_moved(worker)
        answer.close()

    async def _until_moved(self, worker: Worker) -> None:
        """Until the worker is drained, and others could do its work."""
        while True:
            await worker.leaving.wait()
            if self._others(worker):
                return
            await asyncio.sleep(PAUSE_SECONDS)

    async def _send(
        self,
        stack: AsyncExitStack,
        worker: Worker,
        path: str,
        body: dict[str, Any],
        headers: Mapping[str, str],
    ) -> aiohttp.ClientResponse:
        """The answer once it has begun: an instance begins with its first token."""
        try:
            answer = await stack.enter_async_context(
                self._session.post(
                    worker.url + path,
                    json=body,
                    headers=headers,
                    timeout=self._timeout,
                    allow_redirects=False,
                )
            )
            if answer.status in (400, *ELSEWHERE):
                said = Response(await answer.read(), answer.status, _kept(answer.headers))
                if answer.status != 400 or f'"{ID_IN_USE}"'.encode() in bytes(said.body):
                    raise WorkerLost(worker, f"it answers {answer.status}", said)
            return answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            worker.lose(_text(error))
            raise WorkerLost(worker, _text(error)) from error

    async def _send_half(
        self, worker: Worker, call: Call, body: dict[str, Any], headers: Mapping[str, str]
    ) -> None:
        """The prefill instance's half, whose answer only says whether it was computed."""
        async with AsyncExitStack() as stack:
            stack.enter_context(worker.serving(call.length))
            answer = await self._send(stack, worker, call.path, body, headers)
            try:
                await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                worker.lose(_text(error))
                raise WorkerLost(worker, _text(error)) from error

    async def _events(
        self, call: Call, headers: Mapping[str, str], attempt: Attempt, resumes: Resumption
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream; another instance goes on where one is lost."""
        replay, retries = resumes.replay(call.path), self.args.retry_max_retries
        while True:
            try:
                async with attempt.stack:
                    async for data in _read_events(attempt.answer):
                        if (event := _lost_or(attempt.worker, data, replay)) is not None:
                            number = f"id: {replay.mark.encode()}\n" if resumes.wants_ids else ""
                            yield f"{number}data: {event}\n\n".encode()
                if replay.is_done:
                    return
                why = "its answer has no end"
            except Diverged:
                yield _error_event(
                    "this is another answer than the one that the client has the beginning of: the "
                    "instance that took over gave it, or the request is not the same"
                )
                return
            except StreamFailed as failed:
                yield failed.event
                return
            except WorkerLost as lost:
                why = lost.why
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                attempt.worker.lose(why := _text(error))
            found: Attempt | Response | None = None
            if retries > 0:
                retries -= 1
                logger.info("a stream is continued elsewhere: %s: %s", attempt.worker.url, why)
                found = await self._try_all(call, headers, has_begun=True)
            if isinstance(found, Attempt) and found.answer.content_type != SSE:
                await found.stack.aclose()
                found = None
            if not isinstance(found, Attempt):
                yield _error_event(f"the instance that answered is lost: {why}")
                return
            attempt = found
            replay.restart()
            self.stats.resumed += 1


class _NobodyThere(Exception):
    """No instance is healthy."""


def _heed(half: asyncio.Task[None]) -> None:
    """The decode instance computes a prompt that is lost: nobody else asks for this error."""
    if not half.cancelled() and (error := half.exception()) is not None:
        logger.info("a prompt is lost: %s", error)


async def _parts(worker: Worker, answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """A stream as it is: what breaks off for the router breaks off for the client."""
    try:
        async for data in answer.content.iter_any():
            yield data
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        worker.lose(_text(error))
        raise


async def _read_events(answer: aiohttp.ClientResponse) -> AsyncGenerator[str, None]:
    """Lines are put together here: aiohttp's own reader takes none that exceeds its buffer."""
    line = bytearray()
    async for data in answer.content.iter_any():
        first, *more = data.split(b"\n")
        line += first
        if len(line) > MAX_EVENT:
            why = f"an event has more than {MAX_EVENT} bytes, the most that the router passes on"
            raise StreamFailed(_error_event(why))
        for piece in more:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()
            line = bytearray(piece)


def _lost_or(worker: Worker, data: str, replay: StreamReplay) -> str | None:
    """The event to send; WorkerLost for one that says that the instance is, StreamFailed for one
    that says that the request has failed."""
    if not data.startswith('{"error"'):
        return replay.pass_on(data)
    error = json.loads(data)["error"]
    told = error if isinstance(error, dict) else {}
    if told.get("code") in ELSEWHERE or told.get("type") in TYPES_ELSEWHERE:
        raise WorkerLost(worker, str(told.get("message")))
    raise StreamFailed(f"data: {data}\n\ndata: [DONE]\n\n".encode())


def _error_event(message: str) -> bytes:
    error = {"message": message, "type": "server_error", "param": None, "code": 503}
    return f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n".encode()


def _is_elsewhere(path: str, answer: Response) -> bool:
    """Whether another instance may have the response that is asked for."""
    if not path.startswith(STORED) or answer.status_code not in (400, 404):
        return False
    return answer.status_code == 404 or NOT_STORED in bytes(answer.body)


def _aborted(answer: Response) -> int:
    if answer.status_code != 200:
        return -1
    return int(json.loads(bytes(answer.body)).get("aborted", 0))


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in HOP}


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
