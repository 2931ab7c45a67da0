"""Page-locked memory, to and from which a GPU copies while the host goes on."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def lock_pages(parts: Sequence[Tensor], owner: object, stream: torch.cuda.Stream) -> None:
    """Locks memory that ranks of a node share, for copies of this rank on `stream`, until `owner`
    is collected. If CUDA refuses, copies work all the same but hold up the thread that begins
    them."""
    locked: list[Tensor] = []
    with torch.cuda.device(stream.device):
        cudart: Any = torch.cuda.cudart()
        for part in parts:
            assert part.is_contiguous() and part.nbytes, "CUDA locks one piece of some bytes"
            if error := int(cudart.cudaHostRegister(part.data_ptr(), part.nbytes, 0)):
                logger.warning(
                    "%d bytes of shared memory cannot be page-locked (CUDA error %d): copies to "
                    "and from them hold up steps",
                    part.nbytes,
                    error,
                )
                _clear_error(stream.device)
                break
            locked.append(part)
    # When the process ends its memory is unlocked anyway, and CUDA may be gone before.
    weakref.finalize(owner, _unlock, cudart, locked, stream).atexit = False


def _clear_error(device: torch.device) -> None:
    """CUDA reports a refusal once more to whoever launches the next kernel."""
    try:
        torch.ones(1, device=device)
    except RuntimeError as error:
        logger.debug("cleared: %s", error)


def _unlock(cudart: Any, parts: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
    """Holds `parts`, which are views of the memory, until then."""
    stream.synchronize()
    for part in parts:
        cudart.cudaHostUnregister(part.data_ptr())
