"""--crash-dump-folder: the open requests of an engine that fails, as lines of JSON."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from moesaic.config import ServerArgs
from moesaic.config.flags import without_secrets
from moesaic.core.request import Request

logger = logging.getLogger(__name__)

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
# Files of one engine: it goes on after an error outside of any request, which may come again.
MOST_FILES: Final = 20


class CrashDump:
    """Writes a file for each failure: the first line has the reason and the flags, and each further
    one a request with its token ids. Only the user of the server may read it."""

    def __init__(self, args: ServerArgs) -> None:
        assert args.crash_dump_folder is not None
        self._args, self._folder = without_secrets(args), Path(args.crash_dump_folder)
        self._files = 0
        try:
            self._folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--crash-dump-folder {self._folder}: {error.strerror}") from None
        if not os.access(self._folder, os.W_OK | os.X_OK):
            raise ValueError(f"--crash-dump-folder {self._folder} is not writable")

    def write(self, reason: str, requests: Iterable[Request]) -> None:
        """Logs what goes wrong and raises nothing: the requests fail next, in any case."""
        if self._files == MOST_FILES:
            logger.error("no dump of this failure: %d files are in %s", MOST_FILES, self._folder)
            return
        self._files += 1
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._files}"
        path = self._folder / f"moesaic-crash-{stamp}.jsonl"
        try:
            self._write(path, reason, requests)
        except Exception as error:
            logger.error("the open requests were not written to %s: %r", path, error)
        else:
            logger.error("the open requests are in %s", path)

    def _write(self, path: Path, reason: str, requests: Iterable[Request]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        with open(descriptor, "wb") as file:
            file.write(_line({"reason": reason, "time": time.time(), "flags": self._args}))
            for request in requests:
                file.write(_line(_entry(request)))


def _entry(request: Request) -> dict[str, object]:
    return {
        "rid": request.rid,
        "seconds": round(time.monotonic() - request.created, 3),
        "prompt_ids": request.prompt_ids,
        "output_ids": request.token_ids[request.prompt_len :],
        "sampling_params": request.params,
    }


def _line(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"
