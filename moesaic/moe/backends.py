"""Finds all backends: those of the package, and those of other packages.

A backend of the package is one file: `dispatch/<name>.py` registers an `A2aBackend`,
`runner/<name>.py` a `RunnerBackend`. Its name in config/args_parallel.py makes it a choice of the
flag, and this module imports it. A module of another package registers its backends when it is
imported: `--moe-backend-module` names it, or the entry point group `moesaic.moe_backends`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from moesaic.config.args_parallel import A2A_BACKENDS, RUNNER_BACKENDS
from moesaic.moe.registry import A2A_REGISTRY, RUNNER_REGISTRY

ENTRY_POINTS = "moesaic.moe_backends"
# What each module has registered: the same module may be named again.
_added_by: dict[str, set[str]] = {}


@cache
def load_runners() -> None:
    for name in RUNNER_BACKENDS:
        if name != "auto":
            import_module(f"moesaic.moe.runner.{name}")


@cache
def load_builtin() -> None:
    """Runners come first: the fused dispatcher registers itself for each of them. `auto` and the
    reports follow the order of the flags' choices, whatever was imported first."""
    load_runners()
    for name in A2A_BACKENDS:
        import_module(f"moesaic.moe.dispatch.{name}")
    _put_in_order(A2A_REGISTRY, A2A_BACKENDS)
    _put_in_order(RUNNER_REGISTRY, RUNNER_BACKENDS)


def _put_in_order(registry: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if name in registry:
            registry[name] = registry.pop(name)


@cache
def load_entry_points() -> None:
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:
            raise ValueError(
                f"entry point {point.name} = {point.value} in {ENTRY_POINTS} does not load: "
                f"{error!r}; mend or uninstall its package"
            ) from error


def load_backends(modules: Sequence[str] = ()) -> None:
    load_builtin()
    load_entry_points()
    for name in modules:
        _load_module(name)


def _load_module(name: str) -> None:
    """From the current folder too, as `python -m` would."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    known = {*A2A_REGISTRY, *RUNNER_REGISTRY}
    try:
        module = import_module(name)
    except Exception as error:
        raise ValueError(
            f"--moe-backend-module {name!r} cannot be imported from here: "
            f"{type(error).__name__}: {error}"
        ) from error
    added = {*A2A_REGISTRY, *RUNNER_REGISTRY} - known
    if added:
        _added_by[module.__name__] = added
    if module.__name__ not in _added_by:
        raise ValueError(
            f"--moe-backend-module {name!r} registers no backend: it must call register_a2a or "
            f"register_runner"
        )
