"""Chooses the implementation: Triton for tensors on a GPU, torch for all others.

    @native("moesaic.kernels.triton.norm")
    def rms_norm(x_TH, weight_H, eps): …torch…

The decorated function is the torch twin; it defines the result of the kernel with the same name and
signature in that module. Triton is imported with the first tensor on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import ParamSpec, Protocol, TypeVar, cast

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class NativeFunction(Protocol[P, R]):
    twin: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


def native(module: str) -> Callable[[Callable[P, R]], NativeFunction[P, R]]:
    """The first argument decides the device: a tensor, or an object with one in `values`."""

    def decorate(twin: Callable[P, R]) -> NativeFunction[P, R]:
        kernel: Callable[P, R] | None = None

        @wraps(twin)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            nonlocal kernel
            first = args[0]
            while not isinstance(first, Tensor):
                first = first.values  # type: ignore[attr-defined]
            if not first.is_cuda:
                return twin(*args, **kwargs)
            if kernel is None:
                kernel = getattr(import_module(module), twin.__name__)
            return kernel(*args, **kwargs)

        call.twin = twin  # type: ignore[attr-defined]
        return cast(NativeFunction[P, R], call)

    return decorate
