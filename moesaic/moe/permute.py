"""Which functions carry rows between a dispatcher's format and a runner's layout.

Fused functions are registered by (a2a backend, runner backend), permutes by (dispatch format,
runner backend). A name that nobody declared, and a second function for the same pair, are refused
where they are registered; a missing pair is reported with those that exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from moesaic.moe.formats import DISPATCH_FORMATS
from moesaic.moe.registry import A2A_REGISTRY, RUNNER_REGISTRY

Function = TypeVar("Function", bound=Callable[..., Any])
Pair = tuple[str, str]


class PermuteMethodPool:
    """Pre-permute, post-permute and fused functions by pair of names."""

    def __init__(self) -> None:
        self._pre: dict[Pair, Callable[..., Any]] = {}
        self._post: dict[Pair, Callable[..., Any]] = {}
        self._fused: dict[Pair, Callable[..., Any]] = {}

    def register_pre_permute(self, format: str, runner: str) -> Callable[[Function], Function]:
        _known("dispatch format", format, DISPATCH_FORMATS)
        _known("runner backend", runner, RUNNER_REGISTRY)
        return _adder(self._pre, (format, runner), "pre-permute")

    def register_post_permute(self, runner: str, format: str) -> Callable[[Function], Function]:
        _known("runner backend", runner, RUNNER_REGISTRY)
        _known("dispatch format", format, DISPATCH_FORMATS)
        return _adder(self._post, (runner, format), "post-permute")

    def register_fused_func(self, a2a: str, runner: str) -> Callable[[Function], Function]:
        _known("a2a backend", a2a, A2A_REGISTRY)
        _known("runner backend", runner, RUNNER_REGISTRY)
        return _adder(self._fused, (a2a, runner), "fused function")

    def pre_permute(self, format: str, runner: str) -> Callable[..., Any]:
        return _find(self._pre, (format, runner), "pre-permute")

    def post_permute(self, runner: str, format: str) -> Callable[..., Any]:
        return _find(self._post, (runner, format), "post-permute")

    def fused_func(self, a2a: str, runner: str) -> Callable[..., Any] | None:
        return self._fused.get((a2a, runner))

    def formats_of(self, runner: str) -> tuple[str, ...]:
        """Dispatch formats that a runner can take and give back."""
        return tuple(
            format for format, name in self._pre if name == runner and (name, format) in self._post
        )


def _known(kind: str, name: str, names: Iterable[str]) -> None:
    known = sorted(names)
    if name not in known:
        raise ValueError(f"there is no {kind} {name!r}: declare it first; known are {known}")


def _adder(
    functions: dict[Pair, Callable[..., Any]], pair: Pair, kind: str
) -> Callable[[Function], Function]:
    def add(function: Function) -> Function:
        if pair in functions:
            raise ValueError(f"{kind} for {pair} is registered twice")
        functions[pair] = function
        return function

    return add


def _find(functions: dict[Pair, Callable[..., Any]], pair: Pair, kind: str) -> Callable[..., Any]:
    if pair not in functions:
        raise ValueError(f"there is no {kind} for {pair}; there is one for {sorted(functions)}")
    return functions[pair]


POOL = PermuteMethodPool()
register_pre_permute = POOL.register_pre_permute
register_post_permute = POOL.register_post_permute
register_fused_func = POOL.register_fused_func
