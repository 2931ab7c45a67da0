"""The functions that convert between a dispatcher's format and a runner's layout.

Fused functions are registered by (a2a backend, runner backend), permutes by (dispatch format,
runner backend), for a device. Registration refuses undeclared names and a second function for the
same pair; the error for a missing pair lists those that exist.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from moesaic.moe.formats import DISPATCH_FORMATS
from moesaic.moe.registry import A2A_REGISTRY, RUNNER_REGISTRY

Function = TypeVar("Function", bound=Callable[..., Any])
Pair = tuple[str, str]
Functions = dict[Pair, Callable[..., Any]]


class PermuteMethodPool:
    """Pre-permute, post-permute and fused functions by device and pair of names."""

    def __init__(self) -> None:
        self._pre: defaultdict[str, Functions] = defaultdict(dict)
        self._post: defaultdict[str, Functions] = defaultdict(dict)
        self._fused: defaultdict[str, Functions] = defaultdict(dict)

    def register_pre_permute(
        self, format: str, runner: str, device: str = "cpu"
    ) -> Callable[[Function], Function]:
        _known("dispatch format", format, DISPATCH_FORMATS)
        _known("runner backend", runner, RUNNER_REGISTRY)
        return _adder(self._pre[device], (format, runner), f"pre-permute on {device}")

    def register_post_permute(
        self, runner: str, format: str, device: str = "cpu"
    ) -> Callable[[Function], Function]:
        _known("runner backend", runner, RUNNER_REGISTRY)
        _known("dispatch format", format, DISPATCH_FORMATS)
        return _adder(self._post[device], (runner, format), f"post-permute on {device}")

    def register_fused_func(
        self, a2a: str, runner: str, device: str = "cpu"
    ) -> Callable[[Function], Function]:
        _known("a2a backend", a2a, A2A_REGISTRY)
        _known("runner backend", runner, RUNNER_REGISTRY)
        return _adder(self._fused[device], (a2a, runner), f"fused function on {device}")

    def pre_permute(self, format: str, runner: str, device: str = "cpu") -> Callable[..., Any]:
        return _find(self._pre[device], (format, runner), f"pre-permute on {device}")

    def post_permute(self, runner: str, format: str, device: str = "cpu") -> Callable[..., Any]:
        return _find(self._post[device], (runner, format), f"post-permute on {device}")

    def fused_func(self, a2a: str, runner: str, device: str = "cpu") -> Callable[..., Any] | None:
        return self._fused[device].get((a2a, runner))

    def formats_of(self, runner: str, device: str = "cpu") -> tuple[str, ...]:
        """Dispatch formats that a runner can take and give back."""
        pre, post = self._pre[device], self._post[device]
        return tuple(format for format, name in pre if name == runner and (name, format) in post)


def _known(kind: str, name: str, names: Iterable[str]) -> None:
    known = sorted(names)
    if name not in known:
        raise ValueError(f"there is no {kind} {name!r}: declare it first; known are {known}")


def _adder(functions: Functions, pair: Pair, kind: str) -> Callable[[Function], Function]:
    def add(function: Function) -> Function:
        if pair in functions:
            raise ValueError(f"{kind} for {pair} is registered twice")
        functions[pair] = function
        return function

    return add


def _find(functions: Functions, pair: Pair, kind: str) -> Callable[..., Any]:
    if pair not in functions:
        raise ValueError(f"there is no {kind} for {pair}; there is one for {sorted(functions)}")
    return functions[pair]


POOL = PermuteMethodPool()
register_pre_permute = POOL.register_pre_permute
register_post_permute = POOL.register_post_permute
register_fused_func = POOL.register_fused_func
