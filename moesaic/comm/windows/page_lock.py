"""Page-locked memory, to and from which a GPU copies while the host goes on."""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE


def lock_pages(parts: Sequence[Tensor], owner: object, stream: torch.cuda.Stream) -> None:
    """Locks memory that ranks of a node share, for copies of this rank on `stream`, until `owner`
    is collected. If CUDA refuses, copies work all the same but hold up the thread that begins
    them."""
    locked: list[int] = []
    with torch.cuda.device(stream.device):
        cudart: Any = torch.cuda.cudart()
        for pages in _pages_of(parts):
            if error := int(cudart.cudaHostRegister(pages.start, len(pages), 0)):
                logger.warning(
                    "%d bytes of shared memory cannot be page-locked (CUDA error %d): copies to "
                    "and from them hold up steps",
                    len(pages),
                    error,
                )
                _clear_error(stream.device)
                break
            locked.append(pages.start)
    # When the process ends its memory is unlocked anyway, and CUDA may be gone before.
    weakref.finalize(owner, _unlock, cudart, locked, stream, tuple(parts)).atexit = False


def _pages_of(parts: Sequence[Tensor]) -> list[range]:
    """The addresses of whole pages, each once: CUDA refuses to lock a page twice."""
    found: list[range] = []
    for part in sorted(parts, key=Tensor.data_ptr):
        assert part.is_contiguous() and part.nbytes, "CUDA locks one piece of some bytes"
        begin, end = part.data_ptr() // PAGE * PAGE, -(-(part.data_ptr() + part.nbytes) // PAGE)
        if found and begin <= found[-1].stop:
            found[-1] = range(found[-1].start, end * PAGE)
        else:
            found.append(range(begin, end * PAGE))
    return found


def _clear_error(device: torch.device) -> None:
    """CUDA reports a refusal once more to whoever launches the next kernel."""
    try:
        torch.ones(1, device=device)
    except RuntimeError as error:
        logger.debug("cleared: %s", error)


def _unlock(
    cudart: Any, locked: Sequence[int], stream: torch.cuda.Stream, parts: Sequence[Tensor]
) -> None:
    """`parts`: views of the memory, which is held until then."""
    stream.synchronize()
    for address in locked:
        cudart.cudaHostUnregister(address)
