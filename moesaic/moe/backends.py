"""Finds all backends: those of the package, and those that others bring.

A module from outside registers its dispatchers and runners when it is imported. It is named by
`--moe-backend-module`, or found by the entry point group `moesaic.moe_backends`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

ENTRY_POINTS = "moesaic.moe_backends"
RUNNERS = (
    "triton",
    "triton_kernel",
    "deep_gemm",
    "cutlass",
    "flashinfer_trtllm",
    "flashinfer_cutlass",
    "flashinfer_mxfp4",
    "flashinfer_cutedsl",
)
DISPATCHERS = ("none", "deepep", "mooncake", "mori", "flashinfer", "ascend_fuseep")


@cache
def load_builtin() -> None:
    """Runners first: the fused dispatcher registers itself for each of them."""
    for name in RUNNERS:
        import_module(f"moesaic.moe.runner.{name}")
    for name in DISPATCHERS:
        import_module(f"moesaic.moe.dispatch.{name}")


def load_backends(modules: Sequence[str] = ()) -> None:
    load_builtin()
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:
            raise ValueError(
                f"entry point {point.name} = {point.value} in {ENTRY_POINTS} does not load: "
                f"{error!r}; mend or uninstall its package"
            ) from error
    for name in modules:
        _load_module(name)


def _load_module(name: str) -> None:
    """From the current folder too, as `python -m` would."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--moe-backend-module {name}: {error}; give a module that Python can import from here"
        ) from error
