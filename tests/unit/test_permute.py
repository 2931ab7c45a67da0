"""Which backends may be registered, and the errors for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from moesaic.moe.backends import load_builtin
from moesaic.moe.formats import DISPATCH_FORMATS, DispatchOutput, dispatch_format
from moesaic.moe.permute import POOL, PermuteMethodPool
from moesaic.moe.registry import (
    A2A_REGISTRY,
    RUNNER_REGISTRY,
    UNQUANTIZED,
    A2aBackend,
    RunnerBackend,
    register_a2a,
    register_runner,
)

A2A = A2aBackend("courier", "by hand", {"normal": "standard"}, UNQUANTIZED)
RUNNER = RunnerBackend("abacus", "by hand", {"standard": "beads"}, UNQUANTIZED, UNQUANTIZED)
FORMATS = ["deepep_ll", "deepep_normal", "fused", "standard"]


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """Restores the registries of the process after each test."""
    load_builtin()
    saved = [(held, dict(held)) for held in (A2A_REGISTRY, RUNNER_REGISTRY, DISPATCH_FORMATS)]
    yield
    for held, before in saved:
        held.clear()
        held.update(before)  # type: ignore[arg-type]


@pytest.fixture
def pool() -> PermuteMethodPool:
    return PermuteMethodPool()


def function(*_: Any) -> str:
    return "called"


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        act()
    return str(caught.value)


def test_what_is_registered_is_found(pool: PermuteMethodPool) -> None:
    assert pool.register_pre_permute("standard", "triton")(function) is function
    pool.register_post_permute("triton", "standard")(function)
    pool.register_fused_func("none", "triton")(function)
    assert pool.pre_permute("standard", "triton") is function
    assert pool.post_permute("triton", "standard") is function
    assert pool.fused_func("none", "triton") is function
    assert pool.fused_func("deepep", "triton") is None


def test_registration_works_as_a_decorator(pool: PermuteMethodPool) -> None:
    @pool.register_pre_permute("deepep_ll", "cutlass")
    def pre(*_: Any) -> int:
        return 7

    assert pool.pre_permute("deepep_ll", "cutlass")() == pre() == 7


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("pre_permute", ("standrad", "triton")),
        ("post_permute", ("triton", "standrad")),
    ],
)
def test_unknown_format_is_refused_with_those_that_exist(
    pool: PermuteMethodPool, kind: str, args: tuple[str, str]
) -> None:
    register = getattr(pool, f"register_{kind}")
    assert refusal(lambda: register(*args)) == (
        f"there is no dispatch format 'standrad': declare it first; known are {FORMATS}"
    )


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("pre_permute", ("standard", "tritn")),
        ("post_permute", ("tritn", "standard")),
        ("fused_func", ("none", "tritn")),
    ],
)
def test_unknown_runner_is_refused_with_those_that_exist(
    pool: PermuteMethodPool, kind: str, args: tuple[str, str]
) -> None:
    register = getattr(pool, f"register_{kind}")
    assert refusal(lambda: register(*args)) == (
        f"there is no runner backend 'tritn': declare it first; known are {sorted(RUNNER_REGISTRY)}"
    )


def test_unknown_a2a_backend_is_refused_with_those_that_exist(pool: PermuteMethodPool) -> None:
    assert refusal(lambda: pool.register_fused_func("nonee", "triton")) == (
        f"there is no a2a backend 'nonee': declare it first; known are {sorted(A2A_REGISTRY)}"
    )


def test_two_functions_for_a_pair_are_refused(pool: PermuteMethodPool) -> None:
    pairs = {
        "pre-permute on cpu": (pool.register_pre_permute, ("standard", "triton")),
        "post-permute on cpu": (pool.register_post_permute, ("triton", "standard")),
        "fused function on cpu": (pool.register_fused_func, ("none", "triton")),
    }
    for kind, (register, pair) in pairs.items():
        register(*pair)(function)
        message = refusal(lambda register=register, pair=pair: register(*pair)(function))
        assert message == f"{kind} for {pair} is registered twice"


def test_missing_pair_is_reported_with_those_that_exist(pool: PermuteMethodPool) -> None:
    assert refusal(lambda: pool.pre_permute("fused", "triton")) == (
        "there is no pre-permute on cpu for ('fused', 'triton'); there is one for []"
    )
    pool.register_pre_permute("standard", "triton")(function)
    pool.register_pre_permute("deepep_ll", "cutlass")(function)
    pool.register_post_permute("triton", "standard")(function)
    assert refusal(lambda: pool.pre_permute("deepep_ll", "triton")) == (
        "there is no pre-permute on cpu for ('deepep_ll', 'triton'); there is one for "
        "[('deepep_ll', 'cutlass'), ('standard', 'triton')]"
    )
    assert refusal(lambda: pool.post_permute("cutlass", "deepep_ll")) == (
        "there is no post-permute on cpu for ('cutlass', 'deepep_ll'); there is one for "
        "[('triton', 'standard')]"
    )


def test_a_device_has_functions_of_its_own(pool: PermuteMethodPool) -> None:
    pool.register_pre_permute("standard", "triton")(function)
    pool.register_pre_permute("standard", "triton", "cuda")(refusal)
    pool.register_post_permute("triton", "standard", "cuda")(refusal)
    assert pool.pre_permute("standard", "triton") is function
    assert pool.pre_permute("standard", "triton", "cuda") is refusal
    assert pool.formats_of("triton", "cuda") == ("standard",)
    assert pool.formats_of("triton") == ()
    assert refusal(lambda: pool.post_permute("triton", "deepep_ll", "cuda")) == (
        "there is no post-permute on cuda for ('triton', 'deepep_ll'); there is one for "
        "[('triton', 'standard')]"
    )


def test_formats_of_a_runner_are_those_with_a_way_in_and_out(pool: PermuteMethodPool) -> None:
    assert pool.formats_of("triton") == ()
    pool.register_pre_permute("standard", "triton")(function)
    pool.register_pre_permute("deepep_ll", "triton")(function)
    pool.register_post_permute("triton", "deepep_ll")(function)
    pool.register_post_permute("triton", "deepep_normal")(function)
    assert pool.formats_of("triton") == ("deepep_ll",)
    assert pool.formats_of("nobody") == ()


def test_built_in_runners_take_what_they_declare() -> None:
    """A declared format has both permutes, or a fused function for every backend that yields it."""
    for runner in RUNNER_REGISTRY.values():
        for format in runner.layouts:
            givers = [a2a.name for a2a in A2A_REGISTRY.values() if format in a2a.formats.values()]
            fused = all(POOL.fused_func(a2a, runner.name) for a2a in givers)
            assert format in POOL.formats_of(runner.name) or (givers and fused)


def test_pool_knows_what_was_just_declared(pool: PermuteMethodPool) -> None:
    register_runner(RUNNER)
    register_a2a(A2A)
    pool.register_pre_permute("standard", "abacus")(function)
    pool.register_fused_func("courier", "abacus")(function)


@pytest.mark.parametrize("name", ["auto", "", "my-backend", "7up", "a b", "../x"])
def test_bad_names_are_refused(name: str) -> None:
    assert refusal(lambda: register_a2a(replace(A2A, name=name))) == (
        f"a2a backend {name!r}: give a name like my_backend"
    )
    assert refusal(lambda: register_runner(replace(RUNNER, name=name))) == (
        f"runner backend {name!r}: give a name like my_backend"
    )


def test_names_are_taken_once() -> None:
    register_a2a(A2A)
    register_runner(RUNNER)
    message = "backend {!r} is registered twice"
    assert message.format("courier") in refusal(lambda: register_a2a(A2A))
    assert message.format("abacus") in refusal(lambda: register_runner(RUNNER))
    assert message.format("none") in refusal(lambda: register_a2a(replace(A2A, name="none")))
    assert A2A_REGISTRY["none"].summary != A2A.summary


def test_dispatch_formats_are_declared_once() -> None:
    class Mine(DispatchOutput):
        format = "mine"

    dispatch_format(Mine)
    assert refusal(lambda: dispatch_format(Mine)) == "dispatch format 'mine' is registered twice"


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        (
            {"payloads": ("bf16", "fp6")},
            "payload ['fp6']: known are ('fp32', 'fp16', 'bf16', 'fp8', 'int8', 'nvfp4', 'mxfp4')",
        ),
        (
            {"formats": {"fast": "standard"}},
            "mode ['fast']: known are ('normal', 'low_latency')",
        ),
        ({"formats": {}}, "mode missing: known are ('normal', 'low_latency')"),
        ({"phases": ("prefil",)}, "phase ['prefil']: known are ('prefill', 'decode')"),
    ],
)
def test_unknown_words_of_an_a2a_backend(changes: dict[str, Any], unknown: str) -> None:
    message = refusal(lambda: register_a2a(replace(A2A, **changes)))
    assert message == f"a2a backend 'courier': {unknown}"
    assert "courier" not in A2A_REGISTRY


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({"weights": ("bf16", "fp6")}, "['fp6']"),
        ({"payloads": ("fp5", "bf16")}, "['fp5']"),
        ({"weights": ("int3",), "payloads": ("fp5",)}, "['fp5', 'int3']"),
    ],
)
def test_unknown_words_of_a_runner(changes: dict[str, Any], unknown: str) -> None:
    message = refusal(lambda: register_runner(replace(RUNNER, **changes)))
    assert message.startswith(f"runner backend 'abacus': unknown {unknown}; weights are ('fp32', ")
    assert message.endswith(
        "payloads are ('fp32', 'fp16', 'bf16', 'fp8', 'int8', 'nvfp4', 'mxfp4')"
    )
    assert "abacus" not in RUNNER_REGISTRY
