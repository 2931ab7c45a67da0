"""Where kernels wait and where they let the next one begin, read from their source: on a GPU a
wrong order would show now and then, elsewhere never."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from moesaic.kernels import triton

FOLDER = Path(triton.__file__).parent
WAITS, RELEASES = ("await_inputs", "gdc_wait"), ("release_next", "gdc_launch_dependents")
# Of each sequence one program stays.
LEAVES_EARLY = {"decode_kernel"}
# What stands behind them reads before it waits what was written in front of them.
WAITS_FIRST = ("_fp8_kernel", "_gate_up_kernel")


@cache
def kernels() -> dict[str, list[str]]:
    """By file and name: waits, releases and returns, in the order of the source."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem == "launch":
            continue
        for function in ast.parse(path.read_text()).body:
            events = list(_events(function)) if isinstance(function, ast.FunctionDef) else []
            if {"wait", "release"} & set(events):
                found[f"{path.stem}.{function.name}"] = events
    return found


def _events(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", "")
        if name in WAITS:
            yield "wait"
        elif name in RELEASES:
            yield "release"
    elif isinstance(node, ast.Return):
        yield "return"
    for child in ast.iter_child_nodes(node):
        yield from _events(child)


def test_every_kernel_waits() -> None:
    """One that ended without would let those behind it read what is not yet written."""
    assert len(kernels()) > 30
    for name, events in kernels().items():
        assert "wait" in events, name
        early = "return" in events[: events.index("wait")]
        assert early == (name.rpartition(".")[2] in LEAVES_EARLY), name


@pytest.mark.parametrize("name", WAITS_FIRST)
def test_who_must_wait_before_it_releases(name: str) -> None:
    found = [events for path, events in kernels().items() if path.endswith(f".{name}")]
    assert found and all(events[:2] == ["wait", "release"] for events in found)
