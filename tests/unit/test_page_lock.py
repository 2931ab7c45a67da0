"""Memory that is locked for a GPU's copies, with a CUDA of the test's own."""

from __future__ import annotations

import gc
import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from moesaic.comm.windows.page_lock import PAGE, lock_pages


class Cuda:
    """Notes what it is asked for; refuses what comes after `room` bytes."""

    device = torch.device("cpu")

    def __init__(self, room: int) -> None:
        self.room = room
        self.calls: list[Any] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.room -= size
        if self.room < 0:
            return 304
        self.calls.append(("lock", address, size))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unlock", address))
        return 0

    def synchronize(self) -> None:
        self.calls.append("synchronize")


class Owner:
    pass


def made(room: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Owner, list[int]]:
    cuda, owner = Cuda(room), Owner()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    memory = torch.zeros(6 * PAGE, dtype=torch.uint8)
    skip = -memory.data_ptr() % PAGE
    pages = memory[skip : skip + 5 * PAGE].unflatten(0, (5, PAGE))
    # The last two share a page.
    parts = [pages[4, 16:], pages[0, 8:24], pages[3:].flatten()[8 : PAGE + 8]]
    lock_pages(parts, owner, cuda)  # type: ignore[arg-type]
    return cuda, owner, [pages[0].data_ptr(), pages[3].data_ptr()]


def test_pages_are_locked_until_their_owner_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, owner, (first, last) = made(3 * PAGE, monkeypatch)
    assert cuda.calls == [("lock", first, PAGE), ("lock", last, 2 * PAGE)]
    cuda.calls.clear()
    del owner
    gc.collect()
    assert cuda.calls == ["synchronize", ("unlock", first), ("unlock", last)]


def test_a_refusal_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        cuda, owner, (first, _) = made(PAGE, monkeypatch)
    (told,) = caplog.messages
    size = 2 * PAGE
    assert told.startswith(f"{size} bytes of shared memory cannot be page-locked (CUDA error 304)")
    del owner
    gc.collect()
    assert cuda.calls == [("lock", first, PAGE), "synchronize", ("unlock", first)]
