"""Unnamed memory (memfd) that processes of one machine share. No torch here.

A process opens the memory of another as /proc/PID/fd/N. The path comes from another process, so it
is checked before it is opened for writing: only memory of this user, with the expected name and
size and sealed against resizing, is mapped. An access to a mapping that shrank would end the
process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from functools import lru_cache
from typing import Final

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
DESCRIPTOR: Final = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


def round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


@lru_cache(maxsize=4096)
def encode_text(text: str, room: int) -> bytes:
    """`room` bytes, 256 at most: the length and the UTF-8 bytes, truncated to fit."""
    data = text.encode(errors="replace")[: room - 1]
    return (bytes([len(data)]) + data).ljust(room, b"\0")


def decode_text(page: memoryview, start: int, room: int) -> str:
    """The text at `start`; a concurrent write may give a mixture, but no error."""
    data = bytes(page[start : start + room])
    return data[1 : 1 + data[0]].decode(errors="replace")


def create_memory(name: str, length: int) -> int:
    """The descriptor of zeroed memory of a fixed size."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(descriptor, length)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def map_memory(path: str, name: str, length: int) -> mmap.mmap:
    """Maps the memory of that name behind /proc/PID/fd/N; ValueError if it is anything else."""
    if DESCRIPTOR.fullmatch(path) is None:
        raise ValueError(f"{path!r} is not the path of a descriptor, /proc/PID/fd/N")
    # O_PATH: opening a device or a pipe has side effects.
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _check(found, path, name, length)
        descriptor = os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(found)
    try:
        # Regular files and unsealed memory have no seals.
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError(f"{path} is memory that may change its size")
        return mmap.mmap(descriptor, length)
    finally:
        os.close(descriptor)


def _check(descriptor: int, path: str, name: str, length: int) -> None:
    target = os.readlink(f"/proc/self/fd/{descriptor}")
    if target != f"/memfd:{name} (deleted)":
        raise ValueError(f"{path} is {target}, not shared memory named {name}")
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise ValueError(f"{path} is memory of user {status.st_uid}, not of {os.geteuid()}")
    if status.st_size != length:
        raise ValueError(f"{path} has {status.st_size} bytes, not {length}")
