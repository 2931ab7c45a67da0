"""Memory of a GPU that other processes read: the driver's own functions, as torch has none for
memory that is not a tensor's."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

HANDLE_BYTES: Final = 64
LAZY_PEER_ACCESS: Final = 1


class CudaError(OSError):
    """The driver has refused something."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@dataclass(frozen=True)
class _Bytes:
    """What torch makes a tensor of."""

    pointer: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "strides": None,
            "version": 3,
        }


class DeviceMemory:
    """Bytes of a GPU, this process's own or another's that are mapped here."""

    def __init__(self, pointer: int, nbytes: int, device: torch.device) -> None:
        self._pointer, self._device = pointer, device
        self.tensor: Tensor = torch.as_tensor(_Bytes(pointer, nbytes))  # on its own device

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> DeviceMemory:
        """For the life of the process. Outside of torch's allocator, whose blocks have neighbours
        that nobody else is to read."""
        pointer = ctypes.c_uint64()
        _use(device)
        _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        return cls(pointer.value, nbytes, device)

    @classmethod
    def open(cls, handle: bytes, nbytes: int, device: torch.device) -> DeviceMemory:
        """The memory of another process; CudaError where it cannot be read."""
        if len(handle) != HANDLE_BYTES:
            raise CudaError(f"a handle of {len(handle)} bytes: {HANDLE_BYTES} are expected")
        pointer, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        _use(device)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, LAZY_PEER_ACCESS)
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        if size.value < nbytes:
            _call("cuIpcCloseMemHandle", pointer)
            raise CudaError(f"the memory has {size.value} bytes, not {nbytes}")
        return cls(pointer.value, nbytes, device)

    @property
    def handle(self) -> bytes:
        """By which another process of this machine opens it."""
        made = _Handle()
        _use(self._device)
        _call("cuIpcGetMemHandle", ctypes.byref(made), ctypes.c_uint64(self._pointer))
        return bytes(bytearray(made))

    def close(self) -> None:
        """Of memory that was opened; the tensor is invalid afterwards."""
        _use(self._device)
        _call("cuIpcCloseMemHandle", ctypes.c_uint64(self._pointer))


def _use(device: torch.device) -> None:
    """Makes the device's primary context, which torch uses, this thread's."""
    torch.cuda.set_device(device)
    torch.cuda.mem_get_info(device)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    driver = _driver()
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        told = (text.value or b"an unknown error").decode()
        raise CudaError(f"{name} failed with {code}: {told}")
