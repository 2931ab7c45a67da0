"""Memory of a GPU with a descriptor: allocated by one process, mapped by several.

CUDA keeps such memory as long as a process maps it or has a descriptor of it, whoever allocated it.
Torch offers this for process groups only, which a rank that starts again has no part in, so the
driver is called directly.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from moesaic.comm.windows.agreement import MIB
from moesaic.comm.windows.shared_memory import round_up

logger = logging.getLogger(__name__)

DRIVER: Final = "libcuda.so.1"
# Of cuda.h.
PINNED, POSIX_DESCRIPTOR, ON_DEVICE, READ_AND_WRITE = 1, 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32_meta_data", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


ARGUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemExportToShareableHandle": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemRelease": (c_uint64,),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}


class CudaPieces:
    """Pieces of the memory of `device`, and those of other devices that it reaches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.synchronize(device)  # opens CUDA, which the driver's functions do not
        self._properties = _Properties(
            type=PINNED,
            handle_types=POSIX_DESCRIPTOR,
            location=_Location(ON_DEVICE, device.index),
        )
        granularity = c_size_t()
        _call("cuMemGetAllocationGranularity", byref(granularity), byref(self._properties), 0)
        self._granularity: int = granularity.value

    def room(self, nbytes: int) -> int:
        """The bytes that a piece of `nbytes` takes."""
        return round_up(nbytes, self._granularity)

    def create(self, nbytes: int) -> int:
        """The descriptor of a new piece of zeros."""
        check_free(self.room(nbytes), self.device)
        handle, descriptor = c_uint64(), c_int(-1)
        _call("cuMemCreate", byref(handle), self.room(nbytes), byref(self._properties), 0)
        try:
            export = (byref(descriptor), handle, POSIX_DESCRIPTOR, 0)
            _call("cuMemExportToShareableHandle", *export)
        finally:
            _call("cuMemRelease", handle)
        piece = self.map(descriptor.value, nbytes)
        piece.tensor.zero_()
        torch.cuda.synchronize(self.device)
        piece.close()
        return descriptor.value

    def map(self, descriptor: int, nbytes: int) -> CudaPiece:
        """The piece behind a descriptor, which may be closed afterwards."""
        handle, address, length = c_uint64(), c_uint64(), self.room(nbytes)
        _call("cuMemImportFromShareableHandle", byref(handle), descriptor, POSIX_DESCRIPTOR)
        try:
            _call("cuMemAddressReserve", byref(address), length, 0, 0, 0)
            _call("cuMemMap", address, length, 0, handle, 0)
            access = _Access(_Location(ON_DEVICE, self.device.index), READ_AND_WRITE)
            _call("cuMemSetAccess", address, length, byref(access), 1)
        finally:
            _call("cuMemRelease", handle)  # the mapping keeps the memory
        return CudaPiece(address.value, nbytes, length, self.device)


class CudaPiece:
    """A mapping in this process; `tensor` views its bytes until it is closed."""

    def __init__(self, address: int, nbytes: int, length: int, device: torch.device) -> None:
        self._address, self._length = address, length
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        self.tensor: Tensor = torch.as_tensor(self, device=device)
        assert self.tensor.data_ptr() == address, "a view, not a copy"

    def close(self) -> None:
        """No kernel may use it any more."""
        del self.tensor
        _call("cuMemUnmap", self._address, self._length)
        _call("cuMemAddressFree", self._address, self._length)


def check_free(needed: int, device: torch.device) -> None:
    """RuntimeError unless the device has as many bytes for a window."""
    free, total = torch.cuda.mem_get_info(device)
    logger.info(
        "a window takes %.1f MiB of %s, which has %.1f of %.1f free",
        *(needed / MIB, device, free / MIB, total / MIB),
    )
    if needed > free:
        raise RuntimeError(
            f"{device} has {free / MIB:.1f} MiB free: lower --mem-fraction-static, "
            f"--chunked-prefill-size or --max-running-requests"
        )


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL(DRIVER)
    for name, arguments in ARGUMENTS.items():
        getattr(driver, name).argtypes = arguments
    return driver


def _call(name: str, *arguments: Any) -> None:
    """Calls a function of the driver; RuntimeError with its name and CUDA's message."""
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = c_char_p()
        _driver().cuGetErrorString(code, byref(text))
        shown = (text.value or b"an unknown error").decode()
        raise RuntimeError(f"{name}: {shown} (CUDA error {code})")
