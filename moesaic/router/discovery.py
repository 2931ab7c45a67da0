"""Which instances there are, from a file or from Kubernetes, while the router runs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from moesaic.router.args import DEFAULT_BOOTSTRAP_PORT, RouterArgs
from moesaic.router.workers import Worker, port_of, worker_of

logger = logging.getLogger(__name__)

FILE_SECONDS: Final = 1.0
# The keys of the file, and the roles that they mean.
FILE_KEYS: Final = {"workers": "both", "prefill": "prefill", "decode": "decode"}
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# SGLang's name: the bootstrap port of a prefill pod, if it is not 8998.
BOOTSTRAP_ANNOTATION: Final = "sglang.ai/bootstrap-port"
# How long the API keeps a watch open, and how long it may be silent beyond that.
WATCH_SECONDS: Final = 240
SILENCE_SECONDS: Final = 30.0
CONNECT_SECONDS: Final = 10.0
PAUSE_SECONDS: Final = 2.0
# What the API may do: it is away, or answers something else.
NOT_WATCHED: Final = (
    aiohttp.ClientError,
    TimeoutError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
)
# Bytes of one pod.
MOST_BYTES: Final = 16 << 20


class Members:
    """The instances in use: those of the flags stay, others come and go. `workers` is changed in
    place."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers, self._fixed = workers, {worker.url for worker in workers}

    def update(self, roles: Sequence[str], found: Sequence[Worker]) -> None:
        """`found`: all instances of these roles. New ones are used once they are healthy, and what
        is open on those that are gone goes to others."""
        wanted = {(one.role, one.url): one for one in found}
        for worker in [one for one in self._workers if one.role in roles]:
            if worker.url not in self._fixed and (worker.role, worker.url) not in wanted:
                self._workers.remove(worker)
                worker.leave("it is not listed any more")
        known = {(one.role, one.url): one for one in self._workers}
        for key, worker in wanted.items():
            if key in known:
                known[key].bootstrap_port = worker.bootstrap_port
                continue
            logger.info("%s instance %s is listed", worker.role, worker.url)
            worker.is_healthy, worker.why = False, "it was not asked for its health yet"
            self._workers.append(worker)


class FileDiscovery:
    """Reads the file again whenever it changes; one that cannot be read changes nothing."""

    def __init__(self, path: Path, is_pair: bool, members: Members) -> None:
        self._path, self._members = path, members
        self._roles = ("prefill", "decode") if is_pair else ("both",)
        self._state = _state_of(path)
        members.update(self._roles, self._read())

    async def run(self) -> None:
        while True:
            await asyncio.sleep(FILE_SECONDS)
            if (state := _state_of(self._path)) != self._state:
                self._state = state
                try:
                    self._members.update(self._roles, self._read())
                except ValueError as error:
                    logger.error("the instances stay as they are: %s", error)

    def _read(self) -> list[Worker]:
        flag = f"--service-discovery-file {self._path}"
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{flag}: {error}") from None
        if not isinstance(found, dict) or not found.keys() <= FILE_KEYS.keys():
            raise ValueError(f"{flag}: give an object with lists under {', '.join(FILE_KEYS)}")
        return [*self._workers(flag, found)]

    def _workers(self, flag: str, found: dict[str, Any]) -> Iterator[Worker]:
        for key, listed in found.items():
            if FILE_KEYS[key] not in self._roles:
                wanted = "prefill and decode" if "prefill" in self._roles else "workers"
                raise ValueError(f"{flag}: {key!r} is not used with these flags: give {wanted}")
            if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
                raise ValueError(f"{flag}: {key!r} must be a list of texts, URL or URL PORT")
            for text in listed:
                yield worker_of(f"{flag}: {key}", text, FILE_KEYS[key])


def _state_of(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


@dataclass(frozen=True)
class ClusterApi:
    """Where the API of the cluster is, and the account of this pod."""

    url: str
    account: Path = ACCOUNT

    @classmethod
    def of_this_pod(cls) -> ClusterApi:
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))
        if not host or not (ACCOUNT / "token").exists():
            raise ValueError(
                "--service-discovery asks the cluster of this pod, and this is no pod with a "
                "service account: use --service-discovery-file elsewhere"
            )
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port or 443}")

    def connector(self) -> aiohttp.TCPConnector:
        certificate = self.account / "ca.crt"
        if not self.url.startswith("https:"):
            return aiohttp.TCPConnector()
        return aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=certificate))

    @property
    def headers(self) -> dict[str, str]:
        """The token is read each time: it is replaced while the pod lives."""
        return {"Authorization": f"Bearer {(self.account / 'token').read_text().strip()}"}


class PodDiscovery:
    """The pods of one role. While the API is away, nothing changes."""

    def __init__(self, args: RouterArgs, role: str, api: ClusterApi, members: Members) -> None:
        selectors = {"both": args.selector, "prefill": args.prefill_selector}
        self._selector = ",".join(selectors.get(role, args.decode_selector))
        space = args.service_discovery_namespace
        self._path = f"/api/v1/{f'namespaces/{space}/' if space else ''}pods"
        self._port, self._role, self._api, self._members = (
            args.service_discovery_port,
            role,
            api,
            members,
        )
        self._pods: dict[str, dict[str, Any]] = {}
        """By uid."""

    async def run(self) -> None:
        while True:
            try:
                async with aiohttp.ClientSession(connector=self._api.connector()) as session:
                    version = await self._list(session)
                    while True:
                        version = await self._watch(session, version)
            except NOT_WATCHED as error:
                told = str(error) or type(error).__name__
                logger.warning("pods of role %s are not watched: %s", self._role, told)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _list(self, session: aiohttp.ClientSession) -> str:
        """The version of the list."""
        async with self._get(session, {}, SILENCE_SECONDS) as answer:
            found = json.loads(await answer.read())
        self._pods = {pod["metadata"]["uid"]: pod for pod in found["items"]}
        self._update()
        return str(found["metadata"]["resourceVersion"])

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> str:
        """The last version, when the API ends the watch; ValueError if it has forgotten this one,
        so that the pods must be listed again."""
        query = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
        query["timeoutSeconds"] = str(WATCH_SECONDS)
        async with self._get(session, query, WATCH_SECONDS + SILENCE_SECONDS) as answer:
            async for line in _lines(answer):
                event = json.loads(line)
                kind, pod = event["type"], event["object"]
                if kind == "ERROR":
                    raise ValueError(f"the watch has ended: {pod.get('message', pod)}")
                version = str(pod["metadata"]["resourceVersion"])
                if kind == "BOOKMARK":
                    continue
                self._pods.pop(pod["metadata"]["uid"], None)
                if kind != "DELETED":
                    self._pods[pod["metadata"]["uid"]] = pod
                self._update()
        return version

    def _get(self, session: aiohttp.ClientSession, query: dict[str, str], silence: float) -> Any:
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=silence)
        return session.get(
            self._api.url + self._path,
            params={"labelSelector": self._selector, **query},
            headers=self._api.headers,
            timeout=timeout,
            raise_for_status=True,
            allow_redirects=False,
        )

    def _update(self) -> None:
        found = [worker for pod in self._pods.values() if (worker := self._worker(pod))]
        self._members.update((self._role,), found)

    def _worker(self, pod: dict[str, Any]) -> Worker | None:
        """None for a pod that is not ready, that ends, or whose port is none."""
        status, metadata = pod.get("status") or {}, pod["metadata"]
        conditions = {one["type"]: one["status"] for one in status.get("conditions") or ()}
        host = status.get("podIP")
        is_ready = status.get("phase") == "Running" and conditions.get("Ready") == "True"
        if not host or not is_ready or metadata.get("deletionTimestamp"):
            return None
        given = (metadata.get("annotations") or {}).get(BOOTSTRAP_ANNOTATION)
        port = DEFAULT_BOOTSTRAP_PORT if given is None else port_of(given)
        if port is None:
            told = f"{BOOTSTRAP_ANNOTATION} is {given!r}"
            logger.warning("pod %s is not used: %s", metadata.get("name", host), told)
            return None
        url = f"http://{f'[{host}]' if ':' in host else host}:{self._port}"
        return Worker(url, self._role, port)


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Of any length up to MOST_BYTES."""
    rest = b""
    async for data in answer.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > MOST_BYTES:
            raise ValueError(f"a pod has more than {MOST_BYTES} bytes")
        for line in lines:
            if line.strip():
                yield line


def discoveries_of(
    args: RouterArgs, workers: list[Worker], api: ClusterApi | None = None
) -> list[Callable[[], Any]]:
    """What is to run beside the router; ValueError if the file or the cluster is not there. `api`:
    None for that of this pod."""
    members = Members(workers)
    if args.service_discovery_file:
        path = Path(args.service_discovery_file)
        return [FileDiscovery(path, args.pd_disaggregation, members).run]
    if not args.service_discovery:
        return []
    roles = ("prefill", "decode") if args.pd_disaggregation else ("both",)
    cluster = api or ClusterApi.of_this_pod()
    return [PodDiscovery(args, role, cluster, members).run for role in roles]
