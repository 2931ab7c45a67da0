"""Sleeps on a word of shared memory, and wakes sleepers."""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from typing import Final

_NUMBERS: Final = {"x86_64": 202, "aarch64": 98}
_NUMBER: Final = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
# Not the private variants: sleeper and waker are different processes.
_WAIT: Final = 0
_WAKE: Final = 1
_NAP: Final = 0.0005


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
)


def wait(address: int, expected: int, seconds: float) -> None:
    """Sleeps while the 32-bit word holds `expected`, until woken or for `seconds`. It may return
    early: check the condition again. ctypes releases the GIL."""
    if _NUMBER is None:
        time.sleep(min(seconds, _NAP))
        return
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    _syscall(_NUMBER, address, _WAIT, expected, limit)


def wake(address: int) -> None:
    """Wakes a sleeper on the word; change the word first."""
    if _NUMBER is not None:
        _syscall(_NUMBER, address, _WAKE, 1, None)
