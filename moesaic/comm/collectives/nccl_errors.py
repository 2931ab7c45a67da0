"""The errors of a communicator that NCCL notices by itself, such as a lost connection. torch tells
of them only where its own watchdog would end the process, so NCCL's C library is asked."""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

LIBRARY: Final = "libnccl.so"
# Of ncclResult_t: nothing is wrong, or not known yet.
SUCCESS, IN_PROGRESS = 0, 7


def async_error(comm: int) -> str:
    """The error of a communicator, by its address; empty if there is none. Any thread may ask while
    the communicator lives."""
    library, found = _library(), ctypes.c_int(SUCCESS)
    if library is None:
        return ""
    asked = library.ncclCommGetAsyncError(ctypes.c_void_p(comm), ctypes.byref(found))
    result = asked or found.value
    if result in (SUCCESS, IN_PROGRESS):
        return ""
    texts = (library.ncclGetErrorString(result), library.ncclGetLastError(ctypes.c_void_p(comm)))
    return ": ".join(text.decode(errors="replace").strip() for text in texts if text)


@lru_cache
def _library() -> ctypes.CDLL | None:
    """The one that torch has loaded."""
    maps = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    path = next((line.split(maxsplit=5)[5] for line in maps if LIBRARY in line), None)
    if path is None:
        logger.warning("%s is not loaded: connections that it loses are not noticed", LIBRARY)
        return None
    library = ctypes.CDLL(path)
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetLastError.restype = ctypes.c_char_p
    return library
