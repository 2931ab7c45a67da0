"""Which implementation computes: Triton for tensors on a GPU, torch for all others.

    @native("moesaic.kernels.triton.norm")
    def rms_norm(x_TH, weight_H, eps): …torch…

The function under the decorator is the torch twin: it defines what the kernel of the same name and
signature in that module must give. Triton is only imported for the first tensor on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def native(module: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The first argument says where to compute: a tensor, or what has one as its `values`
    (or as theirs)."""

    def decorate(twin: Callable[P, R]) -> Callable[P, R]:
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
        return call

    return decorate
